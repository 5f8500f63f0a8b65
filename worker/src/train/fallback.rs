//! Changes from float16 to bfloat16 during a run: another engine continues from the last finite state.

use super::{Run, TrainError};
use lockstep_engine::Engine;
use lockstep_protocol::{agent::AttemptEvent, spec::Precision};
use std::ops::{Deref, DerefMut};

/// The current engine. `None` only during a replacement, because the next engine needs the memory of the current one.
pub(super) struct CurrentEngine(pub(super) Option<Box<dyn Engine>>);

impl Deref for CurrentEngine {
    type Target = dyn Engine;
    fn deref(&self) -> &Self::Target {
        self.0.as_deref().expect("an engine")
    }
}

impl DerefMut for CurrentEngine {
    fn deref_mut(&mut self) -> &mut Self::Target {
        self.0.as_deref_mut().expect("an engine")
    }
}

impl Run<'_> {
    /// Continues in bfloat16 because the range of float16 does not suffice for `what`. All ranks call this after the
    /// same step. Steps that were not finite have changed nothing, so the run continues from the last finite weights.
    /// The ranks vote on a stop twice. The first vote avoids a useless change, because the checkpoint records
    /// the skipped steps, and the next run changes to bfloat16 at once. The change takes seconds, so the second vote follows it,
    /// and a stop that arrived meanwhile does not wait for another step or evaluation. Returns false if the ranks have voted to
    /// stop. The engine then has the state to save.
    pub(super) fn fall_back_to_bfloat16(&mut self, what: &str) -> Result<bool, TrainError> {
        if !self.vote_now()? {
            return Ok(false);
        }
        self.replace_engine(what)?;
        self.vote_now()
    }

    fn replace_engine(&mut self, what: &str) -> Result<(), TrainError> {
        let (training, step) = (self.training, self.step);
        if training.spec.train.precision != Precision::Auto {
            return Err(TrainError::Overflow { what: what.into(), step });
        }
        self.throughput.report("starting");
        if self.training.is_first() {
            training.observer.log(&format!(
                "float16 could not hold {what}: training continues in bfloat16 after step {step}, from the last weights \
                 that are finite"
            ));
            training.observer.event(&AttemptEvent::PrecisionFallback { step, what: what.into() });
        }
        let state = self.engine.own_state()?;
        if let Some(store) = &training.store {
            // If a rank stopped while the other ranks connect, it would end without a checkpoint and keep them waiting.
            store.leave_stops_to_votes();
        }
        // No rank may unmap its memory before all ranks have reached this point.
        training.group.barrier()?;
        drop(self.engine.0.take());
        self.plan.precision = Precision::Bf16;
        let generation = 1;
        let mut engine = (self.build_engine)(training, &self.plan, generation)?;
        self.data.set_format(engine.take_data(&self.data)?);
        engine.load_state_dict(&state)?;
        self.throughput.set_device(engine.device_name());
        self.throughput.report("training");
        self.engine = CurrentEngine(Some(engine));
        self.skipped.recent.clear();
        Ok(())
    }
}
