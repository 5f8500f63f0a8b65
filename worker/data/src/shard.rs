//! Sharding: which pictures a rank sees, and when.
//! An epoch is a seeded permutation of the training split, equal on every rank. Each step uses the next pictures of the
//! permutation, as many as all ranks' micro-batches have together, divided into equal ranges in the order (micro-batch,
//! rank). So the pictures of a step are the same for any number of ranks, and the ranges of ranks never overlap.

use super::random::Random;
use std::ops::Range;

/// Purpose number of the random stream. It is a key of the stream besides the seed, so streams for different purposes differ.
const SHUFFLE: u64 = 1;

/// The batches of an epoch that a rank requests.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EpochPlan {
    /// The epoch, from 0.
    pub epoch: u32,
    /// The optimizer step of the epoch at which to start, from 0.
    pub first_step: u64,
    /// The rank, from 0.
    pub rank: u32,
    /// The number of ranks, at least 1.
    pub world_size: u32,
    /// Number of pictures of a rank in a micro-batch.
    pub batch_size: usize,
    /// Number of micro-batches in a step.
    pub accumulate: usize,
    /// Whether to leave out a last step with fewer pictures.
    pub drop_remainder: bool,
    /// Number of threads that prepare batches.
    pub threads: usize,
}

impl EpochPlan {
    /// The whole first epoch on a single rank, prepared by one thread.
    pub const fn of(batch_size: usize) -> Self {
        Self {
            epoch: 0,
            first_step: 0,
            rank: 0,
            world_size: 1,
            batch_size,
            accumulate: 1,
            drop_remainder: false,
            threads: 1,
        }
    }
}

/// The order of the training pictures in `epoch` (from 0).
pub(super) fn epoch_order(samples: usize, seed: u64, epoch: u32) -> Vec<u32> {
    Random::new(&[seed, SHUFFLE, u64::from(epoch)]).permutation(samples)
}

/// The number of steps of an epoch over `samples` pictures.
pub(super) fn steps_per_epoch(samples: usize, plan: &EpochPlan) -> u64 {
    let global = global_batch(plan);
    (if plan.drop_remainder { samples / global } else { samples.div_ceil(global) }) as u64
}

/// The positions, in the epoch's order, of micro-batch `micro` of step `step` on the plan's rank. Positions past the
/// end denote the epoch's first pictures: they fill up a last step that is too small to give every rank a picture.
pub(super) fn rank_positions(samples: usize, plan: &EpochPlan, step: u64, micro: usize) -> Range<usize> {
    let part = micro * plan.world_size as usize + plan.rank as usize;
    positions_of_parts(samples, plan, step, part..part + 1)
}

/// The positions of micro-batch `micro` of step `step` on all ranks.
pub(super) fn global_positions(samples: usize, plan: &EpochPlan, step: u64, micro: usize) -> Range<usize> {
    let ranks = plan.world_size as usize;
    positions_of_parts(samples, plan, step, micro * ranks..(micro + 1) * ranks)
}

/// The positions of step `step` on all ranks.
pub(super) fn step_positions(samples: usize, plan: &EpochPlan, step: u64) -> Range<usize> {
    positions_of_parts(samples, plan, step, 0..plan.world_size as usize * plan.accumulate)
}

/// The positions of consecutive parts of a step. A step has a part for each micro-batch of each rank.
fn positions_of_parts(samples: usize, plan: &EpochPlan, step: u64, parts: Range<usize>) -> Range<usize> {
    let all_parts = plan.world_size as usize * plan.accumulate;
    let first = step as usize * global_batch(plan);
    let count = samples.saturating_sub(first).min(global_batch(plan)).max(all_parts);
    first + count * parts.start / all_parts..first + count * parts.end / all_parts
}

/// The consecutive range of `samples` that belongs to `rank`. Every sample is on exactly one rank, and sizes differ
/// by at most one.
pub(super) fn even_share(samples: usize, rank: u32, world_size: u32) -> Range<usize> {
    let (rank, world_size) = (rank as usize, world_size.max(1) as usize);
    samples * rank / world_size..samples * (rank + 1) / world_size
}

fn global_batch(plan: &EpochPlan) -> usize {
    (plan.batch_size * plan.accumulate * plan.world_size as usize).max(1)
}
