//! Operations by themselves, where nothing fits to fuse them with, and the sum of gradients of a tensor with several readers.

use super::*;

impl<'a> GraphEmitter<'a> {
    /// A ReLU, an addition or a max pooling.
    pub(super) fn plain_forward(&mut self, op: &FusedOp, training: bool) -> Result<(), EngineError> {
        let output = op.output();
        let y = self.alloc(output, Content::Activation)?;
        self.activations[output] = Some(y);
        let length = self.length(output);
        match *op {
            FusedOp::Relu { input, .. } => {
                let x = self.activation(input)?;
                if let Some(p) = self.program {
                    p.ops.relu(p.main.0, [x, y].map(|at| self.at(at)), length)?;
                }
            }
            FusedOp::Add { branch, shortcut, .. } => {
                let (a, b) = (self.activation(branch)?, self.activation(shortcut)?);
                if let Some(p) = self.program {
                    p.ops.add_forward(p.main.0, [a, b, y].map(|at| self.at(at)), length)?;
                }
            }
            FusedOp::MaxPool { input, .. } => {
                let x = self.activation(input)?;
                let argmax = training.then(|| self.alloc_bytes(length as usize, Content::Argmax(output)));
                self.argmax[output] = argmax;
                if let Some(p) = self.program {
                    let argmax = argmax.map_or(0, |at| self.at(at));
                    p.ops.plain_max_pool(p.main.0, [self.at(x), self.at(y), argmax], self.plain_pool(op))?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// A ReLU, an addition, a max or a global average pooling.
    pub(super) fn plain_backward(&mut self, op: &FusedOp) -> Result<(), EngineError> {
        let output = op.output();
        let dy = self.gradient(output)?;
        match *op {
            FusedOp::Relu { input, .. } => {
                let y = self.activation(output)?;
                let dx = self.alloc(input, Content::Gradient)?;
                if let Some(p) = self.program {
                    let length = self.length(input);
                    p.ops.relu_backward(p.main.0, [y, dy, dx].map(|at| self.at(at)), length)?;
                }
                self.readers[output] -= 1;
                self.gradients[input].push(Gradient::Whole(dx));
            }
            FusedOp::Add { branch, shortcut, .. } => {
                // It is the gradient of both.
                self.gradients[branch].push(Gradient::Whole(dy));
                self.gradients[shortcut].push(Gradient::Whole(dy));
                self.shared.push(dy);
                return Ok(());
            }
            FusedOp::MaxPool { input, .. } => {
                let dx = self.alloc(input, Content::Gradient)?;
                let argmax = self.argmax[output].take();
                if let Some(p) = self.program {
                    let argmax = argmax.map_or(0, |at| self.at(at));
                    let operands = [self.at(dy), argmax, self.at(dx)];
                    p.ops.plain_max_pool_backward(p.main.0, operands, self.plain_pool(op))?;
                }
                argmax.into_iter().for_each(|at| self.free_now(at));
                self.gradients[input].push(Gradient::Whole(dx));
            }
            FusedOp::GlobalAveragePool { input, .. } => {
                let dx = self.alloc(input, Content::Gradient)?;
                if let Some(p) = self.program {
                    let shape = self.shape(input);
                    let (pictures, pixels, channels) = (shape.pictures, shape.pixels, shape.channels);
                    let average =
                        ops::GlobalAverage { x: self.at(dx), y: self.at(dy), pictures, pixels, channels };
                    p.ops.global_average_backward(p.main.0, average)?;
                }
                self.gradients[input].push(Gradient::Whole(dx));
            }
            _ => {}
        }
        self.free(dy);
        Ok(())
    }

    /// Adds a hidden linear layer's bias to its output; the last one's is left to the loss.
    pub(super) fn bias(&mut self, name: &str, output: TensorId) -> Result<(), EngineError> {
        if let Some(p) = self.program {
            let y = self.at(self.activation(output)?);
            p.ops.add_bias(p.main.0, y, p.state.vector(name, "bias"), self.shape(output))?;
        }
        Ok(())
    }

    /// The gradient of a hidden linear layer's bias.
    pub(super) fn bias_backward(
        &mut self,
        name: &str,
        output: TensorId,
        MicroBatch { first, .. }: MicroBatch,
    ) -> Result<(), EngineError> {
        let dy = self.gradient(output)?;
        if let Some(p) = self.program {
            let dbias = p.vector_gradient(name, "bias");
            p.ops.bias_gradient(p.main.0, self.at(dy), dbias, self.shape(output), !first)?;
        }
        self.gradients[output].push(Gradient::Whole(dy));
        Ok(())
    }

    /// The gradient of an activation, from all of its readers.
    pub(super) fn gradient(&mut self, tensor: TensorId) -> Result<Allocation, EngineError> {
        let incoming = std::mem::take(&mut self.gradients[tensor]);
        match incoming[..] {
            [] => Err(EngineError::Parameters(format!("nothing reads tensor {tensor}"))),
            [gradient] => Ok(gradient.allocation()),
            _ => self.add_gradients(tensor, incoming),
        }
    }

    /// Their sum, in memory of its own: each may be another tensor's gradient, too.
    pub(super) fn add_gradients(
        &mut self,
        tensor: TensorId,
        incoming: Vec<Gradient>,
    ) -> Result<Allocation, EngineError> {
        let mut incoming = incoming.into_iter().map(Gradient::allocation);
        let mut sum = incoming
            .next()
            .ok_or_else(|| EngineError::Parameters(format!("nothing reads tensor {tensor}")))?;
        for more in incoming {
            let to = self.alloc(tensor, Content::Gradient)?;
            if let Some(p) = self.program {
                let operands = [sum, more, to].map(|at| self.at(at));
                p.ops.add_forward(p.main.0, operands, self.length(tensor))?;
            }
            self.free(sum);
            self.free(more);
            sum = to;
        }
        Ok(sum)
    }

    /// Values of the whole batch.
    fn length(&self, tensor: TensorId) -> u64 {
        (self.plan.batch * self.plan.values(tensor)) as u64
    }

    fn plain_pool(&self, op: &FusedOp) -> ops::PlainPool {
        let tensors = &self.plan.network.tensors;
        let (from, to) = (tensors[op.reads()[0]], tensors[op.output()]);
        let (kernel, stride, padding) = match *op {
            FusedOp::MaxPool { kernel, stride, padding, .. } => (kernel, stride, padding),
            _ => (1, 1, 0),
        };
        ops::PlainPool {
            pictures: self.plan.batch as u32,
            input: [from.height, from.width].map(|side| side as u32),
            output: [to.height, to.width].map(|side| side as u32),
            kernel: kernel as u32,
            stride: stride as u32,
            padding: padding as u32,
            channels: from.channels as u32,
        }
    }
}
