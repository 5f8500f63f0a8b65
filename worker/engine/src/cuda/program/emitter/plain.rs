//! Operations that are not fused with other operations, and the sum of the gradients of a tensor with several readers.

use super::*;

impl<'a> GraphEmitter<'a> {
    /// The forward pass of a ReLU, a GELU, an addition or a max pooling.
    pub(super) fn plain_forward(&mut self, op: &FusedOp, trains: bool) -> Result {
        let output = op.output();
        let y = self.alloc_activation(output);
        let (ops, length) = (self.facts.ops, self.length(output));
        match *op {
            FusedOp::Relu { input, .. } => {
                let x = self.activation(input)?;
                self.push(ops.relu([x, y], length));
            }
            FusedOp::Gelu { ref bias, input, .. } => {
                let x = self.activation(input)?;
                if let Some(name) = bias {
                    let bias = self.facts.layout.vector(name, "bias");
                    self.push(ops.add_bias(x, bias, self.shape(input)));
                }
                self.push(ops.gelu([x, y], length));
            }
            FusedOp::Add { branch, shortcut, .. } => {
                let (a, b) = (self.activation(branch)?, self.activation(shortcut)?);
                self.push(ops.add([a, b, y], length));
            }
            FusedOp::MaxPool { input, .. } => {
                let x = self.activation(input)?;
                let argmax = trains.then(|| self.alloc_bytes(length as usize, Content::Argmax(output)));
                self.argmax[output] = argmax;
                let argmax = argmax.unwrap_or(Operand::NONE);
                self.push(ops.plain_max_pool([x, y, argmax], self.plain_pool(op)));
            }
            _ => {}
        }
        Ok(())
    }

    /// The backward pass of a ReLU, a GELU, an addition, a max pooling or a global average pooling.
    pub(super) fn plain_backward(&mut self, op: &FusedOp, MicroBatch { is_first, .. }: MicroBatch) -> Result {
        let output = op.output();
        let dy = self.gradient(output)?;
        let ops = self.facts.ops;
        match *op {
            FusedOp::Relu { input, .. } => {
                let y = self.activation(output)?;
                let dx = self.alloc_gradient(input);
                self.push(ops.relu_backward([y, dy, dx], self.length(input)));
                self.remaining_readers[output] -= 1;
            }
            FusedOp::Gelu { ref bias, input, .. } => {
                let x = self.activation(input)?;
                let dx = self.alloc_gradient(input);
                self.push(ops.gelu_backward([x, dy, dx], self.length(input)));
                if let Some(name) = bias {
                    let dbias = self.facts.layout.vector_gradient(name, "bias");
                    if !dbias.is_none() {
                        self.push(ops.row_sums(dx, dbias, self.shape(input), !is_first));
                    }
                }
                self.remaining_readers[input] -= 1;
            }
            FusedOp::Add { branch, shortcut, .. } => {
                // The gradient of the sum is the gradient of both operands.
                self.gradients[branch].push(Gradient::Whole(dy));
                self.gradients[shortcut].push(Gradient::Whole(dy));
                self.shared_allocations.push(dy);
                return Ok(());
            }
            FusedOp::MaxPool { input, .. } => {
                let dx = self.alloc_gradient(input);
                let argmax = self.argmax[output].take();
                let operands = [dy, argmax.unwrap_or(Operand::NONE), dx];
                self.push(ops.plain_max_pool_backward(operands, self.plain_pool(op)));
                argmax.into_iter().for_each(|at| self.free_now(at));
            }
            FusedOp::GlobalAveragePool { input, .. } => {
                let dx = self.alloc_gradient(input);
                self.push(ops.global_average_backward(dy, dx, self.shape(input)));
            }
            _ => {}
        }
        self.free(dy);
        Ok(())
    }

    /// Adds a hidden linear layer's bias to its output. The loss adds the last layer's bias.
    pub(super) fn add_bias(&mut self, name: &str, output: TensorId) -> Result {
        let (facts, y) = (self.facts, self.activation(output)?);
        self.push(facts.ops.add_bias(y, facts.layout.vector(name, "bias"), self.shape(output)));
        Ok(())
    }

    /// The gradient of a hidden linear layer's bias.
    pub(super) fn bias_backward(&mut self, name: &str, output: TensorId, micro_batch: MicroBatch) -> Result {
        let dy = self.gradient(output)?;
        let (facts, shape) = (self.facts, self.shape(output));
        let dbias = facts.layout.vector_gradient(name, "bias");
        self.push(facts.ops.bias_gradient(dy, dbias, shape, !micro_batch.is_first));
        self.gradients[output].push(Gradient::Whole(dy));
        Ok(())
    }

    /// The gradient of an activation, from all of its readers.
    pub(super) fn gradient(&mut self, tensor: TensorId) -> Result<Operand> {
        let incoming = std::mem::take(&mut self.gradients[tensor]);
        match incoming[..] {
            [] => Err(EngineError::Parameters(format!("nothing reads tensor {tensor}"))),
            [gradient] => Ok(gradient.allocation()),
            _ => self.add_gradients(tensor, incoming),
        }
    }

    /// The sum of gradients, in new memory, because each gradient may also be the gradient of another tensor.
    pub(super) fn add_gradients(&mut self, tensor: TensorId, incoming: Vec<Gradient>) -> Result<Operand> {
        let mut incoming = incoming.into_iter().map(Gradient::allocation);
        let mut sum = incoming
            .next()
            .ok_or_else(|| EngineError::Parameters(format!("nothing reads tensor {tensor}")))?;
        for gradient in incoming {
            let new_sum = self.alloc(tensor, Content::Gradient);
            self.push(self.facts.ops.add([sum, gradient, new_sum], self.length(tensor)));
            self.free(sum);
            self.free(gradient);
            sum = new_sum;
        }
        Ok(sum)
    }

    /// Number of values of a tensor of the whole batch.
    fn length(&self, tensor: TensorId) -> u64 {
        self.plan.values(tensor) as u64
    }

    fn plain_pool(&self, op: &FusedOp) -> ops::PlainPool {
        let tensors = &self.plan.network.tensors;
        let (from, to) = (tensors[op.reads()[0]], tensors[op.output()]);
        let (kernel, stride, padding) = match *op {
            FusedOp::MaxPool { kernel, stride, padding, .. } => (kernel, stride, padding),
            _ => (1, 1, 0),
        };
        ops::PlainPool {
            pictures: self.plan.picture_count(op.output()) as u32,
            input: [from.height, from.width].map(|side| side as u32),
            output: [to.height, to.width].map(|side| side as u32),
            kernel: kernel as u32,
            stride: stride as u32,
            padding: padding as u32,
            row_padding: self.plan.network.row_padding(op.reads()[0], padding) as u32,
            channels: from.channels as u32,
        }
    }
}
