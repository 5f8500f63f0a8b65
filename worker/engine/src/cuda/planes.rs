//! Float32 numbers in two planes of 16 bits: the number rounded to the nearest bfloat16 (ties round away from zero), and the signed
//! integer difference between the float32 bits and this bfloat16. If the GPU computes in bfloat16, weights of which each rank has only a
//! part are stored in planes.
//! Kernels compute with the first plane, so no low-precision copy is needed. `PlanarWeights` in `optimizer.cu` accesses both planes.

use rayon::prelude::*;

/// Number of values per task.
const CHUNK: usize = 1 << 15;

/// Splits values into two planes, which are as long as the values.
pub(super) fn to_planes(values: &[f32], nearest: &mut [u16], differences: &mut [u16]) {
    let planes = nearest.par_chunks_mut(CHUNK).zip(differences.par_chunks_mut(CHUNK));
    values.par_chunks(CHUNK).zip(planes).for_each(|(values, (nearest, differences))| {
        for ((value, nearest), difference) in values.iter().zip(nearest).zip(differences) {
            let bits = value.to_bits();
            // A NaN stays a NaN.
            let carry = if value.is_nan() { 0 } else { 0x8000 };
            (*nearest, *difference) = ((bits.wrapping_add(carry) >> 16) as u16, bits as u16);
        }
    });
}

/// Joins two planes to float32 values.
pub(super) fn from_planes(nearest: &[u16], differences: &[u16], values: &mut [f32]) {
    let planes = nearest.par_chunks(CHUNK).zip(differences.par_chunks(CHUNK));
    values.par_chunks_mut(CHUNK).zip(planes).for_each(|(values, (nearest, differences))| {
        for ((value, nearest), difference) in values.iter_mut().zip(nearest).zip(differences) {
            let difference = i32::from(difference.cast_signed()).cast_unsigned();
            *value = f32::from_bits((u32::from(*nearest) << 16).wrapping_add(difference));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_restore_every_number_and_the_first_plane_is_the_nearest_bfloat16() {
        let mut values =
            vec![0.0, -0.0, 1.0, -1.0, f32::MAX, f32::MIN_POSITIVE, f32::INFINITY, f32::NEG_INFINITY];
        // Every upper half, with the ends and the middle of the lower half.
        let bits = (0..=0xffffu32).flat_map(|high| {
            [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| f32::from_bits(high << 16 | low))
        });
        values.extend(bits.filter(|value| !value.is_nan()));
        let round_trip = |values: &[f32]| {
            let (mut nearest, mut differences) = (vec![0; values.len()], vec![0; values.len()]);
            to_planes(values, &mut nearest, &mut differences);
            let mut back = vec![0.0; values.len()];
            from_planes(&nearest, &differences, &mut back);
            (nearest, back)
        };
        let (first_plane, back) = round_trip(&values);
        for (value, stored) in values.iter().zip(first_plane) {
            // The crate rounds ties to even numbers.
            let [stored, expected] =
                [half::bf16::from_bits(stored), half::bf16::from_f32(*value)].map(f32::from);
            let is_as_near = f64::from(stored - value).abs() <= f64::from(expected - value).abs();
            assert!(stored == expected || is_as_near, "{value:e}: {stored:e}, {expected:e}");
        }
        assert!(back.iter().zip(&values).all(|(a, b)| a.to_bits() == b.to_bits()));
        let (_, nan) = round_trip(&[f32::NAN, f32::from_bits(0x7fff_ffff), f32::from_bits(0xffff_ffff)]);
        assert!(nan.iter().all(|value| value.is_nan()));
    }
}
