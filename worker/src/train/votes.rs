//! The votes of the ranks: whether to continue, and whether values are finite.
//! A stop concerns all ranks, which must end after the same step. So the ranks add up how many of them were asked to
//! stop. A few ranks vote after every step, which takes some microseconds. Many ranks vote about four times per second,
//! or after every step if a step takes longer. The step of the next vote follows from the mean duration of a step over
//! all ranks. That mean is part of the vote, so all ranks choose the same step.

use super::{Run, TrainError, replicas::compare_replicas, sharded_writer::ShardedWriter, step::InFlight};
use lockstep_comm::any_rank;
use lockstep_engine::StepResult;
use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

/// Maximum number of ranks that vote after every step.
const MAX_RANKS_EVERY_STEP: u32 = 16;
/// Time between two votes, as predicted from the duration of the last steps.
const VOTE_EVERY: Duration = Duration::from_millis(250);
/// Maximum number of steps between two votes, because the prediction fails if steps become slower.
const MAX_STEPS: u64 = 256;
/// Number of steps between two comparisons of the ranks' weights. Evaluations and checkpoints compare them, too, but an epoch
/// may take hours. A comparison waits for the steps in flight and takes less time than a step.
const COMPARE_EVERY_STEPS: u64 = 1000;

/// The votes of a sequence of steps (or of the batches of an evaluation), which are numbered from 1.
#[derive(Debug)]
pub(super) struct Votes {
    is_after_every_step: bool,
    /// The step of the next vote.
    next_step: u64,
    /// The time of the last vote, and its step.
    last_vote: (Instant, u64),
}

impl Votes {
    /// The votes of the steps after step `start_step`.
    pub(super) fn of_steps(world_size: u32, start_step: u64) -> Self {
        Self { is_after_every_step: world_size <= MAX_RANKS_EVERY_STEP, ..Self::timed(start_step) }
    }

    /// The votes of the steps after step `start_step`. Their due steps depend only on time, for any number of ranks.
    pub(super) fn timed(start_step: u64) -> Self {
        Self {
            is_after_every_step: false,
            next_step: start_step + 1,
            last_vote: (Instant::now(), start_step),
        }
    }

    /// Whether ranks vote after step `step`. The result is the same on every rank.
    pub(super) fn is_due(&self, step: u64) -> bool {
        self.is_after_every_step || step >= self.next_step
    }

    /// This rank's part of a vote after step `step`: the mean duration of a step since the last vote, in seconds.
    pub(super) fn step_secs(&self, step: u64) -> f64 {
        let (last_at, last_step) = self.last_vote;
        last_at.elapsed().as_secs_f64() / step.saturating_sub(last_step).max(1) as f64
    }

    /// Records that all ranks have voted after step `step`, and that their steps take `mean_secs`.
    pub(super) fn record(&mut self, step: u64, mean_secs: f64) {
        let steps = (VOTE_EVERY.as_secs_f64() / mean_secs.max(1e-9)) as u64;
        self.next_step = step + steps.clamp(1, MAX_STEPS);
        self.last_vote = (Instant::now(), step);
    }
}

/// The first step whose values were not finite and that was not skipped.
#[derive(Debug, Clone, Copy)]
pub(super) struct NotFinite {
    step: u64,
    lr: f32,
    /// Whether the loss of this rank was not finite. Otherwise only the gradient was not finite.
    is_loss: bool,
}

