//! An engine runs a [`crate::net::Network`]: forward, backward, all-reduce and update of one rank.
//! Only this crate and `lockstep-comm` distinguish engines.

// Callers need to know how a call can fail.
#![warn(clippy::missing_errors_doc)]

mod backend;
pub mod bench;
mod check;
pub mod cpu;
mod cuda;
mod distribution;
mod finite;
#[cfg(test)]
mod fixtures;
#[cfg(test)]
mod frozen_norm;
mod fuse;
mod layers;
mod loss;
mod measure;
pub mod net;
pub mod nvjpeg;
pub mod onnx;
mod optimizer;
pub mod plan;
mod prepared_step;
pub mod registry;
mod sharding;
mod state_dict;

pub use backend::{
    Backend, BuildArgs, DeviceChoice, DeviceConfig, DeviceError, DeviceMetrics, Devices, Needs, Selection,
    SharedMemory,
};
pub use cpu::MAX_CPU_SLOTS;
pub use cuda::compile_kernels;
pub use distribution::Distribution;
pub use finite::{all_finite, first_invalid};
pub use layers::LayerTime;
use lockstep_host::tensors::{HostTensor, NamedTensors, TensorSource};
pub use loss::{LossConfig, Margin};
pub use measure::{Sample, WIDE_HEADS, measure, wide_heads};
pub use optimizer::{Optimizer, OptimizerState, slots};
pub use state_dict::{AverageOn, StateDict, Writers};

use lockstep_comm::{CommError, ProcessGroup};
use lockstep_data::loader::{Batch, BatchFormat, DataSource};
use lockstep_protocol::{agent::AxisTimes, spec::Precision};
use serde::{Deserialize, Serialize};
use std::{ops::AddAssign, sync::Arc};

/// Settings that stay the same during a run.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Number of pictures of this rank in a micro-batch (the last micro-batch of an epoch may be smaller).
    pub batch_size: usize,
    pub optimizer: Optimizer,
    pub loss: LossConfig,
    /// Number of micro-batches per step.
    pub accumulate: usize,
    /// Whether batch norms take their statistics over the pictures of all ranks.
    pub sync_batch_norm: bool,
    /// Whether the update uses the mean gradient of the step's pictures on all ranks. Otherwise it uses this mean times the
    /// number of ranks with different pictures.
    pub gradients_mean: bool,
    /// Number of threads of this rank.
    pub threads: usize,
}

impl EngineConfig {
    /// Default settings: the plain mean loss, one micro-batch per step, synchronised batch norms, mean gradients, one thread.
    pub fn new(batch_size: usize, optimizer: Optimizer) -> Self {
        Self {
            batch_size,
            optimizer,
            loss: LossConfig::default(),
            accumulate: 1,
            sync_batch_norm: true,
            gradients_mean: true,
            threads: 1,
        }
    }
}

/// Results of a step on this rank.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepResult {
    /// Mean cross-entropy over this rank's pictures of the step (label smoothing and class weights included).
    pub loss: f32,
    /// Number of correct predictions among this rank's pictures of the step.
    pub correct: u32,
    /// Number of this rank's pictures of the step.
    pub samples: u32,
    /// L2 norm of the reduced gradient, before weight decay.
    pub grad_norm: f32,
    /// Duration of the step in seconds, if the engine runs asynchronously. Otherwise 0, and the step took as long as
    /// the call.
    pub step_secs: f64,
    /// Seconds that this rank waited for gradients or statistics of other ranks.
    pub all_reduce_secs: f64,
    /// `all_reduce_secs` by the axes of the mesh; `None` under data parallelism, and if the engine does not measure them.
    pub axis_secs: Option<AxisTimes>,
    /// Factor of the loss before the backward pass; `None` without loss scaling (all formats but float16).
    pub loss_scale: Option<f32>,
}

impl StepResult {
    /// Whether the loss and the gradient are finite. A non-finite loss makes the gradient non-finite on every rank.
    pub fn is_finite(&self) -> bool {
        self.loss.is_finite() && self.grad_norm.is_finite()
    }

    /// Whether the update was skipped because the gradients overflowed float16 (as PyTorch's `GradScaler` does).
    pub fn is_skipped(&self) -> bool {
        self.loss_scale.is_some() && !self.is_finite()
    }
}

/// State of dynamic loss scaling, with the names of PyTorch's `GradScaler.state_dict()`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LossScaling {
    /// Factor of the next step's loss.
    pub scale: f32,
    /// Finite steps since the scale last changed; after 2,000 the scale is doubled.
    pub growth_tracker: u32,
}

