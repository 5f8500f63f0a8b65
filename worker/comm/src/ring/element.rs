//! The arithmetic of reductions, for each type of values.

use half::{bf16, f16};

/// A type of values that can be reduced.
pub(super) trait Element {
    /// The representation in a buffer.
    type Raw: bytemuck::Pod;
    fn add(a: Self::Raw, b: Self::Raw) -> Self::Raw;
    /// NaN if either argument is NaN.
    fn max(a: Self::Raw, b: Self::Raw) -> Self::Raw;
    fn divide(a: Self::Raw, by: u32) -> Self::Raw;
}

impl Element for f32 {
    type Raw = f32;
    #[inline(always)]
    fn add(a: f32, b: f32) -> f32 {
        a + b
    }
    #[inline(always)]
    fn max(a: f32, b: f32) -> f32 {
        if b > a || b.is_nan() { b } else { a }
    }
    #[inline(always)]
    fn divide(a: f32, by: u32) -> f32 {
        a / by as f32
    }
}

impl Element for f64 {
    type Raw = f64;
    #[inline(always)]
    fn add(a: f64, b: f64) -> f64 {
        a + b
    }
    #[inline(always)]
    fn max(a: f64, b: f64) -> f64 {
        if b > a || b.is_nan() { b } else { a }
    }
    #[inline(always)]
    fn divide(a: f64, by: u32) -> f64 {
        a / f64::from(by)
    }
}

/// 16-bit types are computed in float32. Each result is rounded to the nearest 16-bit value.
macro_rules! sixteen_bits {
    ($($name:ident),*) => {$(
        impl Element for $name {
            type Raw = u16;
            fn add(a: u16, b: u16) -> u16 {
                $name::from_f32($name::from_bits(a).to_f32() + $name::from_bits(b).to_f32()).to_bits()
            }
            fn max(a: u16, b: u16) -> u16 {
                let (left, right) = ($name::from_bits(a).to_f32(), $name::from_bits(b).to_f32());
                if right > left || right.is_nan() { b } else { a }
            }
            fn divide(a: u16, by: u32) -> u16 {
                $name::from_f32($name::from_bits(a).to_f32() / by as f32).to_bits()
            }
        }
    )*};
}

sixteen_bits!(f16, bf16);
