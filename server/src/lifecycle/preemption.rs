//! Preemption by checkpoint: the ranks of a job write a checkpoint and end, because a job of higher priority takes their slots. The
//! job then waits again, and continues by itself. It counts as no failed attempt.

use super::{JobRow, Refused, go, paused, queue, state_event};
use jiff::Timestamp;
use lockstep_protocol::{
    job::{Job, JobState},
    reason::{Facts, Reason, ReasonCode},
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
    let job = (!by.spec.private).then(|| by.id.to_string());
    let facts = Facts { job, priority: Some(by.spec.priority), ..Facts::default() };
    let reason = Reason::new(ReasonCode::Preempting, facts);
    Ok(vec![go(row, JobState::Pausing, Some(reason), None, at)?])
}

/// Whether its ranks are ending for another job's sake, and nobody has asked to pause it.
fn is_preempted(row: &JobRow) -> bool {
    row.job.cause.as_ref().is_some_and(|cause| *cause.code() == ReasonCode::Preempting)
}

/// A user pauses a job that is being preempted: it will not continue by itself.
pub(super) fn pause_instead(row: &mut JobRow) -> Vec<EventBody> {
    if !is_preempted(row) {
        return Vec::new();
    }
    row.job.set_reason(Some(ReasonCode::Pausing.into()));
    vec![state_event(row)]
}

/// The ranks of a job that is pausing have ended, in order or (`why`) otherwise: it is paused, or waits again.
pub(super) fn set_aside(row: &mut JobRow, why: Option<&Reason>, at: Timestamp) -> Result<EventBody, Refused> {
    let Some(cause) = row.job.cause.clone().filter(|_| is_preempted(row)) else {
        return paused(row, why, at);
    };
    let facts = Facts { detail: why.map(|why| why.words().to_owned()), ..cause.facts().clone() };
    queue(row, Reason::new(ReasonCode::Preempted, facts), at)
}