impl Run<'_> {
    /// Records the oldest step in flight if its `result` is not finite and it was not skipped. Only the first such step is kept.
    pub(super) fn record_not_finite(&mut self, result: Option<&StepResult>) {
        let Some(result) = result.filter(|result| !result.is_finite() && !result.is_skipped()) else {
            return;
        };
        if let Some(InFlight { step, lr, .. }) = self.in_flight.front() {
            let is_loss = !result.loss.is_finite();
            self.not_finite.get_or_insert(NotFinite { step: *step, lr: *lr, is_loss });
        }
    }

    /// Votes if a vote is due. Returns false, on all ranks, if some rank was asked to stop.
    ///
    /// # Errors
    /// As [`Run::vote_now`].
    pub(super) fn vote_if_due(&mut self) -> Result<bool, TrainError> {
        let is_due = self.votes.is_due(self.step)
            || self.step == self.plan.total_steps
            || self.step.is_multiple_of(self.plan.steps_per_epoch)
            || self.plan.has_checkpoint_after_step(self.step);
        if is_due { self.vote(is_due) } else { Ok(true) }
    }

    /// Votes before a checkpoint or an evaluation, so that non-finite values are not saved and no evaluation starts
    /// after a stop. Returns false, on all ranks, if some rank was asked to stop.
    ///
    /// # Errors
    /// [`TrainError::Diverged`] on all ranks if the values of any rank are not finite.
    pub(super) fn vote_now(&mut self) -> Result<bool, TrainError> {
        let is_due = false;
        self.vote(is_due)
    }

    /// Votes. Only votes that are due measure the duration of a step.
    fn vote(&mut self, is_due: bool) -> Result<bool, TrainError> {
        let group = &self.training.group;
        let stop = self.training.stop.load(Ordering::Relaxed);
        let is_not_finite = self.not_finite.is_some();
        let is_loss_not_finite = self.not_finite.is_some_and(|n| n.is_loss);
        let is_written = self.sharded_writer.as_ref().is_some_and(ShardedWriter::is_done);
        let own = [stop, is_not_finite, is_loss_not_finite, is_written].map(|vote| f64::from(u8::from(vote)));
        let mut votes = [own[0], own[1], own[2], own[3], self.votes.step_secs(self.step)];
        group.all_reduce((&mut votes).into())?;
        // The first four values are numbers of ranks, and the last value is a sum over all ranks.
        let [stopping, not_finite, loss_not_finite, written, step_secs] = votes;
        if is_due {
            self.votes.record(self.step, step_secs / f64::from(group.size()));
        }
        // Complete the checkpoint of earlier steps when all ranks have written their parts, or before the run ends.
        if written == f64::from(group.size()) || not_finite > 0.0 {
            let is_retry = false;
            let _ = self.complete_parts(is_retry)?;
        }
        if not_finite > 0.0 {
            let oldest = self.in_flight.front().map_or((self.step, 0.0), |u| (u.step, u.lr));
            let (step, lr) = self.not_finite.map_or(oldest, |n| (n.step, n.lr));
            let what = match (loss_not_finite as u32, group.size()) {
                (0, _) => "the gradient is not finite".into(),
                (_, 1) => "the loss is not finite".into(),
                (ranks, world_size) => format!("the loss is not finite on {ranks} of {world_size} ranks"),
            };
            return Err(TrainError::Diverged { what, step, epoch: self.plan.epoch_of(step), lr });
        }
        Ok(stopping == 0.0)
    }

    /// Fails on all ranks if any rank has weights, running statistics or optimizer state that are not finite, or has
    /// weights that differ from those of the other ranks.
    pub(super) fn check_state(&self) -> Result<(), TrainError> {
        let own = self.engine.first_invalid()?;
        if !any_rank(self.training.group.as_ref(), own.is_some())? {
            return self.check_replicas();
        }
        let found = own.unwrap_or_else(|| "a tensor of another rank".into());
        Err(self.diverged(found))
    }

    /// Compares the weights of ranks if a comparison is due.
    ///
    /// # Errors
    /// [`TrainError::ReplicasDiffer`] on all ranks, or [`TrainError::Diverged`] as [`Run::vote_now`].
    pub(super) fn compare_ranks_weights_if_due(&mut self) -> Result<(), TrainError> {
        if self.training.group.size() > 1 && self.step.is_multiple_of(COMPARE_EVERY_STEPS) {
            self.drain()?;
            self.check_replicas()?;
        }
        Ok(())
    }

    /// Fails on all ranks unless all ranks with the same part of the network have the same weights.
    fn check_replicas(&self) -> Result<(), TrainError> {
        match compare_replicas(self.training, &*self.engine)? {
            None => Ok(()),
            Some(what) => Err(TrainError::ReplicasDiffer { what, step: self.step }),
        }
    }

    /// The error for divergence at the newest step.
    pub(super) fn diverged(&self, what: String) -> TrainError {
        let (step, lr) = (self.step, self.schedule.lr(self.step.saturating_sub(1)));
        TrainError::Diverged { what, step, epoch: self.plan.epoch_of(step), lr }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_ranks_vote_every_step_and_many_four_times_per_second() {
        let mut few = Votes::of_steps(16, 0);
        few.record(1, 1e-3);
        assert!(few.is_due(2));

        let mut many = Votes::of_steps(17, 40);
        assert!(many.is_due(41), "no duration is known before the first vote");
        for (step_secs, next) in
            [(0.01, 25), (0.1, 2), (0.2, 1), (60.0, 1), (1e-6, MAX_STEPS), (f64::NAN, MAX_STEPS)]
        {
            many.record(100, step_secs);
            assert!(!many.is_due(100 + next - 1) && many.is_due(100 + next), "{step_secs} s: {many:?}");
            assert!(many.is_due(100 + next + 1), "a vote that was missed is due later");
        }
    }

    #[test]
    fn step_time_is_the_mean_since_the_last_vote() {
        let mut votes = Votes::timed(0);
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(20) {
            std::hint::spin_loop();
        }
        let secs = votes.step_secs(4);
        assert!(secs >= 0.005 && secs <= began.elapsed().as_secs_f64() / 2.0, "{secs}");
        let voted = Instant::now();
        votes.record(4, secs);
        let step_secs = votes.step_secs(5);
        assert!(step_secs <= voted.elapsed().as_secs_f64(), "{step_secs}");
    }
}
