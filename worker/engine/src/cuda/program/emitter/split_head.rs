//! The last layer if the ranks of a model group divide the classes, and its loss. The loss is also used by a rank that alone has all
//! classes, if they are many. Every rank multiplies the features of the whole group's pictures with the weights of its own classes, one
//! chunk of classes at a time. Logits are not exchanged.

use super::{loss::unsplit_logits, *};

/// Memory with `count` sums of squares (f64).
#[derive(Debug, Clone, Copy)]
pub(super) struct Squares {
    pub(super) at: Operand,
    pub(super) count: usize,
}

impl GraphEmitter<'_> {
    /// The logits of this rank's classes, without the bias.
    pub(super) fn split_forward(&mut self, input: TensorId, output: TensorId) -> Result {
        let Some(HeadPart { convolution, chunk_count, w, .. }) = self.head_part() else { return Ok(()) };
        let [.., bytes] = convolution.bytes();
        let (x, y) =
            (self.activation(input)?, self.alloc_bytes(chunk_count * bytes, Content::Activation(output)));
        self.activations[output] = Some(y);
        for chunk in 0..chunk_count {
            let tensors = chunk_tensors(&convolution, (chunk, chunk_count), x, w, y);
            self.convolve(StreamId::Main, convolution, tensors);
        }
        Ok(())
    }

    /// The gradients of features and weights. The gradient of the features comes first, because the backward pass waits for it.
    pub(super) fn split_backward(&mut self, input: TensorId, output: TensorId) -> Result {
        let Some(HeadPart { convolution, chunk_count, w, .. }) = self.head_part() else { return Ok(()) };
        let (dy, x) = (self.gradient(output)?, self.activation(input)?);
        // Allocated before the fork. Otherwise the side stream could write to memory that the main stream frees after the fork.
        let sampled_gradient = self.alloc_sampled_gradient();
        self.fork();
        let dx = self.alloc_gradient(input);
        let [bytes, ..] = convolution.bytes();
        let parts =
            (chunk_count > 1).then(|| self.alloc_bytes(chunk_count * bytes, Content::Gradient(input)));
        let dgrad = Convolution { direction: Direction::Input, ..convolution };
        for chunk in 0..chunk_count {
            let to = parts.map_or(dx, |parts| piece(parts, (chunk, chunk_count), bytes));
            let tensors = chunk_tensors(&dgrad, (chunk, chunk_count), to, w, dy);
            self.convolve(StreamId::Main, dgrad, tensors);
        }
        if let Some(parts) = parts {
            let length = (bytes / self.plan.dtype.size()) as u64;
            self.push(self.facts.ops.sum_parts(parts, dx, length, chunk_count as u32));
            self.free_now(parts);
        }
        let size = [convolution.batch, convolution.in_c];
        self.remove_along(StreamId::Main, x, dx, size);

        // Only the head reads the gathered features.
        (self.remaining_readers[input], self.activations[input]) = (0, None);
        if self.facts.recomputes_head_gradient() {
            self.features_and_dlogits = Some([x, dy]);
            return Ok(());
        }
        let stream = self.weight_gradient_stream;
        let wgrad = Convolution { direction: Direction::Weight, ..convolution };
        let dw = sampled_gradient.unwrap_or_else(|| self.facts.matrix_gradient(self.plan.network.head()));
        for chunk in 0..chunk_count {
            let tensors = chunk_tensors(&wgrad, (chunk, chunk_count), x, dw, dy);
            self.convolve(stream, wgrad, tensors);
        }
        self.remove_along(stream, w, dw, [chunk_count * wgrad.out_c, wgrad.in_c]);
        self.free_after_weight_gradient(vec![x, dy]);
        Ok(())
    }

    /// The description of the logits of this rank's classes. Gathers the labels of the group, if that is not yet done.
    fn split_logits(&mut self, logits: Operand) -> Option<ops::SplitLogits> {
        let plan = self.plan;
        let Some(head) = &plan.head else { return Some(unsplit_logits(&self.cross_entropy(logits))) };
        let part = self.head_part()?;
        if self.sampled_head.is_none() && !plan.splits_operators {
            self.gather_controls();
        }
        let own = head.own_classes();
        Some(ops::SplitLogits {
            logits,
            bias: part.bias,
            sample: part.sample,
            label_positions: part.label_positions,
            controls: CONTROLS,
            control_words: self.control_words(),
            batch: plan.batch as u32,
            ranks: head.ranks as u32,
            rank: head.rank as u32,
            all_classes: plan.network.classes as u32,
            classes: own.len() as u32,
            first_class: own.start as u32,
            chunk_classes: part.convolution.out_c as u32,
            chunk_count: part.chunk_count as u32,
        })
    }

    /// Computes the loss of this rank's pictures. In training, the gradient of the logits replaces the logits. `micro_batch` is `None` in
    /// evaluation.
    pub(super) fn split_loss(&mut self, micro_batch: Option<MicroBatch>) -> Result {
        let facts = self.facts;
        let smoothing = micro_batch.map_or(0.0, |_| facts.label_smoothing);
        // The first micro-batch of a step replaces the totals and bias gradients. Later ones and evaluated ones add to them.
        let accumulate = micro_batch.is_none_or(|micro_batch| !micro_batch.is_first);
        let logits = self.activation(self.plan.network.logits())?;
        let Some(split) = self.split_logits(logits) else { return Ok(()) };
        let bytes = split.record_bytes();
        let label_logits = self.put_margin(split);
        let parts = self.alloc_bytes(split.part_bytes(), Content::Head);
        let records = self.alloc_bytes(bytes, Content::Head);
        self.push(facts.ops.class_records(split, parts, records, label_logits));
        let gathered =
            (split.ranks > 1).then(|| self.alloc_bytes(split.ranks as usize * bytes, Content::Head));
        if let Some(gathered) = gathered {
            let count = bytes / 4;
            self.collective(Collective::AllGather, records, gathered, count, DType::F32);
        }
        let class_rows = micro_batch.map(|_| self.alloc_bytes(split.class_row_bytes(), Content::Head));
        let (all_records, rows) = (gathered.unwrap_or(records), class_rows.unwrap_or(Operand::NONE));
        self.push(facts.ops.class_loss(split, all_records, rows, smoothing, accumulate));
        if let Some(class_rows) = class_rows {
            let bias = facts.layout.vector_gradient(self.plan.last_layer(), "bias");
            let dbias = self.alloc_sampled_bias_gradient().unwrap_or(bias);
            self.push(facts.ops.class_gradient(split, class_rows, smoothing, dbias, accumulate));
            self.convert_cosine_gradient(logits);
        }
        [parts, records].into_iter().chain(gathered).chain(class_rows).for_each(|at| self.free_now(at));
        Ok(())
    }

    /// Sums the gradients of this rank's part of the network over the ranks that have the same part.
    pub(super) fn reduce_split_gradients(&mut self, split: ops::Gradients) {
        if !self.plan.is_split() || self.facts.data_ranks == 1 {
            return;
        }
        let matrix_dtype = if split.is_float32 { DType::F32 } else { self.plan.dtype };
        let all = [(split.matrices, matrix_dtype), (split.vectors, DType::F32)];
        for (at, dtype) in all.into_iter().filter(|(at, _)| at.bytes > 0) {
            self.commands.push(Command::all_reduce(StreamId::Main, Group::Data, at, dtype));
        }
    }

    /// Computes the sums of squares (f64) of the gradients of this rank's parts of parameters. `None` if every rank has all parameters.
    pub(super) fn compute_split_squares(&mut self, split: ops::Gradients) -> Result<Option<Squares>> {
        if !self.plan.is_split() {
            return Ok(None);
        }
        let ops = self.facts.ops;
        if !self.facts.recomputes_head_gradient() {
            let at = self.alloc_bytes(8, Content::Head);
            self.push(ops.gradient_squares(split, at));
            return Ok(Some(Squares { at, count: 1 }));
        }
        let chunk_count = self.plan.chunk_count();
        let at = self.alloc_bytes(8 * (chunk_count + 1), Content::Head);
        let sum_at = |index: usize| at.part(8 * index, 8);
        self.for_each_chunk(|emitter, chunk, gradients| {
            emitter.push(ops.gradient_squares(gradients, sum_at(chunk)));
        })?;
        let length = split.length - split.matrix_length;
        let vectors = ops::Gradients { matrices: Operand::NONE, matrix_length: 0, length, ..split };
        self.push(ops.gradient_squares(vectors, sum_at(chunk_count)));
        Ok(Some(Squares { at, count: chunk_count + 1 }))
    }

    /// Collective: frees this rank's sums of squares, and returns the sums of all ranks of the model group.
    pub(super) fn gather_squares(&mut self, own: Squares) -> Squares {
        let ranks = self.plan.model_ranks;
        let all = self.alloc_bytes(8 * ranks * own.count, Content::Head);
        let (from, count) = (own.at.part(0, 8 * own.count), 2 * own.count);
        self.collective(Collective::AllGather, from, all, count, DType::F32);
        self.free_now(own.at);
        Squares { at: all, count: ranks * own.count }
    }

    /// Updates this rank's parts of weights.
    pub(super) fn update_head(&mut self, gradients: ops::Gradients) -> Result {
        let layout = self.facts.layout;
        if self.facts.recomputes_head_gradient() {
            self.for_each_chunk(|emitter, chunk, gradients| {
                let from = chunk * gradients.length as usize;
                emitter.update_weights(&[emitter.facts.updated_range(gradients, from, from)]);
            })?;
        } else if self.plan.is_split() {
            let none = layout.matrix_len..layout.matrix_len;
            let gradients = gradients.part(0..layout.split_matrix_len, none);
            self.update_weights(&[self.facts.updated_range(gradients, 0, 0)]);
        }
        self.features_and_dlogits.take().into_iter().flatten().for_each(|at| self.free_now(at));
        Ok(())
    }

    /// Computes the gradient of each chunk's weights, and calls `use_gradient` with the index of the chunk and its gradient, to emit the
    /// commands that use the gradient.
    fn for_each_chunk(&mut self, use_gradient: impl Fn(&mut Self, usize, ops::Gradients)) -> Result {
        let convolution = self.plan.ops.last().and_then(|op| self.plan.convolution(op));
        let (Some(convolution), Some([x, dy])) = (convolution, self.features_and_dlogits) else {
            return Err(EngineError::Parameters("the head has no gradient".into()));
        };
        let wgrad = Convolution { direction: Direction::Weight, ..convolution };
        let [_, bytes, of_y] = wgrad.bytes();
        let at = self.alloc_bytes(bytes, Content::Head);
        let length = (bytes / self.plan.dtype.size()) as u64;
        let gradients = ops::Gradients {
            matrices: at,
            vectors: Operand::NONE,
            matrix_length: length,
            length,
            is_float32: self.plan.dtype == DType::F32,
        };
        let weights = self.facts.matrix(self.plan.network.head());
        for chunk in 0..self.plan.chunk_count() {
            let position = (chunk, self.plan.chunk_count());
            let y = piece(dy, position, of_y);
            let tensors = Tensors { x, w: at, y, channel_sums: Operand::NONE };
            self.convolve(StreamId::Main, wgrad, tensors);
            let size = [wgrad.out_c, wgrad.in_c];
            self.remove_along(StreamId::Main, piece(weights, position, bytes), at, size);
            use_gradient(self, chunk, gradients);
        }
        self.free_now(at);
        Ok(())
    }

    /// Appends a collective in the model group; `count` is the number of values in one rank's part.
    pub(super) fn collective(
        &mut self,
        kind: Collective,
        from: Operand,
        to: Operand,
        count: usize,
        dtype: DType,
    ) {
        let (stream, group, dtype) = (StreamId::Main, Group::Model, dtype.into());
        self.commands.push(Command::Collective { stream, kind, group, from, to, count, dtype });
    }

    /// The classes whose logits are computed: the sampled classes in a training step that samples, otherwise all classes of this rank.
    pub(super) fn head_part(&self) -> Option<HeadPart> {
        if let Some(part) = self.sampled_part() {
            return Some(part);
        }
        Some(HeadPart {
            convolution: self.plan.convolution(self.plan.ops.last()?)?,
            chunk_count: self.plan.chunk_count(),
            w: self.facts.matrix(self.plan.network.head()),
            bias: self.facts.head_bias(),
            sample: Operand::NONE,
            label_positions: Operand::NONE,
        })
    }

    pub(super) fn control_words(&self) -> u32 {
        Inputs::control_words(self.plan.batch) as u32
    }

    pub(super) fn gather_controls(&mut self) {
        self.collective(Collective::AllGather, CONTROL, CONTROLS, self.control_words() as usize, DType::F32);
    }
}

