//! Which pictures a rank sees, and when.
//!
//! An epoch is one seeded permutation of the training split, the same on every rank. Step `s` takes
//! the next `global` pictures of it; they are cut into equal runs in the order (micro-batch, rank).
//! So the pictures of a step are the same at any number of ranks, and shards never overlap.

use super::random::Random;
use std::ops::Range;

/// What a random stream is for, so that streams of one seed differ.
const SHUFFLE: u64 = 1;

/// Which batches of an epoch a rank wants.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EpochPlan {
    /// From 0.
    pub epoch: u32,
    /// Optimizer step within the epoch to start at, from 0.
    pub first_step: u64,
    /// From 0.
    pub rank: u32,
    /// At least 1.
    pub world_size: u32,
    /// Pictures of a rank in a micro-batch.
    pub batch_size: usize,
    /// Micro-batches a step.
    pub accumulate: usize,
    /// Leave out the last, smaller step.
    pub drop_remainder: bool,
    /// Threads that prepare batches.
    pub threads: usize,
}

/// The order of the training pictures in `epoch` (from 0).
pub(super) fn epoch_order(samples: usize, seed: u64, epoch: u32) -> Vec<u32> {
    Random::new(&[seed, SHUFFLE, u64::from(epoch)]).permutation(samples)
}

/// Steps of an epoch over `samples` pictures.
pub(super) fn steps_per_epoch(samples: usize, plan: &EpochPlan) -> u64 {
    let global = global_batch(plan);
    (if plan.drop_remainder { samples / global } else { samples.div_ceil(global) }) as u64
}

/// Places in the epoch's order of micro-batch `micro` of step `step` for the plan's rank. Places past
/// the end stand for the epoch's first pictures again: they fill up a last step that is too small
/// to give every rank one.
pub(super) fn places(samples: usize, plan: &EpochPlan, step: u64, micro: usize) -> Range<usize> {
    let part = micro * plan.world_size as usize + plan.rank as usize;
    run(samples, plan, step, part..part + 1)
}

/// Pictures of micro-batch `micro` of step `step` on all ranks together.
pub(super) fn of_all_ranks(samples: usize, plan: &EpochPlan, step: u64, micro: usize) -> usize {
    let ranks = plan.world_size as usize;
    run(samples, plan, step, micro * ranks..(micro + 1) * ranks).len()
}

/// Places of step `step` on all ranks together.
pub(super) fn of_step(samples: usize, plan: &EpochPlan, step: u64) -> Range<usize> {
    run(samples, plan, step, 0..plan.world_size as usize * plan.accumulate)
}

/// Places of some of the parts that a step is cut into, which follow each other.
fn run(samples: usize, plan: &EpochPlan, step: u64, of: Range<usize>) -> Range<usize> {
    let parts = plan.world_size as usize * plan.accumulate;
    let first = step as usize * global_batch(plan);
    let count = samples.saturating_sub(first).min(global_batch(plan)).max(parts);
    first + count * of.start / parts..first + count * of.end / parts
}

/// The run of `samples` that is `rank`'s: every sample on exactly one rank, sizes differing by one at most.
pub(super) fn even_share(samples: usize, rank: u32, world_size: u32) -> Range<usize> {
    let (rank, world_size) = (rank as usize, world_size.max(1) as usize);
    samples * rank / world_size..samples * (rank + 1) / world_size
}

fn global_batch(plan: &EpochPlan) -> usize {
    (plan.batch_size * plan.accumulate * plan.world_size as usize).max(1)
}
