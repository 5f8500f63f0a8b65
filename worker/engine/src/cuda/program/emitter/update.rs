//! Reduction of gradients over all ranks, and the optimizer's step.

use super::{split_head::Squares, *};
use crate::cuda::program::facts::UpdatedRange;
use lockstep_comm::DataType;
use lockstep_protocol::spec::OptimizerKind;

impl GraphEmitter<'_> {
    /// Starts the reduction of the bucket of gradients that layer `name` completes, if any.
    pub(super) fn send_completed_bucket(&mut self, name: &str, micro_batch: MicroBatch) {
        let Facts { layout, accumulates, .. } = *self.facts;
        // With accumulation, `finish_micro_batch` sends the sums.
        if !micro_batch.is_last || accumulates {
            return;
        }
        let Some(statistics) = self.facts.statistics else { return };
        let Some(bucket) = layout.buckets.get(self.sent_bucket_count) else { return };
        // Parameters are in the order of the backward pass, so a bucket is complete with its last parameter.
        if layout.parameter(name, "weight").aligned_range().end < bucket.end {
            return;
        }
        let mut producer = self.weight_gradient_stream;
        if self.uses_side_stream() && statistics.reduces_gradients_on_main_stream() {
            self.join();
            producer = StreamId::Main;
        }
        let size = self.plan.dtype.size();
        let at = Operand::new(Region::MatrixGradients, bucket.start * size, bucket.len() * size);
        self.send_bucket(self.sent_bucket_count, producer, at, self.plan.dtype);
        self.sent_bucket_count += 1;
    }

    /// Reduces a range of gradients over all ranks after the commands so far on the stream `producer`.
    fn send_bucket(&mut self, bucket: usize, producer: StreamId, at: Operand, dtype: DType) {
        // NCCL must not use one group of ranks from two streams at once.
        if self.facts.statistics.is_some_and(Statistics::reduces_gradients_on_main_stream) {
            return self.reduce(producer, at, dtype);
        }
        self.record(producer, EventId::BucketReady(bucket));
        self.wait(StreamId::Collectives, EventId::BucketReady(bucket));
        self.reduce(StreamId::Collectives, at, dtype);
    }

    /// Reduces gradients over all ranks. If ranks divide the optimizer's state, each rank receives only its own part.
    fn reduce(&mut self, stream: StreamId, at: Operand, dtype: DType) {
        match self.facts.share {
            None => self.all_reduce(stream, at, dtype),
            Some(share) => {
                self.commands.push(Command::sharded(stream, Collective::ReduceScatter, share, at, dtype));
            }
        }
    }

    pub(super) fn all_reduce(&mut self, stream: StreamId, at: Operand, dtype: impl Into<DataType>) {
        self.commands.push(Command::all_reduce(stream, Group::World, at, dtype));
    }

    /// Makes the main stream wait for the side stream.
    fn join(&mut self) {
        self.record(StreamId::Side, EventId::SideEnd);
        self.wait(StreamId::Main, EventId::SideEnd);
    }

    /// Ends a micro-batch. If gradients accumulate, adds the gradients of this micro-batch to the sums. After the last micro-batch:
    /// reduces the gradients that are not reduced yet, updates the weights and records the result.
    pub(super) fn finish_micro_batch(&mut self, MicroBatch { is_first, is_last, .. }: MicroBatch) -> Result {
        let Facts { layout, ops, accumulates, .. } = *self.facts;
        if self.uses_side_stream() {
            self.join();
            for (_, allocations) in std::mem::take(&mut self.pending_weight_gradients) {
                allocations.into_iter().for_each(|allocation| self.free(allocation));
            }
        }
        let gradients = self.facts.gradients();
        // Gradients of the parameters that a model group splits, and of the parameters that every rank has whole.
        let [split, whole] = layout.split_and_whole().map(|[matrices, vectors]| {
            gradients.part(matrices, vectors.start..vectors.end.min(layout.trained_len))
        });
        let split = self.sampled_gradients().unwrap_or(split);
        if accumulates {
            let size = self.plan.dtype.size();
            let latest = Operand::new(Region::MatrixGradients, 0, size * layout.matrix_len);
            let length = layout.matrix_len as u64;
            self.push(ops.accumulate_gradients(gradients.matrices, latest, length, is_first));
        }
        if !is_last {
            return Ok(());
        }
        let recomputes_head_gradient = self.facts.recomputes_head_gradient();
        let mut split_squares = None;
        self.push(ops.stamp(Stamp::BackwardDone.operand(), Operand::NONE));
        if let Some(statistics) = self.facts.statistics {
            if accumulates {
                for (number, bucket) in layout.buckets.iter().enumerate() {
                    let at = gradients.matrices.part(4 * bucket.start, 4 * bucket.len());
                    self.send_bucket(number, StreamId::Main, at, DType::F32);
                }
            }
            // If every batch norm and the last layer are split, there are no vectors that every rank has whole.
            if whole.vectors.bytes > 0 {
                self.send_bucket(layout.buckets.len(), StreamId::Main, whole.vectors, DType::F32);
            }
            if recomputes_head_gradient {
                // Runs concurrently with the reduction of the other gradients.
                split_squares = self.compute_split_squares(split)?;
            }
            if !statistics.reduces_gradients_on_main_stream() {
                self.record(StreamId::Collectives, EventId::CollectivesDone);
                self.wait(StreamId::Main, EventId::CollectivesDone);
            }
        }
        self.reduce_split_gradients(split);
        if !recomputes_head_gradient {
            split_squares = self.compute_split_squares(split)?;
        }
        let split_squares = split_squares.map(|own| self.gather_squares(own));
        let updated = self.facts.updated_ranges();
        let bucket_squares = self.facts.share.map(|_| self.compute_bucket_squares(&updated));
        let stage_squares = self.exchange_squares_and_loss(gradients);
        // Sums of squares of all gradients, if ranks have different stages or divide the optimizer's state.
        let squares_of_all_ranks = match stage_squares {
            Some(Squares { at, count }) => Some((at.part(0, 8 * count), count)),
            None => bucket_squares.map(|all| (all, updated.len())),
        };
        // From here on, a rank with the whole optimizer state waits for no other rank, so an update that has begun always ends.
        self.push(ops.stamp(Stamp::Reduced.operand(), UPDATING));
        let is_dynamic = self.facts.has_dynamic_scale;
        match (split_squares, squares_of_all_ranks) {
            (None, None) => self.push(ops.gradient_norm(gradients, is_dynamic)),
            (None, Some((squares, count))) => {
                let no_gradients = gradients.part(0..0, layout.matrix_len..layout.matrix_len);
                self.push(ops.gradient_norm_of_parts(no_gradients, is_dynamic, squares, count as u32));
            }
            // A network that is split in model groups has neither stages nor a divided optimizer state.
            (Some(Squares { at, count }), _) => {
                self.push(ops.gradient_norm_of_parts(whole, is_dynamic, at, count as u32));
                self.free_now(at);
            }
        }
        stage_squares.into_iter().for_each(|squares| self.free_now(squares.at));
        self.update_weights(&updated);
        match self.sampled_head.take() {
            Some(sampled) => self.update_sampled(sampled),
            None => self.update_head(gradients)?,
        }
        if let Some(share) = self.facts.share {
            self.gather_weights(share);
        }
        self.push(ops.stamp(Stamp::End.operand(), Operand::NONE));
        self.push(ops.record());
        Ok(())
    }

    /// Collective: computes the sum of squares (f64) of each range of `updated`. Each rank computes its part of a range, and the parts
    /// are summed over ranks.
    fn compute_bucket_squares(&mut self, updated: &[UpdatedRange]) -> Operand {
        let all = Operand::new(Region::BucketSquares, 0, 8 * updated.len());
        for (number, part) in updated.iter().enumerate() {
            self.push(self.facts.ops.gradient_squares(part.flat.gradients, all.part(8 * number, 8)));
        }
        self.all_reduce(StreamId::Main, all, DataType::F64);
        all
    }

    /// The optimizer's step for these ranges, after the norm of the gradients has been computed.
    pub(super) fn update_weights(&mut self, updated: &[UpdatedRange]) {
        let (facts, ops, optimizer) = (self.facts, self.facts.ops, &self.facts.optimizer);
        let moments = |part: &UpdatedRange| ops::Moments {
            first: part.optimizer_slots[0],
            second: part.optimizer_slots[1],
            beta1: optimizer.beta1,
            beta2: optimizer.beta2,
            epsilon: optimizer.epsilon as f32,
        };
        let sgd = |part: &UpdatedRange, update: ops::Update| {
            ops.sgd(update, part.flat, part.optimizer_slots[0], optimizer.momentum)
        };
        let (rates, decay) = (facts.all_rates(), optimizer.weight_decay);
        match optimizer.kind {
            OptimizerKind::Momentum => {
                updated.iter().for_each(|part| self.push(sgd(part, ops::Update::Momentum)));
            }
            OptimizerKind::Nesterov => {
                updated.iter().for_each(|part| self.push(sgd(part, ops::Update::Nesterov)));
            }
            OptimizerKind::Lars => {
                updated.iter().for_each(|part| self.push(ops.lars_norms(part.flat, part.rates)));
                self.sum_squares_over_ranks(rates);
                self.push(ops.lars_rates(rates, decay));
                updated.iter().for_each(|part| self.push(sgd(part, ops::Update::Lars(part.rates))));
            }
            OptimizerKind::AdamW => {
                updated.iter().for_each(|part| self.push(ops.adamw(part.flat, moments(part))));
            }
            OptimizerKind::Muon => updated.iter().for_each(|part| self.update_by_muon(part)),
            OptimizerKind::Lamb => {
                let update_moments =
                    |part: &UpdatedRange| ops.lamb_moments(part.flat, moments(part), part.rates);
                updated.iter().for_each(|part| self.push(update_moments(part)));
                self.sum_squares_over_ranks(rates);
                self.push(ops.lamb_rates(rates, decay));
                let update = |part: &UpdatedRange| ops.lamb(part.flat, moments(part), part.rates);
                updated.iter().for_each(|part| self.push(update(part)));
            }
        }
    }

    /// Muon's step. Its temporary matrices are in the arena, because activations no longer need that memory.
    fn update_by_muon(&mut self, part: &UpdatedRange) {
        let (facts, optimizer) = (self.facts, &self.facts.optimizer);
        let filters = facts.layout.filters();
        let gram_len = filters.last().map_or(0, |last| last.gram_offset + last.side().pow(2));
        let [iterates, grams] = [facts.layout.matrix_len, gram_len]
            .map(|values| [(); 2].map(|()| self.alloc_bytes(2 * values, Content::Update)));
        let [filter_entries, parameter_policies] = facts.muon_tables(filters.len());
        self.push(facts.ops.muon(ops::Muon {
            flat: part.flat,
            velocity: part.optimizer_slots[0],
            momentum: optimizer.momentum,
            filter_momentum: optimizer.filter_momentum,
            rates: part.rates,
            filters: filter_entries,
            policies: parameter_policies,
            host_filters: &filters,
            iterates,
            grams,
        }));
        iterates.into_iter().chain(grams).for_each(|allocation| self.free_now(allocation));
    }

    /// If each rank has only the squares of its parts of parameters: sums the squares over ranks, for the parameters' norms.
    fn sum_squares_over_ranks(&mut self, rates: ops::Rates) {
        if self.facts.share.is_some() {
            self.all_reduce(StreamId::Main, rates.squares, DataType::F64);
        }
    }

    /// Gathers the new weights of all ranks, matrices in the activations' format. If this is a 16-bit format, the float32 weights are
    /// gathered only on request ([`Program::gather_weights`]).
    fn gather_weights(&mut self, share: Share) {
        let (layout, dtype) = (self.facts.layout, self.plan.dtype);
        for range in layout.reduced_ranges().filter(|range| !range.is_empty()) {
            let (region, dtype) = match dtype {
                DType::F16 | DType::Bf16 if range.start < layout.matrix_len => (Region::LowPrecision, dtype),
                _ => (Region::Weights, DType::F32),
            };
            let at = Operand::new(region, dtype.size() * range.start, dtype.size() * range.len());
            self.commands.push(Command::sharded(StreamId::Main, Collective::AllGather, share, at, dtype));
        }
    }
}
