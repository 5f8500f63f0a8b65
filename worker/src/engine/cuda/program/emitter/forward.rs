//! From the pictures to the loss.

use super::*;

impl<'a> GraphEmitter<'a> {
    /// Takes the next micro-batch in and makes its pictures the network's input.
    pub(super) fn begin(&mut self, input: Input) -> Result<(), EngineError> {
        let tensor = self.plan.network.input();
        let allocation = self.alloc(tensor, Content::Activation)?;
        self.activations[tensor] = Some(allocation);
        let Some(p) = self.program else { return Ok(()) };
        let (plan, main) = (self.plan, p.main.0);
        p.ops.fetch(main, p.inputs.fetch())?;
        p.ops.stamp(main, p.stamps.ptr)?;
        let shape = plan.network.tensors[tensor];
        let (control, pictures, to) = (p.inputs.control.ptr, plan.batch as u32, self.at(allocation));
        let (side, channels, padded) = (shape.height as u32, shape.channels as u32, plan.padded_input as u32);
        let folded = plan.folded;
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
                (pictures, height as u32, width as u32, which, p.scalings.get(&plan.network.image_size))
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
        let training = matches!(phase, Phase::Train(_));
        let op = &self.plan.ops[index];
        match op {
            FusedOp::Conv(conv) => match conv.forward {
                ConvForward::WithBlockEnd { block_end } if training => self.block_end(conv, block_end)?,
                ConvForward::WithNorms { norm_before } if training => {
                    self.bottleneck_forward(conv, norm_before)?;
                }
                ConvForward::Plain { early_statistics: true } if training => {
                    self.convolution_forward(op, conv.input, conv.output, phase)?;
                    // Another convolution's sums come before these would be used.
                    self.statistics_early(self.norm_after(conv)?)?;
                }
                _ => self.convolution_forward(op, conv.input, conv.output, phase)?,
            },
            FusedOp::Linear { name, input, output, is_head } => {
                self.convolution_forward(op, *input, *output, phase)?;
                if !is_head {
                    self.bias(name, *output)?;
                }
            }
            FusedOp::Norm(norm) if training => self.norm_forward(norm)?,
            FusedOp::Norm(norm) => return self.norm_evaluate(norm),
            FusedOp::GlobalAveragePool { input, output, .. } => {
                let (x, y) = (self.activation(*input)?, self.alloc(*output, Content::Activation)?);
                self.activations[*output] = Some(y);
                if let Some(p) = self.program {
                    let shape = self.shape(*input);
                    let (pictures, pixels, channels) = (shape.pictures, shape.pixels, shape.channels);
                    let average =
                        ops::GlobalAverage { x: self.at(x), y: self.at(y), pictures, pixels, channels };
                    p.ops.global_average(p.main.0, average)?;
                }
                // The backward pass does not look at it again.
                if training && self.readers[*input] == 0 && self.plan.read_once(*input) {
                    self.drop_activation(*input);
                }
            }
            FusedOp::Relu { .. } | FusedOp::Add { .. } | FusedOp::MaxPool { .. } => {
                self.plain_forward(op, training)?;
            }
        }
        if !training {
            op.reads().into_iter().for_each(|tensor| self.evaluated(tensor));
        }
        Ok(())
    }

    /// A convolution or linear layer (without its bias) by itself.
    fn convolution_forward(
        &mut self,
        op: &FusedOp,
        input: TensorId,
        output: TensorId,
        phase: Phase,
    ) -> Result<(), EngineError> {
        let (x, y) = (self.activation(input)?, self.alloc(output, Content::Activation)?);
        self.activations[output] = Some(y);
        let (Some((convolution, _)), Some(p)) = (self.plan.convolution(op), self.program) else {
            return Ok(());
        };
        let (FusedOp::Conv(Conv { name, .. }) | FusedOp::Linear { name, .. }) = op else { return Ok(()) };
        let sums = p.reducer.as_ref().and_then(|r| r.sums()).unwrap_or(p.channel_sums.ptr);
        let tensors = Tensors { x: self.at(x), w: p.state.matrix(name), y: self.at(y), sums };
        let with_sums = Convolution { sums: true, ..convolution };
        let whole = matches!(phase, Phase::Train(MicroBatch { whole: true, .. }));
        let feeds_norm = matches!(op, FusedOp::Conv(Conv { norm_after: Some(_), .. }));
        let convolution = if whole && feeds_norm && p.tuner.has(&with_sums) {
            self.summed = Some(output);
            with_sums
        } else {
            convolution
        };
        p.convolve(p.main.0, convolution, tensors)
    }

