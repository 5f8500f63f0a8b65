//! The forward pass.

use super::{
    batch_norm::{self, Affine, Statistics},
    conv::{self, ConvShape},
    linear,
    machine::Machine,
    pool::{self, MaxPool},
};
use crate::{
    engine::{EngineError, plan::Step},
    net::{Network, TensorId},
};

impl Machine {
    /// Runs the network over `pictures` images (NHWC) and leaves every activation for backward.
    ///
    /// Training names the pictures that batch norm's statistics are of (this rank's, or all ranks');
    /// `None` normalises with the running statistics.
    pub(super) fn forward(
        &mut self,
        images: &[f32],
        pictures: usize,
        statistics_of: Option<f64>,
    ) -> Result<(), EngineError> {
        self.reserve(pictures);
        let input = self.network.input();
        self.activations[input][..images.len()].copy_from_slice(images);
        for index in 0..self.steps.len() {
            let output = self.steps[index].output();
            let mut y = std::mem::take(&mut self.activations[output]);
            let result = self.step_forward(index, pictures, statistics_of, &mut y);
            self.activations[output] = y;
            result?;
        }
        Ok(())
    }

    fn step_forward(
        &mut self,
        index: usize,
        pictures: usize,
        statistics_of: Option<f64>,
        y: &mut [f32],
    ) -> Result<(), EngineError> {
        let shapes = &self.network.tensors;
        let step = &self.steps[index];
        let y = &mut y[..pictures * shapes[step.output()].len()];
        let x = |tensor: TensorId| &self.activations[tensor][..pictures * shapes[tensor].len()];
        let weight = |name: &str, suffix: &str| -> Result<&[f32], EngineError> {
            let slot = self.layout.slot(&format!("{name}.{suffix}"))?;
            Ok(&self.state.weights[self.layout.slots[slot].range.clone()])
        };
        match step {
            // Without pictures there is nothing to compute, but statistics of other ranks' still come.
            Step::Norm { .. } => {}
            _ if pictures == 0 => return Ok(()),
            Step::Conv { name, shape, input, output, feeds_norm, .. } => {
                let shape = ConvShape { batch: pictures, ..*shape };
                let weight = weight(name, "weight")?;
                if *feeds_norm && statistics_of.is_some() && !self.exact {
                    self.sums[*output] =
                        conv::forward_with_sums(&shape, x(*input), weight, y, &mut self.scratch);
                } else {
                    conv::forward(&shape, x(*input), weight, y, &mut self.scratch);
                }
                return Ok(());
            }
            Step::MaxPool { input, output, .. } => {
                let len = y.len();
                max_pool(&self.network, step).forward(x(*input), y, &mut self.taps[*output][..len]);
                return Ok(());
            }
            Step::GlobalAveragePool { input, .. } => {
                pool::global_average(x(*input), shapes[*input], y);
                return Ok(());
            }
            Step::Linear { name, input, .. } => {
                linear::forward(x(*input), weight(name, "weight")?, weight(name, "bias")?, y);
                return Ok(());
            }
        }
        let Step::Norm { name, norm, input, shortcut, relu, .. } = step else { return Ok(()) };
        let channels = shapes[*input].channels;
        let statistics = match statistics_of {
            None => {
                let norm = &self.norms[*norm];
                Statistics::from_running(&norm.running_mean, &norm.running_var)
            }
            Some(of) => {
                let mut sums = std::mem::take(&mut self.sums[*input]);
                if sums.is_empty() {
                    sums = batch_norm::sums(x(*input), channels);
                }
                if self.config.sync_batch_norm {
                    self.reducer.statistics(&mut sums, &mut || false)?;
                }
                let count = of * shapes[*input].pixels() as f64;
                if count == 0.0 {
                    return Ok(());
                }
                let statistics = Statistics::from_sums(&sums, count);
                let norm = &mut self.norms[*norm];
                statistics.update_running(count, &mut norm.running_mean, &mut norm.running_var);
                statistics
            }
        };
        let affine =
            Affine { statistics: &statistics, gamma: weight(name, "weight")?, beta: weight(name, "bias")? };
        batch_norm::forward(x(*input), affine, shortcut.map(x), *relu, y);
        self.norms[*norm].statistics = statistics;
        Ok(())
    }
}

/// The pooling that a [`Step::MaxPool`] of `network` is.
pub(super) fn max_pool(network: &Network, step: &Step) -> MaxPool {
    let (mut pool, shapes) = (
        MaxPool { input: network.tensors[0], output: network.tensors[0], kernel: 1, stride: 1, padding: 0 },
        &network.tensors,
    );
    if let Step::MaxPool { input, output, kernel, stride, padding } = *step {
        pool = MaxPool { input: shapes[input], output: shapes[output], kernel, stride, padding };
    }
    pool
}
