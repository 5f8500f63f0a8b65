//! The forward pass.

use super::{
    batch_norm::{self, Affine, Statistics},
    conv::{self, ConvShape},
    elementwise,
    exchange::{self, Region},
    executor::Executor,
    linear,
    pool::{self, MaxPool},
    sample,
};
use crate::{
    EngineError,
    fuse::{Conv, FusedOp, Norm},
    net::{Network, Placement, TensorId},
};
use std::{ops::Range, time::Instant};

impl Executor {
    /// Runs the network, or this rank's stage, over the images (NHWC) of the current pictures, and keeps all activations for backward.
    ///
    /// `stat_pictures`: in training, the number of pictures in batch norm's statistics. `None` normalises with the running
    /// statistics.
    pub(super) fn forward(&mut self, images: &[f32], stat_pictures: Option<f64>) -> Result<(), EngineError> {
        self.reserve();
        if !self.receive_input()? {
            self.copy_pictures(images);
        }
        for index in 0..self.ops.len() {
            let output = self.ops[index].output();
            let mut y = std::mem::take(&mut self.current.activations[output]);
            let began = Instant::now();
            let result = self.op_forward(index, stat_pictures, &mut y);
            self.add_time(index, began);
            self.current.activations[output] = y;
            result?;
        }
        self.send_output()
    }

    /// Computes the output `y` of the operation at `index`.
    fn op_forward(
        &mut self,
        index: usize,
        stat_pictures: Option<f64>,
        y: &mut [f32],
    ) -> Result<(), EngineError> {
        let shapes = &self.network.tensors;
        let op = &self.ops[index];
        let count = |tensor: TensorId| self.current.pictures.count(self.network.placement(tensor));
        // With few rows, some ranks of a height group have none.
        let pictures = if shapes[op.output()].is_empty() { 0 } else { count(op.output()) };
        let y = &mut y[..pictures * shapes[op.output()].len()];
        let x = |tensor: TensorId| &self.current.activations[tensor][..count(tensor) * shapes[tensor].len()];
        let weight = |name: &str, suffix: &str| {
            self.layout.parameter(&format!("{name}.{suffix}")).of(&self.state.weights)
        };
        match op {
            // A rank without pictures still takes part in the reduction of statistics.
            FusedOp::Norm(_) => return self.norm_forward(index, stat_pictures, y),
            FusedOp::Redistribute { input, output } => {
                let [from, to] = [*input, *output].map(|tensor| self.network.placement(tensor));
                self.redistribute(*input, (from, to), x(*input), y)?;
            }
            FusedOp::Halo { input, lowest, .. } => {
                self.exchange_halo(*input, op.output(), *lowest, x(*input), y)?
            }
            FusedOp::MeanOfRows { input, .. } => self.mean_of_rows(*input, x(*input), y)?,
            _ if pictures == 0 => {}
            FusedOp::GlobalAveragePool { input, .. } if shapes[*input].is_empty() => y.fill(0.0),
            FusedOp::Conv(Conv { name, shape, input, output, norm_after, .. }) => {
                let shape = ConvShape { batch: pictures, ..*shape };
                let weight = weight(name, "weight");
                if norm_after.is_some() && stat_pictures.is_some() && !self.has_f64_gradients {
                    self.sums[*output] =
                        conv::forward_with_sums(&shape, x(*input), weight, y, &mut self.scratch);
                } else {
                    conv::forward(&shape, x(*input), weight, y, &mut self.scratch);
                }
            }
            FusedOp::Relu { input, .. } => elementwise::relu(x(*input), y),
            FusedOp::Gelu { bias, input, .. } => {
                let bias = match bias {
                    Some(name) => weight(name, "bias"),
                    None => &[0.0][..],
                };
                elementwise::gelu(x(*input), bias, y);
            }
            FusedOp::Add { branch, shortcut, .. } => elementwise::add(x(*branch), x(*shortcut), y),
            FusedOp::MaxPool { input, output, kernel, stride, padding } => {
                let (len, window) = (y.len(), [*kernel, *stride, *padding]);
                let pool = max_pool(&self.network, [*input, *output], window);
                pool.forward(x(*input), y, &mut self.current.argmax[*output][..len]);
            }
            FusedOp::GlobalAveragePool { input, .. } => pool::global_average(x(*input), shapes[*input], y),
            FusedOp::Linear { name, input, is_head, .. } => {
                let bias = weight(name, "bias");
                let (sample, margin) = (self.sample.as_deref(), self.config.loss.margin.as_ref());
                if *is_head && (sample.is_some() || margin.is_some()) {
                    sample::forward((sample, margin), x(*input), (weight(name, "weight"), bias), y);
                    return Ok(());
                }
                // Of the ranks that compute parts of a sum, only the first one adds the bias.
                let adds_bias = *self.network.placement(op.output()) != Placement::Partial
                    || self.current.pictures.rank == 0;
                let zeros = if adds_bias { Vec::new() } else { vec![0.0; bias.len()] };
                linear::forward(x(*input), weight(name, "weight"), if adds_bias { bias } else { &zeros }, y);
            }
        }
        Ok(())
    }

