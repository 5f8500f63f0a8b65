//! Preemption by checkpoint: the ranks of a job write a checkpoint and end, because a job of higher priority takes their slots. The
//! preempted job then waits again and continues by itself. Preemption does not count as a failed attempt.

use super::{ChangeResult, JobRow, become_paused, change_state, queue, state_event};
use jiff::Timestamp;
use lockstep_protocol::{
    job::{Job, JobState},
    reason::{Reason, ReasonKind},
    stream::EventBody,
};

/// Orders the ranks of a job to end for the job `preemptor`. Nothing changes if the ranks are ending already, or if this version does not
/// know the job's stored state. The reason does not name a private `preemptor`, because others may see the preempted job.
pub fn preempt(row: &mut JobRow, preemptor: &Job, at: Timestamp) -> ChangeResult {
    if !matches!(row.job.state, JobState::Starting | JobState::Running)
        || row.cancel_reason.is_some()
        || row.unknown_state.is_some()
    {
        return Ok(Vec::new());
    }
    let job = (!preemptor.spec.private).then(|| preemptor.id.as_str().into());
    let reason = ReasonKind::Preempting { job, priority: preemptor.spec.priority };
    change_state(row, JobState::Pausing, Some(reason.into()), None, at)
}

/// Pauses a job that is being preempted, for a user. The job then does not continue by itself. Nothing changes for a job that a user has
/// paused.
pub(super) fn pause_instead(row: &mut JobRow) -> Vec<EventBody> {
    if !matches!(row.job.cause.as_ref().map(Reason::kind), Some(ReasonKind::Preempting { .. })) {
        return Vec::new();
    }
    row.job.set_reason(Some(ReasonKind::Pausing.into()));
    vec![state_event(row)]
}

/// Handles the end of the ranks of a pausing job: the job is paused, or queued again if it was preempted. `why` is the reason if the ranks
/// have not ended in an orderly way.
pub(super) fn pause_or_requeue(row: &mut JobRow, why: Option<&Reason>, at: Timestamp) -> ChangeResult {
    let Some(ReasonKind::Preempting { job, priority }) = row.job.cause.as_ref().map(Reason::kind) else {
        return become_paused(row, why, at);
    };
    let (job, priority) = (job.clone(), *priority);
    let reason = ReasonKind::Preempted { job, priority, detail: why.map(|why| why.words().into()) };
    queue(row, reason.into(), at)
}
