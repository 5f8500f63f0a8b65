//! What the stages of a network exchange: an activation goes to the next stage, and its gradient comes back.
//!
//! A message may wait for its receiver, so two neighbours keep the same order of their messages. The earlier stage sends the activation of a
//! later micro-batch before it asks for a gradient, so the later stage takes that activation before it sends the gradient. Stages are a
//! chain: they never wait in a circle.

use super::{
    executor::Executor,
    groups::{Group, Groups},
};
use crate::{EngineError, net::TensorId};
use lockstep_comm::CommError;
use std::mem::swap;

impl Executor {
    /// Exchanges what the passes use for what is kept of micro-batch number `number`, or back. Those that are between their passes at the
    /// same time are kept apart.
    pub(super) fn swap_kept(&mut self, number: usize) {
        let place = number % (self.kept.len() + 1);
        let Some(kept) = place.checked_sub(1).and_then(|place| self.kept.get_mut(place)) else { return };
        swap(&mut self.activations, &mut kept.activations);
        swap(&mut self.argmax, &mut kept.argmax);
        swap(&mut self.pictures, &mut kept.pictures);
        for (norm, statistics) in self.norms.iter_mut().zip(&mut kept.statistics) {
            swap(&mut norm.statistics, statistics);
        }
    }

    /// Values that this rank has of an activation.
    fn len(&self, tensor: TensorId) -> usize {
        self.pictures.of(self.network.placement(tensor)) * self.network.tensors[tensor].len()
    }

    /// The groups and the number of the stage before this one, if there is one.
    fn before(&self) -> Option<(&Groups, u32)> {
        self.groups.as_ref().zip(self.network.stage().0.checked_sub(1).map(|stage| stage as u32))
    }

    /// The same of the next one.
    fn after(&self) -> Option<(&Groups, u32)> {
        let next = self.network.stage().0 as u32 + 1;
        self.groups.as_ref().map(|groups| (groups, next)).filter(|_| !self.network.is_last_stage())
    }

    /// Of a stage but the first: receives the input of a forward pass. False: there is no stage before.
    pub(super) fn take_input(&mut self) -> Result<bool, EngineError> {
        let input = self.network.input();
        let (len, mut values) = (self.len(input), std::mem::take(&mut self.activations[input]));
        let taken = self.before().map(|(groups, from)| receive(&groups.stage, &mut values[..len], from));
        self.activations[input] = values;
        let Some(taken) = taken else { return Ok(false) };
        taken?;
        self.give_gradient()?;
        Ok(true)
    }

    /// Of a stage but the last: sends what a forward pass has made.
    pub(super) fn give_output(&self) -> Result<(), EngineError> {
        let Some((groups, to)) = self.after() else { return Ok(()) };
        let output = self.network.logits();
        Ok(send(&groups.stage, &self.activations[output][..self.len(output)], to)?)
    }

    /// Of a stage but the last: receives the gradient of what it has made.
    pub(super) fn take_gradient(&mut self) -> Result<(), EngineError> {
        self.give_gradient()?;
        if self.network.is_last_stage() {
            return Ok(());
        }
        let output = self.network.logits();
        let len = self.len(output);
        let mut gradient = self.pool.alloc(len);
        if let Some((groups, from)) = self.after() {
            receive(&groups.stage, &mut gradient, from)?;
        }
        self.gradient_parts[output].push(gradient);
        Ok(())
    }

    /// Of a stage but the first: adds up the gradient of its input, for [`Executor::give_gradient`].
    pub(super) fn keep_input_gradient(&mut self) {
        if self.before().is_none() {
            return;
        }
        let input = self.network.input();
        let len = self.len(input);
        let mut parts = std::mem::take(&mut self.gradient_parts[input]).into_iter();
        let mut gradient = parts.next().unwrap_or_else(|| vec![0.0; len]);
        for part in parts {
            gradient.iter_mut().zip(&part).for_each(|(sum, part)| *sum += part);
            self.pool.free(part);
        }
        self.input_gradient = Some(gradient);
    }

    /// Sends the gradient of the newest backward pass to the stage before, unless it is there.
    pub(super) fn give_gradient(&mut self) -> Result<(), EngineError> {
        let Some(gradient) = self.input_gradient.take() else { return Ok(()) };
        if let Some((groups, to)) = self.before() {
            send(&groups.stage, &gradient, to)?;
        }
        self.pool.free(gradient);
        Ok(())
    }
}

/// Ranks without pictures in a micro-batch have no message.
fn send(group: &Group, values: &[f32], to: u32) -> Result<(), CommError> {
    if values.is_empty() { Ok(()) } else { group.send(values.into(), to) }
}

fn receive(group: &Group, values: &mut [f32], from: u32) -> Result<(), CommError> {
    if values.is_empty() { Ok(()) } else { group.recv(values.into(), from) }
}
