//! A backend: a kind of device, its engine, and everything else that a rank on such a device needs. The
//! [`registry`](super::registry) lists all backends; code that works with any backend names no backend.

use super::{Engine, EngineConfig, EngineError, plan::Plan};
use crate::net::Network;
use lockstep_comm::{ProcessGroup, rendezvous::Store, watchdog::Watchdog};
use lockstep_data::device::DeviceDecoder;
use lockstep_host::{gpu::RankGpu, tensors::TensorSource};
use lockstep_protocol::{
    agent::Slot,
    spec::{Device, JobSpec, LossScale, Precision},
};
use std::{
    ffi::OsString,
    fmt::{self, Debug},
    io,
    sync::Arc,
};

/// Each call measures and returns (name, value) pairs, with names of [`lockstep_protocol::metric::NAMES`].
pub type DeviceMetrics = Box<dyn FnMut() -> Vec<(&'static str, f32)> + Send>;

/// A kind of device that ranks compute on.
pub trait Backend: Debug + Sync {
    /// Name of the backend: `cpu`, `cuda`.
    fn name(&self) -> &'static str;
    /// The slots that this machine offers: one per device, with the device's `uuid`, or slots without `uuid` if ranks
    /// share the hardware. No slots if `selection` requests another backend's devices.
    ///
    /// # Errors
    /// `selection` names a device that does not exist. The error is a sentence.
    fn devices(&self, selection: Selection<'_>) -> Result<Devices, String>;
    /// Chooses the device on which a rank computes, from the GPU that the launcher assigned (`gpu`) and the device that the
    /// job requests (`requested`). Returns the device's ordinal in the rank's process, or `None` if the rank does not compute on
    /// this backend. The first backend of the registry that returns a device is used.
    fn device_of(&self, gpu: Option<&RankGpu>, requested: Device) -> Option<i32>;
    /// Name of the device until an engine reports its own: `CPU`, `GPU 1`.
    fn device_name(&self, ordinal: i32) -> String;
    /// What a rank must provide for the engine.
    fn needs(&self) -> Needs;
    /// Environment variables of a rank's process, in addition to the inherited ones.
    ///
    /// # Errors
    /// Files to which the variables refer cannot be prepared on this machine.
    fn environment(&self, _gpu: Option<&RankGpu>) -> io::Result<Vec<(OsString, OsString)>> {
        Ok(Vec::new())
    }
    /// Checks, before the rendezvous, that this process can use the backend in a group of `world_size` ranks.
    ///
    /// # Errors
    /// A requirement is missing on this machine; the error says what to do. Another attempt would fail as well.
    fn preflight(&self, _world_size: u32) -> Result<(), String> {
        Ok(())
    }
    /// The space in this machine's `/dev/shm` that `local_ranks` ranks of a job need.
    fn shared_memory(&self, _spec: &JobSpec, _local_ranks: usize) -> SharedMemory {
        SharedMemory::default()
    }
    /// Checks that the engine supports everything that a job requests.
    ///
    /// # Errors
    /// The engine does not support a request; the error says what to change in the job.
    fn check(&self, _spec: &JobSpec) -> Result<(), String> {
        Ok(())
    }
    /// Checks that the engine supports a network under a plan.
    ///
    /// # Errors
    /// The engine does not support a part of the plan; the error says what to change.
    fn check_plan(&self, _network: &Network, _plan: &Plan) -> Result<(), String> {
        Ok(())
    }
    /// Starts a thread that opens what every engine on device `ordinal` needs in a job of `ranks` ranks, so that
    /// [`Backend::build`] takes less time. `precision` is the job's precision, or `None` if no job is known yet.
    fn warm_up(&self, _ordinal: i32, _ranks: u32, _precision: Option<Precision>) {}
    /// Whether the device that [`Backend::warm_up`] has opened can be used, as far as is known without waiting. If it cannot
    /// be used, only a new process may be able to use it.
    fn is_sound(&self) -> bool {
        true
    }
    /// Builds the engine.
    ///
    /// # Errors
    /// The initial tensors do not fit the network, or the device cannot be used.
    fn build(&self, args: BuildArgs<'_>) -> Result<Box<dyn Engine>, EngineError>;
    /// Opens a device's decoder of JPEG files, for use beside an engine that computes in `precision`.
    ///
    /// # Errors
    /// The device has no decoder, or its pixels differ from the CPU decoder's. The error is a sentence.
    fn decoder(&self, _ordinal: i32, _precision: Precision) -> Result<Arc<dyn DeviceDecoder>, String> {
        Err("there is no decoder of JPEG files".into())
    }
    /// Starts to measure metrics of the rank's device. Returns `None` if the backend has no device metrics.
    ///
    /// # Errors
    /// The device's metrics cannot be read. The error is a sentence. Training continues without device metrics.
    fn device_metrics(&self, _gpu: Option<&RankGpu>) -> Result<Option<DeviceMetrics>, String> {
        Ok(None)
    }
}

/// Selects devices of this machine.
#[derive(Debug, Clone, Copy)]
pub struct Selection<'a> {
    /// The kind of device that a job requests.
    pub device: Device,
    /// The visible devices to use: numbers or names, separated by commas (`agent --gpus`). `None`: all.
    pub list: Option<&'a str>,
    /// Number of CPU slots to offer instead of other devices (`agent --cpu-slots`). `None`: one slot per
    /// core if there are no other devices.
    pub cpu_slots: Option<u32>,
}

impl Default for Selection<'_> {
    fn default() -> Self {
        Self { device: Device::Auto, list: None, cpu_slots: None }
    }
}

/// The slots that a backend offers on this machine.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Devices {
    pub slots: Vec<Slot>,
    /// If a device seems to exist but cannot be used: a sentence that says why, and what to do. Otherwise `None`.
    pub why_no_gpus: Option<String>,
}

