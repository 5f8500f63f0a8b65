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
    pub(crate) lease: Duration,
    held: Mutex<HashMap<JobId, Held>>,
    /// For each restarting job, the attempt that failed and the time from which the next may start.
    restart_after: Mutex<HashMap<JobId, (u32, Instant)>>,
    pub(crate) wake: Notify,
}

/// An attempt and the slots that its ranks are in.
#[derive(Debug, Clone)]
pub(crate) struct Held {
    pub(crate) attempt: AttemptRef,
    pub(crate) places: Vec<Place>,
    until: Instant,
}

impl Held {
    fn is_at(&self, agent_id: &str) -> bool {
        self.places.iter().any(|p| p.agent_id == agent_id)
    }
}

impl Leases {
    pub(crate) fn new(lease: Duration) -> Self {
        Self { lease, held: Mutex::default(), restart_after: Mutex::default(), wake: Notify::new() }
    }

    fn held(&self) -> MutexGuard<'_, HashMap<JobId, Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes dispatch, which then goes through the queue.
    pub(crate) fn poke(&self) {
        self.wake.notify_one();
    }

    pub(crate) fn hold(&self, attempt: AttemptRef, places: Vec<Place>) {
        let until = Instant::now() + self.lease;
        self.held().insert(attempt.job.clone(), Held { attempt, places, until });
    }

    /// An attempt of a job holds no slots any more. A later attempt may: its hold stays.
    pub(crate) fn release(&self, job: &JobId, attempt: u32) {
        let mut held = self.held();
        if held.get(job).is_some_and(|h| h.attempt.attempt <= attempt) {
            held.remove(job);
        }
        drop(held);
        self.poke();
    }

    /// An agent says that it has the ranks of these attempts. Returns those that are not (any longer) its own.
    pub(crate) fn renew(&self, agent_id: &str, attempts: &[AttemptRef]) -> Vec<AttemptRef> {
        let until = Instant::now() + self.lease;
        let mut held = self.held();
        attempts
            .iter()
            .filter(|attempt| match held.get_mut(&attempt.job) {
                Some(h) if h.attempt == **attempt && h.is_at(agent_id) => {
                    h.until = until;
                    false
                }
                _ => true,
            })
            .cloned()
            .collect()
    }

    /// Live attempts on an agent.
    pub(crate) fn of_agent(&self, agent_id: &str) -> Vec<AttemptRef> {
        self.held().values().filter(|h| h.is_at(agent_id)).map(|h| h.attempt.clone()).collect()
    }

    /// Job and rank of each slot in use on an agent.
    pub(crate) fn slots_in_use(&self, agent_id: &str) -> HashMap<u32, (JobId, u32)> {
        let held = self.held();
        let places = held.values().flat_map(|h| h.places.iter().map(move |p| (&h.attempt.job, p)));
        places
            .filter(|(_, p)| p.agent_id == agent_id)
            .flat_map(|(job, p)| p.ranks.iter().map(move |(rank, slot)| (*slot, (job.clone(), *rank))))
            .collect()
    }

    /// Agents that hold a job's ranks.
    pub(crate) fn places_of(&self, job: &JobId) -> Vec<Place> {
        self.held().get(job).map(|h| h.places.clone()).unwrap_or_default()
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

    pub(crate) fn expired(&self) -> Vec<Held> {
        let now = Instant::now();
        self.held().values().filter(|h| h.until <= now).cloned().collect()
    }
}

/// The delay before the restart of this number, from 1.
fn backoff(restarts: u32) -> Duration {
    match restarts {
        0 | 1 => Duration::ZERO,
        n => (FIRST_BACKOFF * 2u32.saturating_pow(n - 2)).min(MAX_BACKOFF),
    }
}
