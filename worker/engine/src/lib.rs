//! An engine runs a [`crate::net::Network`]: forward, backward, all-reduce and update of one rank.
//! Nothing above this crate and `lockstep-comm` knows which engine it is.

// What a call can fail with is part of what its caller has to know.
#![warn(clippy::missing_errors_doc)]

mod backend;
pub mod bench;
mod check;
pub mod cpu;
mod cuda;
mod finite;
#[cfg(test)]
mod frozen_norm;
mod fuse;
mod layers;
mod loss;
mod measure;
pub mod net;
pub mod nvjpeg;
mod optimizer;
pub mod plan;
mod prologue;
pub mod registry;
mod sharding;
mod state_dict;
#[cfg(test)]
mod unfused;

pub use backend::{
    Backend, BuildArgs, DeviceChoice, DeviceError, DeviceMetrics, Devices, Needs, Selection, SharedMemory,
};
pub use cpu::MOST_CPU_SLOTS;
pub use finite::{all_finite, first_not_finite};
pub use layers::LayerTime;
use lockstep_host::tensors::{HostTensor, NamedTensors};
pub use loss::{LossConfig, Margin};
pub use measure::{Sample, measure};
pub use optimizer::{Optimizer, OptimizerState, slot_name, slots};
pub use state_dict::{AverageOn, Contribution, StateDict, Writers};

use lockstep_comm::{CommError, ProcessGroup};
use lockstep_data::loader::{Batch, BatchFormat, DataSource};
use lockstep_protocol::spec::Precision;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// What stays the same over a run.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Pictures of this rank in a micro-batch (the last one of an epoch may be smaller).
    pub batch_size: usize,
    pub optimizer: Optimizer,
    pub loss: LossConfig,
    /// Micro-batches a step.
    pub accumulate: usize,
    pub sync_batch_norm: bool,
    pub gradients_mean: bool,
    /// Threads of this rank.
    pub threads: usize,
}

/// What a step measured on this rank.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepResult {
    /// Mean cross-entropy over this rank's pictures of the step (label smoothing included).
    pub loss: f32,
    /// Right predictions among them.
    pub correct: u32,
    pub samples: u32,
    /// L2 norm of the reduced gradient, before weight decay.
    pub grad_norm: f32,
    /// Seconds that the step took where the engine runs behind the caller; 0: as long as the call.
    pub step_secs: f64,
    /// Seconds in which this rank waited for others' gradients or statistics.
    pub all_reduce_secs: f64,
    /// What the loss was multiplied by before the backward pass; `None` where nothing is scaled (all but float16).
    pub loss_scale: Option<f32>,
}

impl StepResult {
    /// Whether the loss and the gradient are finite. A loss that is not makes the gradient so on every rank.
    pub fn is_finite(&self) -> bool {
        self.loss.is_finite() && self.grad_norm.is_finite()
    }

    /// Whether the update was left out because float16 could not hold the step (PyTorch's `GradScaler` does the same).
    pub fn is_skipped(&self) -> bool {
        self.loss_scale.is_some() && !self.is_finite()
    }
}

/// Dynamic loss scaling, in the words of PyTorch's `GradScaler.state_dict()`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LossScaling {
    /// What the next step's loss is multiplied by.
    pub scale: f32,
    /// Finite steps since the scale last changed; it is doubled after 2,000.
    pub growth_tracker: u32,
}

/// What an evaluation batch measured on this rank. Sums, so that ranks can be added.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct EvalResult {
    pub loss_sum: f64,
    pub correct: u64,
    pub samples: u64,
}

/// Why a step failed.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A tensor that is missing, unknown, or of the wrong shape.
    #[error("{0}")]
    Parameters(String),
    /// The device, its driver or a library does not support it; another attempt would fail as well.
    #[error("{0}")]
    Device(String),
    /// The device or one of its libraries, in the words of its backend.
    #[error("{0}")]
    Backend(Box<dyn DeviceError>),
}

