//! Sums of parts of a bucket of gradients over the ranks of this machine.

use super::BLOCK;
use crate::cpu::reduce::Bucket;
use lockstep_kernels::sums;
use std::ops::Range;

/// Sums into `out`, in rank order, the values at `range` of bucket `bucket`. `gradients` has one element per rank.
pub(super) fn sum_over_ranks(gradients: &[Vec<Bucket>], bucket: usize, range: Range<usize>, out: &mut [f32]) {
    let mut in_f64 = [0.0f64; BLOCK];
    let in_f64 = &mut in_f64[..out.len()];
    for (rank, buckets) in gradients.iter().enumerate() {
        match &buckets[bucket] {
            Bucket::F32(values) if rank == 0 => out.copy_from_slice(&values[range.clone()]),
            Bucket::F32(values) => sums::add(out, &values[range.clone()]),
            Bucket::F64(values) => {
                sums::add_f64(in_f64, &values[range.clone()]);
                if rank + 1 == gradients.len() {
                    sums::round(in_f64, out);
                }
            }
        }
    }
}

/// Copies a part of one bucket, converted to float32.
pub(super) fn read_part(bucket: &Bucket, range: Range<usize>, out: &mut [f32]) {
    match bucket {
        Bucket::F32(values) => out.copy_from_slice(&values[range]),
        Bucket::F64(values) => sums::round(&values[range], out),
    }
}

/// Replaces a part of a bucket by `sum`.
///
/// # Safety
/// No other thread uses this part of the bucket during the call.
pub(super) unsafe fn write_part(bucket: &Bucket, range: Range<usize>, sum: &[f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        match bucket {
            Bucket::F32(values) => values.part(range).copy_from_slice(sum),
            Bucket::F64(values) => sums::widen(sum, values.part(range)),
        }
    }
}
