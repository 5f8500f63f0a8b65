//! Parts of a bucket of gradients, summed over the ranks of this machine.

use super::BLOCK;
use crate::engine::cpu::reduce::Bucket;
use std::ops::Range;

/// A part of bucket number `bucket`, summed over `gradients` (one element a rank) in the order of ranks.
#[inline(always)]
pub(super) fn sum(gradients: &[Vec<Bucket>], bucket: usize, place: Range<usize>, out: &mut [f32]) {
    let mut sums = [0.0f64; BLOCK];
    let sums = &mut sums[..out.len()];
    for (rank, buckets) in gradients.iter().enumerate() {
        match &buckets[bucket] {
            Bucket::F32(values) if rank == 0 => out.copy_from_slice(&values[place.clone()]),
            Bucket::F32(values) => {
                out.iter_mut().zip(&values[place.clone()]).for_each(|(o, v)| *o += v);
            }
            Bucket::F64(values) => {
                sums.iter_mut().zip(&values[place.clone()]).for_each(|(o, v)| *o += v);
                if rank + 1 == gradients.len() {
                    out.iter_mut().zip(&*sums).for_each(|(o, v)| *o = *v as f32);
                }
            }
        }
    }
}

/// A part of one bucket, as float32.
#[inline(always)]
pub(super) fn first(bucket: &Bucket, place: Range<usize>, out: &mut [f32]) {
    match bucket {
        Bucket::F32(values) => out.copy_from_slice(&values[place]),
        Bucket::F64(values) => out.iter_mut().zip(&values[place]).for_each(|(o, v)| *o = *v as f32),
    }
}

/// Replaces a part of a bucket by `sum`.
///
/// # Safety
/// Nobody else uses this place of the bucket meanwhile.
#[inline(always)]
pub(super) unsafe fn keep(bucket: &Bucket, place: Range<usize>, sum: &[f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        match bucket {
            Bucket::F32(values) => values.part(place).copy_from_slice(sum),
            Bucket::F64(values) => {
                values.part(place).iter_mut().zip(sum).for_each(|(o, v)| *o = f64::from(*v));
            }
        }
    }
}
