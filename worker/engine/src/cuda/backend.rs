//! NVIDIA's GPUs as a backend.

use super::{CudaError, GpuConfig, build, build_decoder, program};
use crate::{
    Engine, EngineError,
    backend::{Backend, BuildArgs, DeviceError, DeviceMetrics, Devices, Needs, Selection, SharedMemory},
    net::Network,
    plan::{self, Plan},
};
use lockstep_comm::nccl;
use lockstep_data::device::DeviceDecoder;
use lockstep_host::gpu::{
    RankGpu,
    devices::{self, Usable},
    libraries::{self, Library},
    metrics::{Reader, Sample},
};
use lockstep_protocol::{
    agent::Slot,
    spec::{Device, JobSpec, OptimizerKind, ParallelSpec, Precision},
};
use std::{
    ffi::OsString,
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

/// Shared memory that NCCL takes for each rank on a machine.
const SHARED_MEMORY: u64 = 32 << 20;

/// NVIDIA's GPUs.
#[derive(Debug)]
pub(crate) struct Cuda;

/// This process computes on a GPU.
static HAS_ENGINE: AtomicBool = AtomicBool::new(false);
/// The process ends while its GPU may still wait for other ranks.
static LEFT_TO_DRIVER: AtomicBool = AtomicBool::new(false);

/// From now on this process ends without its exit handlers, of which CUDA's wait for the GPU.
pub(super) fn leave_to_driver() {
    LEFT_TO_DRIVER.store(true, Ordering::Relaxed);
}

impl Backend for Cuda {
    fn name(&self) -> &'static str {
        Device::Cuda.name()
    }

    /// A place a GPU, numbered as `nvidia-smi` numbers them.
    fn devices(&self, selection: Selection<'_>) -> Result<Devices, String> {
        if selection.device.is_cores() || selection.cpu_slots.is_some() {
            return Ok(Devices::default());
        }
        let Usable { gpus, hindrance } = devices::usable(selection.list)?;
        let expected = match (selection.list, selection.device) {
            (Some(_), _) => Some("there is no GPU that a rank can use".into()),
            (None, Device::Cuda) => Some(
                "there is no GPU on this machine; lockstep doctor says more, and \"auto\" or \"cpu\" trains on the CPU"
                    .into(),
            ),
            (None, _) => None,
        };
        let hindrance = if gpus.is_empty() { hindrance.or(expected) } else { None };
        let slots = gpus.into_iter().map(|gpu| Slot {
            index: gpu.index,
            device: self.name().into(),
            name: gpu.name,
            memory_bytes: gpu.memory_bytes,
            uuid: Some(gpu.uuid),
        });
        Ok(Devices { slots: slots.collect(), hindrance })
    }

    /// A job may ask for the CPU on a machine that has GPUs.
    fn device_of(&self, given: Option<&RankGpu>, asked: Device) -> Option<i32> {
        given.filter(|_| !asked.is_cores()).map(|gpu| gpu.ordinal)
    }

    fn device_name(&self, ordinal: i32) -> String {
        format!("GPU {ordinal}")
    }

    fn needs(&self) -> Needs {
        Needs {
            // Gradients go from GPU to GPU.
            shared_memory: false,
            host_memory: false,
            watchdog: true,
            leaves_threads: true,
            half_precision: true,
            decodes: true,
        }
    }

    fn environment(&self, given: Option<&RankGpu>) -> io::Result<Vec<(OsString, OsString)>> {
        given.map_or_else(|| Ok(Vec::new()), RankGpu::environment)
    }

    fn preflight(&self, world_size: u32) -> Result<(), String> {
        libraries::ready(Library::needed(world_size))
    }

    fn check(&self, spec: &JobSpec) -> Result<(), String> {
        if spec.parallel.optimizer_sharding && spec.parallel.ranks > 1 {
            return Err("parallel.optimizer_sharding is done by CPU ranks only: leave it out, or set parallel.device = \"cpu\"".into());
        }
        let ParallelSpec { model, .. } = spec.parallel;
        let adapts = matches!(spec.train.optimizer, OptimizerKind::Lars | OptimizerKind::Lamb);
        if model > 1 && adapts {
            return Err("train.optimizer: GPUs that share a network (parallel.model) compute momentum, nesterov and adamw. Choose one of them, \
                or set parallel.device = \"cpu\""
                .into());
        }
        Ok(())
    }

    fn check_plan(&self, network: &Network, plan: &Plan) -> Result<(), String> {
        program::check(&plan::lower(network, plan, 0)?).map_err(|error| error.to_string())
    }

    fn shared_memory(&self, _spec: &JobSpec, local_ranks: usize) -> SharedMemory {
        let ranks = if local_ranks > 1 { local_ranks } else { 0 };
        SharedMemory { bytes: SHARED_MEMORY * ranks as u64, library: "NCCL" }
    }

    fn build(&self, args: BuildArgs<'_>) -> Result<Box<dyn Engine>, EngineError> {
        let gpu = GpuConfig {
            plan: args.plan,
            ordinal: args.ordinal,
            precision: args.precision,
            loss_scale: args.loss_scale,
            deterministic: args.deterministic,
            store: args.store,
            watchdog: args.watchdog,
            generation: args.generation,
        };
        HAS_ENGINE.store(true, Ordering::Relaxed);
        Ok(Box::new(build(args.network, args.initial, args.config, args.comm, &gpu)?))
    }

    fn decoder(&self, ordinal: i32, precision: Precision) -> Result<Arc<dyn DeviceDecoder>, String> {
        build_decoder(ordinal, precision)
    }

    fn device_metrics(&self, given: Option<&RankGpu>) -> Result<Option<DeviceMetrics>, String> {
        let Some(uuid) = given.and_then(RankGpu::uuid).map(str::to_owned) else { return Ok(None) };
        let nvml = Reader::open()?;
        nvml.sample(&uuid).map_err(|e| format!("no GPU metrics: NVML on {uuid}: {e}"))?;
        Ok(Some(Box::new(move || nvml.sample(&uuid).map(Sample::metrics).unwrap_or_default())))
    }

    fn about_to_exit(&self, _reason: &str) {
        if HAS_ENGINE.load(Ordering::Relaxed) {
            leave_to_driver();
        }
    }

    fn may_run_exit_handlers(&self, limit: Duration) -> bool {
        !LEFT_TO_DRIVER.load(Ordering::Relaxed) && nccl::wait_for_aborts(limit)
    }
}

impl DeviceError for CudaError {
    fn is_retriable(&self) -> bool {
        CudaError::is_retriable(self)
    }

    fn is_out_of_memory(&self) -> bool {
        matches!(self, CudaError::OutOfMemory { .. })
    }
}

impl From<CudaError> for EngineError {
    fn from(error: CudaError) -> Self {
        EngineError::Backend(Box::new(error))
    }
}
