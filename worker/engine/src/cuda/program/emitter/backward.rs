//! The backward pass of operations.

use super::*;

impl<'a> GraphEmitter<'a> {
    pub(super) fn backward(&mut self, index: usize, micro_batch: MicroBatch) -> Result {
        let op = &self.plan.ops[index];
        match op {
            FusedOp::Conv(conv) => match conv.backward {
                ConvBackward::WithNorms { norm_before } => {
                    self.bottleneck_backward(conv, norm_before, micro_batch)?;
                }
                ConvBackward::Plain | ConvBackward::DgradInNorm => {
                    self.convolution_backward(op, micro_batch)?;
                }
            },
            FusedOp::Linear { input, output, is_head: true, .. } if self.plan.head.is_some() => {
                self.split_backward(*input, *output)?;
            }
            FusedOp::Linear { name, output, is_head, .. } => {
                if !is_head && !self.plan.network.has_logits(*output) {
                    self.bias_backward(name, *output, micro_batch)?;
                }
                self.convolution_backward(op, micro_batch)?;
            }
            FusedOp::Norm(node) => self.norm_backward(node, micro_batch)?,
            FusedOp::GlobalAveragePool { input, output, gradient_in_norm: true } => {
                let dy = self.gradient(*output)?;
                self.gradients[*input].push(Gradient::Pooled(dy));
            }
            FusedOp::GlobalAveragePool { .. }
            | FusedOp::Relu { .. }
            | FusedOp::Gelu { .. }
            | FusedOp::Add { .. }
            | FusedOp::MaxPool { .. } => self.plain_backward(op, micro_batch)?,
            FusedOp::Redistribute { input, .. } | FusedOp::Halo { input, .. }
                if self.plan.network.is_pictures(*input) =>
            {
                // Pictures need no gradient.
            }
            FusedOp::Redistribute { input, output } => self.redistribute_backward(*input, *output)?,
            FusedOp::Halo { input, output, .. } => self.halo_backward(*input, *output)?,
            FusedOp::MeanOfRows { input, output } => self.mean_of_rows_backward(*input, *output)?,
        }
        // Frees an output that only the forward pass has read, or that this operation (a ReLU) was the last to read.
        if let Some(allocation) = self.activations[op.output()].take() {
            self.free_with_newest(allocation);
        }
        Ok(())
    }

    /// The wgrad of a convolution or linear layer, and the dgrad unless the preceding batch norm's kernel computes it.
    fn convolution_backward(&mut self, op: &FusedOp, micro_batch: MicroBatch) -> Result {
        let (Some(convolution), Some((name, _))) = (self.plan.convolution(op), op.parameters()) else {
            return Ok(());
        };
        let (input, output) = (op.reads()[0], op.output());
        let dy = self.gradient(output)?;
        let x = self.activation(input)?;
        let facts = self.facts;
        let (w, y, channel_sums) = (facts.matrix_gradient(name), dy, Operand::NONE);
        let wgrad = Convolution { direction: Direction::Weight, ..convolution };
        let weight = facts.layout.parameter(name, "weight");
        self.fork();
        let stream = self.weight_gradient_stream;
        if weight.is_fixed {
            self.push_on(stream, facts.ops.zero_gradient(w, weight.aligned_range().len() as u64));
        } else {
            self.convolve(stream, wgrad, Tensors { x, w, y, channel_sums });
        }
        if reads_pictures(op) && self.plan.has_folded_input {
            let values = weight.range.len();
            self.push_on(stream, facts.ops.fold_gradient(w, values as u32));
        }
        let is_head = matches!(op, FusedOp::Linear { is_head: true, .. });
        if is_head {
            self.remove_along(stream, facts.matrix(name), w, [convolution.out_c, convolution.in_c]);
        }
        self.send_completed_bucket(name, micro_batch);
        self.remaining_readers[input] -= 1;
        let w = facts.matrix(name);
        let dgrad_in_norm = matches!(op, FusedOp::Conv(Conv { backward: ConvBackward::DgradInNorm, .. }));
        if dgrad_in_norm {
            self.gradients[input].push(Gradient::ThroughConv { dy, weights: w, outputs: convolution.out_c });
        } else if !reads_pictures(op) {
            let dx = self.alloc_gradient(input);
            let dgrad = Convolution { direction: Direction::Input, ..convolution };
            self.convolve(StreamId::Main, dgrad, Tensors { x: dx, w, y, channel_sums });
            if is_head {
                let size = [convolution.batch, convolution.in_c];
                self.remove_along(StreamId::Main, x, dx, size);
            }
        }
        // With `dgrad_in_norm`, `norm_backward` still reads `dy`, and frees it.
        let mut used = if dgrad_in_norm { Vec::new() } else { vec![dy] };
        if self.remaining_readers[input] == 0 {
            used.extend(self.activations[input].take());
        }
        self.free_after_weight_gradient(used);
        Ok(())
    }

