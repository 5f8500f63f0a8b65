//! Vectors of sixteen floats for several instruction sets, and the number formats in which vectors are multiplied.

#![expect(unsafe_op_in_unsafe_fn, reason = "the contracts of the traits cover every operation")]

/// Sixteen floats. The methods must be inlined into a function that enables the instructions they use.
///
/// # Safety
/// Pointers must be valid for the floats that a method reads or writes (16, or the given number);
/// they need no alignment. The machine must support the instructions.
pub(super) trait Vector: Copy {
    unsafe fn zero() -> Self;
    unsafe fn load(from: *const f32) -> Self;
    /// The first `count` floats, zeros after them.
    unsafe fn load_first(from: *const f32, count: usize) -> Self;
    /// One float, sixteen times.
    unsafe fn splat(from: *const f32) -> Self;
    /// `self * by + to`.
    unsafe fn mul_add(self, by: Self, to: Self) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn store_first(self, to: *mut f32, count: usize);
    /// Transposes 16 rows of 16 floats.
    #[inline(always)]
    unsafe fn transpose(from: &[f32; 256], to: &mut [f32; 256]) {
        for (column, to) in to.chunks_exact_mut(16).enumerate() {
            for (row, to) in to.iter_mut().enumerate() {
                *to = from[row * 16 + column];
            }
        }
    }
    /// Prefetches a cache line that will be written. Any address is allowed.
    #[inline(always)]
    unsafe fn prefetch(_line: *const f32) {}
}

/// A unit is 32 bits of packed pictures or weights. An implementation defines which values a unit has, and how units are multiplied. Sums
/// are float32. The methods must be inlined like those of [`Vector`].
///
/// # Safety
/// The machine must support the instructions.
pub(super) trait Arithmetic<S: Vector> {
    /// Number of values in a unit.
    const VALUES: usize;
    /// For each lane: multiplies the values of the unit in `units` with the values of the unit in `by`, and adds the products to the sum in
    /// `to`.
    unsafe fn multiply_add(units: S, by: S, to: S) -> S;
    /// Packs consecutive values into units: the values of `first`, then, if a unit has two values, the values of `second`.
    unsafe fn consecutive(first: S, second: S) -> S;
    /// Units that each have a value of `first` and, if a unit has two values, the value in the same lane of `second`.
    unsafe fn pairs(first: S, second: S) -> S;
}

/// A unit is a float32.
pub(super) struct Float32;

impl<S: Vector> Arithmetic<S> for Float32 {
    const VALUES: usize = 1;
    #[inline(always)]
    unsafe fn multiply_add(units: S, by: S, to: S) -> S {
        units.mul_add(by, to)
    }
    #[inline(always)]
    unsafe fn consecutive(first: S, _second: S) -> S {
        first
    }
    #[inline(always)]
    unsafe fn pairs(first: S, _second: S) -> S {
        first
    }
}

/// A unit is two values in bfloat16, rounded to nearest even. The product of two of them is exact in float32. Products of second values
/// are added before those of first values, which is the order of `vdpbf16ps`.
pub(super) struct Bfloat16;

