//! The running average of weights and running statistics.

use super::executor::Norm;
use rayon::prelude::*;

/// Values of a task.
const CHUNK: usize = 1 << 14;

/// In the order of the engine's own.
pub(super) struct Average {
    pub(super) weights: Vec<f32>,
    /// Means and variances of every batch norm.
    pub(super) running: Vec<[Vec<f32>; 2]>,
}

impl Average {
    pub(super) fn new(weights: &[f32], norms: &[Norm]) -> Self {
        let running = norms.iter().map(|n| [n.running_mean.clone(), n.running_var.clone()]).collect();
        Self { weights: weights.to_vec(), running }
    }

    /// `average = decay average + (1 - decay) value`.
    pub(super) fn take(&mut self, decay: f64, weights: &[f32], norms: &[Norm]) {
        let (decay, rest) = (decay as f32, (1.0 - decay) as f32);
        let take = |average: &mut [f32], values: &[f32]| {
            average.iter_mut().zip(values).for_each(|(a, v)| *a = decay * *a + rest * v);
        };
        let parts = self.weights.par_chunks_mut(CHUNK).zip(weights.par_chunks(CHUNK));
        parts.for_each(|(average, values)| take(average, values));
        for ([mean, var], norm) in self.running.iter_mut().zip(norms) {
            take(mean, &norm.running_mean);
            take(var, &norm.running_var);
        }
    }
}
