//! A backend: a kind of device, with the engine that computes on it and what else a rank on it needs. All of them are in the
//! [`registry`](super::registry); nothing outside of a backend's own folder names one where any would do.

use super::{Engine, EngineConfig, EngineError, NamedTensors, plan::Plan};
use crate::net::Network;
use lockstep_comm::{ProcessGroup, rendezvous::Store, watchdog::Watchdog};
use lockstep_data::device::DeviceDecoder;
use lockstep_host::gpu::RankGpu;
use lockstep_protocol::{
    agent::Slot,
    spec::{Device, JobSpec, LossScale, Precision},
};
use std::{
    ffi::OsString,
    fmt::{self, Debug},
    io,
    sync::Arc,
    time::Duration,
};

/// Measures at each call: values by the names of [`lockstep_protocol::metric::NAMES`].
pub type DeviceMetrics = Box<dyn FnMut() -> Vec<(&'static str, f32)> + Send>;

/// A kind of device that ranks compute on.
pub trait Backend: Debug + Sync {
    /// `cpu`, `cuda`.
    fn name(&self) -> &'static str;
    /// The places for ranks that this machine offers: one a device, with what a rank is given as `uuid`, or without one where
    /// ranks share what there is. None where `selection` asks for others.
    ///
    /// # Errors
    /// `selection` names what there is not; a sentence.
    fn devices(&self, selection: Selection<'_>) -> Result<Devices, String>;
    /// The device of this backend that a rank computes on, as its process numbers them: of a rank that its launcher has
    /// given `given`, for a job that asks for `asked`. `None`: of another backend. The first in the registry that has one is
    /// the rank's.
    fn device_of(&self, given: Option<&RankGpu>, asked: Device) -> Option<i32>;
    /// What a rank is said to compute on until its engine says more: `CPU`, `GPU 1`.
    fn device_name(&self, ordinal: i32) -> String;
    /// What a rank arranges for its engine.
    fn needs(&self) -> Needs;
    /// The variables that a rank's process is started with, in addition to those that it inherits.
    ///
    /// # Errors
    /// What they are about cannot be prepared on this machine.
    fn environment(&self, _given: Option<&RankGpu>) -> io::Result<Vec<(OsString, OsString)>> {
        Ok(Vec::new())
    }
    /// Looks whether this process can use the backend in a group of `world_size` ranks, before they meet.
    ///
    /// # Errors
    /// What is missing on this machine, and what to do; another attempt would fail as well.
    fn preflight(&self, _world_size: u32) -> Result<(), String> {
        Ok(())
    }
    /// What `local_ranks` ranks of a job need of this machine's `/dev/shm`.
    fn shared_memory(&self, _spec: &JobSpec, _local_ranks: usize) -> SharedMemory {
        SharedMemory::default()
    }
    /// Looks whether the engine does what a job asks for.
    ///
    /// # Errors
    /// What it does not do, and what to change in the job.
    fn check(&self, _spec: &JobSpec) -> Result<(), String> {
        Ok(())
    }
    /// Looks whether the engine computes a network as a plan spreads it.
    ///
    /// # Errors
    /// What it does not compute, and what to change.
    fn check_plan(&self, _network: &Network, _plan: &Plan) -> Result<(), String> {
        Ok(())
    }
    /// Builds the engine.
    ///
    /// # Errors
    /// The initial tensors do not fit the network, or the device cannot be used.
    fn build(&self, args: BuildArgs<'_>) -> Result<Box<dyn Engine>, EngineError>;
    /// Opens the decoder of JPEG files that a device has, next to an engine that computes in `precision`.
    ///
    /// # Errors
    /// There is none, or it does not make the pixels that cores make; a sentence.
    fn decoder(&self, _ordinal: i32, _precision: Precision) -> Result<Arc<dyn DeviceDecoder>, String> {
        Err("there is no decoder of JPEG files".into())
    }
    /// Measures the metrics of the rank's device. `None` where there is nothing to report.
    ///
    /// # Errors
    /// The device cannot be watched; a sentence. Training does without.
    fn device_metrics(&self, _given: Option<&RankGpu>) -> Result<Option<DeviceMetrics>, String> {
        Ok(None)
    }
    /// This process is about to end, from any thread, while its devices may wait for other ranks.
    fn about_to_exit(&self, _reason: &str) {}
    /// Waits until the process's exit handlers may run; false: `limit` has passed, or they would wait for a device.
    fn may_run_exit_handlers(&self, _limit: Duration) -> bool {
        true
    }
}

/// Which of this machine's devices are wanted.
#[derive(Debug, Clone, Copy)]
pub struct Selection<'a> {
    /// The kind that a job asks for.
    pub device: Device,
    /// The visible devices to use: numbers or names, separated by commas (`agent --gpus`).
    pub list: Option<&'a str>,
    /// So many places on the CPU, whatever else there is (`agent --cpu-slots`).
    pub cpu_slots: Option<u32>,
}

impl Default for Selection<'_> {
    /// Whatever there is.
    fn default() -> Self {
        Self { device: Device::Auto, list: None, cpu_slots: None }
    }
}

/// What a backend offers on this machine.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Devices {
    pub slots: Vec<Slot>,
    /// Why there is nothing, where somebody might have expected it, and what to do; a sentence.
    pub hindrance: Option<String>,
}

