//! The forward pass, from the pictures to the logits.

use super::*;

impl<'a> GraphEmitter<'a> {
    /// Reads the pictures of the next micro-batch, which are the network's input. Later stages receive the activation of the preceding
    /// stage instead.
    pub(super) fn begin(&mut self, phase: Phase, input: Input) -> Result {
        if self.plan.network.stage().0 > 0 {
            self.receive_input(phase);
            return Ok(());
        }
        if self.plan.shares_rows() {
            return self.begin_with_own_rows(phase, input);
        }
        let tensor = self.plan.network.input();
        let pictures = self.alloc_activation(tensor);
        self.read_pictures(phase, input, pictures);
        self.gather_group_control_if_split();
        Ok(())
    }

    /// Fetches the next control block, and records the time at which the micro-batch begins.
    pub(super) fn fetch(&mut self, phase: Phase) {
        let facts = self.facts;
        let begins_step = matches!(phase, Phase::Train(MicroBatch { is_first: true, .. }));
        // The same kernel keeps the running statistics from before the step.
        let running_bytes = begins_step.then(|| facts.running_bytes());
        self.push(facts.ops.fetch(self.control_words(), running_bytes));
        self.push(facts.ops.stamp(Stamp::Begin.operand(), Operand::NONE));
    }

    /// Fetches the next control block, and writes the micro-batch's whole pictures to `output`.
    pub(super) fn read_pictures(&mut self, phase: Phase, input: Input, output: Operand) {
        self.fetch(phase);
        let (facts, plan) = (self.facts, self.plan);
        let sizes = [plan.batch, plan.network.image_size, plan.network.channels, plan.padded_input];
        let [pictures, side, channels, padded] = sizes.map(|size| size as u32);
        if plan.has_folded_input {
            self.push(facts.ops.fold_border(output, pictures, side));
        }
        let batch =
            ops::BatchInput { pictures, side, channels, output, padded, is_folded: plan.has_folded_input };
        let (size, mode, scaling) = match input {
            Input::Staged { format: BatchFormat::Normalised | BatchFormat::AugmentParams, .. } => {
                return self.push(facts.ops.pad_channels(batch));
            }
            Input::Staged { format: BatchFormat::Bytes, .. } => ([side; 2], GatherMode::InOrder, None),
            Input::Dataset { height, width, mode, .. } => {
                ([height, width].map(|side| side as u32), mode, facts.scaling)
            }
        };
        self.push(facts.ops.gather(batch, size, mode, scaling));
    }

    pub(super) fn forward(&mut self, index: usize, phase: Phase) -> Result {
        let trains = matches!(phase, Phase::Train(_));
        let op = &self.plan.ops[index];
        match op {
            FusedOp::Conv(conv) => match conv.forward {
                ConvForward::WithBlockEnd { block_end } if trains => {
                    self.block_end_forward(conv, block_end)?
                }
                ConvForward::WithNorms { norm_before } if trains => {
                    self.bottleneck_forward(conv, norm_before)?;
                }
                ConvForward::Plain { early_statistics: true } if trains => {
                    self.convolution_forward(op, phase)?;
                    // The statistics are computed now, because another convolution runs before the batch norm and replaces the sums.
                    let node = self.norm_after(conv)?;
                    let norm = self.norm_without_fusion(node)?;
                    self.compute_statistics(norm, node);
                }
                _ => self.convolution_forward(op, phase)?,
            },
            FusedOp::Linear { input, output, is_head: true, .. } if self.plan.head.is_some() => {
                if trains {
                    self.sample_classes();
                }
                self.split_forward(*input, *output)?;
                self.scale_to_cosines(*input, *output, trains)?;
            }
            FusedOp::Linear { name, input, output, is_head } => {
                self.convolution_forward(op, phase)?;
                // The loss adds the bias of the last layer. This includes logits that are first summed over ranks (`has_logits`).
                if *is_head {
                    self.scale_to_cosines(*input, *output, trains)?;
                } else if !self.plan.network.has_logits(*output) {
                    self.add_bias(name, *output)?;
                }
            }
            FusedOp::Norm(norm) if trains && !norm.is_frozen() => self.norm_forward(norm)?,
            FusedOp::Norm(norm) => self.norm_with_running_statistics(norm, trains)?,
            FusedOp::GlobalAveragePool { input, output, .. } => {
                let (x, y) = (self.activation(*input)?, self.alloc_activation(*output));
                let shape = self.shape(*input);
                self.push(self.facts.ops.global_average(x, y, shape));
            }
            FusedOp::Relu { .. } | FusedOp::Gelu { .. } | FusedOp::Add { .. } | FusedOp::MaxPool { .. } => {
                self.plain_forward(op, trains)?;
            }
            FusedOp::Redistribute { input, output } => self.redistribute_forward(*input, *output)?,
            FusedOp::Halo { input, output, lowest } => self.halo_forward(*input, *output, *lowest)?,
            FusedOp::MeanOfRows { input, output } => self.mean_of_rows_forward(*input, *output)?,
        }
        if !trains {
            op.reads().into_iter().for_each(|tensor| self.note_read_in_evaluation(tensor));
            return Ok(());
        }
        // The backward pass of these operations does not read the input.
        if let FusedOp::GlobalAveragePool { input, .. } | FusedOp::Redistribute { input, .. } = *op
            && self.remaining_readers[input] == 0
            && self.plan.is_read_once(input)
        {
            self.drop_activation(input);
        }
        if matches!(op, FusedOp::Norm(_) | FusedOp::Redistribute { .. }) {
            self.clear_padding(op.output(), self.activations[op.output()]);
        }
        if self.plan.shares_rows() {
            self.drop_rows(index);
        }
        Ok(())
    }

