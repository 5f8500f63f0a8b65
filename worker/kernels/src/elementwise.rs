//! ReLU and addition that are not fused with a batch norm.

use rayon::prelude::*;

/// Number of values per task.
const CHUNK: usize = 1 << 14;

/// ReLU as in PyTorch: unlike `max`, it keeps a NaN, so that divergence is not hidden.
#[inline(always)]
pub fn relu_of(v: f32) -> f32 {
    if v < 0.0 { 0.0 } else { v }
}

/// y = relu(x).
pub fn relu(x: &[f32], y: &mut [f32]) {
    y.par_chunks_mut(CHUNK)
        .zip(x.par_chunks(CHUNK))
        .for_each(|(y, x)| y.iter_mut().zip(x).for_each(|(y, x)| *y = relu_of(*x)));
}

/// Turns `dy`, the gradient of `y` = relu(x), into the gradient of x.
pub fn relu_backward(y: &[f32], dy: &mut [f32]) {
    dy.par_chunks_mut(CHUNK).zip(y.par_chunks(CHUNK)).for_each(|(dy, y)| {
        for (d, y) in dy.iter_mut().zip(y) {
            *d = if *y > 0.0 { *d } else { 0.0 };
        }
    });
}

/// sum = a + b.
pub fn add(a: &[f32], b: &[f32], sum: &mut [f32]) {
    sum.par_chunks_mut(CHUNK).zip(a.par_chunks(CHUNK).zip(b.par_chunks(CHUNK))).for_each(|(sum, (a, b))| {
        for (s, (a, b)) in sum.iter_mut().zip(a.iter().zip(b)) {
            *s = a + b;
        }
    });
}
