//! Trials of sweeps: jobs that pause at a rung, after an epoch at which their sweep compares them. The sweep then resumes or ends them
//! (`sweeps/decide.rs`).

use super::{JobRow, Refused, change_state, progress::Rung, queue_anew, refused};
use jiff::Timestamp;
use lockstep_protocol::{
    job::JobState,
    reason::{Next, ReasonKind},
    stream::EventBody,
};

/// Whether the stopped ranks of a trial have reached its rung: a checkpoint of that epoch exists.
pub(super) fn is_at_rung(row: &JobRow) -> bool {
    let (steps, newest) = (row.job.steps_per_epoch, row.progress.checkpoint);
    row.progress.pause_after.is_some_and(|epoch| steps > 0 && newest >= Some(u64::from(epoch) * steps))
}

/// Pauses a trial whose ranks have stopped at its rung.
pub(super) fn pause_at_rung(row: &mut JobRow, at: Timestamp) -> Result<EventBody, Refused> {
    let epoch = row.progress.pause_after.take().unwrap_or(row.job.epoch);
    let last = &row.job.last;
    row.progress.rungs.push(Rung { epoch, val_accuracy: last.val_accuracy, val_loss: last.val_loss });
    change_state(row, JobState::Pausing, None, None, at)?;
    let next = Next::ContinueWhenResumed { from_step: row.progress.checkpoint };
    change_state(row, JobState::Paused, Some(ReasonKind::PausedBySweep { epoch }.into()), Some(next), at)
}

/// Refuses a request to resume a trial that waits at a rung, because the trial would continue without a comparison.
pub(super) fn refuse_at_rung(row: &JobRow) -> Result<(), Refused> {
    let Some(trial) = row.job.trial.as_ref().filter(|_| row.job.waits_for_sweep()) else { return Ok(()) };
    let detail = format!(
        "the job is trial {} of {sweep} and waits at a rung, where its sweep compares it with other trials and then resumes or ends it; \
         if the sweep is paused, resume it with `lockstep sweep resume {sweep}`; a trial that the sweep ends can be retried after the sweep has ended",
        trial.number,
        sweep = trial.sweep,
    );
    Err(refused(row.job.state, detail))
}

/// Checks that a trial waits at a rung for its sweep.
fn require_waiting(row: &JobRow) -> Result<(), Refused> {
    match row.job.waits_for_sweep() {
        true => Ok(()),
        false => Err(refused(row.job.state, "the trial does not wait for its sweep")),
    }
}

/// Resumes a trial for its sweep, to the end of epoch `pause_after`, or to the end of training.
pub fn promote(row: &mut JobRow, pause_after: Option<u32>, at: Timestamp) -> Result<Vec<EventBody>, Refused> {
    require_waiting(row)?;
    row.progress.pause_after = pause_after;
    queue_anew(row, ReasonKind::ResumedBySweep, at)
}

/// Ends a trial for its sweep, because other trials are better.
pub fn end(row: &mut JobRow, at: Timestamp) -> Result<Vec<EventBody>, Refused> {
    require_waiting(row)?;
    Ok(vec![change_state(row, JobState::Cancelled, Some(ReasonKind::EndedBySweep.into()), None, at)?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lifecycle::{pause, resume};
    use lockstep_protocol::job::TrialOf;

    #[test]
    fn users_resume_trials_between_rungs_and_only_the_sweep_at_a_rung() {
        let (mut row, at) = (JobRow::queued(), Timestamp::UNIX_EPOCH);
        row.job.trial = Some(TrialOf { sweep: "sweep-1".into(), number: 2 });
        row.progress.pause_after = Some(1);
        pause(&mut row, at).unwrap();
        resume(&mut row, at).unwrap();
        assert_eq!((row.job.state, row.progress.pause_after), (JobState::Queued, Some(1)));
        row.job.state = JobState::Running;
        pause_at_rung(&mut row, at).unwrap();
        let waiting = row.clone();
        let detail = resume(&mut row, at).unwrap_err().detail;
        assert!(detail.contains("`lockstep sweep resume sweep-1`"), "{detail}");
        assert_eq!(row, waiting);
        promote(&mut row, Some(3), at).unwrap();
        assert_eq!((row.job.state, row.progress.pause_after), (JobState::Queued, Some(3)));
    }
}
