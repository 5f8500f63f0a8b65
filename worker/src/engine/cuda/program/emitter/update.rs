//! Gradients over all ranks, and the optimizer's step.

use super::*;
use crate::engine::optimizer::LARS_TRUST;
use lockstep_protocol::spec::OptimizerKind;

impl GraphEmitter<'_> {
    /// Starts adding the gradients that are complete with `name`'s.
    pub(super) fn send_buckets(
        &mut self,
        p: &Program,
        name: &str,
        micro_batch: MicroBatch,
    ) -> Result<(), EngineError> {
        let (Some(reducer), true, None) = (&p.reducer, micro_batch.last, &p.accumulated) else {
            return Ok(());
        };
        let Some(bucket) = p.state.layout.buckets.get(self.sent) else { return Ok(()) };
        // Slots are in the order of backward: the last one of a bucket ends it.
        if p.state.layout.slot(name, "weight").range.end.next_multiple_of(1024) < bucket.end {
            return Ok(());
        }
        let producer = if self.side_stream && !reducer.is_ordered() { p.side.0 } else { p.main.0 };
        if self.side_stream && reducer.is_ordered() {
            p.side_end.record(p.side.0)?;
            p.main.0.wait(&p.side_end)?;
        }
        let at = p.matrix_gradients.ptr + (bucket.start * p.dtype.size()) as u64;
        reducer.start(self.sent, producer, at, bucket.len(), p.dtype)?;
        self.sent += 1;
        Ok(())
    }

    /// Adds what is left over ranks, updates the weights and tells the result.
    pub(super) fn finish(&mut self, MicroBatch { first, last, .. }: MicroBatch) -> Result<(), EngineError> {
        let Some(p) = self.program else { return Ok(()) };
        let main = p.main.0;
        if self.side_stream {
            p.side_end.record(p.side.0)?;
            main.wait(&p.side_end)?;
        }
        let layout = &p.state.layout;
        if let Some(sums) = &p.accumulated {
            p.ops.accumulate_gradients(
                main,
                sums.ptr,
                p.matrix_gradients.ptr,
                layout.matrices as u64,
                first,
            )?;
        }
        if !last {
            return Ok(());
        }
        p.ops.stamp(main, p.stamps.ptr + 8)?;
        if let Some(reducer) = &p.reducer {
            if let Some(sums) = &p.accumulated {
                for (number, bucket) in layout.buckets.iter().enumerate() {
                    reducer.start(
                        number,
                        main,
                        sums.ptr + 4 * bucket.start as u64,
                        bucket.len(),
                        DType::F32,
                    )?;
                }
            }
            let vectors = layout.len - layout.matrices;
            reducer.start(layout.buckets.len(), main, p.vector_gradients.ptr, vectors, DType::F32)?;
            reducer.finish(main)?;
        }
        p.ops.stamp(main, p.stamps.ptr + 16)?;
        let (first, in_float32) = match &p.accumulated {
            Some(sums) => (sums.ptr, true),
            None => (p.matrix_gradients.ptr, p.dtype == DType::F32),
        };
        let gradients = ops::Gradients {
            first,
            second: p.vector_gradients.ptr,
            first_length: layout.matrices as u64,
            length: layout.len as u64,
            in_float32,
        };
        let scaler = p.state.scaling.ptr;
        let dynamic = p.dynamic_scale.unwrap_or(false);
        p.ops.gradient_norm(main, ops::GradientNorm { gradients, scaler, dynamic })?;
        p.update_weights(gradients)?;
        p.ops.stamp(main, p.stamps.ptr + 24)?;
        p.ops.record(main, p.results.record(p.totals.ptr, scaler, p.stamps.ptr))?;
        Ok(())
    }
}

impl Program {
    /// The optimizer's step, by gradients whose norm is known.
    fn update_weights(&self, gradients: ops::Gradients) -> Result<(), CudaError> {
        let main = self.main.0;
        let (optimizer, slots) = (&self.config.optimizer, &self.state.optimizer_slots);
        let flat = ops::Flat {
            weights: self.state.weights.ptr,
            low_precision: self.state.low_precision().unwrap_or(0),
            gradients,
            control: self.inputs.control.ptr,
            scaler: self.state.scaling.ptr,
            // The matrices are all weights of convolutions and linear layers, and nothing else.
            decay: [true, false].map(|is_weight| optimizer.treatment(is_weight).decay),
        };
        let count = self.state.layout.slots.len() as u32;
        let rates = ops::Rates { segments: self.segments.ptr, count, rates: self.rates.ptr };
        let moments = || ops::Moments {
            first: slots[0].ptr,
            second: slots[1].ptr,
            beta1: optimizer.beta1,
            beta2: optimizer.beta2,
            epsilon: optimizer.epsilon as f32,
        };
        let update = match optimizer.kind {
            OptimizerKind::Momentum => ops::Update::Momentum,
            OptimizerKind::Nesterov => ops::Update::Nesterov,
            OptimizerKind::Lars => {
                self.ops.lars_rates(main, ops::LarsRates { flat, rates, trust: LARS_TRUST })?;
                ops::Update::Lars(rates)
            }
            OptimizerKind::AdamW => return self.ops.adamw(main, ops::AdamW { flat, moments: moments() }),
            OptimizerKind::Lamb => return self.ops.lamb(main, ops::Lamb { flat, moments: moments(), rates }),
        };
        self.ops.sgd(main, ops::Sgd { update, flat, velocity: slots[0].ptr, momentum: optimizer.momentum })
    }

    pub(super) fn matrix_gradient(&self, name: &str) -> Ptr {
        let at = self.state.layout.slot(name, "weight").range.start;
        self.matrix_gradients.ptr + (at * self.dtype.size()) as u64
    }

    pub(super) fn vector_gradient(&self, name: &str, suffix: &str) -> Ptr {
        let layout = &self.state.layout;
        self.vector_gradients.ptr + 4 * (layout.slot(name, suffix).range.start - layout.matrices) as u64
    }
}