    /// An unfused convolution or linear layer, without bias.
    fn convolution_forward(&mut self, op: &FusedOp, phase: Phase) -> Result {
        let (Some(convolution), Some((name, _))) = (self.plan.convolution(op), op.parameters()) else {
            return Ok(());
        };
        let (input, output) = (op.reads()[0], op.output());
        let (x, y) = (self.activation(input)?, self.alloc_activation(output));
        let with_sums = Convolution { sums: true, ..convolution };
        let is_full = matches!(phase, Phase::Train(MicroBatch { is_full: true, .. }));
        let feeds_norm = matches!(op, FusedOp::Conv(Conv { norm_after: Some(_), .. }));
        let computes_sums = is_full && feeds_norm && (self.facts.computes_sums)(&with_sums);
        let convolution = if computes_sums { with_sums } else { convolution };
        if computes_sums {
            self.tensor_with_sums = Some(output);
        }
        let (w, channel_sums) = (self.facts.matrix(name), self.facts.channel_sums(output));
        let tensors = Tensors { x, w, y, channel_sums };
        self.convolve(StreamId::Main, convolution, tensors);
        Ok(())
    }

    pub(super) fn convolve(&mut self, stream: StreamId, convolution: Convolution, tensors: Tensors<Operand>) {
        // Weight gradients may run concurrently with other convolutions, so they have their own workspace.
        let workspace = Operand::whole(match convolution.direction {
            Direction::Weight => Region::SideWorkspace,
            Direction::Forward | Direction::Input => Region::Workspace,
        });
        self.commands.push(Command::Convolution { stream, convolution, tensors, workspace });
    }

    /// A batch norm in training: computes the statistics of its input and applies them, as far as no other operation does so.
    fn norm_forward(&mut self, node: &Norm) -> Result {
        let x = self.activation(node.input)?;
        let are_statistics_taken_earlier = node.statistics != StatisticsIn::Norm;
        if matches!(node.forward, NormForward::InShortcut | NormForward::InConv) {
            if !are_statistics_taken_earlier {
                let norm = self.norm_without_fusion(node)?;
                self.compute_statistics(norm, node);
            }
            return Ok(());
        }
        let y = self.alloc_activation(node.output);
        let values = self.plan.values(node.output);
        // Without a shortcut, the backward pass recomputes the ReLU's mask.
        let mask = if node.pooled {
            Some(self.alloc_bytes(values, Content::Argmax(node.norm)))
        } else {
            node.shortcut.map(|_| self.alloc_bytes(values / 8, Content::ReluMask(node.norm)))
        };
        self.masks[node.norm] = mask;
        let (ops, mask) = (self.facts.ops, mask.unwrap_or(Operand::NONE));
        let norm = self.norm(node, x, y, mask)?;
        if node.pooled {
            self.compute_statistics(norm, node);
            self.push(ops.max_pool([x, y, mask], &self.facts.norms[node.norm], self.pool(node.input)));
            return Ok(());
        }
        if node.forward == NormForward::InConvAndStored {
            if !are_statistics_taken_earlier {
                self.compute_statistics(norm, node);
            }
            return Ok(());
        }
        if are_statistics_taken_earlier {
            self.push(ops.norm_apply(norm));
            return Ok(());
        }
        let is_summed = self.tensor_with_sums == Some(node.input);
        if is_summed && matches!(norm.reduce, ops::Reduce::Local) {
            self.tensor_with_sums = None;
            let [sum, square] = halves(self.facts.channel_sums(node.input));
            self.push(ops.norm_finish_apply(sum, square, norm));
        } else if is_summed || matches!(norm.reduce, ops::Reduce::StoreSums { .. }) {
            self.compute_statistics(norm, node);
            self.push(ops.norm_apply(norm));
        } else {
            self.push(ops.norm_forward(norm));
        }
        Ok(())
    }

