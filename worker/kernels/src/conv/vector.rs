//! Vectors of sixteen floats for several instruction sets.

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
        // SAFETY: `from` has sixteen floats (contract of the trait).
        Plain(unsafe { from.cast::<[f32; 16]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, count: usize) -> Self {
        let mut out = [0.0; 16];
        // SAFETY: `from` has `count` floats, at most sixteen (contract of the trait).
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), count) };
        Plain(out)
    }
    #[inline(always)]
    unsafe fn splat(from: *const f32) -> Self {
        // SAFETY: `from` has a float (contract of the trait).
        Plain([unsafe { *from }; 16])
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
        // SAFETY: `to` points to sixteen floats (contract of the trait).
        unsafe { to.cast::<[f32; 16]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, count: usize) {
        // SAFETY: `to` points to `count` floats, at most sixteen (contract of the trait).
        unsafe { std::ptr::copy_nonoverlapping(self.0.as_ptr(), to, count) }
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Vector;
    use std::arch::x86_64::*;

    /// AVX-512F.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx512(__m512);

    impl Vector for Avx512 {
        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: the machine supports the instructions (contract of the trait).
            Avx512(unsafe { _mm512_setzero_ps() })
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: `from` has sixteen floats; the machine supports the instructions (contract of the trait).
            Avx512(unsafe { _mm512_loadu_ps(from) })
        }
        #[inline(always)]
        unsafe fn load_first(from: *const f32, count: usize) -> Self {
            // SAFETY: `from` has `count` floats; the machine supports the instructions (contract of the trait).
            Avx512(unsafe { _mm512_maskz_loadu_ps(((1u32 << count) - 1) as u16, from) })
        }
        #[inline(always)]
        unsafe fn splat(from: *const f32) -> Self {
            // SAFETY: `from` has a float; the machine supports the instructions (contract of the trait).
            Avx512(unsafe { _mm512_set1_ps(*from) })
        }
        #[inline(always)]
        unsafe fn mul_add(self, by: Self, to: Self) -> Self {
            // SAFETY: the machine supports the instructions (contract of the trait).
            Avx512(unsafe { _mm512_fmadd_ps(self.0, by.0, to.0) })
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: the machine supports the instructions (contract of the trait).
            Avx512(unsafe { _mm512_add_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn sub(self, other: Self) -> Self {
            // SAFETY: the machine supports the instructions (contract of the trait).
            Avx512(unsafe { _mm512_sub_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: `to` points to sixteen floats and the machine supports the instructions (contract of the trait).
            unsafe { _mm512_storeu_ps(to, self.0) }
        }
        #[inline(always)]
        unsafe fn store_first(self, to: *mut f32, count: usize) {
            // SAFETY: `to` points to `count` floats and the machine supports the instructions (contract of the trait).
            unsafe { _mm512_mask_storeu_ps(to, ((1u32 << count) - 1) as u16, self.0) }
        }
        #[inline(always)]
        unsafe fn transpose(from: &[f32; 256], to: &mut [f32; 256]) {
            // SAFETY: each slice that is read or written has sixteen floats; the machine supports the instructions (contract of the trait).
            unsafe {
                let mut rows = [_mm512_setzero_ps(); 16];
                for (row, from) in rows.iter_mut().zip(from.chunks_exact(16)) {
                    *row = _mm512_loadu_ps(from.as_ptr());
                }
                // Transposes 4 x 4 quads first; then exchanges quads, twice.
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
                    let (ab, ab_odd) =
                        (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xDD>(a, b));
                    let (cd, cd_odd) =
                        (_mm512_shuffle_f32x4::<0x88>(c, d), _mm512_shuffle_f32x4::<0xDD>(c, d));
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
        }
        #[inline(always)]
        unsafe fn prefetch(line: *const f32) {
            // SAFETY: a hint reads nothing, and the machine supports the instructions (contract of the trait).
            unsafe { _mm_prefetch::<_MM_HINT_ET0>(line.cast()) }
        }
    }

    /// AVX2 and FMA.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx2(__m256, __m256);

    impl Vector for Avx2 {
        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: the machine supports the instructions (contract of the trait).
            unsafe { Avx2(_mm256_setzero_ps(), _mm256_setzero_ps()) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: `from` has sixteen floats; the machine supports the instructions (contract of the trait).
            unsafe { Avx2(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
        }
        #[inline(always)]
        unsafe fn load_first(from: *const f32, count: usize) -> Self {
            let mut out = [0.0; 16];
            // SAFETY: `from` has `count` floats; the machine supports the instructions (contract of the trait).
            unsafe {
                std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), count);
                Self::load(out.as_ptr())
            }
        }
        #[inline(always)]
        unsafe fn splat(from: *const f32) -> Self {
            // SAFETY: `from` has a float; the machine supports the instructions (contract of the trait).
            unsafe {
                let v = _mm256_set1_ps(*from);
                Avx2(v, v)
            }
        }
        #[inline(always)]
        unsafe fn mul_add(self, by: Self, to: Self) -> Self {
            // SAFETY: the machine supports the instructions (contract of the trait).
            unsafe { Avx2(_mm256_fmadd_ps(self.0, by.0, to.0), _mm256_fmadd_ps(self.1, by.1, to.1)) }
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: the machine supports the instructions (contract of the trait).
            unsafe { Avx2(_mm256_add_ps(self.0, other.0), _mm256_add_ps(self.1, other.1)) }
        }
        #[inline(always)]
        unsafe fn sub(self, other: Self) -> Self {
            // SAFETY: the machine supports the instructions (contract of the trait).
            unsafe { Avx2(_mm256_sub_ps(self.0, other.0), _mm256_sub_ps(self.1, other.1)) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: `to` points to sixteen floats and the machine supports the instructions (contract of the trait).
            unsafe {
                _mm256_storeu_ps(to, self.0);
                _mm256_storeu_ps(to.add(8), self.1);
            }
        }
        #[inline(always)]
        unsafe fn store_first(self, to: *mut f32, count: usize) {
            let mut out = [0.0; 16];
            // SAFETY: `to` points to `count` floats and the machine supports the instructions (contract of the trait).
            unsafe {
                self.store(out.as_mut_ptr());
                std::ptr::copy_nonoverlapping(out.as_ptr(), to, count);
            }
        }
    }
}