/// Space in `/dev/shm`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SharedMemory {
    pub bytes: u64,
    /// The library that uses the space: `NCCL`.
    pub library: &'static str,
}

/// What a rank must provide for its backend's engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Needs {
    /// Whether ranks of one machine need a shared memory segment for weights and gradients, in addition to their ring.
    pub shared_memory: bool,
    /// Whether weights, gradients and activations are in host memory.
    pub host_memory: bool,
    /// Whether a watchdog must count the steps, because they run asynchronously and their collectives may wait forever.
    pub watchdog: bool,
    /// Whether the data loader may use all of the rank's threads.
    pub leaves_threads: bool,
    /// Whether the engine computes in 16 bits if `train.precision` is `auto`.
    pub half_precision: bool,
    /// Whether the device may decode JPEG files; see [`Backend::decoder`].
    pub decodes: bool,
}

/// Arguments of [`Backend::build`].
pub struct BuildArgs<'a> {
    pub network: Arc<Network>,
    /// Weights, biases and running statistics.
    pub initial: &'a dyn TensorSource,
    pub config: EngineConfig,
    pub comm: Arc<dyn ProcessGroup>,
    pub device: DeviceConfig,
}

/// Settings of an engine on a device, in addition to [`EngineConfig`].
#[derive(Debug, Clone)]
pub struct DeviceConfig {
    /// How the network is parallelised over the ranks.
    pub plan: Plan,
    /// The device's ordinal among the devices that this process sees.
    pub ordinal: i32,
    /// The floating-point format, if the backend supports several.
    pub precision: Precision,
    /// Loss scaling for fp16.
    pub loss_scale: LossScale,
    /// Whether every run must compute the same bits.
    pub deterministic: bool,
    /// The rendezvous store. `None` for a single rank.
    pub store: Option<Arc<Store>>,
    /// Notified of every submitted and every completed step. `None` if nothing watches the steps.
    pub watchdog: Option<Arc<Watchdog>>,
    /// Number of engines that this process has built before. It makes an engine's keys in the store unique.
    pub generation: u32,
}

impl DeviceConfig {
    /// The settings of a process's first engine, with dynamic loss scaling, and without a store and a watchdog.
    pub fn new(ordinal: i32, precision: Precision, plan: Plan) -> Self {
        Self {
            plan,
            ordinal,
            precision,
            loss_scale: LossScale::Named("dynamic".into()),
            deterministic: false,
            store: None,
            watchdog: None,
            generation: 0,
        }
    }
}

/// An error of a device or of one of the device's libraries.
pub trait DeviceError: std::error::Error + Send + Sync {
    /// Whether another attempt in new processes may succeed.
    fn is_retriable(&self) -> bool;
    /// Whether the device has not enough memory.
    fn is_out_of_memory(&self) -> bool;
}

/// The device on which a rank computes.
#[derive(Debug, Clone, Copy)]
pub struct DeviceChoice {
    pub backend: &'static dyn Backend,
    /// The device's ordinal among the devices that this process sees.
    pub ordinal: i32,
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.backend.device_name(self.ordinal))
    }
}
