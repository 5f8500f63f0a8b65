//! Gradients of parameters: summed over the pictures of a batch, over micro-batches and over ranks.
//!
//! Training is chaotic: a difference in the last bit of one weight grows to 0.1 % of the loss within some twenty steps, because a
//! ReLU somewhere flips. For equal losses at any number of ranks, sums must therefore not depend on how a batch is divided.
//!
//! Small networks have such sums. Each share of [`SHARE`] pictures is summed in float32, and the shares are added in float64, also
//! across ranks. A float64 sum of float32 numbers is exact unless they differ by a factor of 2^29 or more, so its order does not
//! matter. This requires that every rank's micro-batch is a multiple of [`SHARE`] and that batch-norm statistics are synchronised.
//!
//! Float64 doubles the bytes that ranks read and send. Large networks therefore reduce float32 in a fixed order: every run with the
//! same number of ranks has the same bits, but another number of ranks has other bits.

use super::{conv::Scratch, executor::Executor, reduce::Bucket};
use crate::prepared_step::StepPart;
use lockstep_kernels::sums;
use rayon::prelude::*;
use std::ops::Range;

/// Pictures per share: few, so that a rank's part of a batch is usually a multiple of a share, but enough that adding the shares
/// takes little time compared with computing them.
pub(super) const SHARE: usize = 8;

/// Values per task when shares are added.
const CHUNK: usize = 4096;

impl Executor {
    /// Adds the gradient of a parameter over the batch's `pictures`. `compute(range, buffer, scratch)` overwrites `buffer` with the
    /// gradient summed over the pictures of `range`.
    pub(super) fn add_gradient(
        &mut self,
        parameter: usize,
        micro_batch: StepPart<'_>,
        pictures: usize,
        compute: impl Fn(Range<usize>, &mut [f32], &mut Scratch) + Sync,
    ) {
        let (bucket, range) =
            (self.layout.parameters[parameter].bucket, self.layout.parameters[parameter].in_bucket.clone());
        match self.state.gradient(bucket) {
            Bucket::F32(values) => {
                let out = &mut values[range];
                if micro_batch.is_first && pictures == 0 {
                    out.fill(0.0);
                } else if micro_batch.is_first {
                    compute(0..pictures, out, &mut self.scratch);
                } else if pictures > 0 {
                    let mut part = self.pool.alloc(out.len());
                    compute(0..pictures, &mut part, &mut self.scratch);
                    self.pool.add(out, part);
                }
            }
            Bucket::F64(values) => {
                let out = &mut values[range];
                let len = out.len();
                let shares = pictures.div_ceil(SHARE);
                if self.scratches.len() < shares {
                    let format = self.scratch.format();
                    self.scratches.resize_with(shares, || Scratch::new(format));
                }
                let mut parts = self.pool.alloc(shares * len);
                parts.par_chunks_mut(len).zip(&mut self.scratches).enumerate().for_each(
                    |(share, (part, scratch))| {
                        compute(share * SHARE..pictures.min((share + 1) * SHARE), part, scratch);
                    },
                );
                out.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, out)| {
                    if micro_batch.is_first {
                        out.fill(0.0);
                    }
                    for part in parts.chunks_exact(len) {
                        let part = &part[chunk * CHUNK..][..out.len()];
                        sums::add_widened(out, part);
                    }
                });
                self.pool.free(parts);
            }
        }
        self.complete(parameter, micro_batch);
    }

    /// Adds a gradient that is already summed in float64, one value per element of the parameter.
    pub(super) fn add_sums(&mut self, parameter: usize, micro_batch: StepPart<'_>, added: &[f64]) {
        let (bucket, range) =
            (self.layout.parameters[parameter].bucket, self.layout.parameters[parameter].in_bucket.clone());
        match self.state.gradient(bucket) {
            Bucket::F32(values) => values[range].iter_mut().zip(added).for_each(|(o, s)| {
                *o = if micro_batch.is_first { *s as f32 } else { *o + *s as f32 };
            }),
            Bucket::F64(values) => values[range].iter_mut().zip(added).for_each(|(o, s)| {
                *o = if micro_batch.is_first { *s } else { *o + *s };
            }),
        }
        self.complete(parameter, micro_batch);
    }

    /// Starts the sum of a bucket over the ranks if `parameter` is its last parameter and the micro-batch is the step's last.
    fn complete(&mut self, parameter: usize, micro_batch: StepPart<'_>) {
        let bucket = self.layout.parameters[parameter].bucket;
        if !micro_batch.is_last || self.layout.last_parameters[bucket] != parameter {
            return;
        }
        if self.reducer.reduces_gradients() {
            let gradient = std::mem::take(self.state.gradient(bucket));
            self.reducer.start_bucket(gradient, self.layout.axes[bucket]);
        } else {
            self.state.complete(bucket);
            self.state.advance();
        }
    }
}
