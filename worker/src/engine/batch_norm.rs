//! The constants of batch normalisation, the same in every engine: PyTorch's defaults.

/// Added to the variance before its root is taken.
pub(super) const EPSILON: f64 = 1e-5;
/// The share of a new batch in the running statistics.
pub(super) const MOMENTUM: f32 = 0.1;
