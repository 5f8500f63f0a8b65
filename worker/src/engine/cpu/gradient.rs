//! Gradients of parameters: summed over the pictures of a batch, over micro-batches and over ranks.
//!
//! Training is chaotic: a last bit that differs in one weight has grown to 0.1 % of the loss some
//! twenty steps later, because a ReLU somewhere flips. Losses that agree at any number of ranks
//! therefore need sums that do not depend on how a batch is cut. For small networks they do not:
//! float32 partial sums are taken over shares of [`SHARE`] pictures and added in float64, among
//! ranks too. Such a sum of float32 numbers is exact unless they are a factor of 2^29 apart, so
//! its order does not matter. It holds where every rank's micro-batch is a multiple of [`SHARE`]
//! and statistics are synchronised.
//!
//! Float64 doubles what ranks read and send. Large networks reduce float32 in a fixed order: the same bits in
//! every run at one number of ranks, but not at another.

use super::{
    conv::Scratch,
    executor::{Executor, MicroBatch},
    reduce::Bucket,
};
use rayon::prelude::*;
use std::ops::Range;

/// Pictures of a share: few, so that many divisions of a batch are multiples of it, but enough that
/// adding shares costs little against computing them.
pub(super) const SHARE: usize = 8;

/// Values of a task when shares are added.
const CHUNK: usize = 4096;

impl Executor {
    /// Adds the gradient of a parameter: `compute` overwrites a buffer with that of some pictures.
    pub(super) fn add_gradient(
        &mut self,
        slot: usize,
        micro_batch: MicroBatch,
        pictures: usize,
        compute: impl Fn(Range<usize>, &mut [f32], &mut Scratch) + Sync,
    ) {
        let (bucket, range) = (self.layout.slots[slot].bucket, self.layout.slots[slot].in_bucket.clone());
        match self.state.gradient(bucket) {
            Bucket::F32(values) => {
                let out = &mut values[range];
                match (pictures, micro_batch.first) {
                    (0, true) => out.fill(0.0),
                    (0, false) => {}
                    (_, true) => compute(0..pictures, out, &mut self.scratch),
                    (_, false) => {
                        let mut part = self.spare.alloc(out.len());
                        compute(0..pictures, &mut part, &mut self.scratch);
                        out.iter_mut().zip(&part).for_each(|(o, p)| *o += p);
                        self.spare.free(part);
                    }
                }
            }
            Bucket::F64(values) => {
                let out = &mut values[range];
                let len = out.len();
                let shares = pictures.div_ceil(SHARE);
                if self.scratches.len() < shares {
                    self.scratches.resize_with(shares, Scratch::default);
                }
                let mut parts = self.spare.alloc(shares * len);
                parts.par_chunks_mut(len).zip(&mut self.scratches).enumerate().for_each(
                    |(share, (part, scratch))| {
                        compute(share * SHARE..pictures.min((share + 1) * SHARE), part, scratch);
                    },
                );
                out.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, out)| {
                    if micro_batch.first {
                        out.fill(0.0);
                    }
                    for part in parts.chunks_exact(len) {
                        let part = &part[chunk * CHUNK..][..out.len()];
                        out.iter_mut().zip(part).for_each(|(o, p)| *o += f64::from(*p));
                    }
                });
                self.spare.free(parts);
            }
        }
        self.complete(slot, micro_batch);
    }

    /// Adds a gradient that is known in float64.
    pub(super) fn add_sums(&mut self, slot: usize, micro_batch: MicroBatch, sums: &[f64]) {
        let (bucket, range) = (self.layout.slots[slot].bucket, self.layout.slots[slot].in_bucket.clone());
        match self.state.gradient(bucket) {
            Bucket::F32(values) => values[range].iter_mut().zip(sums).for_each(|(o, s)| {
                *o = if micro_batch.first { *s as f32 } else { *o + *s as f32 };
            }),
            Bucket::F64(values) => values[range].iter_mut().zip(sums).for_each(|(o, s)| {
                *o = if micro_batch.first { *s } else { *o + *s };
            }),
        }
        self.complete(slot, micro_batch);
    }

    /// Notes a bucket whose last gradient this was.
    fn complete(&mut self, slot: usize, micro_batch: MicroBatch) {
        let bucket = self.layout.slots[slot].bucket;
        if !micro_batch.last || self.layout.last_slots[bucket] != slot {
            return;
        }
        if self.reducer.carries_gradients() {
            self.ready.push(bucket);
            if !(self.config.sync_batch_norm && self.reducer.shares_one_queue()) {
                self.send_ready();
            }
        } else {
            self.state.complete(bucket);
            self.state.advance();
        }
    }

    /// Hands complete buckets to the reducer.
    pub(super) fn send_ready(&mut self) {
        for bucket in self.ready.drain(..) {
            self.reducer.start_bucket(std::mem::take(self.state.gradient(bucket)));
        }
    }
}
