//! The rules by which reports, requests and time change a job. The functions are pure: each edits a [`JobRow`] and returns the events to
//! store. A store runs them inside transactions, so every database uses the same rules. Transitions between states are in this file, and
//! the effects of reports in `lifecycle/reports.rs`.

use jiff::Timestamp;
use lockstep_protocol::{
    agent::CheckpointInfo,
    attempt::AttemptState,
    job::{Job, JobState, Parent},
    reason::{Next, Reason, ReasonKind},
    stream::EventBody,
};

mod end_on_agent;
pub mod external;
mod preemption;
mod progress;
mod reports;
mod row;
pub mod trial;

pub use end_on_agent::{EndOnAgent, find_end_on_agent, is_ending, record_end_on_agent};
pub use preemption::preempt;
pub use progress::{Progress, Rung};
use reports::MAX_NOT_BEGUN;
pub use reports::{merge_points, report};
pub use row::{AttemptEnd, JobRow, Refusal};

/// The events of a change, which the caller stores, or why the change is refused.
pub type ChangeResult = Result<Vec<EventBody>, Refusal>;

fn refusal(state: JobState, detail: impl Into<String>) -> Refusal {
    Refusal { state, detail: detail.into() }
}

/// The origin of a forked job.
#[derive(Debug, Clone, PartialEq)]
pub struct Fork {
    /// The first reason of the fork, which names the parent job and checkpoint.
    pub reason: Reason,
    /// The parent job and checkpoint, which are kept as long as the fork.
    pub parent: Parent,
    /// Whether the parent is private and the fork is not. Then people who can see the fork may have no access to the parent.
    pub hides_parent: bool,
    /// The checkpoint, which is already in the new job's folder.
    pub checkpoint: CheckpointInfo,
}

/// Changes the state of a job, and returns the event of the change. `next` is the consequence of `reason`.
///
/// # Errors
/// [`JobState::may_become`] does not allow the transition.
fn change_state(
    row: &mut JobRow,
    state: JobState,
    reason: Option<Reason>,
    next: Option<Next>,
    at: Timestamp,
) -> ChangeResult {
    if !row.job.state.may_become(state) {
        return Err(refusal(row.job.state, format!("a job that is {} cannot become {state}", row.job.state)));
    }
    if !state.is_active() && row.fencing_token.take().is_some() {
        let has_trained = state == JobState::Succeeded || row.progress.trained;
        row.attempt_end =
            Some(AttemptEnd { state: attempt_state(state), reason: reason.clone(), has_trained });
    }
    if state.is_waiting() && !row.job.state.is_waiting() {
        row.waiting_since = Some(at);
    }
    let job = &mut row.job;
    if state.is_active() && !job.state.is_active() {
        row.progress.began = Some(at);
    } else if job.state.is_active() && !state.is_active() {
        job.ran_secs = row.progress.end_attempt(at);
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
            row.cancel_reason = None;
            row.progress.others.clear();
        }
        _ => {}
    }
    Ok(vec![state_event(row)])
}