    /// As [`Executor::op_forward`], for a batch norm and the operations fused with it.
    fn norm_forward(
        &mut self,
        index: usize,
        stat_pictures: Option<f64>,
        y: &mut [f32],
    ) -> Result<(), EngineError> {
        let FusedOp::Norm(Norm { name, norm, input, shortcut, relu, .. }) = &self.ops[index] else {
            return Ok(());
        };
        let shapes = &self.network.tensors;
        let pictures = self.current.pictures.count(self.network.placement(*input));
        let x = |tensor: TensorId| &self.current.activations[tensor][..pictures * shapes[tensor].len()];
        let channels = shapes[*input].channels;
        let statistics = match stat_pictures.filter(|_| !self.network.frozen_norm) {
            None => {
                let [mean, var] = &self.norms[*norm].running;
                Statistics::from_running(mean, var)
            }
            Some(stat_pictures) => {
                let mut sums = std::mem::take(&mut self.sums[*input]);
                if sums.is_empty() {
                    sums = batch_norm::sums(x(*input), channels);
                }
                if self.config.sync_batch_norm {
                    self.reducer.sum_statistics(&mut sums, self.network.axes(*input), &mut || false)?;
                }
                let count = self.statistics_count(*input, stat_pictures);
                if count == 0.0 {
                    return Ok(());
                }
                let statistics = Statistics::from_sums(&sums, count);
                let momentum = self.network.running_momentum();
                let [mean, var] = &mut self.norms[*norm].running;
                statistics.update_running(count, momentum, mean, var);
                statistics
            }
        };
        let weight =
            |suffix: &str| self.layout.parameter(&format!("{name}.{suffix}")).of(&self.state.weights);
        let affine = Affine { statistics: &statistics, gamma: weight("weight"), beta: weight("bias") };
        batch_norm::forward(x(*input), affine, shortcut.map(|s| x(s.tensor)), *relu, y);
        self.current.statistics[*norm] = statistics;
        Ok(())
    }

    /// Number of values of a channel of `tensor` in batch norm's statistics. Synchronised statistics are over `pictures`
    /// pictures of all ranks, other statistics over this rank's pictures.
    pub(super) fn statistics_count(&self, tensor: TensorId, pictures: f64) -> f64 {
        if self.config.sync_batch_norm {
            return pictures * self.network.whole_pixels(tensor) as f64;
        }
        let own = self.current.pictures.count(self.network.placement(tensor));
        own as f64 * self.network.tensors[tensor].pixels() as f64
    }

    /// Redistributes `x`, an activation or gradient with the shape of `tensor`, over the model group.
    pub(super) fn redistribute(
        &self,
        tensor: TensorId,
        placements: (&Placement, &Placement),
        x: &[f32],
        y: &mut [f32],
    ) -> Result<(), EngineError> {
        let groups = self.groups.as_ref().filter(|_| self.current.pictures.total() > 0);
        let Some(groups) = groups else { return Ok(()) };
        let shape = self.network.tensors[tensor];
        let channels = self.network.split_channels(tensor).map_or(shape.channels, |(_, whole)| whole);
        let shape = (shape.pixels(), channels);
        Ok(self.current.pictures.redistribute(&groups.model, placements, shape, x, y)?)
    }

