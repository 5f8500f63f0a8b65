//! The rules by which reports, requests and time change a job. Pure: every function edits a [`JobRow`] and returns the events
//! to store, so that a store can run it inside its transaction, and one rule serves every database. The moves between states
//! are here; what reports do is in `lifecycle/reports.rs`.

use jiff::Timestamp;
use lockstep_protocol::{
    agent::CheckpointInfo,
    attempt::AttemptState,
    job::{Job, JobState, Parent},
    reason::{Facts, Next, Reason, ReasonCode},
    stream::EventBody,
};

pub mod external;
mod gang;
mod place_end;
mod preemption;
mod progress;
mod reports;
mod row;
pub mod trial;

pub use gang::{end_at, has_ended_at, is_ending, place_ended};
pub use place_end::PlaceEnd;
pub use preemption::preempt;
pub use progress::{Progress, Rung};
use reports::NOT_BEGUN;
pub use reports::{merge_points, report};
pub use row::{AttemptEnd, JobRow, Refused};

fn refused(state: JobState, detail: impl Into<String>) -> Refused {
    Refused { state, detail: detail.into() }
}

/// Where a forked job comes from.
#[derive(Debug, Clone, PartialEq)]
pub struct Fork {
    /// From which job and checkpoint, also for people.
    pub reason: Reason,
    /// The same, kept for ever.
    pub parent: Parent,
    /// The parent is private and the fork is not: who sees the fork may not see the parent.
    pub hides_parent: bool,
    /// Already in the new job's folder.
    pub checkpoint: CheckpointInfo,
}

/// Moves a job to `state`, for a reason that may have a consequence.
///
/// # Errors
/// A move that [`JobState::may_become`] does not know.
fn go(
    row: &mut JobRow,
    state: JobState,
    reason: Option<Reason>,
    next: Option<Next>,
    at: Timestamp,
) -> Result<EventBody, Refused> {
    if !row.job.state.may_become(state) {
        return Err(refused(row.job.state, format!("a job that is {} cannot become {state}", row.job.state)));
    }
    if !state.is_active() && row.fencing_token.take().is_some() {
        let trained = state == JobState::Succeeded || row.progress.trained.unwrap_or(true);
        row.ended = Some(AttemptEnd { state: attempt_state(state), reason: reason.clone(), trained });
    }
    if state.is_waiting() && !row.job.state.is_waiting() {
        row.waiting_since = Some(at);
    }
    let job = &mut row.job;
    match (job.state.is_active(), state.is_active()) {
        (false, true) => row.progress.begin(at),
        (true, false) => job.ran_secs = row.progress.end(at),
        _ => {}
    }
    job.state = state;
    job.set_reason(match (reason, next) {
        (Some(reason), Some(next)) => Some(reason.then(next)),
        (reason, _) => reason,
    });
    if !state.is_active() {
        job.eta_secs = None;
    }
    match state {
        JobState::Starting => {
            job.started_at.get_or_insert(at);
            job.finished_at = None;
        }
        JobState::Queued => job.finished_at = None,
        _ if state.is_final() => {
            job.finished_at = Some(at);
            row.stop = None;
            row.progress.over();
        }
        _ => {}
    }
    Ok(state_event(row))
}

/// How an attempt ended whose job is now in this state.
fn attempt_state(of_job: JobState) -> AttemptState {
    match of_job {
        JobState::Succeeded => AttemptState::Succeeded,
        JobState::Cancelled => AttemptState::Cancelled,
        JobState::Paused => AttemptState::Paused,
        JobState::Lost => AttemptState::Lost,
        JobState::Queued => AttemptState::Stopped,
        _ => AttemptState::Failed,
    }
}

fn state_event(row: &JobRow) -> EventBody {
    let job = &row.job;
    let (reason, cause) = (job.reason.clone(), job.cause.clone());
    EventBody::State { state: job.state, reason, cause, attempt: job.attempt }
}

/// A job was made, perhaps as a fork of another one: then its first checkpoint is there already.
pub fn created(row: &mut JobRow, fork: Option<&Fork>) -> Vec<EventBody> {
    row.job.set_reason(fork.map(|f| f.reason.clone()));
    let mut events = vec![state_event(row)];
    if let Some(Fork { checkpoint, .. }) = fork {
        row.progress.checkpoint = Some(checkpoint.step);
        let id = checkpoint_id(row, checkpoint.epoch, checkpoint.step);
        events.push(EventBody::Checkpoint { attempt: 0, id, checkpoint: checkpoint.clone() });
    }
    events
}