/// The final state of an attempt, from the state to which its job has changed.
fn attempt_state(job_state: JobState) -> AttemptState {
    match job_state {
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

/// The first events of a new job. A fork begins with a checkpoint.
pub fn first_events(row: &mut JobRow, fork: Option<&Fork>) -> Vec<EventBody> {
    row.job.set_reason(fork.map(|f| f.reason.clone()));
    let mut events = vec![state_event(row)];
    if let Some(Fork { checkpoint, .. }) = fork {
        row.progress.checkpoint = Some(checkpoint.step);
        let id = checkpoint_id(row, checkpoint.epoch, checkpoint.step);
        events.push(EventBody::Checkpoint { attempt: 0, id, checkpoint: checkpoint.clone() });
    }
    events
}

/// Starts the next attempt. The caller has set attempt, fencing token and agents. `fewer_ranks_reason` is the reason if the attempt has
/// fewer ranks than the job.
pub fn start_attempt(row: &mut JobRow, fewer_ranks_reason: Option<Reason>, at: Timestamp) -> ChangeResult {
    row.progress.trained = false;
    row.progress.began_from = row.progress.checkpoint;
    row.progress.ends.clear();
    row.progress.unreachable.clear();
    change_state(row, JobState::Starting, fewer_ranks_reason, None, at)
}

/// Whether a waiting job shows `reason`, the reason why it waits. Otherwise the job shows how its last attempt ended, which tells a user
/// more if the job will start again by itself.
pub fn shows_wait_reason(job: &Job, reason: &Reason) -> bool {
    let continues = job.cause.as_ref().is_some_and(|c| matches!(c.next(), Some(Next::Continue { .. })));
    let cannot_start = matches!(reason.kind(), ReasonKind::UnreadableSpec { .. });
    match job.state {
        JobState::Queued => cannot_start || job.attempt == 0 || !continues,
        JobState::Restarting => cannot_start,
        _ => false,
    }
}

/// Sets the reason why a job still waits. Returns no event if the job shows this reason already, or if it shows how its last attempt ended
/// ([`shows_wait_reason`]).
pub fn set_wait_reason(row: &mut JobRow, reason: &Reason) -> ChangeResult {
    let job = &mut row.job;
    if !shows_wait_reason(job, reason) || job.reason.as_deref() == Some(reason.words()) {
        return Ok(Vec::new());
    }
    job.set_reason(Some(reason.clone()));
    Ok(vec![state_event(row)])
}

/// Cancels a job for a user. If no agent of the job is reachable to stop its ranks, the job ends at once, and the agents get the order when
/// they reconnect.
pub fn cancel(row: &mut JobRow, is_agent_reachable: bool, at: Timestamp) -> ChangeResult {
    let state = row.job.state;
    if state.is_final() {
        return Err(refusal(state, format!("the job has already ended: it {}", state.predicate())));
    }
    let reason: Reason = ReasonKind::CancelledByUser { detail: None }.into();
    if row.fencing_token.is_some() && is_agent_reachable {
        if row.cancel_reason.is_some() {
            return Ok(Vec::new());
        }
        row.cancel_reason = Some(reason);
        row.job.set_reason(Some(ReasonKind::Cancelling.into()));
        return Ok(vec![state_event(row)]);
    }
    change_state(row, JobState::Cancelled, Some(reason), None, at)
}

/// Pauses a job for a user: its ranks write a checkpoint and free their slots. An unreachable agent gets the order when it reconnects, or
/// its ranks end when the lease expires.
pub fn pause(row: &mut JobRow, at: Timestamp) -> ChangeResult {
    external::refuse_external(&row.job, "paused")?;
    let state = row.job.state;
    match state {
        JobState::Queued | JobState::Restarting => become_paused(row, None, at),
        JobState::Starting | JobState::Running if row.cancel_reason.is_none() => {
            change_state(row, JobState::Pausing, Some(ReasonKind::Pausing.into()), None, at)
        }
        JobState::Pausing => Ok(preemption::pause_instead(row)),
        _ => {
            let detail =
                format!("the job {}; only a waiting or running job can be paused", state.predicate());
            Err(refusal(state, detail))
        }
    }
}

/// Ends the refusal of a request to continue a job that has succeeded.
const TRAIN_LONGER: &str = "; to train longer, fork it with another train.epochs";

/// Resumes a paused job for a user.
pub fn resume(row: &mut JobRow, at: Timestamp) -> ChangeResult {
    external::refuse_external(&row.job, "resumed")?;
    trial::refuse_at_rung(row)?;
    let state = row.job.state;
    if state != JobState::Paused {
        let hint = match state {
            JobState::Succeeded => TRAIN_LONGER,
            state if state.is_final() => "; retry it instead",
            _ => "",
        };
        let detail = format!("the job {}; only a paused job can be resumed{hint}", state.predicate());
        return Err(refusal(state, detail));
    }
    queue_anew(row, ReasonKind::ResumedByUser, at)
}

/// Changes a job without running ranks to `paused`. `why` is the reason if its ranks have not ended in an orderly way.
fn become_paused(row: &mut JobRow, why: Option<&Reason>, at: Timestamp) -> ChangeResult {
    let reason = ReasonKind::PausedByUser { detail: why.map(|why| why.words().into()) };
    let next = Next::ContinueWhenResumed { from_step: row.progress.checkpoint };
    change_state(row, JobState::Paused, Some(reason.into()), Some(next), at)
}

/// Queues a job, to continue from its newest checkpoint.
fn queue(row: &mut JobRow, reason: Reason, at: Timestamp) -> ChangeResult {
    let next = Next::Continue { from_step: row.progress.checkpoint };
    change_state(row, JobState::Queued, Some(reason), Some(next), at)
}

/// Queues a job to continue, and forgets earlier restarts. Without a known checkpoint, the reason names no step, because the next start may
/// find a checkpoint that no rank has reported.
fn queue_anew(row: &mut JobRow, reason: ReasonKind, at: Timestamp) -> ChangeResult {
    row.restarts = 0;
    row.progress.not_begun = 0;
    let next = row.progress.checkpoint.map(|step| Next::Continue { from_step: Some(step) });
    change_state(row, JobState::Queued, Some(reason.into()), next, at)
}

/// Retries a failed or cancelled job from its newest checkpoint, for a user.
pub fn retry(row: &mut JobRow, at: Timestamp) -> ChangeResult {
    external::refuse_external(&row.job, "retried")?;
    let state = row.job.state;
    if !matches!(state, JobState::Failed | JobState::Cancelled) {
        let hint = if state == JobState::Succeeded { TRAIN_LONGER } else { "" };
        let detail = format!(
            "the job {}; only a job that has failed or was cancelled can be retried{hint}",
            state.predicate()
        );
        return Err(refusal(state, detail));
    }
    queue_anew(row, ReasonKind::RetriedByUser, at)
}

/// Ends an attempt whose agent was silent for longer than the lease, or has reconnected without the attempt's ranks.
pub fn end_lost_attempt(row: &mut JobRow, why: &Reason, at: Timestamp) -> ChangeResult {
    if row.job.state == JobState::Pausing && row.cancel_reason.is_none() {
        return preemption::pause_or_requeue(row, Some(why), at);
    }
    let mut events = change_state(row, JobState::Lost, Some(why.clone()), None, at)?;
    events.extend(match row.cancel_reason.take() {
        Some(reason) => change_state(row, JobState::Cancelled, Some(reason), None, at)?,
        None => restart_or_fail(row, why.clone(), at)?,
    });
    Ok(events)
}

/// Returns a job to the queue without counting a restart, such as when its agent was stopped in an orderly way.
pub fn requeue(row: &mut JobRow, why: &Reason, at: Timestamp) -> ChangeResult {
    match row.cancel_reason.take() {
        Some(reason) => change_state(row, JobState::Cancelled, Some(reason), None, at),
        None if row.job.state == JobState::Pausing => preemption::pause_or_requeue(row, None, at),
        None => queue(row, why.clone(), at),
    }
}

/// Fails a job that could not start because one of its requirements no longer exists.
pub fn fail_to_start(row: &mut JobRow, why: &Reason, at: Timestamp) -> ChangeResult {
    change_state(row, JobState::Failed, Some(why.clone()), None, at)
}

/// Restarts a job after a failed attempt, or fails the job if it has no restarts left. The loss of a machine does not count as a restart if
/// the attempt has written a newer checkpoint, because a job on many machines loses machines from time to time, but makes progress in each
/// attempt.
fn restart_or_fail(row: &mut JobRow, why: Reason, at: Timestamp) -> ChangeResult {
    // No rank has run, because the order to start ranks was lost with a connection.
    let start_was_lost = matches!(why.kind(), ReasonKind::StartLost { .. })
        && !row.progress.trained
        && row.progress.not_begun < MAX_NOT_BEGUN;
    row.progress.not_begun += u32::from(start_was_lost);
    let has_lost_machine =
        matches!(why.kind(), ReasonKind::AgentLost { .. }) || !row.progress.unreachable.is_empty();
    let is_forgiven = has_lost_machine && row.progress.checkpoint > row.progress.began_from;
    let is_restart = !start_was_lost && !is_forgiven;
    if !is_restart || row.restarts < row.job.spec.recovery.max_restarts {
        row.restarts += u32::from(is_restart);
        // For these reasons, ranks may have written newer checkpoints that their agent has not reported.
        let or_newer =
            matches!(why.kind(), ReasonKind::AgentLost { .. } | ReasonKind::AgentWithoutRanks { .. });
        let (attempt, from_step) = (row.job.attempt + 1, row.progress.checkpoint);
        let next = Next::Restart { attempt, from_step, or_newer };
        return change_state(row, JobState::Restarting, Some(why), Some(next), at);
    }
    let next = Next::GiveUp { restarts: row.restarts };
    change_state(row, JobState::Failed, Some(why), Some(next), at)
}

fn checkpoint_id(row: &JobRow, epoch: u32, step: u64) -> String {
    format!("{}-{epoch}-{step}", row.job.id)
}
