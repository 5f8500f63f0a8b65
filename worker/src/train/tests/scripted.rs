//! A simulated engine, whose float16 overflows as requested.

use lockstep_data::loader::Batch;
use lockstep_engine::{Engine, EngineError, EvalResult, OptimizerState, StateDict, StepResult, Writers};
use lockstep_host::tensors::{HostTensor, NamedTensors, TensorSource, fit::Shapes};
use lockstep_protocol::spec::Precision;
use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

/// The values that exceed the range of float16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Overflow {
    Gradients,
    Validation,
    Nothing,
}

/// An engine that adds 1 to the first value of each tensor in each step. In float16, steps whose gradients overflow are skipped, as
/// with loss scaling.
pub(super) struct Scripted {
    pub(super) precision: Precision,
    pub(super) overflow: Overflow,
    pub(super) weights: NamedTensors,
    pub(super) momentum: NamedTensors,
    pub(super) updates: u64,
    /// The rank in the group.
    pub(super) replica: u32,
    /// How many times the weights were copied from the engine.
    pub(super) copies: Arc<AtomicU32>,
    /// Called for each batch of a validation pass.
    pub(super) on_evaluation: Box<dyn FnMut() + Send>,
    /// The results since the last `finish_evaluation`.
    pub(super) evaluated: EvalResult,
}

impl Scripted {
    fn overflows(&self, values: Overflow) -> bool {
        self.precision == Precision::Fp16 && self.overflow == values
    }
}

pub(super) fn zeros(shapes: Shapes) -> NamedTensors {
    let tensor = |(name, shape): (String, Vec<usize>)| {
        (name, HostTensor { values: vec![0.0; shape.iter().product()], shape })
    };
    shapes.into_iter().map(tensor).collect()
}

impl Engine for Scripted {
    fn add_image_sizes(&mut self, _: &[usize], _: &[usize]) -> Result<(), EngineError> {
        Ok(())
    }
    fn set_image_size(&mut self, _: usize) -> Result<(), EngineError> {
        Ok(())
    }
    fn start_step(&mut self, batches: &[Batch], _: f32) -> Result<Option<StepResult>, EngineError> {
        let is_skipped = self.overflows(Overflow::Gradients);
        if !is_skipped {
            self.weights.values_mut().for_each(|tensor| tensor.values[0] += 1.0);
            self.updates += 1;
        }
        let value = if is_skipped { f32::INFINITY } else { 1.0 };
        Ok(Some(StepResult {
            loss: value,
            grad_norm: value,
            samples: batches.iter().map(|batch| batch.labels.len() as u32).sum(),
            loss_scale: (self.precision == Precision::Fp16).then_some(1.0),
            ..StepResult::default()
        }))
    }
    fn start_evaluation(&mut self, batch: &Batch) -> Result<(), EngineError> {
        (self.on_evaluation)();
        let loss_sum = if self.overflows(Overflow::Validation) { f64::INFINITY } else { 1.0 };
        self.evaluated += EvalResult { loss_sum, correct: 1, samples: batch.labels.len() as u64 };
        Ok(())
    }
    fn finish_evaluation(&mut self) -> Result<EvalResult, EngineError> {
        Ok(std::mem::take(&mut self.evaluated))
    }
    fn predict(&mut self, _: &Batch) -> Result<Vec<f32>, EngineError> {
        Ok(Vec::new())
    }
    fn parameters(&self) -> Result<NamedTensors, EngineError> {
        self.copies.fetch_add(1, Ordering::Relaxed);
        Ok(self.weights.clone())
    }
    fn set_parameters(&mut self, values: &dyn TensorSource) -> Result<(), EngineError> {
        for (name, tensor) in &mut self.weights {
            values.read(name, 0, &mut tensor.values);
        }
        Ok(())
    }
    fn optimizer_state(&self) -> Result<OptimizerState, EngineError> {
        Ok(OptimizerState { slots: self.momentum.clone(), updates: self.updates })
    }
    fn set_optimizer_state(&mut self, state: &OptimizerState) -> Result<(), EngineError> {
        (self.momentum, self.updates) = (state.slots.clone(), state.updates);
        Ok(())
    }
    fn update_average(&mut self, _: f64) -> Result<(), EngineError> {
        Ok(())
    }
    fn has_average(&self) -> bool {
        false
    }
    fn averaged(&self) -> Result<Option<NamedTensors>, EngineError> {
        Ok(None)
    }
    fn set_averaged(&mut self, _: &NamedTensors) -> Result<(), EngineError> {
        Ok(())
    }
    fn state_dict(&self, writers: &Writers) -> Result<Option<StateDict>, EngineError> {
        if !writers.contains(self.replica) {
            return Ok(None);
        }
        let mut state = self.own_state()?;
        writers.retain(&mut state, |rank| rank == self.replica);
        Ok(Some(state))
    }
    fn precision(&self) -> Precision {
        self.precision
    }
    fn first_invalid(&self) -> Result<Option<String>, EngineError> {
        Ok(None)
    }
    fn checksum(&self) -> Result<[u64; 2], EngineError> {
        Ok([self.weights["fc.bias"].values[0].to_bits().into(), 0])
    }
    fn broadcast_parameters(&mut self) -> Result<(), EngineError> {
        Ok(())
    }
    fn device_name(&self) -> String {
        "scripted".into()
    }
}
