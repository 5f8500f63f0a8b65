//! Which attempts hold which slots, and until when.
//!
//! Leases live in memory, on the monotonic clock: a wall clock that is set back or forward ends none. Which
//! attempt may write is in the store (its fencing token), so a restarted server gives every live attempt one
//! full lease to be heard of, and no longer.

use crate::store::{JobRow, Place};
use lockstep_protocol::{
    agent::AttemptRef,
    job::{JobId, JobState},
};
use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::sync::Notify;

/// Restart backoff: the first restart is immediate, the second waits this long, each later one twice as long, up to
/// [`MAX_BACKOFF`].
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(60);

/// Which attempts hold which slots, and until when.
#[derive(Debug)]
pub(crate) struct Leases {
    pub(crate) duration: Duration,
    by_job: Mutex<HashMap<JobId, Lease>>,
    /// For each restarting job, the attempt that failed and the time from which the next may start.
    restart_after: Mutex<HashMap<JobId, (u32, Instant)>>,
    pub(crate) wake: Notify,
}

/// An attempt, the slots of its ranks, and until when it holds them.
#[derive(Debug, Clone)]
pub(crate) struct Lease {
    pub(crate) attempt: AttemptRef,
    pub(crate) places: Vec<Place>,
    until: Instant,
}

impl Lease {
    fn is_at(&self, agent_id: &str) -> bool {
        self.places.iter().any(|p| p.agent_id == agent_id)
    }
}

impl Leases {
    pub(crate) fn new(duration: Duration) -> Self {
        Self { duration, by_job: Mutex::default(), restart_after: Mutex::default(), wake: Notify::new() }
    }

    fn by_job(&self) -> MutexGuard<'_, HashMap<JobId, Lease>> {
        self.by_job.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes dispatch, which then goes through the queue.
    pub(crate) fn poke(&self) {
        self.wake.notify_one();
    }

    pub(crate) fn hold(&self, attempt: AttemptRef, places: Vec<Place>) {
        let until = Instant::now() + self.duration;
        self.by_job().insert(attempt.job.clone(), Lease { attempt, places, until });
    }

    /// An attempt of a job holds no slots any more. A later attempt may: its hold stays.
    pub(crate) fn release(&self, job: &JobId, attempt: u32) {
        let mut leases = self.by_job();
        if leases.get(job).is_some_and(|lease| lease.attempt.attempt <= attempt) {
            leases.remove(job);
        }
        drop(leases);
        self.poke();
    }

    /// An agent says that it has the ranks of these attempts. Returns those that are not (any longer) its own.
    pub(crate) fn renew(&self, agent_id: &str, attempts: &[AttemptRef]) -> Vec<AttemptRef> {
        let until = Instant::now() + self.duration;
        let mut leases = self.by_job();
        attempts
            .iter()
            .filter(|attempt| match leases.get_mut(&attempt.job) {
                Some(lease) if lease.attempt == **attempt && lease.is_at(agent_id) => {
                    lease.until = until;
                    false
                }
                _ => true,
            })
            .cloned()
            .collect()
    }

    /// Whether an agent has ranks of an attempt that may run; if so, whether rank 0 is among them.
    pub(crate) fn held_by(&self, agent_id: &str, attempt: &AttemptRef) -> Option<bool> {
        let leases = self.by_job();
        let lease = leases.get(&attempt.job).filter(|lease| lease.attempt == *attempt)?;
        let place = lease.places.iter().find(|place| place.agent_id == agent_id)?;
        Some(place.ranks.iter().any(|(rank, _)| *rank == 0))
    }

    /// The attempt of a job that may run.
    pub(crate) fn attempt_of(&self, job: &JobId) -> Option<AttemptRef> {
        self.by_job().get(job).map(|lease| lease.attempt.clone())
    }

    /// Live attempts on an agent.
    pub(crate) fn of_agent(&self, agent_id: &str) -> Vec<AttemptRef> {
        self.by_job()
            .values()
            .filter(|lease| lease.is_at(agent_id))
            .map(|lease| lease.attempt.clone())
            .collect()
    }

    /// How long the attempts on an agent may continue without word from it: the one that has least; none: there is no attempt.
    pub(crate) fn left(&self, agent_id: &str) -> Option<Duration> {
        let now = Instant::now();
        let leases = self.by_job();
        let held = leases.values().filter(|lease| lease.is_at(agent_id));
        held.map(|lease| lease.until.saturating_duration_since(now)).min()
    }

    /// Job and rank of each slot in use on an agent.
    pub(crate) fn slots_in_use(&self, agent_id: &str) -> HashMap<u32, (JobId, u32)> {
        let leases = self.by_job();
        let places =
            leases.values().flat_map(|lease| lease.places.iter().map(move |p| (&lease.attempt.job, p)));
        places
            .filter(|(_, p)| p.agent_id == agent_id)
            .flat_map(|(job, p)| p.ranks.iter().map(move |(rank, slot)| (*slot, (job.clone(), *rank))))
            .collect()
    }

    /// Agents that hold a job's ranks.
    pub(crate) fn places_of(&self, job: &JobId) -> Vec<Place> {
        self.by_job().get(job).map(|lease| lease.places.clone()).unwrap_or_default()
    }

    /// Whether a restarting job still waits for its backoff. The clock starts at the first call after its attempt failed.
    pub(crate) fn in_backoff(&self, row: &JobRow) -> bool {
        let mut restart_after = self.restart_after.lock().unwrap_or_else(PoisonError::into_inner);
        if row.job.state != JobState::Restarting {
            restart_after.remove(&row.job.id);
            return false;
        }
        let now = Instant::now();
        let after = row.job.attempt;
        let start = restart_after.entry(row.job.id.clone()).or_insert((0, now));
        if start.0 != after {
            *start = (after, now + backoff(row.restarts));
        }
        now < start.1
    }

    pub(crate) fn expired(&self) -> Vec<Lease> {
        let now = Instant::now();
        self.by_job().values().filter(|lease| lease.until <= now).cloned().collect()
    }
}

/// The delay before the restart of this number, from 1.
fn backoff(restarts: u32) -> Duration {
    match restarts {
        0 | 1 => Duration::ZERO,
        n => (FIRST_BACKOFF * 2u32.saturating_pow(n - 2)).min(MAX_BACKOFF),
    }
}
