//! NVIDIA's GPUs as a backend.

use super::{CudaError, GpuConfig, build, build_decoder};
use crate::{
    comm::nccl,
    data::device::DeviceDecoder,
    engine::{
        Engine, EngineError,
        backend::{Backend, BuildArgs, DeviceError, Needs},
    },
    gpu::{
        RankGpu,
        libraries::{self, Which},
        metrics::Sampler,
    },
    report::Observer,
};
use lockstep_protocol::spec::{Device, Precision};
use std::{
    any::Any,
    ffi::OsString,
    io,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

/// NVIDIA's GPUs.
#[derive(Debug)]
pub(in crate::engine) struct Cuda;

impl Backend for Cuda {
    fn name(&self) -> &'static str {
        "cuda"
    }

    /// A job may ask for the CPU on a machine that has GPUs.
    fn device_of(&self, given: Option<&RankGpu>, asked: Device) -> Option<i32> {
        given.filter(|_| asked != Device::Cpu).map(|gpu| gpu.ordinal)
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
        libraries::ready(Which::needed(world_size))
    }

    fn build(&self, args: BuildArgs<'_>) -> Result<Box<dyn Engine>, EngineError> {
        let gpu = GpuConfig {
            ordinal: args.ordinal,
            precision: args.precision,
            loss_scale: args.loss_scale,
            deterministic: args.deterministic,
            store: args.store,
            watchdog: args.watchdog,
            generation: args.generation,
        };
        build(args.network, args.initial, args.config, args.comm, &gpu)
    }

    fn decoder(&self, ordinal: i32, precision: Precision) -> Result<Arc<dyn DeviceDecoder>, String> {
        build_decoder(ordinal, precision)
    }

    fn watch_device(
        &self,
        given: Option<&RankGpu>,
        observer: Arc<dyn Observer>,
        progress: Arc<AtomicU64>,
    ) -> Result<Option<Box<dyn Any + Send>>, String> {
        let Some(uuid) = given.and_then(RankGpu::uuid) else { return Ok(None) };
        Ok(Some(Box::new(Sampler::start(uuid, observer, progress)?)))
    }

    fn abort(&self, reason: &str) {
        nccl::abort_all(reason);
    }

    fn wait_for_aborts(&self, limit: Duration) -> bool {
        nccl::wait_for_aborts(limit)
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
