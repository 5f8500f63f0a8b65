//! From the loss back to the first weights; weight gradients run on a side stream.

use super::{forward::reduction, *};

impl<'a> GraphEmitter<'a> {
    pub(super) fn backward(&mut self, index: usize, micro_batch: MicroBatch) -> Result<(), EngineError> {
        let op = &self.plan.ops[index];
        match op {
            FusedOp::Conv(conv) => match conv.backward {
                ConvBackward::WithNorms { norm_before } => {
                    self.bottleneck_backward(conv, norm_before, micro_batch)?;
                }
                backward => {
                    let dgrad_in_norm = backward == ConvBackward::DgradInNorm;
                    self.convolution_backward(op, conv.input, conv.output, dgrad_in_norm, micro_batch)?;
                }
            },
            FusedOp::Linear { name, input, output, is_head } => {
                if !is_head {
                    self.bias_backward(name, *output, micro_batch)?;
                }
                self.convolution_backward(op, *input, *output, false, micro_batch)?;
            }
            FusedOp::Norm(node) => self.norm_backward(node, micro_batch)?,
            FusedOp::GlobalAveragePool { input, output, gradient_in_norm: true } => {
                let dy = self.gradient(*output)?;
                self.gradients[*input].push(Gradient::Pooled(dy));
            }
            FusedOp::GlobalAveragePool { .. }
            | FusedOp::Relu { .. }
            | FusedOp::Add { .. }
            | FusedOp::MaxPool { .. } => self.plain_backward(op)?,
        }
        // What only the forward pass has read; the output of a ReLU is read for the last time here.
        if let Some(allocation) = self.activations[op.output()].take() {
            self.free_with_newest(allocation);
        }
        Ok(())
    }

    /// wgrad, and dgrad unless the batch norm before computes it.
    fn convolution_backward(
        &mut self,
        op: &FusedOp,
        input: TensorId,
        output: TensorId,
        dgrad_in_norm: bool,
        micro_batch: MicroBatch,
    ) -> Result<(), EngineError> {
        let Some((convolution, first)) = self.plan.convolution(op) else { return Ok(()) };
        let (FusedOp::Conv(Conv { name, .. }) | FusedOp::Linear { name, .. }) = op else { return Ok(()) };
        let dy = self.gradient(output)?;
        let x = self.activation(input)?;
        if let Some(p) = self.program {
            let dw = p.matrix_gradient(name);
            let tensors = Tensors { x: self.at(x), w: dw, y: self.at(dy), sums: 0 };
            let convolution = Convolution { direction: Direction::Weight, ..convolution };
            let stream = self.weight_gradient(p, convolution, tensors)?;
            if first && self.plan.folded {
                let values = p.state.layout.slot(name, "weight").range.len();
                p.ops.fold_gradient(stream, dw, values as u32)?;
            }
            self.send_buckets(p, name, micro_batch)?;
        }
        self.readers[input] -= 1;
        if dgrad_in_norm {
            let weights = self.program.map_or(0, |p| p.state.matrix(name));
            self.gradients[input].push(Gradient::ThroughConv { dy, weights, outputs: convolution.out_c });
        } else if !first {
            let dx = self.alloc(input, Content::Gradient)?;
            if let Some(p) = self.program {
                let tensors = Tensors { x: self.at(dx), w: p.state.matrix(name), y: self.at(dy), sums: 0 };
                let convolution = Convolution { direction: Direction::Input, ..convolution };
                p.convolve(p.main.0, convolution, tensors)?;
            }
            self.gradients[input].push(Gradient::Whole(dx));
        }
        // Batch norm's input is where its gradient is, which is freed.
        let mut read = if dgrad_in_norm { Vec::new() } else { vec![dy] };
        if self.readers[input] == 0 {
            read.extend(self.activations[input].take());
        }
        self.free_after_weight_gradient(read)
    }

