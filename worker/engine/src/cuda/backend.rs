//! NVIDIA's GPUs as a backend.

use super::{build, check_sample, dtype_of, jpeg, program, warm};
use crate::{
    Engine, EngineError,
    backend::{Backend, BuildArgs, DeviceMetrics, Devices, Needs, Selection, SharedMemory},
    net::Network,
    plan::{self, Plan},
};
use lockstep_data::device::DeviceDecoder;
use lockstep_host::gpu::{
    RankGpu,
    devices::{self, Usable},
    libraries::{self, Library},
    metrics::{Reader, metrics},
};
use lockstep_protocol::{
    agent::Slot,
    spec::{Arch, Device, JobSpec, OptimizerKind, ParallelSpec, Precision},
};
use std::{ffi::OsString, io, sync::Arc};

/// Bytes of shared memory that NCCL uses for each rank of a machine.
const SHARED_BYTES_PER_RANK: u64 = 32 << 20;

#[derive(Debug)]
pub(crate) struct Cuda;

impl Backend for Cuda {
    fn name(&self) -> &'static str {
        Device::Cuda.as_str()
    }

    /// One slot per GPU, numbered as in `nvidia-smi`.
    fn devices(&self, selection: Selection<'_>) -> Result<Devices, String> {
        if selection.device.is_cpu() || selection.cpu_slots.is_some() {
            return Ok(Devices::default());
        }
        let Usable { gpus, why_no_gpus } = devices::usable(selection.list)?;
        let no_gpu = match (selection.list, selection.device) {
            (Some(_), _) => Some("there is no GPU that a rank can use".into()),
            (None, Device::Cuda) => Some(
                "there is no GPU on this machine. `lockstep doctor` says why; with \"auto\" or \"cpu\" ranks compute on CPU cores"
                    .into(),
            ),
            (None, _) => None,
        };
        let why_no_gpus = if gpus.is_empty() { why_no_gpus.or(no_gpu) } else { None };
        let slots = gpus.into_iter().map(|gpu| Slot {
            index: gpu.index,
            device: self.name().into(),
            name: gpu.name,
            memory_bytes: gpu.memory_bytes,
            uuid: Some(gpu.uuid),
        });
        Ok(Devices { slots: slots.collect(), why_no_gpus })
    }

    /// The GPU's ordinal; `None` if the rank has no GPU, or if the job requests the CPU.
    fn device_of(&self, gpu: Option<&RankGpu>, requested: Device) -> Option<i32> {
        gpu.filter(|_| !requested.is_cpu()).map(|gpu| gpu.ordinal)
    }

    fn device_name(&self, ordinal: i32) -> String {
        format!("GPU {ordinal}")
    }

    fn needs(&self) -> Needs {
        Needs {
            // Gradients are sent directly between GPUs.
            shared_memory: false,
            host_memory: false,
            watchdog: true,
            leaves_threads: true,
            half_precision: true,
            decodes: true,
        }
    }

    fn environment(&self, gpu: Option<&RankGpu>) -> io::Result<Vec<(OsString, OsString)>> {
        gpu.map_or_else(|| Ok(Vec::new()), RankGpu::environment)
    }

    fn preflight(&self, world_size: u32) -> Result<(), String> {
        libraries::check_loadable(Library::needed(world_size))
    }

    fn check(&self, spec: &JobSpec) -> Result<(), String> {
        let ParallelSpec { ranks, model, height, pipeline, optimizer_sharding, .. } = spec.parallel;
        if pipeline > 1 && (model * height > 1 || optimizer_sharding) {
            return Err("parallel.pipeline: stages on GPUs are combined with data parallelism only. Leave parallel.model, parallel.height \
                and parallel.optimizer_sharding out, or set parallel.device = \"cpu\""
                .into());
        }
        if spec.loss.sample_share < 1.0 {
            check_sample(ranks, model, spec.train.accumulate)?;
        }
        let is_layerwise = matches!(spec.train.optimizer, OptimizerKind::Lars | OptimizerKind::Lamb);
        if model > 1 && is_layerwise {
            return Err("train.optimizer: GPUs that share a network (parallel.model) compute momentum, nesterov and adamw. Choose one of \
                them, or set parallel.device = \"cpu\""
                .into());
        }
        if spec.model.arch == Arch::CifarNet
            && spec.train.optimizer != OptimizerKind::Muon
            && spec.train.weight_decay > 0.0
        {
            return Err("train.weight_decay: on GPUs, all optimizers except muon also decay a cifarnet's untrained convolution. \
                Set train.weight_decay = 0, train.optimizer = \"muon\" or parallel.device = \"cpu\""
                .into());
        }
        if model > 1 && optimizer_sharding {
            return Err("parallel.optimizer_sharding: GPUs that share a network (parallel.model) do not divide optimizer state further. \
                Leave one of the two out, or set parallel.device = \"cpu\""
                .into());
        }
        // With a divided optimizer state, a GPU has summed gradients and new float32 weights only of its part of the parameters.
        for (key, is_set) in
            [("log.histograms", spec.log.histograms > 0), ("train.ema_decay", spec.train.ema_decay > 0.0)]
        {
            if is_set && optimizer_sharding && ranks > 1 {
                return Err(format!(
                    "{key} on GPUs: no GPU has all weights and gradients with parallel.optimizer_sharding; leave one of the two out"
                ));
            }
        }
        Ok(())
    }

    fn check_plan(&self, network: &Network, plan: &Plan) -> Result<(), String> {
        (0..plan.mesh.stage).try_for_each(|stage| {
            let part = plan::lower(network, plan, stage * plan.mesh.ranks_of_stage())?;
            program::check(&part).map_err(|error| error.to_string())?;
            // The planner's predicted costs do not include the GPU's exchanges and kernels for split operators.
            match program::split_operator(&part) {
                Some(name) => Err(format!("{name} is split, which GPUs compute in mode = \"hybrid\" only")),
                None => Ok(()),
            }
        })
    }

    fn shared_memory(&self, _spec: &JobSpec, local_ranks: usize) -> SharedMemory {
        let ranks = if local_ranks > 1 { local_ranks } else { 0 };
        SharedMemory { bytes: SHARED_BYTES_PER_RANK * ranks as u64, library: "NCCL" }
    }

    fn warm_up(&self, ordinal: i32, ranks: u32, precision: Option<Precision>) {
        warm::start_opening(ordinal, ranks, precision.map(dtype_of));
    }

    fn is_sound(&self) -> bool {
        warm::is_sound()
    }

    fn build(&self, args: BuildArgs<'_>) -> Result<Box<dyn Engine>, EngineError> {
        Ok(Box::new(build(args.network, args.initial, args.config, args.comm, &args.device)?))
    }

    fn decoder(&self, ordinal: i32, precision: Precision) -> Result<Arc<dyn DeviceDecoder>, String> {
        libraries::check_loadable(&[Library::Driver])?;
        jpeg::open(ordinal, dtype_of(precision))
    }

    fn device_metrics(&self, gpu: Option<&RankGpu>) -> Result<Option<DeviceMetrics>, String> {
        let Some(uuid) = gpu.and_then(RankGpu::uuid).map(str::to_owned) else { return Ok(None) };
        let nvml = Reader::open()?;
        // The metrics do not include the slot.
        let slot = 0;
        nvml.sample(slot, &uuid).map_err(|e| format!("no GPU metrics: NVML on {uuid}: {e}"))?;
        Ok(Some(Box::new(move || {
            nvml.sample(slot, &uuid).map(|sample| metrics(&sample)).unwrap_or_default()
        })))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_settings_are_refused_with_advice() {
        let refusal = |change: fn(&mut JobSpec)| {
            let mut spec = JobSpec::default();
            spec.parallel.ranks = 4;
            change(&mut spec);
            Cuda.check(&spec).err()
        };
        let cases: [(fn(&mut JobSpec), &[&str]); 7] = [
            (
                |spec| (spec.parallel.pipeline, spec.parallel.height) = (2, 2),
                &["parallel.pipeline", "parallel.height", "device = \"cpu\""],
            ),
            (
                |spec| (spec.parallel.pipeline, spec.parallel.optimizer_sharding) = (2, true),
                &["parallel.pipeline", "parallel.optimizer_sharding"],
            ),
            (
                |spec| (spec.parallel.model, spec.train.optimizer) = (2, OptimizerKind::Lamb),
                &["train.optimizer", "Choose one of them"],
            ),
            (
                |spec| (spec.model.arch, spec.train.weight_decay) = (Arch::CifarNet, 0.1),
                &["train.weight_decay", "muon", "set train.weight_decay = 0"],
            ),
            (
                |spec| (spec.parallel.model, spec.parallel.optimizer_sharding) = (2, true),
                &["parallel.optimizer_sharding", "parallel.model", "leave one of the two out"],
            ),
            (
                |spec| (spec.log.histograms, spec.parallel.optimizer_sharding) = (1, true),
                &["log.histograms", "leave one of the two out"],
            ),
            (
                |spec| (spec.train.ema_decay, spec.parallel.optimizer_sharding) = (0.9, true),
                &["train.ema_decay", "leave one of the two out"],
            ),
        ];
        for (change, parts) in cases {
            let refusal = refusal(change).unwrap();
            let message = refusal.to_lowercase();
            assert!(parts.iter().all(|part| message.contains(&part.to_lowercase())), "{refusal}");
        }
        assert_eq!(refusal(|spec| spec.parallel.optimizer_sharding = true), None);
        assert_eq!(refusal(|spec| spec.parallel.model = 2), None);
        assert_eq!(refusal(|spec| spec.parallel.pipeline = 2), None);
        assert_eq!(
            refusal(|spec| (spec.parallel.height, spec.parallel.optimizer_sharding) = (2, true)),
            None
        );
    }
}