    /// Copies this rank's rows of all images.
    fn copy_pictures(&mut self, images: &[f32]) {
        let (network, input) = (&self.network, self.network.input());
        let own_pixels = &mut self.current.activations[input];
        let Some((part, rows)) = network.part.as_ref().zip(network.rows(input)) else {
            return own_pixels[..images.len()].copy_from_slice(images);
        };
        let row_len = network.tensors[input].width * network.tensors[input].channels;
        let own_rows = &rows.of_rank[part.height_rank];
        let range = own_rows.start as usize * row_len..own_rows.end as usize * row_len;
        let pictures = images.chunks_exact(rows.whole * row_len);
        for (own, picture) in own_pixels.chunks_exact_mut(range.len()).zip(pictures) {
            own.copy_from_slice(&picture[range.clone()]);
        }
    }

    /// By rank of the height group: the region of an activation that the rank has.
    pub(super) fn row_regions(&self, tensor: TensorId) -> Vec<Region> {
        let (shape, pictures) =
            (self.network.tensors[tensor], self.current.pictures.count(self.network.placement(tensor)));
        let of_rank = |rows: &Range<isize>| {
            // Windows may reach rows above the picture, so rows are counted from `ABOVE` rows above it.
            let [start, end] = [rows.start, rows.end].map(|row| (row + ABOVE) as usize * shape.width);
            Region { pictures: 0..pictures, pixels: start..end, channels: 0..shape.channels }
        };
        self.network.rows(tensor).map_or_else(Vec::new, |rows| rows.of_rank.iter().map(of_rank).collect())
    }

    /// Fetches from other ranks the rows of `input` that this rank's windows reach. Rows outside the picture become 0, or
    /// minus infinity if `lowest`.
    fn exchange_halo(
        &self,
        input: TensorId,
        output: TensorId,
        lowest: bool,
        x: &[f32],
        y: &mut [f32],
    ) -> Result<(), EngineError> {
        let (Some(groups), Some((part, rows))) =
            (&self.groups, self.network.part.as_ref().zip(self.network.rows(output)))
        else {
            return Ok(());
        };
        let regions = [input, output].map(|tensor| self.row_regions(tensor));
        exchange::exchange(&groups.height, (&regions[0], &regions[1]), x, y)?;
        let (shape, own) = (self.network.tensors[output], &rows.of_rank[part.height_rank]);
        if lowest && !shape.is_empty() {
            let row_len = shape.width * shape.channels;
            let above = (-own.start).max(0) as usize * row_len;
            let below = (own.end - rows.whole as isize).max(0) as usize * row_len;
            for picture in y.chunks_exact_mut(shape.len()) {
                picture[..above].fill(f32::NEG_INFINITY);
                picture[shape.len() - below..].fill(f32::NEG_INFINITY);
            }
        }
        Ok(())
    }

    /// Computes the mean `y` over all rows from `x`, this rank's mean over its own rows.
    fn mean_of_rows(&self, input: TensorId, x: &[f32], y: &mut [f32]) -> Result<(), EngineError> {
        let Some(groups) = &self.groups else { return Ok(()) };
        let share = self.network.share_of_rows(input);
        y.iter_mut().zip(x).for_each(|(y, x)| *y = x * share);
        if !y.is_empty() {
            groups.height.all_reduce(y.into())?;
        }
        Ok(())
    }
}

/// Maximum number of rows by which a window reaches above a picture.
const ABOVE: isize = 1 << 16;

pub(super) fn max_pool(
    network: &Network,
    [input, output]: [TensorId; 2],
    [kernel, stride, padding]: [usize; 3],
) -> MaxPool {
    let row_padding = network.row_padding(input, padding);
    let [input, output] = [input, output].map(|tensor| network.tensors[tensor]);
    MaxPool { input, output, kernel, stride, padding, row_padding }
}
