//! The arithmetic of the CPU engine: functions over slices of float32, NHWC.
//!
//! This is a separate crate because it is optimised in every profile: training takes twenty times as long with these
//! loops at `opt-level = 1`, and the rest of the worker compiles in a tenth of the time without optimisation.
//!
//! The folder also has the sources of the GPU kernels (`*.cu`), which the worker compiles at run time.

// Ranks on different machines must draw the same weights and compute the same updates. Therefore the mathematical functions of the
// system's C library are forbidden (`clippy.toml`).
#![warn(clippy::disallowed_methods)]

#[cfg(test)]
mod against_pytorch;
pub mod batch_norm;
pub mod conv;
pub mod draws;
pub mod elementwise;
pub mod linear;
pub mod loss;
pub mod nearest;
pub mod optimizer;
pub mod orthogonal;
pub mod pool;
mod shape;
mod simd;
pub mod sums;
pub mod synthetic;

pub use shape::TensorShape;