    /// Statistics of a convolution's output, and what they are applied to.
    fn norm_forward(&mut self, node: &Norm) -> Result<(), EngineError> {
        let x = self.activation(node.input)?;
        let taken = node.statistics != StatisticsIn::Norm;
        if matches!(node.forward, NormForward::InShortcut | NormForward::InConv) {
            return match (self.program, taken) {
                (Some(p), false) => self.statistics(p, self.norm_alone(p, node)?, node),
                _ => Ok(()),
            };
        }
        let y = self.alloc(node.output, Content::Activation)?;
        self.activations[node.output] = Some(y);
        let values = self.plan.batch * self.plan.values(node.output);
        let mask = match (node.pooled, node.shortcut) {
            (true, _) => Some(self.alloc_bytes(values, Content::Argmax(node.norm))),
            (false, None) => None,
            (false, Some(_)) => Some(self.alloc_bytes(values / 8, Content::ReluMask(node.norm))),
        };
        self.masks[node.norm] = mask;
        let Some(p) = self.program else { return Ok(()) };
        let main = p.main.0;
        let mask = mask.map_or(0, |m| self.at(m));
        let norm = self.norm(p, node, x, self.at(y), mask)?;
        if node.pooled {
            self.statistics(p, norm, node)?;
            return Ok(p.ops.max_pool(main, self.pooling(p, node, x, self.at(y), mask))?);
        }
        if node.forward == NormForward::InNextConv {
            return if taken { Ok(()) } else { self.statistics(p, norm, node) };
        }
        if taken {
            return Ok(p.ops.norm_apply(main, norm.into())?);
        }
        if self.summed == Some(node.input) && matches!(norm.reduce, ops::Reduce::Local) {
            let sum = p.channel_sums.ptr;
            let square = sum + 4 * u64::from(norm.shape.channels);
            return Ok(p.ops.norm_finish_apply(main, sum, square, norm)?);
        }
        if self.summed == Some(node.input) || matches!(norm.reduce, ops::Reduce::Leave { .. }) {
            self.statistics(p, norm, node)?;
            return Ok(p.ops.norm_apply(main, norm.into())?);
        }
        Ok(p.ops.norm_forward(main, norm)?)
    }

    /// Statistics alone, unless the convolution took them along; over all ranks if they are synchronised.
    fn statistics(&self, p: &Program, norm: ops::NormForward, node: &Norm) -> Result<(), EngineError> {
        let summed = self.summed == Some(node.input);
        if !summed {
            p.ops.norm_statistics(p.main.0, norm)?;
        }
        if matches!(norm.reduce, ops::Reduce::Leave { .. }) {
            return statistics_left(p, norm);
        }
        if summed {
            let sums = p.channel_sums.ptr;
            p.ops.norm_finish(p.main.0, sums, sums + 4 * u64::from(norm.shape.channels), norm)?;
        }
        Ok(())
    }

    /// Statistics right after the convolution, before the rest of the addition that they are for is there.
    fn statistics_early(&mut self, node: &Norm) -> Result<(), EngineError> {
        if let Some(p) = self.program {
            self.statistics(p, self.norm_alone(p, node)?, node)?;
        }
        self.summed = None;
        Ok(())
    }

    /// A batch norm without what is fused with it.
    pub(super) fn norm_alone(&self, p: &Program, node: &Norm) -> Result<ops::NormForward, EngineError> {
        let alone = Norm { shortcut: None, ..node.clone() };
        self.norm(p, &alone, self.activation(node.input)?, 0, 0)
    }

    /// Running statistics instead of the batch's.
    fn norm_evaluate(&mut self, node: &Norm) -> Result<(), EngineError> {
        let x = self.activation(node.input)?;
        if let Some(p) = self.program {
            let site = &p.norms[node.norm];
            let fold = ops::NormFold {
                gamma: site.gamma,
                beta: site.beta,
                running_mean: site.running_mean,
                running_var: site.running_var,
                scale: site.scale,
                bias: site.bias,
                channels: self.shape(node.input).channels,
            };
            p.ops.norm_fold(p.main.0, fold)?;
        }
        if node.forward == NormForward::InShortcut {
            return Ok(());
        }
        let y = self.alloc(node.output, Content::Activation)?;
        self.activations[node.output] = Some(y);
        if let Some(p) = self.program {
            if node.pooled {
                p.ops.max_pool(p.main.0, self.pooling(p, node, x, self.at(y), 0))?;
            } else {
                p.ops.norm_apply(p.main.0, self.norm(p, node, x, self.at(y), 0)?.into())?;
            }
        }
        self.evaluated(node.input);
        if let Some(shortcut) = node.shortcut {
            self.evaluated(shortcut.read());
        }
        Ok(())
    }

