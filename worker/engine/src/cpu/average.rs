//! The moving average of weights and running statistics (`train.ema_decay`), which only rank 0 keeps. As in torchvision's script, the
//! average equals the weights up to the first update after the warm-up.

use super::executor::Norm;
use lockstep_kernels::sums;

/// Averages, in the order of [`super::state::State`]'s weights and of the batch norms.
pub(super) struct Average {
    pub(super) weights: Vec<f32>,
    /// Running mean and variance of each batch norm.
    pub(super) running: Vec<[Vec<f32>; 2]>,
}

impl Average {
    pub(super) fn new(weights: &[f32], norms: &[Norm]) -> Self {
        let running = norms.iter().map(|norm| norm.running.clone()).collect();
        Self { weights: weights.to_vec(), running }
    }

    pub(super) fn update(&mut self, decay: f64, weights: &[f32], norms: &[Norm]) {
        sums::average(decay, &mut self.weights, weights);
        let values = norms.iter().flat_map(|norm| &norm.running);
        for (average, values) in self.running.iter_mut().flatten().zip(values) {
            sums::average(decay, average, values);
        }
    }
}
