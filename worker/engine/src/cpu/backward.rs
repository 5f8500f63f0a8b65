//! The backward pass.

use super::{
    batch_norm::{self, Affine, Mask},
    conv::{self, ConvShape},
    elementwise, exchange,
    executor::Executor,
    forward::max_pool,
    linear,
    margin::UnitRows,
    pool,
};
use crate::{
    EngineError,
    fuse::{Conv, FusedOp, Norm},
    prepared_step::StepPart,
};
use std::{ops::Range, time::Instant};

impl Executor {
    /// Computes the gradients of all parameters from the gradient of the logits, or of the next stage's input.
    pub(super) fn backward(&mut self, micro_batch: StepPart<'_>) -> Result<(), EngineError> {
        self.receive_gradient()?;
        for index in (0..self.ops.len()).rev() {
            let parts = std::mem::take(&mut self.gradient_parts[self.ops[index].output()]);
            let began = Instant::now();
            self.op_backward(index, micro_batch, parts)?;
            self.add_time(index, began);
        }
        self.sum_input_gradient();
        // An earlier micro-batch may have left gradients of activations that no operation reads.
        for parts in &mut self.gradient_parts {
            for part in parts.drain(..) {
                self.pool.free(part);
            }
        }
        Ok(())
    }

    fn parameter_indices(&self, name: &str) -> [usize; 2] {
        ["weight", "bias"].map(|suffix| self.layout.index_of(&format!("{name}.{suffix}")))
    }