    /// Through ReLU and batch norm; the gradient of the input is left where the input was, or to the convolution before.
    fn norm_backward(
        &mut self,
        node: &Norm,
        MicroBatch { first, .. }: MicroBatch,
    ) -> Result<(), EngineError> {
        let x = self.activation(node.input)?;
        let [Some(dy), more] = self.gradients_of_norm(node)? else {
            return Err(EngineError::Parameters(format!("{} has no gradient", node.name)));
        };
        let summed = matches!(dy, Gradient::Summed(_));
        let deferred = node.backward_in_conv;
        // The gradient of what comes after the addition is the shortcut's, too.
        let dz = match node.shortcut {
            None => None,
            Some(_) => Some(self.alloc(node.output, Content::Gradient)?),
        };
        let dx = if node.overwrites_input { x } else { self.alloc(node.input, Content::Gradient)? };
        if let Some(p) = self.program {
            let main = p.main.0;
            let at = |gradient: Option<Gradient>| gradient.map_or(0, |g| self.at(g.allocation()));
            let (mask, pooled) =
                (self.masks[node.norm].map_or(0, |m| self.at(m)), matches!(dy, Gradient::Pooled(_)));
            let through = match dy {
                Gradient::ThroughConv { weights, outputs, .. } => Some((weights, outputs as u32)),
                _ => None,
            };
            let (dy, more, dz) = (at(Some(dy)), at(more), dz.map_or(0, |d| self.at(d)));
            if node.pooled {
                self.norm_backward_pooled(p, node, [x, dx], [dy, more, mask], first)?;
            } else {
                let gradient = match (node.relu, mask, pooled) {
                    (false, ..) => ops::Gradient::All { dy },
                    (true, 0, _) => ops::Gradient::Relu { dy, more },
                    (true, mask, false) => ops::Gradient::Mask { dy, more, mask },
                    (true, mask, true) => ops::Gradient::MaskPooled { dy, mask },
                };
                let backward = ops::NormBackward {
                    x: self.at(x),
                    gradient,
                    dz,
                    dx: self.at(dx),
                    control: p.inputs.control.ptr,
                    shape: self.shape(node.input),
                    site: p.norms[node.norm],
                    accumulate: !first,
                    reduce: reduction(p, node, true),
                };
                let whole = through.is_none() && !summed && !deferred;
                if let Some((weights, outputs)) = through {
                    let through = ops::Through { dy, weights, inner: outputs, more, mask };
                    p.ops.norm_backward_through(main, backward, through)?;
                } else if whole {
                    p.ops.norm_backward(main, backward)?;
                } else if !summed {
                    p.ops.norm_backward_sums(main, backward)?;
                }
                let added = self.added_sums(p, node)?;
                let local = ops::NormBackward { reduce: ops::Reduce::Local, ..backward };
                if let Some(sums) = added {
                    p.ops.norm_backward_finish(main, sums, local)?;
                }
                if !deferred && (!whole || added.is_some()) {
                    p.ops.norm_backward_apply(main, local)?;
                }
            }
        }
        let mut done = vec![dy];
        done.extend(more);
        self.gradients[node.input].push(if deferred {
            if let Some(dz) = dz {
                self.shared.push(dz);
            } else {
                done.clear();
            }
            Gradient::Deferred { g: dz.unwrap_or(dy.allocation()), x, norm: node.norm }
        } else {
            Gradient::Whole(dx)
        });
        for gradient in done {
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
            self.readers[node.input] -= 1;
            if self.readers[node.input] == 0
                && let Some(allocation) = self.activations[node.input].take()
            {
                self.free_with_newest(allocation);
            }
        }
        if let (Some(dz), Some(shortcut)) = (dz, node.shortcut) {
            self.gradients[shortcut.tensor].push(Gradient::Whole(dz));
        }
        Ok(())
    }

