//! How the initial values of a parameter are drawn.

use lockstep_kernels::draws::{normal, uniform};

/// The initial values of one parameter.
pub(super) enum Draw {
    Constant(f32),
    /// Uniform from `-bound` to `bound`: (key of the random stream, bound).
    Uniform(u64, f64),
    /// Normal with mean 0: (key of the random stream, standard deviation).
    Normal(u64, f64),
    Given(Vec<f32>),
}

impl Draw {
    /// Fills `to` with the values from index `from` on.
    pub(super) fn fill(&self, from: usize, to: &mut [f32]) {
        match self {
            Self::Constant(value) => to.fill(*value),
            Self::Uniform(key, bound) => uniform(*key, from, to, *bound),
            Self::Normal(key, std) => normal(*key, from, to, *std),
            Self::Given(values) => to.copy_from_slice(&values[from..from + to.len()]),
        }
    }
}
