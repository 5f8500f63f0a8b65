//! CPU cores as a backend: every machine has them, so it takes every rank that is no other's.

use super::build;
use crate::{
    engine::{
        Engine, EngineError,
        backend::{Backend, BuildArgs, Needs},
    },
    gpu::RankGpu,
};
use lockstep_protocol::spec::{Device, JobSpec, Precision};

/// The CPU's cores.
#[derive(Debug)]
pub(in crate::engine) struct Cpu;

impl Backend for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn device_of(&self, _given: Option<&RankGpu>, _asked: Device) -> Option<i32> {
        Some(0)
    }

    fn device_name(&self, _ordinal: i32) -> String {
        "CPU".into()
    }

    fn needs(&self) -> Needs {
        Needs { shared_memory: true, host_memory: true, ..Needs::default() }
    }

    fn check(&self, spec: &JobSpec) -> Result<(), String> {
        if spec.parallel.device == Device::Cuda {
            return Err("parallel.device = \"cuda\": this rank has no GPU; use cpu or auto".into());
        }
        if matches!(spec.train.precision, Precision::Bf16 | Precision::Fp16) {
            return Err("train.precision: CPU ranks compute in fp32; use fp32 or auto".into());
        }
        Ok(())
    }

    fn build(&self, args: BuildArgs<'_>) -> Result<Box<dyn Engine>, EngineError> {
        build(args.network, args.initial, args.config, args.comm)
    }
}
