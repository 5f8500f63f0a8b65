//! Trials of sweeps: jobs that pause at a rung, after an epoch at which their sweep compares them. The sweep then resumes or ends them
//! (`sweeps/decide.rs`).

use super::{ChangeResult, JobRow, Refusal, change_state, progress::Rung, queue_anew, refusal};
use jiff::Timestamp;
use lockstep_protocol::{
    job::JobState,
    reason::{Next, ReasonKind},
};

/// Whether the stopped ranks of a trial have reached its rung, so that a checkpoint of that epoch exists.
pub(super) fn is_at_rung(row: &JobRow) -> bool {
    let (steps, newest) = (row.job.steps_per_epoch, row.progress.checkpoint);
    row.progress.pause_after.is_some_and(|epoch| steps > 0 && newest >= Some(u64::from(epoch) * steps))
}

/// Returns the results of a trial after `epoch`, its newest epoch.
pub fn rung(row: &JobRow, epoch: u32) -> Rung {
    let JobRow { job, progress, .. } = row;
    Rung {
        epoch,
        val_accuracy: job.last.val_accuracy.and(job.best).map(|best| best.value),
        val_loss: job.last.val_loss.map(|last| progress.lowest_val_loss.unwrap_or(last)),
    }
}

/// Pauses a trial whose ranks have stopped at its rung.
pub(super) fn pause_at_rung(row: &mut JobRow, at: Timestamp) -> ChangeResult {
    let epoch = row.progress.pause_after.take().unwrap_or(row.job.epoch);
    let reached = rung(row, epoch);
    row.progress.rungs.push(reached);
    change_state(row, JobState::Pausing, None, None, at)?;
    let next = Next::ContinueWhenResumed { from_step: row.progress.checkpoint };
    change_state(row, JobState::Paused, Some(ReasonKind::PausedBySweep { epoch }.into()), Some(next), at)
}

/// Refuses a request to resume a trial that waits at a rung, because the trial would continue without a comparison.
pub(super) fn refuse_at_rung(row: &JobRow) -> Result<(), Refusal> {
    let Some(trial) = row.job.trial.as_ref().filter(|_| row.job.waits_for_sweep()) else { return Ok(()) };
    let detail = format!(
        "the job is trial {} of {sweep} and waits at a rung, where its sweep compares it with other trials and then resumes or ends it; \
         if the sweep is paused, resume it with `lockstep sweep resume {sweep}`; a trial that the sweep ends can be retried after the \
         sweep has ended",
        trial.number,
        sweep = trial.sweep,
    );
    Err(refusal(row.job.state, detail))
}

/// Checks that a trial waits at a rung for its sweep.
fn require_waiting(row: &JobRow) -> Result<(), Refusal> {
    if row.job.waits_for_sweep() {
        return Ok(());
    }
    Err(refusal(row.job.state, "the trial does not wait for its sweep"))
}

/// Resumes a trial for its sweep, to the end of epoch `pause_after`, or to the end of training.
pub fn promote(row: &mut JobRow, pause_after: Option<u32>, at: Timestamp) -> ChangeResult {
    require_waiting(row)?;
    row.progress.pause_after = pause_after;
    queue_anew(row, ReasonKind::ResumedBySweep, at)
}

/// Ends a trial for its sweep, because other trials are better.
pub fn end(row: &mut JobRow, at: Timestamp) -> ChangeResult {
    require_waiting(row)?;
    change_state(row, JobState::Cancelled, Some(ReasonKind::EndedBySweep.into()), None, at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lifecycle::{pause, report, resume};
    use lockstep_protocol::{
        agent::{AttemptEvent, Evaluation},
        job::TrialOf,
    };

    #[test]
    fn trials_are_compared_by_the_best_of_their_validations() {
        let (mut row, at) = (JobRow::queued(), Timestamp::UNIX_EPOCH);
        let mut compared_by = |accuracy, loss| {
            let evaluation = Evaluation { epoch: 1, step: 10, samples: 200, accuracy, loss, secs: 0.1 };
            report(&mut row, AttemptEvent::Evaluation(evaluation), None, at).unwrap();
            let Rung { val_accuracy, val_loss, .. } = rung(&row, 1);
            (val_accuracy, val_loss)
        };
        assert_eq!(compared_by(0.5, 1.0), (Some(0.5), Some(1.0)));
        assert_eq!(compared_by(0.75, 1.5), (Some(0.75), Some(1.0)));
        assert_eq!(compared_by(0.25, 0.5), (Some(0.75), Some(0.5)));
        assert_eq!(compared_by(0.25, f64::NAN), (None, None), "a trial that has diverged is the worst");
    }

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