/// Results of evaluated batches on this rank: sums, which can be added over batches and ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct EvalResult {
    /// Sum of the pictures' cross-entropies.
    pub loss_sum: f64,
    pub correct: u64,
    /// Number of pictures.
    pub samples: u64,
}

impl AddAssign for EvalResult {
    fn add_assign(&mut self, other: Self) {
        self.loss_sum += other.loss_sum;
        self.correct += other.correct;
        self.samples += other.samples;
    }
}

/// Why a step failed.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A tensor that is missing, unknown, or of the wrong shape.
    #[error("{0}")]
    Parameters(String),
    /// The device, its driver or a library does not support an operation; another attempt would fail as well.
    #[error("{0}")]
    Device(String),
    /// The device or one of its libraries failed. This is the backend's error.
    #[error("{0}")]
    Backend(Box<dyn DeviceError>),
}

/// One rank's copy of the network and its optimizer.
/// An engine is built for a group of ranks that see different pictures and keep the same weights, or that share copies
/// of the network according to a [`plan::Plan`]. Building an engine is collective. Every rank of the group calls the collective
/// methods, in the same order. Where ranks share a network, [`Engine::start_evaluation`] and [`Engine::predict`] are collective, too.
///
/// Every method that returns a `Result` fails if the device fails, and a collective method fails with [`EngineError::Comm`] if
/// a rank of the group is gone. The methods list only their other errors.
#[allow(clippy::missing_errors_doc)] // The errors of all methods are above.
pub trait Engine: Send {
    /// Prepares for the pictures of `data`, before the first step: the engine may copy pictures that are in memory to its device.
    /// Returns the format in which this engine reads the pictures of batches.
    ///
    /// # Errors
    /// The device has not enough memory for the copy.
    fn take_data(&mut self, _data: &DataSource) -> Result<BatchFormat, EngineError> {
        Ok(BatchFormat::Normalised)
    }
    /// Prepares for pictures of other sizes than the network's: `training` sizes, and `evaluation` sizes, which only
    /// [`Engine::start_evaluation`] and [`Engine::predict`] use. Call it before [`Engine::take_data`].
    ///
    /// # Errors
    /// [`EngineError::Parameters`]: the network cannot be built for a size. The device has not enough memory.
    fn add_image_sizes(&mut self, training: &[usize], evaluation: &[usize]) -> Result<(), EngineError>;
    /// Sets the size of pictures from the next batch on: the network's own, or one given to [`Engine::add_image_sizes`]. Weights,
    /// running statistics and optimizer state do not change. No step may be under way.
    ///
    /// # Errors
    /// [`EngineError::Parameters`]: the engine was not prepared for this size.
    fn set_image_size(&mut self, image_size: usize) -> Result<(), EngineError>;
    /// Collective: starts one optimizer step over `micro_batches` (at most `accumulate`, equally many on every rank): forward and
    /// backward of each, gradients reduced over all ranks while backward is still running, then the update.
    ///
    /// An engine may run asynchronously: each call returns the oldest result that has not been returned yet, or `None` while the
    /// first steps are under way.
    ///
    /// # Errors
    /// [`EngineError::Parameters`]: more micro-batches than `accumulate`, or a batch that does not fit the network. The error may
    /// be of an earlier step. After an error the engine cannot be used any more.
    fn start_step(&mut self, micro_batches: &[Batch], lr: f32) -> Result<Option<StepResult>, EngineError>;
    /// Waits for the steps under way and returns their results, oldest first.
    ///
    /// # Errors
    /// As for [`Engine::start_step`].
    fn finish_steps(&mut self) -> Result<Vec<StepResult>, EngineError> {
        Ok(Vec::new())
    }
    /// Collective: runs a whole step and returns its result.
    ///
    /// # Errors
    /// As for [`Engine::start_step`].
    fn train_step(&mut self, micro_batches: &[Batch], lr: f32) -> Result<StepResult, EngineError> {
        let result = self.start_step(micro_batches, lr)?;
        Ok(self.finish_steps()?.pop().or(result).unwrap_or_default())
    }
    /// Collective: makes the next step keep its gradients for [`Engine::gradients`].
    ///
    /// # Errors
    /// There is not enough memory for the gradients.
    fn keep_gradients(&mut self) -> Result<(), EngineError> {
        Ok(())
    }
    /// The gradients that the newest step kept ([`Engine::keep_gradients`]), reduced over all ranks as the update used
    /// them. The names are as in [`Engine::parameters`], without frozen batch norms. No step may be under way. Empty if
    /// the engine had not enough memory.
    fn gradients(&self) -> Result<NamedTensors, EngineError> {
        Ok(NamedTensors::new())
    }
    /// Makes the next step time its layers. The step has the same results, but its operations do not overlap.
    fn time_layers(&mut self) {}
    /// The times of the step after [`Engine::time_layers`]; empty if the engine cannot time layers.
    fn layer_times(&mut self) -> Vec<LayerTime> {
        Vec::new()
    }
    /// Starts a forward pass with running statistics, whose result is added to the results that [`Engine::finish_evaluation`]
    /// returns. Weights and statistics do not change; only ranks that share a network communicate. An engine may run asynchronously.
    /// No step may be under way, and neither a step nor [`Engine::predict`] may be called before [`Engine::finish_evaluation`].
    ///
    /// # Errors
    /// [`EngineError::Parameters`]: pictures or labels do not fit the network.
    fn start_evaluation(&mut self, batch: &Batch) -> Result<(), EngineError>;
    /// Waits for the evaluation under way, and returns its results: sums since the last call. Ranks of other stages than the last
    /// return zeros.
    fn finish_evaluation(&mut self) -> Result<EvalResult, EngineError>;
    /// Evaluates one batch.
    ///
    /// # Errors
    /// As for [`Engine::start_evaluation`].
    fn eval_step(&mut self, batch: &Batch) -> Result<EvalResult, EngineError> {
        self.start_evaluation(batch)?;
        self.finish_evaluation()
    }
    /// Logits `[samples, classes]` with running statistics. Empty on ranks of other stages than the last.
    ///
    /// # Errors
    /// As for [`Engine::start_evaluation`].
    fn predict(&mut self, batch: &Batch) -> Result<Vec<f32>, EngineError>;
    /// This rank's weights, biases and running statistics: its parts of split tensors, and no tensors of other stages.
    fn parameters(&self) -> Result<NamedTensors, EngineError>;
    /// Replaces weights, biases and running statistics. `values` must contain all tensors of this rank. Where ranks share
    /// memory, rank 0's weights and biases apply, and all ranks see them after the next collective.
    ///
    /// # Errors
    /// [`EngineError::Parameters`] names tensors that are missing, unknown or of another shape; no state has changed then.
    fn set_parameters(&mut self, values: &dyn TensorSource) -> Result<(), EngineError>;
    /// The state of the optimizer for this rank's parameters. Where ranks divide the state of a parameter, the parts of other
    /// ranks are zeros.
    fn optimizer_state(&self) -> Result<OptimizerState, EngineError>;
    /// Replaces the optimizer's state. Ranks that share weights also share the slots, but each rank has its own number of
    /// updates.
    ///
    /// # Errors
    /// As for [`Engine::set_parameters`], for the optimizer's slots.
    fn set_optimizer_state(&mut self, state: &OptimizerState) -> Result<(), EngineError>;
    /// Updates the moving average of weights, biases and running statistics after the steps so far:
    /// `average = decay average + (1 - decay) value`, as torchvision's `ExponentialMovingAverage`, which averages buffers, too.
    /// The first call copies the values.
    ///
    /// # Errors
    /// There is not enough memory for an average.
    fn update_average(&mut self, decay: f64) -> Result<(), EngineError>;
    fn has_average(&self) -> bool;
    /// The moving average, if it exists, with the names of [`Engine::parameters`].
    fn averaged(&self) -> Result<Option<NamedTensors>, EngineError>;
    /// Replaces the moving average.
    ///
    /// # Errors
    /// As for [`Engine::set_parameters`]; or there is not enough memory for an average.
    fn set_averaged(&mut self, values: &NamedTensors) -> Result<(), EngineError>;
    /// Loss scaling of the next step; `None` without loss scaling (all formats but float16).
    fn loss_scaling(&self) -> Result<Option<LossScaling>, EngineError> {
        Ok(None)
    }
    /// Replaces the state of loss scaling. No effect without loss scaling or with a fixed scale.
    fn set_loss_scaling(&mut self, _scaling: LossScaling) -> Result<(), EngineError> {
        Ok(())
    }
    /// The floating-point format of convolutions; never [`Precision::Auto`].
    fn precision(&self) -> Precision {
        Precision::Fp32
    }
    /// Collective: the tensors that this rank writes to a checkpoint, each complete. `None` if it writes no tensors. Such a rank
    /// copies its state off the device only if it has a part of a tensor that another rank writes.
    fn state_dict(&self, writers: &Writers) -> Result<Option<StateDict>, EngineError>;
    /// This rank's own state, copied off the device.
    fn own_state(&self) -> Result<StateDict, EngineError> {
        Ok(StateDict {
            parameters: self.parameters()?,
            optimizer: Some(self.optimizer_state()?),
            average: self.averaged()?,
            loss_scaling: self.loss_scaling()?,
        })
    }
    /// Resets this rank's state ([`Engine::own_state`]) to the end of the newest finished step, after a collective method has
    /// failed because another rank is gone. Returns the results of finished steps that have not been returned yet, oldest first.
    /// Returns `None` if the state may mix two steps or cannot be read. It must then be discarded.
    fn undo_unfinished_steps(&mut self) -> Option<Vec<StepResult>> {
        None
    }
    /// Collective: continues from `state`, this rank's own state ([`Engine::own_state`], [`Distribution::scatter`]). Where ranks
    /// share memory, callers need a barrier before and after the call: no rank may use the old state after another rank has called
    /// this method, or the new state before all ranks have returned.
    ///
    /// # Errors
    /// As for [`Engine::set_parameters`] and [`Engine::set_optimizer_state`]. Parts of the state may have been replaced.
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
    /// [`first_invalid`] for this rank's weights, biases, running statistics, optimizer state and average.
    fn first_invalid(&self) -> Result<Option<String>, EngineError> {
        finite::first_of_engine(self)
    }
    /// Two checksums: of the weights and biases that every rank of the stage has, and of this rank's parts of split
    /// parameters. After a step the first one is equal on all ranks of the stage, and the second one on all ranks of
    /// the stage with the same parts. No step may be under way.
    fn checksum(&self) -> Result<[u64; 2], EngineError>;
    /// Collective: copies rank 0's parameters and running statistics to all ranks.
    fn broadcast_parameters(&mut self) -> Result<(), EngineError>;
    /// Collective: as [`Engine::broadcast_parameters`], for ranks whose weights are equal, so that only running statistics may have to be
    /// copied.
    fn broadcast_statistics(&mut self) -> Result<(), EngineError> {
        self.broadcast_parameters()
    }
    /// Drops the engine in a process that is about to end, without waiting for work in flight and without freeing device
    /// memory, which the driver does.
    fn leak(self: Box<Self>) {}
    /// Bytes of device memory that this process has allocated; 0 on the CPU.
    fn memory_bytes(&self) -> u64 {
        0
    }
    /// How gradients are exchanged between ranks, for the log; may be empty.
    fn exchange(&self) -> String {
        String::new()
    }
    /// Name of the device, e.g. `CPU, 2 threads` or `NVIDIA H200, fp16`.
    fn device_name(&self) -> String;
}

