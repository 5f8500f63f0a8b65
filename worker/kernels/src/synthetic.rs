//! Synthetic values for tests and benchmarks. `tests/pytorch/generator.py` generates the same values, so
//! fixtures need not store inputs and weights.

use crate::draws::{GOLDEN, hash, mix};

/// Uniform in -1..1 on a grid of 2^-23, exact in float32. Value `i` depends only on `name` and `i`.
pub fn values(name: &str, len: usize) -> Vec<f32> {
    let key = hash(name);
    let value = |i: u64| {
        let bits = mix(key.wrapping_add((i + 1).wrapping_mul(GOLDEN)));
        (bits >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len as u64).map(value).collect()
}

/// Labels below `classes`.
pub fn labels(name: &str, len: usize, classes: usize) -> Vec<u32> {
    values(name, len).iter().map(|v| ((v + 1.0) * (classes as f32 / 2.0)) as u32).collect()
}
