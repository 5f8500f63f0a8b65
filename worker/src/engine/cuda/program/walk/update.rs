//! Gradients over all ranks, and the optimizer's step.

use super::*;
use crate::engine::optimizer::LARS_TRUST;
use lockstep_protocol::spec::OptimizerKind;

impl Walk<'_> {
    /// Starts adding the gradients that are complete with `name`'s.
    pub(super) fn send_buckets(&mut self, name: &str, accumulation: Accumulation) -> Result<(), EngineError> {
        let p = self.p;
        let (Some(reducer), true, None) = (&p.reducer, accumulation.last, &p.accumulated) else {
            return Ok(());
        };
        let Some(bucket) = p.state.layout.buckets.get(self.sent) else { return Ok(()) };
        // Slots are in the order of backward: the last one of a bucket ends it.
        if p.state.layout.slot(name, "weight").range.end.next_multiple_of(1024) < bucket.end {
            return Ok(());
        }
        let producer = if self.beside && !reducer.is_ordered() { p.side.0 } else { self.main() };
        if self.beside && reducer.is_ordered() {
            p.side_end.record(p.side.0)?;
            self.main().wait(&p.side_end)?;
        }
        let at = p.wide_gradients.ptr + (bucket.start * p.dtype.size()) as u64;
        reducer.start(self.sent, producer, at, bucket.len(), p.dtype)?;
        self.sent += 1;
        Ok(())
    }

    /// Adds what is left over ranks, updates the weights and tells the result.
    pub(super) fn finish(
        &mut self,
        Accumulation { first, last, .. }: Accumulation,
    ) -> Result<(), EngineError> {
        if !self.starts() {
            return Ok(());
        }
        let (p, main) = (self.p, self.main());
        if self.beside {
            p.side_end.record(p.side.0)?;
            main.wait(&p.side_end)?;
        }
        let layout = &p.state.layout;
        if let Some(sums) = &p.accumulated {
            p.ops.accumulate_gradients(main, sums.ptr, p.wide_gradients.ptr, layout.wide as u64, first)?;
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
            let narrow = layout.len - layout.wide;
            reducer.start(layout.buckets.len(), main, p.narrow_gradients.ptr, narrow, DType::F32)?;
            reducer.finish(main)?;
        }
        p.ops.stamp(main, p.stamps.ptr + 16)?;
        let (first, wide) = match &p.accumulated {
            Some(sums) => (sums.ptr, true),
            None => (p.wide_gradients.ptr, p.dtype == DType::F32),
        };
        let gradients = ops::Gradients {
            first,
            second: p.narrow_gradients.ptr,
            first_length: layout.wide as u64,
            length: layout.len as u64,
            wide,
        };
        let scaler = p.state.scaling.ptr;
        let dynamic = p.dynamic_scale.unwrap_or(false);
        p.ops.gradient_norm(main, ops::GradientNorm { gradients, scaler, dynamic })?;
        self.update_weights(gradients)?;
        p.ops.stamp(main, p.stamps.ptr + 24)?;
        p.ops.record(main, p.results.record(p.totals.ptr, scaler, p.stamps.ptr))?;
        Ok(())
    }

    /// The optimizer's step, by gradients whose norm is known.
    fn update_weights(&self, gradients: ops::Gradients) -> Result<(), CudaError> {
        let (p, main) = (self.p, self.main());
        let (optimizer, slots) = (&p.config.optimizer, &p.state.optimizer_slots);
        let flat = ops::Flat {
            weights: p.state.weights.ptr,
            shadow: p.state.shadow().unwrap_or(0),
            gradients,
            control: p.inputs.control.ptr,
            scaler: p.state.scaling.ptr,
            // The wide part has all weights of convolutions and linear layers, and nothing else.
            decay: [true, false].map(|is_weight| optimizer.treatment(is_weight).decay),
        };
        let count = p.state.layout.slots.len() as u32;
        let rates = ops::Rates { segments: p.segments.ptr, count, rates: p.rates.ptr };
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
                p.ops.lars_rates(main, ops::LarsRates { flat, rates, trust: LARS_TRUST })?;
                ops::Update::Lars(rates)
            }
            OptimizerKind::AdamW => return p.ops.adamw(main, ops::AdamW { flat, moments: moments() }),
            OptimizerKind::Lamb => return p.ops.lamb(main, ops::Lamb { flat, moments: moments(), rates }),
        };
        p.ops.sgd(main, ops::Sgd { update, flat, velocity: slots[0].ptr, momentum: optimizer.momentum })
    }

    pub(super) fn wide_gradient(&self, name: &str) -> Ptr {
        let at = self.p.state.layout.slot(name, "weight").range.start;
        self.p.wide_gradients.ptr + (at * self.p.dtype.size()) as u64
    }

    pub(super) fn narrow_gradient(&self, name: &str, suffix: &str) -> Ptr {
        let layout = &self.p.state.layout;
        self.p.narrow_gradients.ptr + 4 * (layout.slot(name, suffix).range.start - layout.wide) as u64
    }
}
