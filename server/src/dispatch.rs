//! From the queue to slots, and what happens when those who hold them fall silent.
//!
//! Leases live in memory, on the monotonic clock: a wall clock that is set back or forward ends none. Which
//! attempt may write is in the store (its fencing token), so a restarted server gives every live attempt one
//! full lease to be heard of, and no longer.

use crate::{
    agents::Online,
    app::App,
    lifecycle,
    store::{AttemptRow, JobRow, Place, Result, StoreError, quarantine},
};
use lockstep_protocol::{
    agent::{AttemptRef, ToAgent},
    job::{Job, JobId, JobState},
    reason::{Facts, Reason, ReasonCode},
};
use place::{place, tell_why_it_waits};
use std::{
    collections::{HashMap, HashSet},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::sync::Notify;

mod place;

pub(crate) use place::{device_for, is_checkpoint_id, slots_for};

/// The queue is looked at this often even when nobody says that something changed.
const POLL: Duration = Duration::from_millis(500);
/// Between a job's second failure and its start; then twice as long each time, up to the longest.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Which attempts hold which slots, and until when.
#[derive(Debug)]
pub(crate) struct Dispatch {
    lease: Duration,
    held: Mutex<HashMap<JobId, Held>>,
    /// When a job that is being restarted may start, and after which attempt it was.
    pauses: Mutex<HashMap<JobId, (u32, Instant)>>,
    wake: Notify,
}

#[derive(Debug, Clone)]
struct Held {
    attempt: AttemptRef,
    places: Vec<Place>,
    until: Instant,
}

impl Held {
    fn is_at(&self, agent_id: &str) -> bool {
        self.places.iter().any(|p| p.agent_id == agent_id)
    }
}

impl Dispatch {
    pub(crate) fn new(lease: Duration) -> Self {
        Self { lease, held: Mutex::default(), pauses: Mutex::default(), wake: Notify::new() }
    }

    fn held(&self) -> MutexGuard<'_, HashMap<JobId, Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Look at the queue now.
    pub(crate) fn poke(&self) {
        self.wake.notify_one();
    }

    fn hold(&self, attempt: AttemptRef, places: Vec<Place>) {
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

    /// Whether a job that is being restarted is to wait a little longer: the first restart comes at once, each
    /// further one after twice the time of the one before.
    fn is_resting(&self, row: &JobRow) -> bool {
        let mut pauses = self.pauses.lock().unwrap_or_else(PoisonError::into_inner);
        if row.job.state != JobState::Restarting {
            pauses.remove(&row.job.id);
            return false;
        }
        let now = Instant::now();
        let after = row.job.attempt;
        let pause = pauses.entry(row.job.id.clone()).or_insert((0, now));
        if pause.0 != after {
            *pause = (after, now + backoff(row.restarts));
        }
        now < pause.1
    }

    fn expired(&self) -> Vec<Held> {
        let now = Instant::now();
        self.held().values().filter(|h| h.until <= now).cloned().collect()
    }
}

/// The pause before the restart of this number, from 1.
fn backoff(restarts: u32) -> Duration {
    match restarts {
        0 | 1 => Duration::ZERO,
        n => (FIRST_PAUSE * 2u32.saturating_pow(n - 2)).min(LONGEST_PAUSE),
    }
}

/// At start: every attempt that may write gets one lease to be heard of.
pub(crate) async fn restore(app: &App) -> Result<()> {
    for AttemptRow { attempt, places, .. } in app.store.live_attempts().await? {
        app.dispatch.hold(attempt, places);
    }
    Ok(())
}

/// Looks at leases and queue until dropped.
pub(crate) async fn run(app: App) {
    loop {
        if let Err(error) = round(&app).await {
            tracing::warn!(%error, "dispatch could not do its round; trying again");
        }
        tokio::select! {
            () = app.dispatch.wake.notified() => {}
            () = tokio::time::sleep(POLL) => {}
        }
    }
}

async fn round(app: &App) -> Result<()> {
    for held in app.dispatch.expired() {
        let job = held.attempt.job.clone();
        apart(&job, expire(app, held).await)?;
    }
    let mut reserved = HashSet::new();
    for row in app.store.waiting().await? {
        if matches!(row.job.state, JobState::Queued | JobState::Restarting) && !app.dispatch.is_resting(&row)
        {
            let placed = place(app, &row, &mut reserved).await;
            if let Err(error) = &placed
                && !error.may_pass()
            {
                apart(&row.job.id, tell_why_it_waits(app, &row, error.to_string().into()).await)?;
            }
            apart(&row.job.id, placed)?;
        }
    }
    Ok(())
}

/// What fails for one job, and always will, keeps no other one from its turn.
fn apart(job: &JobId, done: Result<()>) -> Result<()> {
    match done {
        Err(error) if !error.may_pass() => {
            quarantine::tell(&format!("job {job} cannot be dispatched: {error}"));
            Ok(())
        }
        other => other,
    }
}

/// A silent agent's attempt is fenced; its job starts anew elsewhere, or has failed.
async fn expire(app: &App, held: Held) -> Result<()> {
    let online: Vec<_> = app.agents.online().into_iter().map(|o| o.row.id).collect();
    let names: Vec<_> = held.places.iter().map(|p| p.agent.as_str()).collect();
    let lease = app.dispatch.lease.as_secs_f64();
    let code = if held.places.iter().all(|p| online.contains(&p.agent_id)) {
        ReasonCode::AgentWithoutRanks
    } else {
        ReasonCode::AgentLost
    };
    let facts = Facts {
        agent: Some(names.join(", ")),
        attempt: Some(held.attempt.attempt),
        secs: (code == ReasonCode::AgentLost).then_some(lease),
        ..Facts::default()
    };
    let attempt = held.attempt.clone();
    let places = held.places.clone();
    end_attempt(app, &attempt, move |row| {
        let facts = Facts { step: Some(row.job.step), ..facts.clone() };
        lifecycle::lost(row, &Reason::new(code.clone(), facts), crate::now())
    })
    .await?;
    for place in &places {
        let reason = "its lease ran out".into();
        app.agents.tell(&place.agent_id, ToAgent::Stop { attempt: attempt.clone(), reason, patient: false });
    }
    Ok(())
}

/// Changes the job of an attempt, if that attempt may still write.
async fn end_attempt(
    app: &App,
    attempt: &AttemptRef,
    change: impl Fn(
        &mut JobRow,
    ) -> std::result::Result<Vec<lockstep_protocol::stream::EventBody>, lifecycle::Refused>
    + Send
    + Sync
    + 'static,
) -> Result<()> {
    let expected = attempt.clone();
    let change = move |row: &mut JobRow| {
        if row.live().as_ref() == Some(&expected) { change(row) } else { Ok(Vec::new()) }
    };
    match app.store.change_job(&attempt.job, Box::new(change)).await {
        Ok(changed) => {
            app.announce(&changed);
            // Whatever the job is doing now, it is not this attempt any more.
            app.dispatch.release(&attempt.job, attempt.attempt);
            Ok(())
        }
        Err(StoreError::NotFound(_)) => {
            app.dispatch.release(&attempt.job, attempt.attempt);
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// An agent that was stopped in order has closed its connection: what it did not finish goes back to the queue.
pub(crate) async fn left(app: &App, agent: &Online, reason: &str) -> Result<()> {
    app.ingest.drained().await;
    for attempt in app.dispatch.of_agent(&agent.row.id) {
        let why = leaving_reason(&agent.row.name, reason);
        end_attempt(app, &attempt, move |row| lifecycle::requeue(row, &why, crate::now())).await?;
    }
    Ok(())
}

/// How a job says that its agent was stopped in order.
pub(crate) fn leaving_reason(agent: &str, reason: &str) -> Reason {
    let facts = Facts { agent: Some(agent.into()), detail: Some(reason.into()), ..Facts::default() };
    Reason::new(ReasonCode::AgentStopped, facts)
}

/// What a person wants of a job's ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wish {
    Cancel,
    Pause,
}

/// A person wants a job to end or to stand still: at once when nothing runs, else its agents are told.
///
/// # Errors
/// Its state forbids it, or there is none.
pub(crate) async fn stop(app: &App, id: &JobId, wish: Wish) -> Result<Job> {
    let places = app.dispatch.places_of(id);
    let online = app.agents.online();
    let reachable = places.iter().any(|p| online.iter().any(|o| o.row.id == p.agent_id));
    let change = move |row: &mut JobRow| match wish {
        Wish::Cancel => lifecycle::cancel(row, reachable, crate::now()),
        Wish::Pause => lifecycle::pause(row, crate::now()),
    };
    let changed = app.store.change_job(id, Box::new(change)).await?;
    app.announce(&changed);
    if let Some(row) = app.store.job(id).await?
        && let (Some(attempt), Some((reason, patient))) = (row.live(), wanted(&row))
    {
        for place in &places {
            let (attempt, reason) = (attempt.clone(), reason.clone());
            app.agents.tell(&place.agent_id, ToAgent::Stop { attempt, reason, patient });
        }
    }
    Ok(changed.job)
}

/// Why a job's ranks are to end, and whether a checkpoint is wanted of them.
fn wanted(row: &JobRow) -> Option<(String, bool)> {
    match (&row.stop, row.job.state) {
        (Some(stop), _) => Some((stop.words().to_owned(), false)),
        (None, JobState::Pausing) => Some((Reason::from(ReasonCode::PausedByUser).words().to_owned(), true)),
        (None, _) => None,
    }
}
