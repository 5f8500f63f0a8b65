//! Random initial weights: SplitMix64's output function of a counter, with a key hashed from a seed and a parameter's name. Logarithm
//! and cosine come from the `libm` crate, because the last bits of a system's functions differ between systems.

use rayon::prelude::*;

/// Number of values per task; even, because normal values are drawn in pairs.
const CHUNK: usize = 1 << 14;

/// The step from one input of [`mix`] to the next, as in SplitMix64.
pub const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// SplitMix64's output function (Steele, Lea, Flood 2014).
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// FNV-1a of a name.
pub(crate) fn hash(name: &str) -> u64 {
    name.bytes().fold(0xCBF2_9CE4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01B3))
}

/// The key of a parameter's stream: the hash of the name, mixed with the seed.
pub fn key(seed: u64, name: &str) -> u64 {
    mix(mix(seed.wrapping_add(GOLDEN)) ^ hash(name))
}

/// Value `index` of a stream, strictly between 0 and 1.
fn unit(key: u64, index: u64) -> f64 {
    let bits = mix(key.wrapping_add(index.wrapping_mul(GOLDEN))) >> 11;
    (bits as f64 + 0.5) / (1u64 << 53) as f64
}

/// Fills `values` with the values of a stream from index `first` on, uniform in `-bound..bound`.
pub fn uniform(key: u64, first: usize, values: &mut [f32], bound: f64) {
    in_chunks(values, |offset, values| {
        for (i, value) in values.iter_mut().enumerate() {
            *value = ((2.0 * unit(key, (first + offset + i) as u64) - 1.0) * bound) as f32;
        }
    });
}

/// Fills `values` with the values of a stream from index `first` on, normal with mean 0 and standard deviation `std`, in pairs by the
/// Box-Muller transform.
pub fn normal(key: u64, first: usize, values: &mut [f32], std: f64) {
    // The values `index` and `index + 1`.
    let pair = |index: usize| {
        let radius = std * (-2.0 * libm::log(unit(key, index as u64))).sqrt();
        let (sin, cos) = libm::sincos(std::f64::consts::TAU * unit(key, index as u64 + 1));
        [(radius * cos) as f32, (radius * sin) as f32]
    };
    // If `first` is odd, the first value is the second of a pair.
    let (half, pairs) = values.split_at_mut((first % 2).min(values.len()));
    if let [second] = half {
        [_, *second] = pair(first - 1);
    }
    let first = first.next_multiple_of(2);
    in_chunks(pairs, |offset, values| {
        for (i, out) in values.chunks_mut(2).enumerate() {
            out.copy_from_slice(&pair(first + offset + 2 * i)[..out.len()]);
        }
    });
}

/// Calls `fill` for all chunks of `values` with the offset of the chunk, on the threads of the current pool.
fn in_chunks(values: &mut [f32], fill: impl Fn(usize, &mut [f32]) + Sync) {
    if values.len() <= CHUNK {
        return fill(0, values);
    }
    values.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, values)| fill(chunk * CHUNK, values));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values depend neither on the number of threads nor on the first index of a part.
    #[test]
    fn a_part_of_a_stream_has_the_values_of_the_whole_stream() {
        type Draw = fn(u64, usize, &mut [f32], f64);
        let threads = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        for draw in [uniform as Draw, normal] {
            let mut one_by_one = vec![0.0; 2 * CHUNK + 5];
            for (index, value) in one_by_one.iter_mut().enumerate() {
                draw(9, index, std::slice::from_mut(value), 0.5);
            }
            for (first, len) in
                [(0, 2 * CHUNK + 5), (1, 2 * CHUNK + 3), (7, CHUNK + 1), (4, 1), (3, 0), (6, 3)]
            {
                let mut part = vec![0.0; len];
                threads.install(|| draw(9, first, &mut part, 0.5));
                assert!(part == one_by_one[first..first + len], "{len} values from {first}");
            }
        }
    }
}