impl Bfloat16 {
    /// The upper 16 bits of `value`, rounded to nearest even. Bit 0x40 marks a quiet NaN.
    #[inline(always)]
    fn round(value: f32) -> u32 {
        let bits = value.to_bits();
        if value.is_nan() { (bits >> 16) | 0x40 } else { (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 }
    }
    #[inline(always)]
    fn unit(first: f32, second: f32) -> f32 {
        f32::from_bits(Self::round(first) | (Self::round(second) << 16))
    }
}

impl Arithmetic<Plain> for Bfloat16 {
    const VALUES: usize = 2;
    #[inline(always)]
    unsafe fn multiply_add(units: Plain, by: Plain, to: Plain) -> Plain {
        let second = |unit: f32| f32::from_bits(unit.to_bits() & 0xFFFF_0000);
        let first = |unit: f32| f32::from_bits(unit.to_bits() << 16);
        Plain(std::array::from_fn(|i| {
            let to = to.0[i] + second(units.0[i]) * second(by.0[i]);
            to + first(units.0[i]) * first(by.0[i])
        }))
    }
    #[inline(always)]
    unsafe fn consecutive(first: Plain, second: Plain) -> Plain {
        Plain(std::array::from_fn(|i| {
            let from = if i < 8 { &first.0 } else { &second.0 };
            Self::unit(from[2 * i % 16], from[2 * i % 16 + 1])
        }))
    }
    #[inline(always)]
    unsafe fn pairs(first: Plain, second: Plain) -> Plain {
        Plain(std::array::from_fn(|i| Self::unit(first.0[i], second.0[i])))
    }
}

/// For any CPU: the compiler vectorises the loops for the target's baseline (SSE2, NEON).
#[derive(Clone, Copy)]
pub(super) struct Plain([f32; 16]);

impl Vector for Plain {
    #[inline(always)]
    unsafe fn zero() -> Self {
        Plain([0.0; 16])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        Plain(from.cast::<[f32; 16]>().read_unaligned())
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, count: usize) -> Self {
        let mut out = [0.0; 16];
        std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), count);
        Plain(out)
    }
    #[inline(always)]
    unsafe fn splat(from: *const f32) -> Self {
        Plain([*from; 16])
    }
    #[inline(always)]
    unsafe fn mul_add(self, by: Self, to: Self) -> Self {
        // aarch64 always has a fused instruction; elsewhere `mul_add` would be a library call.
        #[cfg(target_arch = "aarch64")]
        return Plain(std::array::from_fn(|i| self.0[i].mul_add(by.0[i], to.0[i])));
        #[cfg(not(target_arch = "aarch64"))]
        return Plain(std::array::from_fn(|i| self.0[i] * by.0[i] + to.0[i]));
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Plain(std::array::from_fn(|i| self.0[i] + other.0[i]))
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        Plain(std::array::from_fn(|i| self.0[i] - other.0[i]))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        to.cast::<[f32; 16]>().write_unaligned(self.0)
    }
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, count: usize) {
        std::ptr::copy_nonoverlapping(self.0.as_ptr(), to, count)
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Arithmetic, Bfloat16, Vector};
    use std::arch::x86_64::*;

    /// AVX-512F.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx512(__m512);

    impl Vector for Avx512 {
        #[inline(always)]
        unsafe fn zero() -> Self {
            Avx512(_mm512_setzero_ps())
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            Avx512(_mm512_loadu_ps(from))
        }
        #[inline(always)]
        unsafe fn load_first(from: *const f32, count: usize) -> Self {
            Avx512(_mm512_maskz_loadu_ps(((1u32 << count) - 1) as u16, from))
        }
        #[inline(always)]
        unsafe fn splat(from: *const f32) -> Self {
            Avx512(_mm512_set1_ps(*from))
        }
        #[inline(always)]
        unsafe fn mul_add(self, by: Self, to: Self) -> Self {
            Avx512(_mm512_fmadd_ps(self.0, by.0, to.0))
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            Avx512(_mm512_add_ps(self.0, other.0))
        }
        #[inline(always)]
        unsafe fn sub(self, other: Self) -> Self {
            Avx512(_mm512_sub_ps(self.0, other.0))
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            _mm512_storeu_ps(to, self.0)
        }
        #[inline(always)]
        unsafe fn store_first(self, to: *mut f32, count: usize) {
            _mm512_mask_storeu_ps(to, ((1u32 << count) - 1) as u16, self.0)
        }
        #[inline(always)]
        unsafe fn transpose(from: &[f32; 256], to: &mut [f32; 256]) {
            let mut rows = [_mm512_setzero_ps(); 16];
            for (row, from) in rows.iter_mut().zip(from.chunks_exact(16)) {
                *row = _mm512_loadu_ps(from.as_ptr());
            }
            // First transposes each block of 4 x 4 floats. Two shuffles then move parts of 4 floats to their rows.
            let mut quads = rows;
            for i in (0..16).step_by(4) {
                let [a, b, c, d] = [rows[i], rows[i + 1], rows[i + 2], rows[i + 3]];
                let (ab, ab_high) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
                let (cd, cd_high) = (_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
                quads[i] = _mm512_shuffle_ps::<0x44>(ab, cd);
                quads[i + 1] = _mm512_shuffle_ps::<0xEE>(ab, cd);
                quads[i + 2] = _mm512_shuffle_ps::<0x44>(ab_high, cd_high);
                quads[i + 3] = _mm512_shuffle_ps::<0xEE>(ab_high, cd_high);
            }
            for i in 0..4 {
                let [a, b, c, d] = [quads[i], quads[4 + i], quads[8 + i], quads[12 + i]];
                let (ab, ab_odd) = (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xDD>(a, b));
                let (cd, cd_odd) = (_mm512_shuffle_f32x4::<0x88>(c, d), _mm512_shuffle_f32x4::<0xDD>(c, d));
                for (column, value) in [
                    (i, _mm512_shuffle_f32x4::<0x88>(ab, cd)),
                    (i + 4, _mm512_shuffle_f32x4::<0x88>(ab_odd, cd_odd)),
                    (i + 8, _mm512_shuffle_f32x4::<0xDD>(ab, cd)),
                    (i + 12, _mm512_shuffle_f32x4::<0xDD>(ab_odd, cd_odd)),
                ] {
                    _mm512_storeu_ps(to[column * 16..].as_mut_ptr(), value);
                }
            }
        }
        #[inline(always)]
        unsafe fn prefetch(line: *const f32) {
            _mm_prefetch::<_MM_HINT_ET0>(line.cast())
        }
    }

    /// Uses AVX-512BW and AVX512-BF16. `vdpbf16ps` rounds after it adds each product. In contrast to the implementation for `Plain`, it
    /// treats subnormal numbers as zero.
    impl Arithmetic<Avx512> for Bfloat16 {
        const VALUES: usize = 2;
        #[inline(always)]
        unsafe fn multiply_add(units: Avx512, by: Avx512, to: Avx512) -> Avx512 {
            let units = std::mem::transmute::<__m512, __m512bh>(units.0);
            let by = std::mem::transmute::<__m512, __m512bh>(by.0);
            Avx512(_mm512_dpbf16_ps(to.0, units, by))
        }
        #[inline(always)]
        unsafe fn consecutive(first: Avx512, second: Avx512) -> Avx512 {
            let values = _mm512_cvtne2ps_pbh(second.0, first.0);
            Avx512(std::mem::transmute::<__m512bh, __m512>(values))
        }
        #[inline(always)]
        unsafe fn pairs(first: Avx512, second: Avx512) -> Avx512 {
            const ORDER: [u16; 32] = {
                let mut order = [0; 32];
                let mut i = 0;
                while i < 32 {
                    order[i] = (i / 2 + i % 2 * 16) as u16;
                    i += 1;
                }
                order
            };
            let values = _mm512_castps_si512(Self::consecutive(first, second).0);
            let order = _mm512_loadu_si512(ORDER.as_ptr().cast());
            Avx512(_mm512_castsi512_ps(_mm512_permutexvar_epi16(order, values)))
        }
    }

    /// AVX2 and FMA.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx2(__m256, __m256);

    impl Vector for Avx2 {
        #[inline(always)]
        unsafe fn zero() -> Self {
            Avx2(_mm256_setzero_ps(), _mm256_setzero_ps())
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            Avx2(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8)))
        }
        #[inline(always)]
        unsafe fn load_first(from: *const f32, count: usize) -> Self {
            let mut out = [0.0; 16];
            std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), count);
            Self::load(out.as_ptr())
        }
        #[inline(always)]
        unsafe fn splat(from: *const f32) -> Self {
            let v = _mm256_set1_ps(*from);
            Avx2(v, v)
        }
        #[inline(always)]
        unsafe fn mul_add(self, by: Self, to: Self) -> Self {
            Avx2(_mm256_fmadd_ps(self.0, by.0, to.0), _mm256_fmadd_ps(self.1, by.1, to.1))
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            Avx2(_mm256_add_ps(self.0, other.0), _mm256_add_ps(self.1, other.1))
        }
        #[inline(always)]
        unsafe fn sub(self, other: Self) -> Self {
            Avx2(_mm256_sub_ps(self.0, other.0), _mm256_sub_ps(self.1, other.1))
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            _mm256_storeu_ps(to, self.0);
            _mm256_storeu_ps(to.add(8), self.1);
        }
        #[inline(always)]
        unsafe fn store_first(self, to: *mut f32, count: usize) {
            let mut out = [0.0; 16];
            self.store(out.as_mut_ptr());
            std::ptr::copy_nonoverlapping(out.as_ptr(), to, count);
        }
    }
}