    /// The backward pass of a batch norm and of the ReLU after it. It writes the gradient of the input over the input or into new memory,
    /// unless the preceding convolution's backward pass computes this gradient.
    fn norm_backward(&mut self, node: &Norm, MicroBatch { is_first, .. }: MicroBatch) -> Result {
        let x = self.activation(node.input)?;
        let [Some(dy), added] = self.gradients_of_norm(node)? else {
            return Err(EngineError::Parameters(format!("{} has no gradient", node.name)));
        };
        // The gradient of the sum is also the shortcut's gradient.
        let dz = node.shortcut.map(|_| self.alloc(node.output, Content::Gradient));
        let dx = if node.overwrites_input { x } else { self.alloc(node.input, Content::Gradient) };
        let at = |gradient: Option<Gradient>| gradient.map_or(Operand::NONE, Gradient::allocation);
        let operands = Incoming {
            dy: at(Some(dy)),
            added: at(added),
            mask: self.masks[node.norm].unwrap_or(Operand::NONE),
        };
        if node.pooled {
            self.norm_backward_pooled(node, [x, dx], operands, is_first);
        } else {
            self.norm_backward_kernels(node, [x, dx], dy, operands, dz.unwrap_or(Operand::NONE), is_first);
        }
        self.clear_padding(node.input, Some(dx));
        let mut used = vec![dy];
        used.extend(added);
        self.gradients[node.input].push(if node.backward_in_conv {
            if let Some(dz) = dz {
                self.shared_allocations.push(dz);
            } else {
                used.clear();
            }
            Gradient::Deferred { g: dz.unwrap_or(dy.allocation()), x, norm: node.norm }
        } else {
            Gradient::Whole(dx)
        });
        for gradient in used {
            match gradient {
                Gradient::ThroughConv { dy, .. } => self.free_with_newest(dy),
                gradient => self.free(gradient.allocation()),
            }
        }
        if let Some(mask) = self.masks[node.norm].take() {
            self.free_now(mask);
        }
        if node.overwrites_input {
            self.activations[node.input] = None;
        } else {
            self.note_read_in_backward(node.input);
        }
        if let (Some(dz), Some(shortcut)) = (dz, node.shortcut) {
            self.gradients[shortcut.tensor].push(Gradient::Whole(dz));
        }
        Ok(())
    }

    /// The kernels of a batch norm's backward pass: a single call, or the sums, their reduction over ranks, and their application.
    fn norm_backward_kernels(
        &mut self,
        node: &Norm,
        [x, dx]: [Operand; 2],
        gradient: Gradient,
        Incoming { dy, added, mask }: Incoming,
        dz: Operand,
        is_first: bool,
    ) {
        let ops = self.facts.ops;
        let backward = ops::NormBackward {
            x,
            gradient: if !node.relu {
                ops::Gradient::All { dy }
            } else if mask.is_none() {
                ops::Gradient::Relu { dy, added }
            } else if matches!(gradient, Gradient::Pooled(_)) {
                ops::Gradient::MaskPooled { dy, mask }
            } else {
                ops::Gradient::Mask { dy, added, mask }
            },
            dz,
            dx,
            control: self.control_of(node.input),
            shape: self.shape(node.input),
            site: self.facts.norms[node.norm],
            accumulate: !is_first,
            reduce: self.facts.reduction(node, NormPass::Backward),
        };
        if node.is_frozen() {
            return self.push(ops.norm_backward_frozen(backward));
        }
        let has_sums = matches!(gradient, Gradient::Summed(_));
        let through = match gradient {
            Gradient::ThroughConv { weights, outputs, .. } => {
                Some(ops::OutputGradient { dy, weights, inner: outputs as u32, added, mask })
            }
            _ => None,
        };
        let is_single_call = through.is_none() && !has_sums && !node.backward_in_conv;
        if let Some(through) = through {
            self.push(ops.norm_backward_through(backward, through));
        } else if is_single_call {
            self.push(ops.norm_backward(backward));
        } else if !has_sums {
            self.push(ops.norm_backward_sums(backward));
        }
        let local = ops::NormBackward { reduce: ops::Reduce::Local, ..backward };
        let reduced_sums = self.reduce_sums(backward.reduce, node);
        if let Some(sums) = reduced_sums {
            let of_all_ranks = ops::NormBackward { shape: self.whole_shape(node.input), ..local };
            self.push(ops.norm_backward_finish(sums, of_all_ranks));
        }
        if !node.backward_in_conv && (!is_single_call || reduced_sums.is_some()) {
            self.push(ops.norm_backward_apply(local));
        }
    }

