//! The arithmetic of reductions, for each type of values.

/// A type of values that can be reduced.
pub(super) trait Element: bytemuck::Pod {
    fn add(a: Self, b: Self) -> Self;
    /// NaN if either argument is NaN.
    fn max(a: Self, b: Self) -> Self;
    fn divide(a: Self, by: u32) -> Self;
}

macro_rules! elements {
    ($($number:ty),*) => {$(
        impl Element for $number {
            #[inline(always)]
            fn add(a: Self, b: Self) -> Self {
                a + b
            }
            #[inline(always)]
            fn max(a: Self, b: Self) -> Self {
                if b > a || b.is_nan() { b } else { a }
            }
            #[inline(always)]
            fn divide(a: Self, by: u32) -> Self {
                a / by as Self
            }
        }
    )*};
}

elements!(f32, f64);
