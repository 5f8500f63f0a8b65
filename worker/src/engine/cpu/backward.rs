//! The backward pass.

use super::{
    batch_norm::{self, Affine, Mask},
    conv::{self, ConvShape},
    forward::max_pool,
    linear,
    machine::Machine,
    plan::Step,
    pool,
};
use crate::engine::EngineError;

impl Machine {
    /// Gradients of all parameters from that of the logits. `statistics_of` is as in forward.
    ///
    /// The `first` micro-batch overwrites gradients, later ones add; the `last` one hands complete
    /// buckets to the reducer.
    pub(super) fn backward(
        &mut self,
        pictures: usize,
        statistics_of: f64,
        first: bool,
        last: bool,
    ) -> Result<(), EngineError> {
        for index in (0..self.steps.len()).rev() {
            let parts = std::mem::take(&mut self.gradient_parts[self.steps[index].output()]);
            self.step_backward(index, pictures, statistics_of, first, last, parts)?;
        }
        self.send_ready();
        // The first micro-batch may have left gradients for activations that nobody reads.
        for parts in &mut self.gradient_parts {
            for part in parts.drain(..) {
                self.spare.give(part);
            }
        }
        Ok(())
    }

    fn step_backward(
        &mut self,
        index: usize,
        pictures: usize,
        statistics_of: f64,
        first: bool,
        last: bool,
        parts: Vec<Vec<f32>>,
    ) -> Result<(), EngineError> {
        let network = self.network.clone();
        let shapes = &network.tensors;
        let step = self.steps[index].clone();
        let len = |tensor: usize| pictures * shapes[tensor].len();
        let mut parts = parts.into_iter();
        // An output that nothing read has no gradient: the logits' loss reaches all of ours.
        let mut dy = parts.next().unwrap_or_else(|| vec![0.0; len(step.output())]);
        let more = parts.next();

        if let Step::Norm { name, norm, input, shortcut, relu, output } = &step {
            let slots = ["weight", "bias"].map(|s| self.layout.slot(&format!("{name}.{s}")));
            let [gamma, beta] = slots.map(|s| &self.weights[self.layout.slots[s].range.clone()]);
            let affine = Affine { statistics: &self.norms[*norm].statistics, gamma, beta };
            let x = &self.activations[*input][..len(*input)];
            let keep = more.is_some() || shortcut.is_some();
            let mask = match (relu, shortcut) {
                (false, _) => Mask::None,
                (true, None) => Mask::Input,
                (true, Some(_)) => Mask::Output(&self.activations[*output][..len(*output)]),
            };
            let mut sums = batch_norm::backward_sums(x, affine, &mut dy, more.as_deref(), mask, keep);
            let (dgamma, dbeta) = batch_norm::parameter_gradients(&sums, affine.statistics);
            if self.config.sync_batch_norm {
                self.reducer.statistics(&mut sums)?;
            }
            let count = statistics_of * shapes[*input].pixels() as f64;
            if let Some(shortcut) = shortcut {
                let mut dx = self.spare.take(len(*input));
                batch_norm::backward_input(x, affine, &sums, count, &dy, &mut dx);
                self.gradient_parts[*input].push(dx);
                self.gradient_parts[*shortcut].push(dy);
            } else {
                batch_norm::backward_input_in_place(x, affine, &sums, count, *relu && !keep, &mut dy);
                self.gradient_parts[*input].push(dy);
            }
            if let Some(more) = more {
                self.spare.give(more);
            }
            // Buckets that were complete before go now: they have the next convolution to hide behind.
            self.send_ready();
            self.gradient(slots[0], first, last, |out| out.copy_from_slice(&dgamma));
            self.gradient(slots[1], first, last, |out| out.copy_from_slice(&dbeta));
            return Ok(());
        }

        if let Some(more) = more {
            for (d, m) in dy.iter_mut().zip(&more) {
                *d += m;
            }
            self.spare.give(more);
        }
        match &step {
            Step::Norm { .. } => {}
            Step::Conv { name, shape, input, needs_input_gradient, .. } => {
                let shape = ConvShape { batch: pictures, ..*shape };
                let slot = self.layout.slot(&format!("{name}.weight"));
                let x = std::mem::take(&mut self.activations[*input]);
                let mut scratch = std::mem::take(&mut self.scratch);
                self.gradient(slot, first, last, |out| {
                    if pictures == 0 {
                        out.fill(0.0);
                    } else {
                        conv::backward_weight(&shape, &x[..len(*input)], &dy, out, &mut scratch);
                    }
                });
                self.activations[*input] = x;
                if *needs_input_gradient {
                    let mut dx = self.spare.take(len(*input));
                    let weight = &self.weights[self.layout.slots[slot].range.clone()];
                    if pictures > 0 {
                        conv::backward_input(&shape, &dy, weight, &mut dx, &mut scratch);
                    }
                    self.gradient_parts[*input].push(dx);
                }
                self.scratch = scratch;
            }
            Step::MaxPool { input, output, .. } => {
                let mut dx = self.spare.take(len(*input));
                max_pool(&network, &step).backward(&dy, &self.taps[*output][..len(*output)], &mut dx);
                self.gradient_parts[*input].push(dx);
            }
            Step::GlobalAveragePool { input, .. } => {
                let mut dx = self.spare.take(len(*input));
                pool::global_average_backward(&dy, shapes[*input], &mut dx);
                self.gradient_parts[*input].push(dx);
            }
            Step::Linear { name, input, output } => {
                let slots = ["weight", "bias"].map(|s| self.layout.slot(&format!("{name}.{s}")));
                let x = &self.activations[*input][..len(*input)];
                let outputs = shapes[*output].len();
                let (mut dweight, mut dbias) =
                    (self.spare.take(outputs * shapes[*input].len()), vec![0.0; outputs]);
                linear::backward_parameters(x, &dy, &mut dweight, &mut dbias);
                let mut dx = self.spare.take(len(*input));
                let weight = &self.weights[self.layout.slots[slots[0]].range.clone()];
                linear::backward_input(&dy, weight, outputs, &mut dx);
                self.gradient_parts[*input].push(dx);
                self.gradient(slots[0], first, last, |out| out.copy_from_slice(&dweight));
                self.gradient(slots[1], first, last, |out| out.copy_from_slice(&dbias));
                self.spare.give(dweight);
            }
        }
        self.spare.give(dy);
        Ok(())
    }

    /// Writes (or, after the first micro-batch, adds) the gradient of a parameter that `compute`
    /// overwrites its argument with, and notes its bucket when that is complete.
    fn gradient(&mut self, slot: usize, first: bool, last: bool, compute: impl FnOnce(&mut [f32])) {
        let (bucket, range) = (self.layout.slots[slot].bucket, self.layout.slots[slot].in_bucket.clone());
        let out = &mut self.gradients[bucket][range];
        if first {
            compute(out);
        } else {
            let mut part = self.spare.take(out.len());
            compute(&mut part);
            for (o, p) in out.iter_mut().zip(&part) {
                *o += p;
            }
            self.spare.give(part);
        }
        if last && self.layout.last_slots[bucket] == slot {
            self.ready.push(bucket);
            if !(self.config.sync_batch_norm && self.reducer.shares_one_queue()) {
                self.send_ready();
            }
        }
    }

    fn send_ready(&mut self) {
        for bucket in self.ready.drain(..) {
            self.reducer.start_bucket(std::mem::take(&mut self.gradients[bucket]));
        }
    }
}