/// One rank's copy of the network and its optimizer.
///
/// An engine is built for a group, whose ranks see different pictures and keep the same weights, or share copies of the network as a
/// [`plan::Plan`] says; [`Engine::eval_step`] and [`Engine::predict`] are then collective, too. Building one is collective, and so are [`Engine::start_step`] with what follows from it,
/// [`Engine::broadcast_parameters`], [`Engine::state_dict`] and [`Engine::load_state_dict`]: every rank of the group calls them,
/// in the same order. All other methods concern this rank alone.
pub trait Engine: Send {
    /// How this engine wants the pictures of its batches; it may take a copy of those in memory.
    ///
    /// # Errors
    /// The device fails, or has no memory for a copy that it has begun.
    fn take_data(&mut self, _data: &DataSource) -> Result<BatchFormat, EngineError> {
        Ok(BatchFormat::Normalised)
    }
    /// Makes ready for pictures of other sizes than the network was built for: some to train on, others only for
    /// [`Engine::eval_step`] and [`Engine::predict`]. Before [`Engine::take_data`].
    ///
    /// # Errors
    /// [`EngineError::Parameters`]: the network cannot be built for one of them. The device fails or has no memory for it.
    fn take_sizes(&mut self, training: &[usize], evaluation: &[usize]) -> Result<(), EngineError>;
    /// From the next batch on pictures have this side: the network's own, or one of [`Engine::take_sizes`]. Weights, running
    /// statistics and optimizer state stay as they are. No step may be under way.
    ///
    /// # Errors
    /// [`EngineError::Parameters`]: none of those sizes.
    fn set_image_size(&mut self, image_size: usize) -> Result<(), EngineError>;
    /// Collective: starts one optimizer step over `micro_batches` (up to `accumulate`, as many on every rank): forward and backward of
    /// each, gradients reduced over all ranks while backward is still running, then the update.
    ///
    /// An engine may run behind its caller: results come in the order of steps, the oldest one that
    /// has not been reported yet with each call, `None` while the first steps are under way.
    ///
    /// # Errors
    /// [`EngineError::Parameters`]: more micro-batches than `accumulate`, or a batch that does not fit the network.
    /// [`EngineError::Comm`]: a rank of the group is gone. The device fails. It may be an earlier step's error. After any of them
    /// the engine is of no more use.
    fn start_step(&mut self, micro_batches: &[Batch], lr: f32) -> Result<Option<StepResult>, EngineError>;
    /// Waits for the steps under way; their results, oldest first.
    ///
    /// # Errors
    /// As [`Engine::start_step`], of the steps under way.
    fn finish_steps(&mut self) -> Result<Vec<StepResult>, EngineError> {
        Ok(Vec::new())
    }
    /// Collective: a step from beginning to end.
    ///
    /// # Errors
    /// As [`Engine::start_step`].
    fn train_step(&mut self, micro_batches: &[Batch], lr: f32) -> Result<StepResult, EngineError> {
        let result = self.start_step(micro_batches, lr)?;
        Ok(self.finish_steps()?.pop().or(result).unwrap_or_default())
    }
    /// A step (with a learning rate of 0) in which each call is timed by itself: (what, milliseconds), in
    /// order. Empty where the engine cannot measure it.
    ///
    /// # Errors
    /// As [`Engine::start_step`].
    fn profile_step(&mut self, _batch: &Batch) -> Result<Vec<(String, f64)>, EngineError> {
        Ok(Vec::new())
    }
    /// Collective: has the next step keep its gradients for [`Engine::gradients`].
    ///
    /// # Errors
    /// There is no memory for them. [`EngineError::Comm`]: a rank of the group is gone.
    fn keep_gradients(&mut self) -> Result<(), EngineError> {
        Ok(())
    }
    /// The gradients of the newest step that was to keep them, reduced over all ranks as the update used them: names as in
    /// [`Engine::parameters`], without those of frozen batch norms. No step may be under way, and none may have been started
    /// since. Empty where the engine has no room for them.
    ///
    /// # Errors
    /// The device fails.
    fn gradients(&self) -> Result<NamedTensors, EngineError> {
        Ok(NamedTensors::new())
    }
    /// Has the next step time its layers. It does what every step does, in parts one after another.
    fn time_layers(&mut self) {}
    /// What that step has found; empty where the engine cannot measure it.
    fn layer_times(&mut self) -> Vec<LayerTime> {
        Vec::new()
    }
    /// Forward with running statistics; no change of state, no communication but among ranks that share a network. Zeros on the ranks of a
    /// stage but the last.
    ///
    /// # Errors
    /// [`EngineError::Parameters`]: pictures or labels do not fit the network. The device fails.
    fn eval_step(&mut self, batch: &Batch) -> Result<EvalResult, EngineError>;
    /// Logits `[samples, classes]` with running statistics; none on the ranks of a stage but the last.
    ///
    /// # Errors
    /// As [`Engine::eval_step`].
    fn predict(&mut self, batch: &Batch) -> Result<Vec<f32>, EngineError>;
    /// Weights, biases and running statistics. Of what is split over ranks, or is on another stage: this rank's part in tensors of the whole
    /// shape, and 0 in the place of the others', so that the sum over the ranks of a copy of the network is the parameter.
    ///
    /// # Errors
    /// The device fails.
    fn parameters(&self) -> Result<NamedTensors, EngineError>;
    /// Replaces weights, biases and running statistics; `values` must hold all of them. Where ranks share memory,
    /// weights and biases are rank 0's, for all to see after the next collective.
    ///
    /// # Errors
    /// [`EngineError::Parameters`] names tensors that are missing, unknown or of another shape; nothing has changed then. The device
    /// fails.
    fn set_parameters(&mut self, values: &NamedTensors) -> Result<(), EngineError>;
    /// What the optimizer keeps from step to step. Where ranks divide it, this rank's part in tensors of the whole shape, and 0 in the
    /// place of the others'.
    ///
    /// # Errors
    /// The device fails.
    fn optimizer_state(&self) -> Result<OptimizerState, EngineError>;
    /// Replaces it: slots are shared as weights are, updates are counted by every rank.
    ///
    /// # Errors
    /// As [`Engine::set_parameters`], of the optimizer's slots.
    fn set_optimizer_state(&mut self, to: &OptimizerState) -> Result<(), EngineError>;
    /// Takes weights, biases and running statistics as the steps so far leave them into their running average: `average =
    /// decay average + (1 - decay) value` (torchvision's `ExponentialMovingAverage`, whose buffers are averaged, too). The
    /// first time they are the average.
    ///
    /// # Errors
    /// There is no memory for an average; the device fails.
    fn average(&mut self, decay: f64) -> Result<(), EngineError>;
    /// Whether there is one.
    fn has_average(&self) -> bool;
    /// That average, if there is one: names as in [`Engine::parameters`].
    ///
    /// # Errors
    /// The device fails.
    fn averaged(&self) -> Result<Option<NamedTensors>, EngineError>;
    /// Replaces it.
    ///
    /// # Errors
    /// As [`Engine::set_parameters`]; there is no memory for an average.
    fn set_averaged(&mut self, values: &NamedTensors) -> Result<(), EngineError>;
    /// Loss scaling as the next step will use it; `None` where nothing is scaled (all but float16).
    ///
    /// # Errors
    /// The device fails.
    fn loss_scaling(&self) -> Result<Option<LossScaling>, EngineError> {
        Ok(None)
    }
    /// Replaces it; without effect where nothing is scaled, or where the scale is a fixed one.
    ///
    /// # Errors
    /// The device fails.
    fn set_loss_scaling(&mut self, _scaling: LossScaling) -> Result<(), EngineError> {
        Ok(())
    }
    /// The format that convolutions are computed in; never [`Precision::Auto`].
    fn precision(&self) -> Precision {
        Precision::Fp32
    }
    /// Which replica of the state this rank has: its rank in the data-parallel group.
    fn replica(&self) -> u32;
    /// Collective: what this rank contributes to a checkpoint, of which each of `writers` writes some tensors. Only they copy their state
    /// off the device; the others do nothing, but for giving their parts of the optimizer's state where ranks divide that.
    ///
    /// # Errors
    /// The device fails.
    fn state_dict(&self, writers: &Writers) -> Result<Contribution, EngineError> {
        let own = self.replica();
        if !writers.include(own) {
            return Ok(Contribution::Replica);
        }
        let mut state = self.own_state()?;
        writers.retain(&mut state, |rank| rank == own);
        Ok(writers.contribution(state))
    }
    /// What this rank itself has of the state, copied off the device.
    ///
    /// # Errors
    /// The device fails.
    fn own_state(&self) -> Result<StateDict, EngineError> {
        Ok(StateDict {
            parameters: self.parameters()?,
            optimizer: Some(self.optimizer_state()?),
            average: self.averaged()?,
            loss_scaling: self.loss_scaling()?,
        })
    }
    /// After a collective method has failed because another rank is gone: makes this rank's state, as [`Engine::own_state`] gives it, that
    /// of the newest step that it has finished. Gives the results of finished steps that have not been returned, oldest first.
    /// `None`: parts of it may be of two steps, or it cannot be had; nothing may be kept of it.
    fn undo_unfinished_steps(&mut self) -> Option<Vec<StepResult>> {
        None
    }
    /// Collective: continues from `state`, which is the same on every rank but for the average, which only rank 0 keeps. Where
    /// ranks share memory, none may use the old state any more when one calls this, nor the new one before all have: a
    /// barrier before and one after.
    ///
    /// # Errors
    /// As [`Engine::set_parameters`] and [`Engine::set_optimizer_state`]. State that comes before the tensor at fault has been replaced.
    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), EngineError> {
        self.set_parameters(&state.parameters)?;
        if let Some(optimizer) = &state.optimizer {
            self.set_optimizer_state(optimizer)?;
        }
        if let Some(average) = &state.average {
            self.set_averaged(average)?;
        }
        if let Some(scaling) = state.loss_scaling {
            self.set_loss_scaling(scaling)?;
        }
        Ok(())
    }
    /// As [`first_not_finite`] of this rank's weights, biases, running statistics, optimizer state and average.
    ///
    /// # Errors
    /// The device fails.
    fn first_not_finite(&self) -> Result<Option<String>, EngineError>;
    /// Checksums of the weights and biases that every rank of the stage has, and of the parts that this rank has of split ones. After a step
    /// the first is the same on every rank of the stage, the second on every rank of it with the same parts. No step may be under way.
    ///
    /// # Errors
    /// The device fails.
    fn checksum(&self) -> Result<[u64; 2], EngineError>;
    /// Collective: rank 0's parameters and running statistics to every rank.
    ///
    /// # Errors
    /// [`EngineError::Comm`]: a rank of the group is gone. The device fails.
    fn broadcast_parameters(&mut self) -> Result<(), EngineError>;
    /// Drops the engine in a process that is about to exit: waits for nothing in flight, and leaves device memory for the driver to free.
    fn abandon(self: Box<Self>) {}
    /// Memory of the device that this process holds; 0 on the CPU.
    fn memory_bytes(&self) -> u64 {
        0
    }
    /// How gradients reach other ranks, for the log; empty where that goes without saying.
    fn exchange(&self) -> String {
        String::new()
    }
    /// `CPU, 2 threads`, `NVIDIA H200, fp16`.
    fn device_name(&self) -> String;
}

/// The error for an image size that [`Engine::take_sizes`] did not name.
fn unknown_size(image_size: usize) -> EngineError {
    EngineError::Parameters(format!("this engine is not ready for pictures of {image_size} pixels"))
}

/// Builds the CPU engine for `network` with `parameters` already set from `crate::net::init`.
///
/// # Errors
/// When the initial tensors do not fit the network.
pub fn build_cpu(
    network: Arc<crate::net::Network>,
    initial: &NamedTensors,
    config: EngineConfig,
    comm: Arc<dyn ProcessGroup>,
) -> Result<Box<dyn Engine>, EngineError> {
    let plan = plan::Plan::data(comm.size());
    cpu::build(network, initial, config, comm, &plan)
}

/// As [`build_cpu`], for ranks that share copies of the network as `plan` says.
///
/// # Errors
/// As [`build_cpu`]; the network cannot be split so.
pub fn build_cpu_with(
    network: Arc<crate::net::Network>,
    initial: &NamedTensors,
    config: EngineConfig,
    comm: Arc<dyn ProcessGroup>,
    plan: &plan::Plan,
) -> Result<Box<dyn Engine>, EngineError> {
    cpu::build(network, initial, config, comm, plan)
}