/// Control blocks of all ranks of the model group.
pub(super) const CONTROLS: Operand = Operand::whole(Region::GroupControls);

/// The classes of a pass, in chunks.
pub(super) struct HeadPart {
    /// The forward convolution of a chunk.
    pub(super) convolution: Convolution,
    pub(super) chunk_count: usize,
    pub(super) w: Operand,
    /// [`Operand::NONE`] with a margin.
    pub(super) bias: Operand,
    /// The sampled classes; [`Operand::NONE`] for all classes.
    pub(super) sample: Operand,
    /// Positions of the labels in `sample`.
    pub(super) label_positions: Operand,
}

/// The operands of a chunk of the classes: `x`, and the chunk's parts of the weights and of the logits, or of their gradients. `position`
/// is the index of the chunk, and the number of chunks.
fn chunk_tensors(
    convolution: &Convolution,
    position: (usize, usize),
    x: Operand,
    w: Operand,
    y: Operand,
) -> Tensors<Operand> {
    let [_, of_w, of_y] = convolution.bytes();
    Tensors { x, w: piece(w, position, of_w), y: piece(y, position, of_y), channel_sums: Operand::NONE }
}

/// The piece with index `index` of `count` pieces of `bytes` bytes each. The last piece includes the remaining bytes.
fn piece(whole: Operand, (index, count): (usize, usize), bytes: usize) -> Operand {
    let offset = index * bytes;
    whole.part(offset, if index + 1 == count { whole.bytes - offset } else { bytes })
}