    /// The gradients of a batch norm's output for its backward pass: one, or two that its kernels add. Adds further gradients first.
    fn gradients_of_norm(&mut self, node: &Norm) -> Result<[Option<Gradient>; 2]> {
        let mut incoming = std::mem::take(&mut self.gradients[node.output]);
        // A gradient through a convolution comes first, so that it is not one of the gradients that are added below.
        incoming.sort_by_key(|gradient| !matches!(gradient, Gradient::ThroughConv { .. }));
        // The kernels of a batch norm with ReLU add two gradients themselves. The kernels of a pooled batch norm add in place, so they do
        // this only if no gradient has a second owner.
        let kernel_adds = node.relu
            && !(node.pooled
                && incoming.iter().any(|other| self.shared_allocations.contains(&other.allocation())));
        let max = if kernel_adds { 2 } else { 1 };
        if incoming.len() > max {
            let rest = incoming.split_off(max - 1);
            let sum = self.add_gradients(node.output, rest)?;
            incoming.push(Gradient::Whole(sum));
        }
        let mut incoming = incoming.into_iter();
        Ok([incoming.next(), incoming.next()])
    }

    /// The kernels of the backward pass of the stem's batch norm, from the gradient of the stem's pooling.
    fn norm_backward_pooled(
        &mut self,
        node: &Norm,
        [x, dx]: [Operand; 2],
        Incoming { dy, added, mask: argmax }: Incoming,
        is_first: bool,
    ) {
        let ops = self.facts.ops;
        if !added.is_none() {
            self.push(ops.add([dy, added, dy], self.plan.values(node.output) as u64));
        }
        let backward = ops::NormBackward {
            x,
            gradient: ops::Gradient::All { dy },
            dz: Operand::NONE,
            dx,
            control: self.control_of(node.input),
            shape: self.whole_shape(node.input),
            site: self.facts.norms[node.norm],
            accumulate: !is_first,
            reduce: self.facts.reduction(node, NormPass::Backward),
        };
        let pool = self.pool(node.input);
        self.push(ops.norm_backward_max_pool(backward, argmax, pool));
        if let Some(sums) = self.reduce_sums(backward.reduce, node) {
            let local = ops::NormBackward { reduce: ops::Reduce::Local, ..backward };
            self.push(ops.norm_backward_finish(sums, local));
            self.push(ops.norm_backward_apply_max_pool(backward, argmax, pool));
        }
    }

    /// Returns `None` if the batch norm's kernel itself adds the sums of all ranks. Otherwise NCCL adds the stored sums, which are
    /// returned.
    fn reduce_sums(&mut self, reduce: ops::Reduce, node: &Norm) -> Option<Operand> {
        let ops::Reduce::StoreSums { sums } = reduce else { return None };
        self.reduce_statistics(sums, node);
        Some(sums)
    }

    /// Frees the allocations that the newest weight gradient reads: after the weight gradient if it runs on the side stream, otherwise at
    /// once.
    pub(super) fn free_after_weight_gradient(&mut self, allocations: Vec<Operand>) {
        if !self.uses_side_stream() {
            allocations.into_iter().for_each(|allocation| self.free(allocation));
            return;
        }
        self.record(StreamId::Side, EventId::WeightGradient(self.weight_gradient_count));
        self.pending_weight_gradients.push_back((self.weight_gradient_count, allocations));
        self.weight_gradient_count += 1;
    }

    pub(super) fn uses_side_stream(&self) -> bool {
        self.weight_gradient_stream == StreamId::Side
    }

    /// If weight gradients run on the side stream: makes it wait for the main stream's commands so far.
    pub(super) fn fork(&mut self) {
        if self.uses_side_stream() {
            self.record(StreamId::Main, EventId::SideBegin);
            self.wait(StreamId::Side, EventId::SideBegin);
        }
    }
}

/// The inputs of a batch norm's backward pass; each may be [`Operand::NONE`].
struct Incoming {
    dy: Operand,
    /// A second gradient, which is added to `dy`.
    added: Operand,
    /// The ReLU's mask, or the pooling's argmax.
    mask: Operand,
}