/// The error for an image size that [`Engine::add_image_sizes`] did not name.
fn unknown_size(image_size: usize) -> EngineError {
    EngineError::Parameters(format!("this engine was not prepared for pictures of {image_size} pixels"))
}

fn thread_pool(threads: usize) -> Result<rayon::ThreadPool, EngineError> {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads.max(1))
        .thread_name(|i| format!("compute-{i}"))
        .build()
        .map_err(|e| EngineError::Parameters(format!("cannot start {threads} threads: {e}")))
}

/// Builds the CPU engine for `network` with the parameters and running statistics `initial`.
///
/// # Errors
/// The initial tensors do not fit the network.
pub fn build_cpu(
    network: Arc<crate::net::Network>,
    initial: &dyn TensorSource,
    config: EngineConfig,
    comm: Arc<dyn ProcessGroup>,
) -> Result<Box<dyn Engine>, EngineError> {
    let plan = plan::Plan::data(comm.size());
    build_cpu_with(network, initial, config, comm, &plan)
}

/// [`build_cpu`] for ranks that share copies of the network according to `plan`.
///
/// # Errors
/// As for [`build_cpu`]; `plan` cannot split the network.
pub fn build_cpu_with(
    network: Arc<crate::net::Network>,
    initial: &dyn TensorSource,
    config: EngineConfig,
    comm: Arc<dyn ProcessGroup>,
    plan: &plan::Plan,
) -> Result<Box<dyn Engine>, EngineError> {
    cpu::build(network, initial, config, comm, plan, lockstep_kernels::conv::Format::Float32)
}
