//! From the pictures to the loss.

use super::*;

impl<'a> Walk<'a> {
    /// Takes the next micro-batch in and makes its pictures the network's input.
    pub(super) fn begin(&mut self, input: Input) -> Result<(), EngineError> {
        let tensor = self.p.network.input();
        let place = self.take(tensor)?;
        self.activations[tensor] = Some(place);
        if !self.starts() {
            return Ok(());
        }
        let (p, main) = (self.p, self.main());
        p.ops.fetch(main, p.inputs.fetch())?;
        p.ops.stamp(main, p.stamps.ptr)?;
        let shape = p.network.tensors[tensor];
        let (control, pictures, to) = (p.inputs.control.ptr, p.config.batch_size as u32, self.at(place));
        let (side, channels, padded) = (shape.height as u32, shape.channels as u32, p.padded_input as u32);
        let folded = p.folded;
        if folded {
            p.ops.fold_border(main, to, pictures, side)?;
        }
        let (source, height, width, which, scales) = match input {
            Input::Staged { at: from, form: Form::Normalised | Form::Draws } => {
                let pad = ops::PadChannels { from, to, control, pictures, side, channels, padded, folded };
                return Ok(p.ops.pad_channels(main, pad)?);
            }
            Input::Staged { at, form: Form::Bytes } => (at, side, side, ops::Which::InOrder, None),
            Input::Dataset { pictures, height, width, crop_padding, training } => {
                let drawn = ops::Which::Drawn { crop_padding: crop_padding as u32 };
                let which = if training { drawn } else { ops::Which::Indexed };
                (pictures, height as u32, width as u32, which, p.scalings.get(&p.network.image_size))
            }
        };
        let scaling = scales.map(|[rows, columns]| ops::Scaling {
            rows: &rows.table,
            rows_at: rows.at.ptr,
            columns: &columns.table,
            columns_at: columns.at.ptr,
        });
        let table = p.normalisation.ptr;
        let gather = ops::Gather {
            source,
            height,
            width,
            channels,
            which,
            scaling,
            control,
            pictures,
            side,
            table,
            to,
            padded,
            folded,
        };
        Ok(p.ops.gather(main, gather)?)
    }

    pub(super) fn forward(&mut self, index: usize, phase: Phase) -> Result<(), EngineError> {
        let p = self.p;
        let training = matches!(phase, Phase::Train(_));
        match &p.nodes[index] {
            Node::Conv { name, input, output, .. }
                if self.unfinished.is_some_and(|end| end.output == *input) =>
            {
                self.block_end(name, [*input, *output])?;
            }
            node @ Node::Conv { name, input, output, .. } if training && self.is_bottleneck(node) => {
                self.bottleneck_forward(name, [*input, *output])?;
            }
            node @ (Node::Conv { name, input, output, .. } | Node::Linear { name, input, output }) => {
                let (x, y) = (self.activation(*input)?, self.take(*output)?);
                self.activations[*output] = Some(y);
                if let Some((convolution, _)) = p.convolution(node)
                    && self.starts()
                {
                    let sums = p.reducer.as_ref().and_then(|r| r.sums()).unwrap_or(p.channel_sums.ptr);
                    let tensors = Tensors { x: self.at(x), w: p.state.wide(name), y: self.at(y), sums };
                    let with_sums = Convolution { sums: true, ..convolution };
                    let whole = matches!(phase, Phase::Train(Accumulation { whole: true, .. }));
                    let convolution = if whole && p.tuner.has(&with_sums) {
                        self.summed = Some(*output);
                        with_sums
                    } else {
                        convolution
                    };
                    self.convolve(self.main(), convolution, tensors)?;
                }
                let follows = matches!(p.nodes.get(index + 1), Some(Node::Norm(n)) if n.input == *output);
                if training && !follows && matches!(node, Node::Conv { .. }) {
                    // Another convolution's sums come before these would be used. On every rank, with or without
                    // sums: ranks that synchronise have to come to the same batch norm.
                    self.statistics_early(self.norm_behind(name, *output)?)?;
                }
                if !training {
                    self.readers[*input] -= 1;
                    self.drop_after_evaluation(*input);
                }
            }
            Node::Norm(node) if training => self.norm_forward(node)?,
            Node::Norm(node) => self.norm_evaluate(node)?,
            Node::GlobalAveragePool { input, output } => {
                let (x, y) = (self.activation(*input)?, self.take(*output)?);
                self.activations[*output] = Some(y);
                if self.starts() {
                    let shape = p.network.tensors[*input];
                    let average = ops::GlobalAverage {
                        x: self.at(x),
                        y: self.at(y),
                        pictures: p.config.batch_size as u32,
                        pixels: shape.pixels() as u32,
                        channels: shape.channels as u32,
                    };
                    p.ops.global_average(self.main(), average)?;
                }
                // Backward does not look at it again.
                self.drop_activation(*input);
            }
        }
        Ok(())
    }

