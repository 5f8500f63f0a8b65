//! When ranks vote on whether to go on.
//!
//! A stop concerns all ranks, and they must end after the same step, so they add up who was told. Few ranks do so after
//! every step: it costs them some microseconds. Many vote about four times a second, or after every step where that takes
//! longer. The step to vote at next follows from the mean time of a step over all ranks, which is part of the vote: so
//! all ranks come to the same one.

use std::time::{Duration, Instant};

/// Up to this many ranks vote after every step.
const FEW_RANKS: u32 = 16;
/// Between two votes, while steps take as long as they did.
const EVERY: Duration = Duration::from_millis(250);
/// Steps between two votes at most: the next steps may be slower than the ones before.
const MOST_STEPS: u64 = 256;

/// The votes of a run of steps (or of an evaluation's batches), which are counted from 1.
#[derive(Debug)]
pub(super) struct Votes {
    after_every_step: bool,
    /// The step to vote at.
    next: u64,
    /// When the last one was, and after which step.
    last: (Instant, u64),
}

impl Votes {
    /// Of steps after number `done`.
    pub(super) fn of_steps(world_size: u32, done: u64) -> Self {
        Self { after_every_step: world_size <= FEW_RANKS, ..Self::timed(done) }
    }

    /// By time alone, whatever the number of ranks.
    pub(super) fn timed(done: u64) -> Self {
        Self { after_every_step: false, next: done + 1, last: (Instant::now(), done) }
    }

    /// Whether ranks vote after step `step`; the same on every rank.
    pub(super) fn is_due(&self, step: u64) -> bool {
        self.after_every_step || step >= self.next
    }

    /// This rank's part of a vote after step `step`: seconds a step since the last one.
    pub(super) fn step_secs(&self, step: u64) -> f64 {
        let (at, before) = self.last;
        at.elapsed().as_secs_f64() / step.saturating_sub(before).max(1) as f64
    }

    /// All ranks have voted after step `step`, and their steps take `mean_secs`.
    pub(super) fn voted(&mut self, step: u64, mean_secs: f64) {
        let steps = (EVERY.as_secs_f64() / mean_secs.max(1e-9)) as u64;
        self.next = step + steps.clamp(1, MOST_STEPS);
        self.last = (Instant::now(), step);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_ranks_vote_after_every_step_and_many_about_four_times_a_second() {
        let mut few = Votes::of_steps(16, 0);
        few.voted(1, 1e-3);
        assert!(few.is_due(2));

        let mut many = Votes::of_steps(17, 40);
        assert!(many.is_due(41), "the first step, whose time nobody knows");
        for (step_secs, next) in
            [(0.01, 25), (0.1, 2), (0.2, 1), (60.0, 1), (1e-6, MOST_STEPS), (f64::NAN, MOST_STEPS)]
        {
            many.voted(100, step_secs);
            assert!(!many.is_due(100 + next - 1) && many.is_due(100 + next), "{step_secs} s: {many:?}");
            assert!(many.is_due(100 + next + 1), "one that was passed by is made up for");
        }
    }

    #[test]
    fn the_time_of_a_step_is_the_mean_since_the_last_vote() {
        let mut votes = Votes::timed(0);
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(20) {
            std::hint::spin_loop();
        }
        let secs = votes.step_secs(4);
        assert!(secs >= 0.005 && secs <= began.elapsed().as_secs_f64() / 2.0, "{secs}");
        let voted = Instant::now();
        votes.voted(4, secs);
        let anew = votes.step_secs(5);
        assert!(anew <= voted.elapsed().as_secs_f64(), "{anew}");
    }
}
