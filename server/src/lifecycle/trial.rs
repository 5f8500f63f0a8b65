//! Trials of sweeps: jobs that pause by themselves after an epoch, where their sweep compares them, and that continue or end as it
//! decides (`sweeps/decide.rs`).

use super::{JobRow, Refused, go, progress::Rung, queue, refused};
use jiff::Timestamp;
use lockstep_protocol::{
    job::JobState,
    reason::{Next, Reason, ReasonKind},
    stream::EventBody,
};

/// Whether the ranks of a trial, which have stopped, have done so at its rung: a checkpoint of that epoch is there.
pub(super) fn is_at_rung(row: &JobRow) -> bool {
    let (steps, written) = (row.job.steps_per_epoch, row.progress.checkpoint);
    row.progress.pause_after.is_some_and(|epoch| steps > 0 && written >= Some(u64::from(epoch) * steps))
}

/// The ranks of a trial have stopped at its rung.
pub(super) fn reached(row: &mut JobRow, at: Timestamp) -> Result<EventBody, Refused> {
    let epoch = row.progress.pause_after.take().unwrap_or(row.job.epoch);
    let last = &row.job.last;
    row.progress.rungs.push(Rung { epoch, val_accuracy: last.val_accuracy, val_loss: last.val_loss });
    go(row, JobState::Pausing, None, None, at)?;
    let next = Next::ContinueWhenResumed { from_step: row.progress.checkpoint };
    go(row, JobState::Paused, Some(ReasonKind::PausedBySweep { epoch }.into()), Some(next), at)
}

/// Whether a job is paused for this reason by its sweep, and not by a person.
pub(crate) fn is_paused_by_sweep(reason: Option<&Reason>) -> bool {
    reason.is_some_and(|reason| matches!(reason.kind(), ReasonKind::PausedBySweep { .. }))
}

/// Checks that a trial waits at a rung for its sweep.
fn require_waiting(row: &JobRow) -> Result<(), Refused> {
    match row.job.state == JobState::Paused && is_paused_by_sweep(row.job.cause.as_ref()) {
        true => Ok(()),
        false => Err(refused(row.job.state, "the trial does not wait for its sweep")),
    }
}

/// The sweep lets a trial train on, to the end of an epoch or of its training.
pub fn promote(row: &mut JobRow, pause_after: Option<u32>, at: Timestamp) -> Result<Vec<EventBody>, Refused> {
    require_waiting(row)?;
    row.restarts = 0;
    row.progress.not_begun = 0;
    row.progress.pause_after = pause_after;
    Ok(vec![queue(row, ReasonKind::ResumedBySweep.into(), at)?])
}

/// The sweep ends a trial: others are better.
pub fn end(row: &mut JobRow, at: Timestamp) -> Result<Vec<EventBody>, Refused> {
    require_waiting(row)?;
    Ok(vec![go(row, JobState::Cancelled, Some(ReasonKind::EndedBySweep.into()), None, at)?])
}