/// Room in `/dev/shm`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SharedMemory {
    pub bytes: u64,
    /// What takes it: `NCCL`.
    pub library: &'static str,
}

/// What a rank arranges for the engine of its backend.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Needs {
    /// Ranks of one machine share the host's memory in addition to their ring: weights and gradients are there.
    pub shared_memory: bool,
    /// Weights, gradients and what is kept for the backward pass are in the host's memory.
    pub host_memory: bool,
    /// Steps run behind the caller, and their collectives may wait for ever: a watchdog counts them.
    pub watchdog: bool,
    /// The engine leaves the rank's threads to who prepares its data.
    pub leaves_threads: bool,
    /// It computes in 16 bits, and `train.precision` chooses.
    pub half_precision: bool,
    /// It may decode JPEG files; see [`Backend::decoder`].
    pub decodes: bool,
}

/// What an engine is built from.
pub struct BuildArgs<'a> {
    pub network: Arc<Network>,
    /// Weights, biases and running statistics.
    pub initial: &'a NamedTensors,
    pub config: EngineConfig,
    pub comm: Arc<dyn ProcessGroup>,
    /// How the network is spread over the ranks of `comm`.
    pub plan: Plan,
    /// Its number among the devices that this process sees.
    pub ordinal: i32,
    /// To compute in, where there is a choice.
    pub precision: Precision,
    /// For fp16.
    pub loss_scale: LossScale,
    /// The same bits in every run.
    pub deterministic: bool,
    /// Where the ranks meet; absent for a single rank.
    pub store: Option<Arc<Store>>,
    /// Notified of every step that is submitted and completed.
    pub watchdog: Option<Arc<Watchdog>>,
    /// Engines that this process has built before: each connects its ranks' devices under names of its own.
    pub generation: u32,
}

/// An error of a device or of one of its libraries, in its backend's words.
pub trait DeviceError: std::error::Error + Send + Sync {
    /// Whether another attempt, in new processes, may succeed.
    fn is_retriable(&self) -> bool;
    /// Whether the device's memory does not suffice.
    fn is_out_of_memory(&self) -> bool;
}

/// Where a rank computes.
#[derive(Clone, Copy)]
pub struct DeviceChoice {
    pub backend: &'static dyn Backend,
    /// Its number among the devices that this process sees.
    pub ordinal: i32,
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.backend.device_name(self.ordinal))
    }
}

impl Debug for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.backend.name(), self.ordinal)
    }
}