    /// Statistics of a convolution's output, and what they are applied to.
    fn norm_forward(&mut self, node: &'a NormNode) -> Result<(), EngineError> {
        let p = self.p;
        let x = self.activation(node.input)?;
        let taken = self.taken.contains(&node.input);
        if node.deferred || self.is_left_to_bottleneck(node) {
            return if self.starts() && !taken {
                self.statistics(self.norm_alone(node)?, node)
            } else {
                Ok(())
            };
        }
        let y = self.take(node.output)?;
        self.activations[node.output] = Some(y);
        let values = p.config.batch_size * self.values(node.output);
        // A byte a value says which of a window won; a bit, whether the ReLU let it through.
        let marks = match (node.pooled, node.shortcut) {
            (true, _) => Some(self.arena.take(values)),
            (false, Shortcut::None) => None,
            (false, _) => Some(self.arena.take(values / 8)),
        };
        self.marks[node.norm] = marks;
        let unfinished = self.is_left_to_next(node);
        if unfinished {
            self.unfinished = Some(node);
        }
        if !self.starts() {
            return Ok(());
        }
        let marks = marks.map_or(0, |m| self.at(m));
        let norm = self.norm(node, x, self.at(y), marks)?;
        if node.pooled {
            self.statistics(norm, node)?;
            return Ok(p.ops.max_pool(self.main(), self.pooling(node, x, self.at(y), marks))?);
        }
        if unfinished {
            return if taken { Ok(()) } else { self.statistics(norm, node) };
        }
        if taken {
            return Ok(p.ops.norm_apply(self.main(), norm.into())?);
        }
        if self.summed == Some(node.input) && matches!(norm.reduce, ops::Reduce::Local) {
            let sum = p.channel_sums.ptr;
            let square = sum + 4 * u64::from(norm.shape.channels);
            return Ok(p.ops.norm_finish_apply(self.main(), sum, square, norm)?);
        }
        if self.summed == Some(node.input) || matches!(norm.reduce, ops::Reduce::Leave { .. }) {
            self.statistics(norm, node)?;
            return Ok(p.ops.norm_apply(self.main(), norm.into())?);
        }
        Ok(p.ops.norm_forward(self.main(), norm)?)
    }

    /// Statistics alone, unless the convolution took them along; over all ranks if they are synchronised.
    fn statistics(&self, norm: ops::NormForward, node: &NormNode) -> Result<(), EngineError> {
        let p = self.p;
        let summed = self.summed == Some(node.input);
        if !summed {
            p.ops.norm_statistics(self.main(), norm)?;
        }
        if matches!(norm.reduce, ops::Reduce::Leave { .. }) {
            return self.statistics_left(norm);
        }
        if summed {
            let sums = p.channel_sums.ptr;
            p.ops.norm_finish(self.main(), sums, sums + 4 * u64::from(norm.shape.channels), norm)?;
        }
        Ok(())
    }