    /// Computes the gradients of the inputs and of the parameters of the operation at `index`. `parts` are the parts of the gradient of
    /// its output, one from each operation that reads the output.
    fn op_backward(
        &mut self,
        index: usize,
        micro_batch: StepPart<'_>,
        parts: Vec<Vec<f32>>,
    ) -> Result<(), EngineError> {
        let network = self.network.clone();
        let shapes = &network.tensors;
        let op = self.ops[index].clone();
        let group_pictures = self.current.pictures.clone();
        let count = |tensor: usize| group_pictures.count(network.placement(tensor));
        // With few rows, some ranks of a height group have none.
        let pictures = if shapes[op.output()].is_empty() { 0 } else { count(op.output()) };
        let len = |tensor: usize| count(tensor) * shapes[tensor].len();
        let mut parts = parts.into_iter();
        // An output that no operation reads has no gradient.
        let mut dy = parts.next().unwrap_or_else(|| vec![0.0; len(op.output())]);
        // The backward pass of a batch norm adds a second part itself.
        let second = parts.next();
        parts.for_each(|part| self.pool.add(&mut dy, part));

        if let FusedOp::Norm(norm) = &op {
            return self.norm_backward(norm, micro_batch, dy, second);
        }
        if let Some(second) = second {
            self.pool.add(&mut dy, second);
        }
        match &op {
            // Handled above.
            FusedOp::Norm(_) => {}
            // Pictures have no gradient.
            FusedOp::Redistribute { input, .. } | FusedOp::Halo { input, .. }
                if network.is_pictures(*input) => {}
            FusedOp::Redistribute { input, output } => {
                let [from, to] = [*output, *input].map(|tensor| network.placement(tensor).of_gradient());
                let mut dx = self.pool.alloc(len(*input));
                self.redistribute(*input, (&from, &to), &dy, &mut dx)?;
                self.gradient_parts[*input].push(dx);
            }
            FusedOp::Halo { input, output, .. } => {
                let mut dx = self.pool.alloc(len(*input));
                let regions = [*output, *input].map(|tensor| self.row_regions(tensor));
                if let Some(groups) = &self.groups {
                    exchange::exchange(&groups.height, (&regions[0], &regions[1]), &dy, &mut dx)?;
                }
                self.gradient_parts[*input].push(dx);
            }
            FusedOp::MeanOfRows { input, .. } => {
                let share = network.share_of_rows(*input);
                dy.iter_mut().for_each(|d| *d *= share);
                self.gradient_parts[*input].push(dy);
                return Ok(());
            }
            FusedOp::Relu { input, output } => {
                elementwise::relu_backward(&self.current.activations[*output][..len(*output)], &mut dy);
                self.gradient_parts[*input].push(dy);
                return Ok(());
            }
            FusedOp::Gelu { bias, input, .. } => {
                let parameter = bias.as_ref().map(|name| self.layout.index_of(&format!("{name}.bias")));
                let values = match parameter {
                    Some(parameter) => self.layout.parameters[parameter].of(&self.state.weights),
                    None => &[0.0][..],
                };
                elementwise::gelu_backward(&self.current.activations[*input][..len(*input)], values, &mut dy);
                if let Some(parameter) = parameter {
                    let channels = shapes[*input].channels;
                    let sums = batch_norm::sums(&dy, channels);
                    self.add_sums(parameter, micro_batch, &sums[..channels]);
                }
                self.gradient_parts[*input].push(dy);
                return Ok(());
            }
            FusedOp::Add { branch, shortcut, .. } => {
                let mut copy = self.pool.alloc(dy.len());
                copy.copy_from_slice(&dy);
                self.gradient_parts[*shortcut].push(copy);
                self.gradient_parts[*branch].push(dy);
                return Ok(());
            }
            FusedOp::Conv(Conv { name, shape, input, output, needs_input_gradient, .. }) => {
                let shape = ConvShape { batch: pictures, ..*shape };
                let parameter = self.layout.index_of(&format!("{name}.weight"));
                if *needs_input_gradient {
                    let mut dx = self.pool.alloc(len(*input));
                    let weight = self.layout.parameters[parameter].of(&self.state.weights);
                    if pictures > 0 {
                        conv::backward_input(&shape, &dy, weight, &mut dx, &mut self.scratch);
                    }
                    self.gradient_parts[*input].push(dx);
                }
                if self.layout.parameters[parameter].is_frozen {
                    let zeros = vec![0.0; self.layout.parameters[parameter].range.len()];
                    self.add_sums(parameter, micro_batch, &zeros);
                    self.pool.free(dy);
                    return Ok(());
                }
                // Follows the last use of the weights, because they may change as soon as their gradient is complete.
                let x = std::mem::take(&mut self.current.activations[*input]);
                let (from, to) = (shapes[*input].len(), shapes[*output].len());
                self.add_gradient(parameter, micro_batch, pictures, |share, out, scratch| {
                    let shape = ConvShape { batch: share.len(), ..shape };
                    let x = &x[share.start * from..share.end * from];
                    let dy = &dy[share.start * to..share.end * to];
                    conv::backward_weight(&shape, x, dy, out, scratch);
                });
                self.current.activations[*input] = x;
            }
            FusedOp::MaxPool { input, output, kernel, stride, padding } => {
                let mut dx = self.pool.alloc(len(*input));
                if pictures > 0 {
                    let pool = max_pool(&network, [*input, *output], [*kernel, *stride, *padding]);
                    pool.backward(&dy, &self.current.argmax[*output][..len(*output)], &mut dx);
                }
                self.gradient_parts[*input].push(dx);
            }
            FusedOp::GlobalAveragePool { input, .. } => {
                let mut dx = self.pool.alloc(len(*input));
                if !shapes[*input].is_empty() {
                    pool::global_average_backward(&dy, shapes[*input], &mut dx);
                }
                self.gradient_parts[*input].push(dx);
            }
            FusedOp::Linear { name, input, output, is_head } => {
                let parameters = self.parameter_indices(name);
                let sample = self.sample.clone().filter(|_| *is_head);
                let inputs = shapes[*input].len();
                let outputs = sample.as_ref().map_or(shapes[*output].len(), |sample| sample.rows.len());
                let mut dx = self.pool.alloc(len(*input));
                let x = std::mem::take(&mut self.current.activations[*input]);
                let weight = self.layout.parameters[parameters[0]].of(&self.state.weights);
                let rows = sample.as_ref().map(|sample| sample.copy_rows(weight, inputs));
                let weight = rows.as_deref().unwrap_or(weight);
                // With a margin, logits are cosines: features and weights are scaled to length 1.
                let margin = self.config.loss.margin.filter(|_| *is_head);
                let units = margin.map(|margin| {
                    margin.multiply_by_scale(&mut dy);
                    [UnitRows::new(&x[..len(*input)], inputs), UnitRows::new(weight, inputs)]
                });
                match &units {
                    None => linear::backward_input(&dy, weight, outputs, &mut dx),
                    Some([features, weights]) => {
                        linear::backward_input(&dy, &weights.rows, outputs, &mut dx);
                        features.backward(&mut dx);
                    }
                }
                self.gradient_parts[*input].push(dx);
                let dy_of = |share: &Range<usize>| &dy[share.start * outputs..share.end * outputs];
                self.add_gradient(parameters[0], micro_batch, pictures, |share, out, _| {
                    let compute = |rows: &mut [f32]| match &units {
                        None => {
                            let x = &x[share.start * inputs..share.end * inputs];
                            linear::backward_weight(x, dy_of(&share), outputs, rows);
                        }
                        Some([features, weights]) => {
                            linear::backward_weight(
                                features.slice(share.clone()),
                                dy_of(&share),
                                outputs,
                                rows,
                            );
                            weights.backward(rows);
                        }
                    };
                    match &sample {
                        None => compute(out),
                        Some(sample) => sample.fill_rows(out, inputs, compute),
                    }
                });
                self.add_gradient(parameters[1], micro_batch, pictures, |share, out, _| {
                    let compute = |rows: &mut [f32]| match &units {
                        None => linear::backward_bias(dy_of(&share), rows),
                        Some(_) => rows.fill(0.0),
                    };
                    match &sample {
                        None => compute(out),
                        Some(sample) => sample.fill_rows(out, 1, compute),
                    }
                });
                self.current.activations[*input] = x;
            }
        }
        self.pool.free(dy);
        Ok(())
    }

