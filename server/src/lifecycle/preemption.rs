//! Preemption by checkpoint: the ranks of a job write a checkpoint and end, because a job of higher priority takes their slots. The
//! job then waits again, and continues by itself. It counts as no failed attempt.

use super::{JobRow, Refused, go, paused, queue, state_event};
use jiff::Timestamp;
use lockstep_protocol::{
    job::{Job, JobState},
    reason::{Reason, ReasonKind},
    stream::EventBody,
};

/// Orders the ranks of a job to end for another one. Nothing changes when they are ending already, or when another version of the
/// program knows alone what state they are in. A private job is not named: those who see the one that gives way may not see it.
pub fn preempt(row: &mut JobRow, by: &Job, at: Timestamp) -> Result<Vec<EventBody>, Refused> {
    if !matches!(row.job.state, JobState::Starting | JobState::Running)
        || row.stop.is_some()
        || row.unknown_state.is_some()
    {
        return Ok(Vec::new());
    }
    let job = (!by.spec.private).then(|| by.id.as_str().into());
    let reason = ReasonKind::Preempting { job, priority: by.spec.priority };
    Ok(vec![go(row, JobState::Pausing, Some(reason.into()), None, at)?])
}

/// Whether its ranks are ending for another job's sake, and nobody has asked to pause it.
fn is_preempted(row: &JobRow) -> bool {
    matches!(row.job.cause.as_ref().map(Reason::kind), Some(ReasonKind::Preempting { .. }))
}

/// A user pauses a job that is being preempted: it will not continue by itself.
pub(super) fn pause_instead(row: &mut JobRow) -> Vec<EventBody> {
    if !is_preempted(row) {
        return Vec::new();
    }
    row.job.set_reason(Some(ReasonKind::Pausing.into()));
    vec![state_event(row)]
}

/// The ranks of a job that is pausing have ended, in order or (`why`) otherwise: it is paused, or waits again.
pub(super) fn set_aside(row: &mut JobRow, why: Option<&Reason>, at: Timestamp) -> Result<EventBody, Refused> {
    let Some(ReasonKind::Preempting { job, priority }) = row.job.cause.as_ref().map(Reason::kind) else {
        return paused(row, why, at);
    };
    let (job, priority) = (job.clone(), *priority);
    let reason = ReasonKind::Preempted { job, priority, detail: why.map(|why| why.words().into()) };
    queue(row, reason.into(), at)
}
