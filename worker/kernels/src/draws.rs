//! Random initial weights: SplitMix64's output function of a counter, with a key hashed from a seed and a parameter's name. Logarithm
//! and cosine come from the `libm` crate, because the last bits of a system's functions differ.

use rayon::prelude::*;

/// Number of values per task; even, because normal values are drawn in pairs.
const CHUNK: usize = 1 << 14;

/// SplitMix64's output function (Steele, Lea, Flood 2014).
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The key of a parameter's stream: FNV-1a of the name, mixed with the seed.
pub fn key(seed: u64, name: &str) -> u64 {
    let hash = name
        .bytes()
        .fold(0xCBF2_9CE4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01B3));
    mix(mix(seed.wrapping_add(0x9E37_79B9_7F4A_7C15)) ^ hash)
}

/// Value `index` of a stream, strictly between 0 and 1.
fn unit(key: u64, index: u64) -> f64 {
    let bits = mix(key.wrapping_add(index.wrapping_mul(0x9E37_79B9_7F4A_7C15))) >> 11;
    (bits as f64 + 0.5) / (1u64 << 53) as f64
}

/// `len` values of a stream, uniform in `-bound..bound`.
pub fn uniform(key: u64, len: usize, bound: f64) -> Vec<f32> {
    (0..len as u64).map(|i| ((2.0 * unit(key, i) - 1.0) * bound) as f32).collect()
}

/// `len` values of a stream, normal with mean 0 and standard deviation `std`, in pairs by the Box-Muller transform.
pub fn normal(key: u64, len: usize, std: f64) -> Vec<f32> {
    let mut values = vec![0.0f32; len];
    values.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, values)| {
        for (pair, out) in values.chunks_mut(2).enumerate() {
            let first = (chunk * CHUNK + 2 * pair) as u64;
            let radius = std * (-2.0 * libm::log(unit(key, first))).sqrt();
            let (sin, cos) = libm::sincos(std::f64::consts::TAU * unit(key, first + 1));
            out[0] = (radius * cos) as f32;
            if let Some(second) = out.get_mut(1) {
                *second = (radius * sin) as f32;
            }
        }
    });
    values
}