    /// What a kernel has left of statistics, over all ranks, by NCCL; where they are not left, nothing.
    pub(super) fn statistics_left(&self, norm: ops::NormForward) -> Result<(), EngineError> {
        let (ops::Reduce::Leave { sums }, Some(reducer)) = (norm.reduce, &self.p.reducer) else {
            return Ok(());
        };
        let channels = norm.shape.channels;
        reducer.add_statistics(self.main(), 2 * channels as usize)?;
        let norm = ops::NormForward { reduce: ops::Reduce::Local, ..norm };
        Ok(self.p.ops.norm_finish(self.main(), sums, sums + 4 * u64::from(channels), norm)?)
    }

    /// Statistics before the rest of the addition that they are for is there.
    fn statistics_early(&mut self, node: &NormNode) -> Result<(), EngineError> {
        if self.starts() {
            self.statistics(self.norm_alone(node)?, node)?;
        }
        self.taken.push(node.input);
        self.summed = None;
        Ok(())
    }

    /// A batch norm without what is fused with it.
    pub(super) fn norm_alone(&self, node: &NormNode) -> Result<ops::NormForward, EngineError> {
        let alone = NormNode { shortcut: Shortcut::None, ..node.clone() };
        self.norm(&alone, self.activation(node.input)?, 0, 0)
    }

    /// Running statistics instead of the batch's.
    fn norm_evaluate(&mut self, node: &NormNode) -> Result<(), EngineError> {
        let p = self.p;
        let x = self.activation(node.input)?;
        if self.starts() {
            let site = &p.norms[node.norm];
            let fold = ops::NormFold {
                gamma: site.gamma,
                beta: site.beta,
                running_mean: site.running_mean,
                running_var: site.running_var,
                scale: site.scale,
                bias: site.bias,
                channels: p.network.tensors[node.input].channels as u32,
            };
            p.ops.norm_fold(self.main(), fold)?;
        }
        if node.deferred {
            return Ok(());
        }
        let y = self.take(node.output)?;
        self.activations[node.output] = Some(y);
        if self.starts() {
            if node.pooled {
                p.ops.max_pool(self.main(), self.pooling(node, x, self.at(y), 0))?;
            } else {
                p.ops.norm_apply(self.main(), self.norm(node, x, self.at(y), 0)?.into())?;
            }
        }
        self.drop_activation(node.input);
        match node.shortcut {
            Shortcut::Tensor(tensor) => self.drop_after_evaluation(tensor),
            Shortcut::Norm(norm) => {
                let input = self.node_of(norm).input;
                self.drop_activation(input);
            }
            Shortcut::None => {}
        }
        Ok(())
    }

    /// A batch norm with what is fused with it.
    pub(super) fn norm(
        &self,
        node: &NormNode,
        x: Place,
        y: Ptr,
        mask: Ptr,
    ) -> Result<ops::NormForward, EngineError> {
        let p = self.p;
        let shortcut = match node.shortcut {
            Shortcut::None => ops::Shortcut::None,
            Shortcut::Tensor(tensor) => ops::Shortcut::Plain(self.at(self.activation(tensor)?)),
            Shortcut::Norm(norm) => ops::Shortcut::Norm {
                x: self.at(self.activation(self.node_of(norm).input)?),
                scale: p.norms[norm].scale,
                bias: p.norms[norm].bias,
            },
        };
        Ok(ops::NormForward {
            x: self.at(x),
            y,
            shortcut,
            relu: node.relu,
            mask,
            control: p.inputs.control.ptr,
            shape: self.shape(node.input),
            site: p.norms[node.norm],
            reduce: self.reduction(node, false),
        })
    }

    pub(super) fn shape(&self, tensor: TensorId) -> ops::Shape {
        let shape = self.p.network.tensors[tensor];
        ops::Shape {
            pictures: self.p.config.batch_size as u32,
            pixels: shape.pixels() as u32,
            channels: shape.channels as u32,
        }
    }

