//! From the loss back to the first weights; weight gradients run beside it.

use super::*;

impl<'a> Walk<'a> {
    pub(super) fn backward(&mut self, index: usize, accumulation: Accumulation) -> Result<(), EngineError> {
        let p = self.p;
        match &p.nodes[index] {
            node @ Node::Conv { name, input, output, .. } if self.is_bottleneck(node) => {
                self.bottleneck_backward(name, [*input, *output], accumulation)?;
            }
            node @ (Node::Conv { name, input, output, .. } | Node::Linear { name, input, output }) => {
                let Some((convolution, first)) = p.convolution(node) else { return Ok(()) };
                let dy = self.only_gradient(*output)?;
                let x = self.activation(*input)?;
                if self.starts() {
                    let dw = self.wide_gradient(name);
                    let tensors = Tensors { x: self.at(x), w: dw, y: self.at(dy), sums: 0 };
                    let convolution = Convolution { direction: Direction::Weight, ..convolution };
                    let stream = self.weight_gradient(convolution, tensors)?;
                    if first && p.folded {
                        let values = p.state.layout.slot(name, "weight").range.len();
                        p.ops.fold_gradient(stream, dw, values as u32)?;
                    }
                    self.send_buckets(name, accumulation)?;
                }
                self.readers[*input] -= 1;
                let through = self.goes_through(node);
                if through {
                    let (weights, inner) = (p.state.wide(name), convolution.out_c);
                    self.gradients[*input].push(Gradient::Convolved { dy, weights, inner });
                } else if !first {
                    let dx = self.take(*input)?;
                    if self.starts() {
                        let tensors =
                            Tensors { x: self.at(dx), w: p.state.wide(name), y: self.at(dy), sums: 0 };
                        let convolution = Convolution { direction: Direction::Input, ..convolution };
                        self.convolve(self.main(), convolution, tensors)?;
                    }
                    self.gradients[*input].push(Gradient::Whole(dx));
                }
                // Batch norm's input is where its gradient is, which is given back.
                let mut read = if through { Vec::new() } else { vec![dy] };
                if self.readers[*input] == 0 {
                    read.extend(self.activations[*input].take());
                }
                self.give_back(read)?;
            }
            Node::Norm(node) => self.norm_backward(node, accumulation)?,
            Node::GlobalAveragePool { input, output } => {
                let dy = self.only_gradient(*output)?;
                self.gradients[*input].push(Gradient::Pooled(dy));
            }
        }
        Ok(())
    }

    /// The gradient of an activation with one reader.
    fn only_gradient(&mut self, tensor: TensorId) -> Result<Place, EngineError> {
        match self.gradients[tensor].pop() {
            Some(gradient) => Ok(gradient.place()),
            None => Err(EngineError::Parameters(format!("nothing reads tensor {tensor}"))),
        }
    }