    /// The gradients of a batch norm's output as its backward pass takes them: one, or two that it adds.
    fn gradients_of_norm(&mut self, node: &Norm) -> Result<[Option<Gradient>; 2], EngineError> {
        let mut incoming = std::mem::take(&mut self.gradients[node.output]);
        // What comes through a convolution is met first.
        incoming.sort_by_key(|gradient| !matches!(gradient, Gradient::ThroughConv { .. }));
        // Its kernels add two where a ReLU is to be passed. The pooled one adds in place, which must be nobody else's.
        let adds =
            node.relu && !(node.pooled && incoming.iter().any(|g| self.shared.contains(&g.allocation())));
        let most = if adds { 2 } else { 1 };
        if incoming.len() > most {
            let rest = incoming.split_off(most - 1);
            let sum = self.add_gradients(node.output, rest)?;
            incoming.push(Gradient::Whole(sum));
        }
        let mut incoming = incoming.into_iter();
        Ok([incoming.next(), incoming.next()])
    }

    /// The same for the stem, from the gradient of its pooling.
    fn norm_backward_pooled(
        &self,
        p: &Program,
        node: &Norm,
        [x, dx]: [Allocation; 2],
        [dy, more, argmax]: [Ptr; 3],
        first: bool,
    ) -> Result<(), EngineError> {
        let main = p.main.0;
        if more != 0 {
            let values = self.plan.batch * self.plan.values(node.output);
            p.ops.add(main, dy, more, values as u64)?;
        }
        let backward = ops::NormBackwardMaxPool {
            x: self.at(x),
            dy,
            argmax,
            dx: self.at(dx),
            control: p.inputs.control.ptr,
            pool: self.pool(node.input),
            site: p.norms[node.norm],
            accumulate: !first,
            reduce: reduction(p, node, true),
        };
        p.ops.norm_backward_max_pool(main, backward)?;
        if let Some(sums) = self.added_sums(p, node)? {
            let local = ops::NormBackward {
                x: self.at(x),
                gradient: ops::Gradient::All { dy },
                dz: 0,
                dx: self.at(dx),
                control: backward.control,
                shape: self.shape(node.input),
                site: backward.site,
                accumulate: backward.accumulate,
                reduce: ops::Reduce::Local,
            };
            p.ops.norm_backward_finish(main, sums, local)?;
            p.ops.norm_backward_apply_max_pool(main, backward)?;
        }
        Ok(())
    }

    /// The backward pass's sums over all ranks, where kernels leave them to NCCL.
    fn added_sums(&self, p: &Program, node: &Norm) -> Result<Option<Ptr>, EngineError> {
        let (Some(reducer), ops::Reduce::Leave { sums }) = (&p.reducer, reduction(p, node, true)) else {
            return Ok(None);
        };
        reducer.add_statistics(p.main.0, 2 * self.plan.network.tensors[node.input].channels)?;
        Ok(Some(sums))
    }

    /// Frees what a weight gradient reads: at once, or when it is known to be done.
    fn free_after_weight_gradient(&mut self, read: Vec<Allocation>) -> Result<(), EngineError> {
        if !self.side_stream {
            read.into_iter().for_each(|allocation| self.free(allocation));
            return Ok(());
        }
        if let Some(p) = self.program {
            p.side_done[self.weight_gradients].record(p.side.0)?;
        }
        self.pending.push_back((self.weight_gradients, read));
        self.weight_gradients += 1;
        Ok(())
    }

    /// A convolution's weight gradient, on the main or the side stream. Gives the stream that it is on.
    fn weight_gradient(
        &self,
        p: &Program,
        convolution: Convolution,
        tensors: Tensors,
    ) -> Result<Stream, EngineError> {
        let stream = if self.side_stream { p.side.0 } else { p.main.0 };
        if self.side_stream {
            p.side_begin.record(p.main.0)?;
            stream.wait(&p.side_begin)?;
        }
        p.convolve_with(stream, convolution, tensors, p.side_workspace.ptr)?;
        Ok(stream)
    }

    /// Has the side stream follow the main one from here on.
    pub(super) fn fork(&self) -> Result<(), EngineError> {
        if let (Some(p), true) = (self.program, self.side_stream) {
            p.side_begin.record(p.main.0)?;
            p.side.0.wait(&p.side_begin)?;
        }
        Ok(())
    }
}
