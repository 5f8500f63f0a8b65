//! Exchange between pipeline stages: an activation is sent to the next stage, and its gradient is sent back.
//!
//! A send may block until it is received, so neighbouring stages must order their messages alike. The earlier stage sends the activation of
//! a later micro-batch before it receives a gradient, so the later stage receives that activation before it sends the gradient. Stages form
//! a chain, so they never wait in a cycle.

use super::{executor::Executor, groups::Groups};
use crate::EngineError;

impl Executor {
    /// Swaps the current activations with those kept for the micro-batch at index `micro_batch`; a second call swaps them back.
    /// Micro-batches that are between their passes at the same time have separate buffers.
    pub(super) fn swap_in_flight(&mut self, micro_batch: usize) {
        // Number 0 stands for the current buffers.
        let buffer = micro_batch % (self.in_flight.len() + 1);
        let Some(saved) = buffer.checked_sub(1).and_then(|index| self.in_flight.get_mut(index)) else {
            return;
        };
        std::mem::swap(&mut self.current, saved);
    }

    /// The groups, and the index of the preceding stage, if there is one.
    fn preceding_stage(&self) -> Option<(&Groups, u32)> {
        self.groups.as_ref().zip(self.network.stage().0.checked_sub(1).map(|stage| stage as u32))
    }

    /// The groups, and the index of the next stage, if there is one.
    fn next_stage(&self) -> Option<(&Groups, u32)> {
        let next = self.network.stage().0 as u32 + 1;
        self.groups.as_ref().map(|groups| (groups, next)).filter(|_| !self.network.is_last_stage())
    }

    /// Receives the input of a forward pass from the preceding stage. Returns false on the first stage.
    pub(super) fn receive_input(&mut self) -> Result<bool, EngineError> {
        let input = self.network.input();
        let (len, mut values) =
            (self.value_count(input), std::mem::take(&mut self.current.activations[input]));
        let received =
            self.preceding_stage().map(|(groups, from)| groups.stage.recv((&mut values[..len]).into(), from));
        self.current.activations[input] = values;
        let Some(received) = received else { return Ok(false) };
        received?;
        self.send_input_gradient()?;
        Ok(true)
    }

    /// Sends the output of a forward pass to the next stage, if there is one.
    pub(super) fn send_output(&self) -> Result<(), EngineError> {
        let Some((groups, to)) = self.next_stage() else { return Ok(()) };
        let output = self.network.logits();
        Ok(groups.stage.send((&self.current.activations[output][..self.value_count(output)]).into(), to)?)
    }

    /// Receives the gradient of the stage's output from the next stage, if there is one.
    pub(super) fn receive_gradient(&mut self) -> Result<(), EngineError> {
        self.send_input_gradient()?;
        if self.network.is_last_stage() {
            return Ok(());
        }
        let output = self.network.logits();
        let len = self.value_count(output);
        let mut gradient = self.pool.alloc(len);
        if let Some((groups, from)) = self.next_stage() {
            groups.stage.recv((&mut gradient).into(), from)?;
        }
        self.gradient_parts[output].push(gradient);
        Ok(())
    }

    /// Sums the gradient of the stage's input, for [`Executor::send_input_gradient`]. Does nothing on the first stage.
    pub(super) fn sum_input_gradient(&mut self) {
        if self.preceding_stage().is_none() {
            return;
        }
        let input = self.network.input();
        let len = self.value_count(input);
        let mut parts = std::mem::take(&mut self.gradient_parts[input]).into_iter();
        let mut gradient = parts.next().unwrap_or_else(|| vec![0.0; len]);
        parts.for_each(|part| self.pool.add(&mut gradient, part));
        self.input_gradient = Some(gradient);
    }

    /// Sends the gradient of the newest backward pass to the preceding stage, unless it has been sent already.
    pub(super) fn send_input_gradient(&mut self) -> Result<(), EngineError> {
        let Some(gradient) = self.input_gradient.take() else { return Ok(()) };
        if let Some((groups, to)) = self.preceding_stage() {
            groups.stage.send((&gradient).into(), to)?;
        }
        self.pool.free(gradient);
        Ok(())
    }
}