    /// How a batch norm's sums are added over ranks.
    pub(super) fn reduction(&self, node: &NormNode, backward: bool) -> ops::Reduce {
        let Some(reducer) = &self.p.reducer else { return ops::Reduce::Local };
        match (reducer.meeting(node.norm, backward), reducer.sums()) {
            (Some(m), _) => ops::Reduce::Exchange { peers: m.peers, at: m.offset, sequence: m.sequence },
            (None, Some(sums)) => ops::Reduce::Leave { sums },
            (None, None) => ops::Reduce::Local,
        }
    }

    /// The stem's pooling, through its batch norm.
    pub(super) fn pooling(&self, node: &NormNode, x: Place, y: Ptr, taps: Ptr) -> ops::MaxPool {
        let site = &self.p.norms[node.norm];
        let norm = (site.scale, site.bias);
        ops::MaxPool { x: self.at(x), norm, y, taps, pool: self.pool(node.input) }
    }

    pub(super) fn pool(&self, tensor: TensorId) -> ops::Pool {
        let shape = self.p.network.tensors[tensor];
        ops::Pool {
            pictures: self.p.config.batch_size as u32,
            height: shape.height as u32,
            width: shape.width as u32,
            channels: shape.channels as u32,
        }
    }

    /// Gives back what only evaluation's readers needed; a shortcut may still read it.
    fn drop_after_evaluation(&mut self, tensor: TensorId) {
        let done = self.p.nodes.iter().all(|node| match node {
            Node::Norm(NormNode { shortcut: Shortcut::Tensor(read), output, .. }) if *read == tensor => {
                self.activations[*output].is_some()
            }
            _ => true,
        });
        if self.readers[tensor] == 0 && done {
            self.drop_activation(tensor);
        }
    }

    // ----------------------------------------------------------------- the loss

    pub(super) fn loss(&mut self, Accumulation { first, .. }: Accumulation) -> Result<(), EngineError> {
        let p = self.p;
        let logits = p.network.logits();
        let (place, gradient) = (self.activation(logits)?, self.take(logits)?);
        if self.starts() {
            let dbias = self.narrow_gradient(self.linear_name(), "bias");
            let dlogits = self.at(gradient);
            let loss = ops::CrossEntropy { dlogits, dbias, accumulate: !first, ..self.cross_entropy(place) };
            p.ops.cross_entropy(self.main(), loss)?;
        }
        self.drop_activation(logits);
        self.gradients[logits].push(Gradient::Whole(gradient));
        Ok(())
    }

    pub(super) fn evaluate(&mut self) -> Result<(), EngineError> {
        let p = self.p;
        let place = self.activation(p.network.logits())?;
        if self.starts() {
            let loss = ops::CrossEntropy { smoothing: 0.0, ..self.cross_entropy(place) };
            p.ops.cross_entropy(self.main(), loss)?;
            let logits = ops::BiasedLogits {
                logits: loss.logits,
                bias: loss.bias,
                to: p.evaluated_logits.ptr,
                pictures: loss.pictures,
                classes: loss.classes,
                padded: loss.padded,
            };
            p.ops.biased_logits(self.main(), logits)?;
        }
        Ok(())
    }

    /// The loss without gradients.
    fn cross_entropy(&self, logits: Place) -> ops::CrossEntropy {
        let p = self.p;
        ops::CrossEntropy {
            logits: self.at(logits),
            bias: p.state.narrow(self.linear_name(), "bias"),
            control: p.inputs.control.ptr,
            pictures: p.config.batch_size as u32,
            classes: p.network.classes as u32,
            padded: p.padded_classes as u32,
            smoothing: p.config.label_smoothing,
            loss_scale: p.state.scaling.ptr,
            dlogits: 0,
            dbias: 0,
            totals: p.totals.ptr,
            accumulate: false,
        }
    }

    fn linear_name(&self) -> &'a str {
        self.p
            .nodes
            .iter()
            .find_map(|n| if let Node::Linear { name, .. } = n { Some(&name[..]) } else { None })
            .unwrap_or("fc")
    }
}