    /// As [`Executor::op_backward`], for a batch norm and the operations fused with it. `dy` and `second` are the parts of the
    /// gradient of its output.
    fn norm_backward(
        &mut self,
        op: &Norm,
        micro_batch: StepPart<'_>,
        mut dy: Vec<f32>,
        second: Option<Vec<f32>>,
    ) -> Result<(), EngineError> {
        let Norm { name, norm, input, shortcut, relu, output, .. } = op;
        let input_len = self.value_count(*input);
        let parameters = self.parameter_indices(name);
        let [gamma, beta] = parameters.map(|index| self.layout.parameters[index].of(&self.state.weights));
        let affine = Affine { statistics: &self.current.statistics[*norm], gamma, beta };
        let x = &self.current.activations[*input][..input_len];
        let frozen = self.network.frozen_norm;
        // Whether `dy` becomes the gradient of the ReLU's input, which includes `second` and which the shortcut receives.
        let masks_dy = second.is_some() || shortcut.is_some();
        let mask = match shortcut {
            _ if !relu => Mask::None,
            None => Mask::Input,
            Some(_) => Mask::Output(&self.current.activations[*output][..self.value_count(*output)]),
        };
        // Frozen statistics do not depend on the input: dx = scale g, which is the formula with sums of zero and any number of
        // values per channel.
        let mut sums = vec![0.0; 2 * gamma.len()];
        if !frozen || masks_dy {
            let computed = batch_norm::backward_sums(x, affine, &mut dy, second.as_deref(), mask, masks_dy);
            sums = if frozen { sums } else { computed };
        }
        let (dgamma, dbeta) = batch_norm::parameter_gradients(&sums, affine.statistics);
        if self.config.sync_batch_norm && !frozen {
            self.reducer
                .sum_statistics(&mut sums, self.network.axes(*input), &mut || self.state.advance())?;
        }
        let values_per_channel =
            if frozen { 1.0 } else { self.statistics_count(*input, micro_batch.stat_pictures) };
        if let Some(shortcut) = shortcut {
            let mut dx = self.pool.alloc(input_len);
            batch_norm::backward_input(x, affine, &sums, values_per_channel, &dy, &mut dx);
            self.gradient_parts[*input].push(dx);
            self.gradient_parts[shortcut.tensor].push(dy);
        } else {
            batch_norm::backward_input_in_place(
                x,
                affine,
                &sums,
                values_per_channel,
                *relu && !masks_dy,
                &mut dy,
            );
            self.gradient_parts[*input].push(dy);
        }
        if let Some(second) = second {
            self.pool.free(second);
        }
        self.add_sums(parameters[0], micro_batch, &dgamma);
        self.add_sums(parameters[1], micro_batch, &dbeta);
        Ok(())
    }
}
