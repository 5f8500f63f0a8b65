//! Gradients over all ranks, and the optimizer's step.

use super::*;
use crate::cuda::{command::ShardExchange, program::facts::Updated};
use lockstep_kernels::optimizer::LARS_TRUST;
use lockstep_protocol::spec::OptimizerKind;

impl GraphEmitter<'_> {
    /// Starts adding the gradients that are complete with `name`'s.
    pub(super) fn send_buckets(&mut self, name: &str, micro_batch: MicroBatch) {
        let Facts { layout, accumulates, .. } = *self.facts;
        let (Some(ranks), true, false) = (self.facts.ranks, micro_batch.last, accumulates) else { return };
        let Some(bucket) = layout.buckets.get(self.sent) else { return };
        // Slots are in the order of backward: the last one of a bucket ends it.
        if layout.slot(name, "weight").padded().end < bucket.end {
            return;
        }
        let producer = if self.side_stream && !ranks.is_ordered() { StreamId::Side } else { StreamId::Main };
        if self.side_stream && ranks.is_ordered() {
            self.join();
        }
        let size = self.plan.dtype.size();
        let at = Operand::new(Region::MatrixGradients, bucket.start * size, bucket.len() * size);
        self.send_bucket(self.sent, producer, at, self.plan.dtype);
        self.sent += 1;
    }

    /// Adds a range of gradients over all ranks, once what `producer` was given so far is done.
    fn send_bucket(&mut self, number: usize, producer: StreamId, at: Operand, dtype: DType) {
        // One group of ranks must not be used from two streams at once.
        if self.facts.ranks.is_some_and(Statistics::is_ordered) {
            return self.reduce(producer, at, dtype);
        }
        self.record(producer, EventId::BucketReady(number));
        self.wait(StreamId::Collectives, EventId::BucketReady(number));
        self.reduce(StreamId::Collectives, at, dtype);
    }

    /// Adds gradients over all ranks: for each rank, or where ranks divide the optimizer's state, each part for its own.
    fn reduce(&mut self, stream: StreamId, at: Operand, dtype: DType) {
        match self.facts.share {
            None => self.all_reduce(stream, at, dtype),
            Some(_) => {
                let exchange = ShardExchange::ReduceScatter(dtype);
                self.commands.push(Command::Sharded { stream, exchange, at });
            }
        }
    }

    /// Adds values over all ranks.
    pub(super) fn all_reduce(&mut self, stream: StreamId, at: Operand, dtype: DType) {
        self.commands.push(Command::AllReduce { stream, at, count: at.bytes / dtype.size(), dtype });
    }

    /// Has the main stream wait for the side stream.
    fn join(&mut self) {
        self.record(StreamId::Side, EventId::SideEnd);
        self.wait(StreamId::Main, EventId::SideEnd);
    }

    /// Adds what is left over ranks, updates the weights and reports the result.
    pub(super) fn finish(&mut self, MicroBatch { first, last, .. }: MicroBatch) {
        let Facts { layout, ops, accumulates, .. } = *self.facts;
        if self.side_stream {
            self.join();
            for (_, read) in std::mem::take(&mut self.pending) {
                read.into_iter().for_each(|allocation| self.free(allocation));
            }
        }
        let gradients = self.facts.gradients();
        if accumulates {
            let size = self.plan.dtype.size();
            let own = Operand::new(Region::MatrixGradients, 0, size * layout.matrices);
            self.main(ops.accumulate_gradients(gradients.first, own, layout.matrices as u64, first));
        }
        if !last {
            return;
        }
        self.main(ops.stamp(stamp(1), Operand::NONE));
        if let Some(ranks) = self.facts.ranks {
            if accumulates {
                for (number, bucket) in layout.buckets.iter().enumerate() {
                    let at = gradients.first.part(4 * bucket.start, 4 * bucket.len());
                    self.send_bucket(number, StreamId::Main, at, DType::F32);
                }
            }
            self.send_bucket(layout.buckets.len(), StreamId::Main, gradients.second, DType::F32);
            if !ranks.is_ordered() {
                self.record(StreamId::Collectives, EventId::CollectivesDone);
                self.wait(StreamId::Main, EventId::CollectivesDone);
            }
        }
        let updated = self.facts.updated();
        if self.facts.share.is_some() {
            updated.iter().for_each(|part| {
                self.main(ops.gradient_squares(part.flat.gradients, part.squares));
            });
            self.exchange(ShardExchange::Sum, self.bucket_squares(&updated));
        }
        // From here on nothing waits for other ranks that have all of an update: what begins also ends.
        self.main(ops.stamp(stamp(2), UPDATING));
        let (scaler, dynamic) = (Operand::whole(Region::LossScale), self.facts.dynamic_scale);
        match self.facts.share {
            None => self.main(ops.gradient_norm(ops::GradientNorm { gradients, scaler, dynamic })),
            Some(_) => self.main(ops.norm_of_squares(self.bucket_squares(&updated), scaler, dynamic)),
        }
        self.update_weights(&updated);
        if self.facts.share.is_some() {
            self.gather_weights();
        }
        self.main(ops.stamp(stamp(3), Operand::NONE));
        self.main(ops.record(rings::record()));
    }

    /// The sums of squares of all of the rank's parts.
    fn bucket_squares(&self, updated: &[Updated]) -> Operand {
        Operand::new(Region::BucketSquares, 0, updated.last().map_or(0, |part| part.squares.end()))
    }

    /// With ranks that divide the optimizer's state.
    fn exchange(&mut self, exchange: ShardExchange, at: Operand) {
        self.commands.push(Command::Sharded { stream: StreamId::Main, exchange, at });
    }

    /// The optimizer's step, by gradients whose norm is known.
    fn update_weights(&mut self, updated: &[Updated]) {
        let (facts, ops, optimizer) = (self.facts, self.facts.ops, &self.facts.optimizer);
        let moments = |part: &Updated| ops::Moments {
            first: part.slots[0],
            second: part.slots[1],
            beta1: optimizer.beta1,
            beta2: optimizer.beta2,
            epsilon: optimizer.epsilon as f32,
        };
        let lamb = |part: &Updated| ops::Lamb { flat: part.flat, moments: moments(part), rates: part.rates };
        let sgd = |part: &Updated, update: ops::Update| {
            ops.sgd(ops::Sgd {
                update,
                flat: part.flat,
                velocity: part.slots[0],
                momentum: optimizer.momentum,
            })
        };
        let (rates, decay) = (facts.all_rates(), optimizer.policy(true).decay);
        let scaler = Operand::whole(Region::LossScale);
        match optimizer.kind {
            OptimizerKind::Momentum => {
                updated.iter().for_each(|part| self.main(sgd(part, ops::Update::Momentum)));
            }
            OptimizerKind::Nesterov => {
                updated.iter().for_each(|part| self.main(sgd(part, ops::Update::Nesterov)));
            }
            OptimizerKind::Lars => {
                updated.iter().for_each(|part| self.main(ops.lars_norms(part.flat, part.rates)));
                self.add_up_norms(rates);
                self.main(ops.lars_rates(ops::LarsRates { scaler, decay, rates, trust: LARS_TRUST }));
                updated.iter().for_each(|part| self.main(sgd(part, ops::Update::Lars(part.rates))));
            }
            OptimizerKind::AdamW => updated.iter().for_each(|part| {
                self.main(ops.adamw(ops::AdamW { flat: part.flat, moments: moments(part) }));
            }),
            OptimizerKind::Lamb => {
                updated.iter().for_each(|part| self.main(ops.lamb_moments(lamb(part))));
                self.add_up_norms(rates);
                self.main(ops.lamb_rates(rates, decay));
                updated.iter().for_each(|part| self.main(ops.lamb(lamb(part))));
            }
        }
    }

    /// Adds up the squares that parameters' norms are of, where each rank has those of its parts.
    fn add_up_norms(&mut self, rates: ops::Rates) {
        if self.facts.share.is_some() {
            self.exchange(ShardExchange::Sum, rates.squares);
        }
    }

    /// Gives each rank the new weights of the others: matrices in the type that is computed in. Float32 ones of 16-bit matrices follow when
    /// somebody wants to see them ([`Program::gather_weights`]).
    fn gather_weights(&mut self) {
        let (layout, dtype) = (self.facts.layout, self.plan.dtype);
        for range in layout.reduced().filter(|range| !range.is_empty()) {
            let (region, dtype) = match dtype {
                DType::F16 | DType::Bf16 if range.start < layout.matrices => (Region::LowPrecision, dtype),
                _ => (Region::Weights, DType::F32),
            };
            let at = Operand::new(region, dtype.size() * range.start, dtype.size() * range.len());
            self.exchange(ShardExchange::AllGather(dtype), at);
        }
    }
}