/// The next attempt was claimed: the caller has set attempt, fencing token and agents. `fewer`: with how many ranks and why, where it has
/// fewer than the job.
pub fn started(row: &mut JobRow, fewer: Option<Reason>, at: Timestamp) -> Result<Vec<EventBody>, Refused> {
    row.progress.trained = Some(false);
    row.progress.began_from = row.progress.checkpoint;
    row.progress.ends.clear();
    row.progress.unreachable.clear();
    Ok(vec![go(row, JobState::Starting, fewer, None, at)?])
}

/// Whether a waiting job says why it waits, and not how its last attempt ended, which is more useful to a user who can only wait.
pub fn tells_wait(job: &Job, reason: &Reason) -> bool {
    let continues = job.cause.as_ref().is_some_and(|c| matches!(c.next(), Some(Next::Continue { .. })));
    let never = *reason.code() == ReasonCode::UnreadableSpec;
    match job.state {
        JobState::Queued => never || job.attempt == 0 || !continues,
        JobState::Restarting => never,
        _ => false,
    }
}

/// Why a job still waits; no event when it is what the job says already, or when the job says how its last attempt
/// ended, which is more useful to a user who can only wait.
pub fn waits(row: &mut JobRow, reason: &Reason) -> Result<Vec<EventBody>, Refused> {
    let job = &mut row.job;
    if !tells_wait(job, reason) || job.reason.as_deref() == Some(reason.words()) {
        return Ok(Vec::new());
    }
    job.set_reason(Some(reason.clone()));
    Ok(vec![state_event(row)])
}

/// A user cancels the job. With `reachable` false no agent can be asked to stop its ranks: the job ends at once, and its agent
/// gets the order when it is back.
pub fn cancel(row: &mut JobRow, reachable: bool, at: Timestamp) -> Result<Vec<EventBody>, Refused> {
    let state = row.job.state;
    if state.is_final() {
        return Err(refused(state, format!("the job is already over: it is {state}")));
    }
    let reason: Reason = ReasonCode::CancelledByUser.into();
    if row.fencing_token.is_some() && reachable {
        if row.stop.is_some() {
            return Ok(Vec::new());
        }
        row.stop = Some(reason);
        row.job.set_reason(Some(ReasonCode::Cancelling.into()));
        return Ok(vec![state_event(row)]);
    }
    Ok(vec![go(row, JobState::Cancelled, Some(reason), None, at)?])
}

/// A user pauses the job: its ranks write a checkpoint and free their slots. If their agent is away, it gets the order when it is
/// back, or the ranks end with its lease.
pub fn pause(row: &mut JobRow, at: Timestamp) -> Result<Vec<EventBody>, Refused> {
    external::refuse_external(row, "paused")?;
    let state = row.job.state;
    match state {
        JobState::Queued | JobState::Restarting => Ok(vec![paused(row, None, at)?]),
        JobState::Starting | JobState::Running if row.stop.is_none() => {
            Ok(vec![go(row, JobState::Pausing, Some(ReasonCode::Pausing.into()), None, at)?])
        }
        JobState::Pausing => Ok(preemption::pause_instead(row)),
        _ => Err(refused(state, format!("the job is {state}; only one that waits or runs can be paused"))),
    }
}

/// A user resumes a paused job.
pub fn resume(row: &mut JobRow, at: Timestamp) -> Result<Vec<EventBody>, Refused> {
    external::refuse_external(row, "resumed")?;
    let state = row.job.state;
    if state != JobState::Paused {
        let hint = match state {
            JobState::Succeeded => "; to train longer, fork it with another train.epochs",
            state if state.is_final() => "; retry it instead",
            _ => "",
        };
        return Err(refused(state, format!("the job is {state}; only a paused one can be resumed{hint}")));
    }
    row.restarts = 0;
    row.progress.not_begun = 0;
    Ok(vec![queue(row, ReasonCode::ResumedByUser.into(), at)?])
}