    /// A batch norm with what is fused with it.
    pub(super) fn norm(
        &self,
        p: &Program,
        node: &Norm,
        x: Allocation,
        y: Ptr,
        mask: Ptr,
    ) -> Result<ops::NormForward, EngineError> {
        let shortcut = match node.shortcut {
            None => ops::Shortcut::None,
            Some(shortcut) => {
                let x = self.at(self.activation(shortcut.read())?);
                match shortcut.deferred {
                    None => ops::Shortcut::Plain(x),
                    Some(DeferredNorm { norm, .. }) => {
                        ops::Shortcut::Norm { x, scale: p.norms[norm].scale, bias: p.norms[norm].bias }
                    }
                }
            }
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
            reduce: reduction(p, node, false),
        })
    }

    pub(super) fn shape(&self, tensor: TensorId) -> ops::Shape {
        let shape = self.plan.network.tensors[tensor];
        ops::Shape {
            pictures: self.plan.batch as u32,
            pixels: shape.pixels() as u32,
            channels: shape.channels as u32,
        }
    }

    /// The stem's pooling, through its batch norm.
    pub(super) fn pooling(
        &self,
        p: &Program,
        node: &Norm,
        x: Allocation,
        y: Ptr,
        argmax: Ptr,
    ) -> ops::MaxPool {
        let site = &p.norms[node.norm];
        let norm = (site.scale, site.bias);
        ops::MaxPool { x: self.at(x), norm, y, argmax, pool: self.pool(node.input) }
    }

    pub(super) fn pool(&self, tensor: TensorId) -> ops::Pool {
        let shape = self.plan.network.tensors[tensor];
        ops::Pool {
            pictures: self.plan.batch as u32,
            height: shape.height as u32,
            width: shape.width as u32,
            channels: shape.channels as u32,
        }
    }

    // ----------------------------------------------------------------- the loss

    pub(super) fn loss(&mut self, MicroBatch { first, .. }: MicroBatch) -> Result<(), EngineError> {
        let logits = self.plan.network.logits();
        let (allocation, gradient) = (self.activation(logits)?, self.alloc(logits, Content::Gradient)?);
        if let Some(p) = self.program {
            let dbias = p.vector_gradient(self.plan.network.head(), "bias");
            let dlogits = self.at(gradient);
            let loss =
                ops::CrossEntropy { dlogits, dbias, accumulate: !first, ..self.cross_entropy(p, allocation) };
            p.ops.cross_entropy(p.main.0, loss)?;
        }
        self.drop_activation(logits);
        self.gradients[logits].push(Gradient::Whole(gradient));
        Ok(())
    }

    pub(super) fn evaluate(&mut self) -> Result<(), EngineError> {
        let allocation = self.activation(self.plan.network.logits())?;
        if let Some(p) = self.program {
            let loss = ops::CrossEntropy { smoothing: 0.0, ..self.cross_entropy(p, allocation) };
            p.ops.cross_entropy(p.main.0, loss)?;
            let logits = ops::BiasedLogits {
                logits: loss.logits,
                bias: loss.bias,
                to: p.evaluated_logits.ptr,
                pictures: loss.pictures,
                classes: loss.classes,
                padded: loss.padded,
            };
            p.ops.biased_logits(p.main.0, logits)?;
        }
        Ok(())
    }

    /// The loss without gradients.
    fn cross_entropy(&self, p: &Program, logits: Allocation) -> ops::CrossEntropy {
        ops::CrossEntropy {
            logits: self.at(logits),
            bias: p.state.vector(self.plan.network.head(), "bias"),
            control: p.inputs.control.ptr,
            pictures: self.plan.batch as u32,
            classes: self.plan.network.classes as u32,
            padded: self.plan.padded_classes as u32,
            smoothing: p.config.label_smoothing,
            loss_scale: p.state.scaling.ptr,
            dlogits: 0,
            dbias: 0,
            totals: p.totals.ptr,
            accumulate: false,
        }
    }
}

/// What a kernel has left of statistics, over all ranks, by NCCL; where they are not left, nothing.
pub(super) fn statistics_left(p: &Program, norm: ops::NormForward) -> Result<(), EngineError> {
    let (ops::Reduce::Leave { sums }, Some(reducer)) = (norm.reduce, &p.reducer) else {
        return Ok(());
    };
    let channels = norm.shape.channels;
    reducer.add_statistics(p.main.0, 2 * channels as usize)?;
    let norm = ops::NormForward { reduce: ops::Reduce::Local, ..norm };
    Ok(p.ops.norm_finish(p.main.0, sums, sums + 4 * u64::from(channels), norm)?)
}

/// How a batch norm's sums are added over ranks.
pub(super) fn reduction(p: &Program, node: &Norm, backward: bool) -> ops::Reduce {
    let Some(reducer) = &p.reducer else { return ops::Reduce::Local };
    match (reducer.meeting(node.norm, backward), reducer.sums()) {
        (Some(m), _) => ops::Reduce::Exchange { peers: m.peers, at: m.offset, sequence: m.sequence },
        (None, Some(sums)) => ops::Reduce::Leave { sums },
        (None, None) => ops::Reduce::Local,
    }
}
