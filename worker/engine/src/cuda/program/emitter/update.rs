//! Gradients over all ranks, and the optimizer's step.

use super::{split_head::Squares, *};
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
            return self.all_reduce(producer, at, dtype);
        }
        self.record(producer, EventId::BucketReady(number));
        self.wait(StreamId::Collectives, EventId::BucketReady(number));
        self.all_reduce(StreamId::Collectives, at, dtype);
    }

    /// Adds values over all ranks.
    pub(super) fn all_reduce(&mut self, stream: StreamId, at: Operand, dtype: DType) {
        self.commands.push(Command::all_reduce(stream, Group::World, at, dtype));
    }

    /// Has the main stream wait for the side stream.
    fn join(&mut self) {
        self.record(StreamId::Side, EventId::SideEnd);
        self.wait(StreamId::Main, EventId::SideEnd);
    }

    /// Adds what is left over ranks, updates the weights and reports the result.
    pub(super) fn finish(&mut self, MicroBatch { first, last, .. }: MicroBatch) -> Result<(), EngineError> {
        let Facts { layout, ops, accumulates, .. } = *self.facts;
        if self.side_stream {
            self.join();
            for (_, read) in std::mem::take(&mut self.pending) {
                read.into_iter().for_each(|allocation| self.free(allocation));
            }
        }
        let gradients = self.facts.gradients();
        let [split, whole] = [0, 1].map(|which| {
            let [matrices, vectors] = &layout.split_and_whole()[which];
            gradients.part(matrices.clone(), vectors.start..vectors.end.min(layout.trained))
        });
        let split = self.sampled_gradients().unwrap_or(split);
        if accumulates {
            let size = self.plan.dtype.size();
            let own = Operand::new(Region::MatrixGradients, 0, size * layout.matrices);
            self.main(ops.accumulate_gradients(gradients.first, own, layout.matrices as u64, first));
        }
        if !last {
            return Ok(());
        }
        let recomputes = self.facts.recomputes();
        let mut squares = None;
        self.main(ops.stamp(stamp(1), Operand::NONE));
        if let Some(ranks) = self.facts.ranks {
            if accumulates {
                for (number, bucket) in layout.buckets.iter().enumerate() {
                    let at = gradients.first.part(4 * bucket.start, 4 * bucket.len());
                    self.send_bucket(number, StreamId::Main, at, DType::F32);
                }
            }
            self.send_bucket(layout.buckets.len(), StreamId::Main, whole.second, DType::F32);
            if recomputes {
                // While the others' gradients are on their way.
                squares = self.split_squares(split)?;
            }
            if !ranks.is_ordered() {
                self.record(StreamId::Collectives, EventId::CollectivesDone);
                self.wait(StreamId::Main, EventId::CollectivesDone);
            }
        }
        self.add_split_gradients(split);
        if !recomputes {
            squares = self.split_squares(split)?;
        }
        let squares = squares.map(|own| self.gather_squares(own));
        // From here on nothing waits for other ranks: an update that begins also ends.
        self.main(ops.stamp(stamp(2), UPDATING));
        let (scaler, dynamic) = (Operand::whole(Region::LossScale), self.facts.dynamic_scale);
        match squares {
            None => self.main(ops.gradient_norm(ops::GradientNorm { gradients, scaler, dynamic })),
            Some(Squares { at, count }) => {
                let norm = ops::GradientNorm { gradients: whole, scaler, dynamic };
                self.main(ops.gradient_norm_of_parts(norm, at.operand(), count as u32));
                self.free_now(at);
            }
        }
        let (split, matrices) = (layout.split_matrices, layout.matrices);
        if let Some(sampled) = self.sampled.take() {
            let vectors = matrices + layout.split_vectors;
            self.update_weights(gradients.part(split..matrices, matrices..matrices), split);
            self.update_weights(gradients.part(matrices..matrices, vectors..layout.trained), vectors);
            self.update_sampled(sampled);
        } else {
            self.update_weights(gradients.part(split..matrices, matrices..layout.trained), split);
            self.update_head(gradients)?;
        }
        self.main(ops.stamp(stamp(3), Operand::NONE));
        self.main(ops.record(rings::record()));
        Ok(())
    }

    /// The optimizer's step of the values from `from` on, by gradients whose norm is known.
    pub(super) fn update_weights(&mut self, gradients: ops::Gradients, from: usize) {
        let (facts, layout) = (self.facts, self.facts.layout);
        let (length, bytes) = (gradients.length as usize, 4 * gradients.length as usize);
        let planar = self.plan.is_planar() && from < layout.split_matrices;
        let [low_precision, weights] = match self.plan.dtype {
            _ if planar => layout.planes(from..from + length),
            DType::F32 => [Operand::NONE, Operand::new(Region::Weights, 4 * from, bytes)],
            dtype => {
                let copied = dtype.size() * gradients.first_length as usize;
                let copy = Operand::new(Region::LowPrecision, dtype.size() * from, copied);
                [copy, Operand::new(Region::Weights, 4 * from, bytes)]
            }
        };
        let slots = facts.optimizer_slots().map(|slot| slot.part(4 * from, bytes)).collect();
        self.update(Trained { weights, low_precision, planar, slots }, gradients);
    }

    /// The optimizer's step.
    pub(super) fn update(&mut self, trained: Trained, gradients: ops::Gradients) {
        let (facts, layout) = (self.facts, self.facts.layout);
        let (ops, optimizer) = (facts.ops, &facts.optimizer);
        let slot = |number: usize| trained.slots[number];
        let flat = ops::Flat {
            weights: trained.weights,
            low_precision: trained.low_precision,
            planar: trained.planar,
            gradients,
            control: CONTROL,
            scaler: Operand::whole(Region::LossScale),
            // The matrices are all weights of convolutions and linear layers, and nothing else.
            decay: [true, false].map(|is_weight| optimizer.policy(is_weight).decay),
        };
        let rates = ops::Rates {
            segments: Operand::whole(Region::Segments),
            count: layout.trained_slots().len() as u32,
            rates: Operand::whole(Region::Rates),
        };
        let moments = || ops::Moments {
            first: slot(0),
            second: slot(1),
            beta1: optimizer.beta1,
            beta2: optimizer.beta2,
            epsilon: optimizer.epsilon as f32,
        };
        let update = match optimizer.kind {
            OptimizerKind::Momentum => ops::Update::Momentum,
            OptimizerKind::Nesterov => ops::Update::Nesterov,
            OptimizerKind::Lars => {
                self.main(ops.lars_rates(ops::LarsRates { flat, rates, trust: LARS_TRUST }));
                ops::Update::Lars(rates)
            }
            OptimizerKind::AdamW => return self.main(ops.adamw(ops::AdamW { flat, moments: moments() })),
            OptimizerKind::Lamb => return self.main(ops.lamb(ops::Lamb { flat, moments: moments(), rates })),
        };
        let (velocity, momentum) = (slot(0), optimizer.momentum);
        self.main(ops.sgd(ops::Sgd { update, flat, velocity, momentum }));
    }
}

/// What a step of the optimizer changes; see [`ops::Flat`].
pub(super) struct Trained {
    pub(super) weights: Operand,
    pub(super) low_precision: Operand,
    pub(super) planar: bool,
    /// Of the optimizer.
    pub(super) slots: Vec<Operand>,
}