/// Its ranks have ended as asked, or it had none.
fn paused(row: &mut JobRow, why: Option<&Reason>, at: Timestamp) -> Result<EventBody, Refused> {
    let facts = Facts { detail: why.map(|why| why.words().to_owned()), ..Facts::default() };
    let reason = Reason::new(ReasonCode::PausedByUser, facts);
    let next = Next::ContinueWhenResumed { from_step: row.progress.checkpoint };
    go(row, JobState::Paused, Some(reason), Some(next), at)
}

/// Queues the job, to continue from its newest checkpoint.
fn queue(row: &mut JobRow, reason: Reason, at: Timestamp) -> Result<EventBody, Refused> {
    let next = Next::Continue { from_step: row.progress.checkpoint };
    go(row, JobState::Queued, Some(reason), Some(next), at)
}

/// A user retries a failed or cancelled job from its newest checkpoint.
pub fn retry(row: &mut JobRow, at: Timestamp) -> Result<Vec<EventBody>, Refused> {
    external::refuse_external(row, "retried")?;
    let state = row.job.state;
    if !matches!(state, JobState::Failed | JobState::Cancelled) {
        return Err(refused(
            state,
            format!("the job is {state}; only a job that has failed or was cancelled can be retried"),
        ));
    }
    row.restarts = 0;
    row.progress.not_begun = 0;
    Ok(vec![queue(row, ReasonCode::RetriedByUser.into(), at)?])
}

/// Its agent was silent for longer than the lease, or came back without it.
pub fn lost(row: &mut JobRow, why: &Reason, at: Timestamp) -> Result<Vec<EventBody>, Refused> {
    if row.job.state == JobState::Pausing && row.stop.is_none() {
        return Ok(vec![preemption::set_aside(row, Some(why), at)?]);
    }
    let mut events = vec![go(row, JobState::Lost, Some(why.clone()), None, at)?];
    events.push(match row.stop.take() {
        Some(stop) => go(row, JobState::Cancelled, Some(stop), None, at)?,
        None => restart_or_fail(row, why.clone(), at)?,
    });
    Ok(events)
}

/// Its agent was stopped in an orderly way: back to the queue, not counted as a restart.
pub fn requeue(row: &mut JobRow, why: &Reason, at: Timestamp) -> Result<Vec<EventBody>, Refused> {
    let event = match row.stop.take() {
        Some(stop) => go(row, JobState::Cancelled, Some(stop), None, at)?,
        None if row.job.state == JobState::Pausing => preemption::set_aside(row, None, at)?,
        None => queue(row, why.clone(), at)?,
    };
    Ok(vec![event])
}

/// Something that it needs is gone before it could start.
pub fn cannot_start(row: &mut JobRow, why: &Reason, at: Timestamp) -> Result<Vec<EventBody>, Refused> {
    Ok(vec![go(row, JobState::Failed, Some(why.clone()), None, at)?])
}

/// A machine that was lost counts as a restart only where the attempt got no further than a checkpoint before it: a job on many
/// machines loses some of them in its time, and goes further with each attempt.
fn restart_or_fail(row: &mut JobRow, why: Reason, at: Timestamp) -> Result<EventBody, Refused> {
    // The order to start its ranks was lost with a connection: nothing was tried.
    let never_came = *why.code() == ReasonCode::StartLost
        && row.progress.trained == Some(false)
        && row.progress.not_begun < NOT_BEGUN;
    row.progress.not_begun += u32::from(never_came);
    let lost_machine = *why.code() == ReasonCode::AgentLost || !row.progress.unreachable.is_empty();
    let is_free = never_came || (lost_machine && row.progress.checkpoint > row.progress.began_from);
    if is_free || row.restarts < row.job.spec.recovery.max_restarts {
        row.restarts += u32::from(!is_free);
        let next = Next::Restart { attempt: row.job.attempt + 1, from_step: row.progress.checkpoint };
        return go(row, JobState::Restarting, Some(why), Some(next), at);
    }
    let next = Next::GiveUp { restarts: row.restarts };
    go(row, JobState::Failed, Some(why), Some(next), at)
}

fn checkpoint_id(row: &JobRow, epoch: u32, step: u64) -> String {
    format!("{}-{epoch}-{step}", row.job.id)
}