    /// Through ReLU and batch norm; the gradient of the input is left where the input was, or to the convolution before.
    fn norm_backward(
        &mut self,
        node: &NormNode,
        Accumulation { first, .. }: Accumulation,
    ) -> Result<(), EngineError> {
        let p = self.p;
        let x = self.activation(node.input)?;
        let mut incoming = std::mem::take(&mut self.gradients[node.output]);
        // What comes through a convolution is met first.
        incoming.sort_by_key(|gradient| !matches!(gradient, Gradient::Convolved { .. }));
        let mut incoming = incoming.into_iter();
        let (Some(dy), more, None) = (incoming.next(), incoming.next(), incoming.next()) else {
            return Err(EngineError::Parameters(format!("{} has no gradient, or more than two", node.name)));
        };
        let summed = matches!(dy, Gradient::Summed(_));
        let unapplied = self.makes_bottleneck(node.input);
        // The gradient of what comes after the addition is the shortcut's, too.
        let dz = match node.shortcut {
            Shortcut::None => None,
            _ => Some(self.take(node.output)?),
        };
        if self.starts() {
            let at = |gradient: Option<Gradient>| gradient.map_or(0, |g| self.at(g.place()));
            let (mask, pooled) =
                (self.marks[node.norm].map_or(0, |m| self.at(m)), matches!(dy, Gradient::Pooled(_)));
            let through = match dy {
                Gradient::Convolved { weights, inner, .. } => Some((weights, inner as u32)),
                _ => None,
            };
            let (dy, more, dz) = (at(Some(dy)), at(more), dz.map_or(0, |d| self.at(d)));
            if node.pooled {
                self.norm_backward_pooled(node, x, dy, more, mask, first)?;
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
                    dx: self.at(x),
                    control: p.inputs.control.ptr,
                    shape: self.shape(node.input),
                    site: p.norms[node.norm],
                    accumulate: !first,
                    reduce: self.reduction(node, true),
                };
                let whole = through.is_none() && !summed && !unapplied;
                if let Some((weights, inner)) = through {
                    let through = ops::Through { dy, weights, inner, more, mask };
                    p.ops.norm_backward_through(self.main(), backward, through)?;
                } else if whole {
                    p.ops.norm_backward(self.main(), backward)?;
                } else if !summed {
                    p.ops.norm_backward_sums(self.main(), backward)?;
                }
                let added = self.added_sums(node)?;
                let local = ops::NormBackward { reduce: ops::Reduce::Local, ..backward };
                if let Some(sums) = added {
                    p.ops.norm_backward_finish(self.main(), sums, local)?;
                }
                if !unapplied && (!whole || added.is_some()) {
                    p.ops.norm_backward_apply(self.main(), local)?;
                }
            }
        }
        let mut done = vec![dy];
        done.extend(more);
        self.gradients[node.input].push(if unapplied {
            if let Some(dz) = dz {
                self.shared.push(dz);
            } else {
                done.clear();
            }
            Gradient::Unapplied { g: dz.unwrap_or(dy.place()), x, norm: node.norm }
        } else {
            Gradient::Whole(x)
        });
        for gradient in done {
            match gradient {
                Gradient::Convolved { dy, .. } => self.give_with_newest(dy),
                gradient => self.give(gradient.place()),
            }
        }
        if let Some(marks) = self.marks[node.norm].take() {
            self.arena.give(marks);
        }
        self.activations[node.input] = None;
        if let Some(dz) = dz {
            let shortcut = match node.shortcut {
                Shortcut::Norm(norm) => self.node_of(norm).output,
                Shortcut::Tensor(tensor) => tensor,
                Shortcut::None => node.output,
            };
            self.gradients[shortcut].push(Gradient::Whole(dz));
        }
        Ok(())
    }

    /// The same for the stem, from the gradient of its pooling.
    fn norm_backward_pooled(
        &self,
        node: &NormNode,
        x: Place,
        dy: Ptr,
        more: Ptr,
        taps: Ptr,
        first: bool,
    ) -> Result<(), EngineError> {
        let (p, main) = (self.p, self.main());
        if more != 0 {
            let values = p.config.batch_size * self.values(node.output);
            p.ops.add(main, dy, more, values as u64)?;
        }
        let backward = ops::NormBackwardMaxPool {
            x: self.at(x),
            dy,
            taps,
            dx: self.at(x),
            control: p.inputs.control.ptr,
            pool: self.pool(node.input),
            site: p.norms[node.norm],
            accumulate: !first,
            reduce: self.reduction(node, true),
        };
        p.ops.norm_backward_max_pool(main, backward)?;
        if let Some(sums) = self.added_sums(node)? {
            let local = ops::NormBackward {
                x: self.at(x),
                gradient: ops::Gradient::All { dy },
                dz: 0,
                dx: self.at(x),
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

    /// Backward's sums over all ranks, where kernels leave them to NCCL.
    fn added_sums(&self, node: &NormNode) -> Result<Option<Ptr>, EngineError> {
        let (Some(reducer), ops::Reduce::Leave { sums }) = (&self.p.reducer, self.reduction(node, true))
        else {
            return Ok(None);
        };
        reducer.add_statistics(self.main(), 2 * self.p.network.tensors[node.input].channels)?;
        Ok(Some(sums))
    }

    pub(super) fn node_of(&self, norm: usize) -> &'a NormNode {
        let found = self.p.nodes.iter().find_map(|node| match node {
            Node::Norm(n) if n.norm == norm => Some(n),
            _ => None,
        });
        // Numbers are those of nodes.
        found.unwrap_or_else(|| unreachable!("no batch norm {norm}"))
    }

    /// Gives back what a weight gradient reads: at once, or when it is known to be done.
    fn give_back(&mut self, read: Vec<Place>) -> Result<(), EngineError> {
        if !self.beside {
            read.into_iter().for_each(|place| self.give(place));
            return Ok(());
        }
        if self.starts() {
            self.p.side_done[self.weight_gradients].record(self.p.side.0)?;
        }
        self.read.push_back((self.weight_gradients, read));
        self.weight_gradients += 1;
        Ok(())
    }

    /// A convolution's weight gradient: on the way, or beside it. Gives the stream that it is on.
    fn weight_gradient(&self, convolution: Convolution, tensors: Tensors) -> Result<Stream, EngineError> {
        let stream = if self.beside { self.p.side.0 } else { self.main() };
        if self.beside {
            self.p.side_begin.record(self.main())?;
            stream.wait(&self.p.side_begin)?;
        }
        self.convolve_with(stream, convolution, tensors, self.p.side_workspace.ptr)?;
        Ok(stream)
    }

    pub(super) fn convolve(
        &self,
        stream: Stream,
        convolution: Convolution,
        tensors: Tensors,
    ) -> Result<(), EngineError> {
        self.convolve_with(stream, convolution, tensors, self.p.workspace.ptr)
    }

    fn convolve_with(
        &self,
        stream: Stream,
        convolution: Convolution,
        tensors: Tensors,
        workspace: Ptr,
    ) -> Result<(), EngineError> {
        let plan = self.p.tuner.plan(&convolution)?;
        let run = || Ok(self.p.tuner.cudnn().run(stream, plan, tensors, workspace)?);
        self.p.ops.profile().around(stream, || convolution.to_string(), run)
    }

    /// Has the side stream follow the main one from here on.
    pub(super) fn fork(&self) -> Result<(), EngineError> {
        if self.starts() && self.beside {
            self.p.side_begin.record(self.main())?;
            self.p.side.0.wait(&self.p.side_begin)?;
        }
        Ok(())
    }
}