    /// Computes the statistics of a batch norm's input, over all ranks if they are synchronised. The convolution may already have computed
    /// the sums.
    fn compute_statistics(&mut self, norm: ops::NormForward, node: &Norm) {
        // A convolution's sums are used once: NCCL reduces them in place, and the next convolution replaces them.
        let is_summed = self.tensor_with_sums.take_if(|tensor| *tensor == node.input).is_some();
        if !is_summed {
            self.push(self.facts.ops.norm_statistics(norm));
        }
        if matches!(norm.reduce, ops::Reduce::StoreSums { .. }) {
            self.finish_statistics(norm, node);
        } else if is_summed {
            let [sum, square] = halves(self.facts.channel_sums(node.input));
            self.push(self.facts.ops.norm_finish(sum, square, norm));
        }
    }

    /// Does nothing if the batch norm's kernel itself adds the sums of all ranks. Otherwise NCCL adds the stored sums, and a kernel
    /// computes the statistics from them.
    pub(super) fn finish_statistics(&mut self, norm: ops::NormForward, node: &Norm) {
        let ops::Reduce::StoreSums { sums } = norm.reduce else { return };
        self.reduce_statistics(sums, node);
        let shape = self.whole_shape(node.input);
        let norm = ops::NormForward { reduce: ops::Reduce::Local, shape, ..norm };
        let [sum, square] = halves(sums);
        self.push(self.facts.ops.norm_finish(sum, square, norm));
    }

    /// The kernel's description of a batch norm without the operations that are fused with it.
    pub(super) fn norm_without_fusion(&self, node: &Norm) -> Result<ops::NormForward> {
        let without_shortcut = Norm { shortcut: None, ..node.clone() };
        self.norm(&without_shortcut, self.activation(node.input)?, Operand::NONE, Operand::NONE)
    }

    /// A batch norm that applies running statistics: in evaluation, or frozen in training. In training it keeps the ReLU's mask for the
    /// backward pass.
    fn norm_with_running_statistics(&mut self, node: &Norm, trains: bool) -> Result {
        let (ops, x) = (self.facts.ops, self.activation(node.input)?);
        self.push(ops.norm_to_scale_and_bias(&self.facts.norms[node.norm]));
        if node.forward == NormForward::InShortcut {
            return Ok(());
        }
        let y = self.alloc_activation(node.output);
        if node.pooled {
            let (operands, site) = ([x, y, Operand::NONE], &self.facts.norms[node.norm]);
            self.push(ops.max_pool(operands, site, self.pool(node.input)));
            return Ok(());
        }
        if trains && node.shortcut.is_some() {
            let values = self.plan.values(node.output);
            self.masks[node.norm] = Some(self.alloc_bytes(values / 8, Content::ReluMask(node.norm)));
        }
        let norm = self.norm(node, x, y, self.masks[node.norm].unwrap_or(Operand::NONE))?;
        self.push(ops.norm_apply(norm));
        Ok(())
    }

    /// The kernel's description of a batch norm with the operations that are fused with it.
    pub(super) fn norm(
        &self,
        node: &Norm,
        x: Operand,
        y: Operand,
        mask: Operand,
    ) -> Result<ops::NormForward> {
        let norms = self.facts.norms;
        let shortcut = match node.shortcut {
            None => ops::Shortcut::None,
            Some(shortcut) => {
                let x = self.activation(shortcut.stored_tensor())?;
                match shortcut.deferred {
                    None => ops::Shortcut::Plain(x),
                    Some(DeferredNorm { norm, .. }) => {
                        ops::Shortcut::Norm { x, scale: norms[norm].scale, bias: norms[norm].bias }
                    }
                }
            }
        };
        Ok(ops::NormForward {
            x,
            y,
            shortcut,
            has_relu: node.relu,
            mask,
            control: self.control_of(node.input),
            shape: self.shape(node.input),
            site: norms[node.norm],
            reduce: self.facts.reduction(node, NormPass::Forward),
        })
    }

    pub(super) fn shape(&self, tensor: TensorId) -> ops::Shape {
        let shape = self.plan.network.tensors[tensor];
        ops::Shape {
            pictures: self.plan.picture_count(tensor) as u32,
            pixels: shape.pixels() as u32,
            channels: shape.channels as u32,
        }
    }

    /// Same as [`Self::shape`], but with the pixels of all ranks that share a picture's rows, for sums over these ranks.
    pub(super) fn whole_shape(&self, tensor: TensorId) -> ops::Shape {
        ops::Shape { pixels: self.plan.network.whole_pixels(tensor) as u32, ..self.shape(tensor) }
    }

    /// The stem's pooling, which is fused with the preceding batch norm.
    pub(super) fn pool(&self, tensor: TensorId) -> ops::Pool {
        let shape = self.plan.network.tensors[tensor];
        ops::Pool {
            pictures: self.plan.picture_count(tensor) as u32,
            height: shape.height as u32,
            width: shape.width as u32,
            channels: shape.channels as u32,
        }
    }
}

/// Splits a buffer into its two halves: sums, and sums of squares.
fn halves(sums: Operand) -> [Operand; 2] {
    let bytes = sums.bytes / 2;
    [sums.part(0, bytes), sums.part(bytes, bytes)]
}
