//! Sums of gradients over shares of a batch, micro-batches and ranks, and the running average of weights. The slices of a call have
//! the same length.

use crate::simd::with_simd;
use rayon::prelude::*;

/// Values of a task of [`average`].
const CHUNK: usize = 1 << 14;

/// `sum += values`.
pub fn add(sum: &mut [f32], values: &[f32]) {
    with_simd(
        #[inline(always)]
        || sum.iter_mut().zip(values).for_each(|(s, v)| *s += v),
    );
}

/// `sum += values`, in float64.
pub fn add_f64(sum: &mut [f64], values: &[f64]) {
    with_simd(
        #[inline(always)]
        || sum.iter_mut().zip(values).for_each(|(s, v)| *s += v),
    );
}

/// `sum += values`, with a sum in float64.
pub fn add_to_f64(sum: &mut [f64], values: &[f32]) {
    with_simd(
        #[inline(always)]
        || sum.iter_mut().zip(values).for_each(|(s, v)| *s += f64::from(*v)),
    );
}

/// `to = from`, rounded to float32.
pub fn round(from: &[f64], to: &mut [f32]) {
    with_simd(
        #[inline(always)]
        || to.iter_mut().zip(from).for_each(|(t, f)| *t = *f as f32),
    );
}

/// `to = from`.
pub fn widen(from: &[f32], to: &mut [f64]) {
    with_simd(
        #[inline(always)]
        || to.iter_mut().zip(from).for_each(|(t, f)| *t = f64::from(*f)),
    );
}

/// `average = decay average + (1 - decay) values`.
pub fn average(decay: f64, average: &mut [f32], values: &[f32]) {
    let (decay, rest) = (decay as f32, (1.0 - decay) as f32);
    average.par_chunks_mut(CHUNK).zip(values.par_chunks(CHUNK)).for_each(|(average, values)| {
        average.iter_mut().zip(values).for_each(|(a, v)| *a = decay * *a + rest * v);
    });
}
