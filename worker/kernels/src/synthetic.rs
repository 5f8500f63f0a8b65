//! Synthetic values for tests and benchmarks. `tests/pytorch/generator.py` generates the same values, so
//! fixtures need not store inputs and weights.

/// Uniform in -1..1 on a grid of 2^-23, exact in float32. Value `i` depends only on `name` and `i`.
pub fn values(name: &str, len: usize) -> Vec<f32> {
    let key = name
        .bytes()
        .fold(0xCBF2_9CE4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01B3));
    let value = |i: u64| {
        let mut z = key.wrapping_add((i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len as u64).map(value).collect()
}

/// Labels below `classes`.
pub fn labels(name: &str, len: usize, classes: usize) -> Vec<u32> {
    values(name, len).iter().map(|v| ((v + 1.0) * (classes as f32 / 2.0)) as u32).collect()
}
