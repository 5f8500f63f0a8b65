//! Sums of gradients over shares of a batch, micro-batches and ranks, and the moving average of weights. All slices of a call must
//! have the same length.

use crate::simd::with_simd;
use rayon::prelude::*;

/// Number of values per task of [`average`].
const CHUNK: usize = 1 << 14;

/// `sum += values`.
pub fn add(sum: &mut [f32], values: &[f32]) {
    with_simd(
        #[inline(always)]
        || sum.iter_mut().zip(values).for_each(|(s, v)| *s += v),
    );
}

/// `sum += values`, both in float64.
pub fn add_f64(sum: &mut [f64], values: &[f64]) {
    with_simd(
        #[inline(always)]
        || sum.iter_mut().zip(values).for_each(|(s, v)| *s += v),
    );
}

/// `sum += values`, for float32 values and a sum in float64.
pub fn add_widened(sum: &mut [f64], values: &[f32]) {
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

/// `to = from`, converted to float64.
pub fn widen(from: &[f32], to: &mut [f64]) {
    with_simd(
        #[inline(always)]
        || to.iter_mut().zip(from).for_each(|(t, f)| *t = f64::from(*f)),
    );
}

/// `average = decay average + (1 - decay) values`, computed as in `torch.lerp`. Separate factors `decay` and `1 - decay` in float32 would
/// not sum to exactly 1, which would change the scale of the average over many steps.
pub fn average(decay: f64, average: &mut [f32], values: &[f32]) {
    let weight = (1.0 - decay) as f32;
    average.par_chunks_mut(CHUNK).zip(values.par_chunks(CHUNK)).for_each(|(average, values)| {
        average.iter_mut().zip(values).for_each(|(a, v)| *a = lerp(*a, *v, weight));
    });
}

/// Linear interpolation; exactly `to` if `weight` is 1.
fn lerp(from: f32, to: f32, weight: f32) -> f32 {
    if weight < 0.5 { from + weight * (to - from) } else { to - (to - from) * (1.0 - weight) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_average_is_unbiased_for_any_decay() {
        for decay in [0.0, 0.5, 0.9, 0.999, 0.99998, 0.999999] {
            let (mut averages, values) = ([0.0, -3.7, 0.1], [1.0, -3.7, 0.1]);
            let mut exact = 0.0;
            for _ in 0..200_000 {
                average(decay, &mut averages, &values);
                exact += (1.0 - decay) * (1.0 - exact);
            }
            assert!((f64::from(averages[0]) - exact).abs() < 1e-4, "{decay}: {} of {exact}", averages[0]);
            assert_eq!(averages[1..], values[1..], "{decay}: a constant value is its own average");
        }
    }
}
