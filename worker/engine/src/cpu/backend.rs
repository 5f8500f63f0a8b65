//! CPU cores as a backend. Every machine has cores, so this backend accepts every rank that no other backend accepts.

use super::build;
use crate::{
    Engine, EngineError,
    backend::{Backend, BuildArgs, Devices, Needs, Selection},
};
use lockstep_host::{cores, cpu_name, gpu::RankGpu};
use lockstep_kernels::conv::Format;
use lockstep_protocol::{
    agent::Slot,
    numbers::plural,
    spec::{Device, JobSpec, Precision},
};

/// Maximum number of CPU slots of a machine.
pub const MAX_CPU_SLOTS: u32 = 1024;

/// The CPU's cores.
#[derive(Debug)]
pub(crate) struct Cpu;

impl Backend for Cpu {
    fn name(&self) -> &'static str {
        Device::Cpu.as_str()
    }

    /// One slot per core, or the requested number of slots. The ranks of an attempt divide this machine's cores evenly among
    /// themselves.
    fn devices(&self, selection: Selection<'_>) -> Result<Devices, String> {
        if selection.device.is_accelerator() || selection.list.is_some() {
            return Ok(Devices::default());
        }
        let cores = cores();
        let count = selection.cpu_slots.unwrap_or(cores.min(MAX_CPU_SLOTS));
        if !(1..=MAX_CPU_SLOTS).contains(&count) {
            return Err(format!("--cpu-slots {count}: give a number from 1 to {MAX_CPU_SLOTS}"));
        }
        let share = match cores / count {
            0 => format!("1/{} core", count.div_ceil(cores)),
            n => plural(n.into(), "core"),
        };
        let name = format!("{share} of {}", cpu_name());
        let slot = |index| Slot {
            index,
            device: self.name().into(),
            name: name.clone(),
            memory_bytes: 0,
            uuid: None,
        };
        Ok(Devices { slots: (0..count).map(slot).collect(), why_no_gpus: None })
    }

    fn device_of(&self, _gpu: Option<&RankGpu>, _requested: Device) -> Option<i32> {
        Some(0)
    }

    fn device_name(&self, _ordinal: i32) -> String {
        "CPU".into()
    }

    fn needs(&self) -> Needs {
        Needs { shared_memory: true, host_memory: true, ..Needs::default() }
    }

    fn check(&self, spec: &JobSpec) -> Result<(), String> {
        if let Some(kind) = spec.parallel.device.kind().filter(|kind| kind.is_accelerator) {
            let (name, slot) = (kind.name, kind.slot_name);
            return Err(format!("parallel.device = \"{name}\": this rank has no {slot}; use cpu or auto"));
        }
        // Assumes a processor with bfloat16: another machine may run the job, and its ranks check their own processor.
        format_of(spec.train.precision, true).map(drop)
    }

    fn build(&self, args: BuildArgs<'_>) -> Result<Box<dyn Engine>, EngineError> {
        let format =
            format_of(args.device.precision, Format::Bfloat16.is_fast()).map_err(EngineError::Device)?;
        build(args.network, args.initial, args.config, args.comm, &args.device.plan, format)
    }
}

/// The format of the convolutions. `has_bfloat16`: whether the processor has instructions for bfloat16.
fn format_of(precision: Precision, has_bfloat16: bool) -> Result<Format, String> {
    match precision {
        Precision::Auto | Precision::Fp32 => Ok(Format::Float32),
        Precision::Bf16 if has_bfloat16 => Ok(Format::Bfloat16),
        Precision::Bf16 => Err(format!(
            "train.precision = \"bf16\": the processor of this machine ({}) has no AVX512-BF16 instructions. Use fp32 or auto, or a \
             machine whose processor has these instructions",
            cpu_name()
        )),
        Precision::Fp16 => {
            Err("train.precision: CPU ranks compute in fp32 or bf16; use fp32, bf16 or auto".into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offered(cpu_slots: u32) -> Result<Devices, String> {
        Cpu.devices(Selection { cpu_slots: Some(cpu_slots), ..Selection::default() })
    }

    #[test]
    fn half_precision_is_bf16_on_processors_that_have_it() {
        assert_eq!(format_of(Precision::Auto, true), Ok(Format::Float32));
        assert_eq!(format_of(Precision::Bf16, true), Ok(Format::Bfloat16));
        let refused = |precision, has_bfloat16| format_of(precision, has_bfloat16).unwrap_err();
        assert!(refused(Precision::Bf16, false).contains("has no AVX512-BF16 instructions. Use fp32"));
        assert!(refused(Precision::Fp16, true).contains("use fp32, bf16 or auto"));
    }

    #[test]
    fn the_requested_number_of_slots_shares_the_cores() {
        let slots = offered(3).unwrap().slots;
        assert_eq!(slots.iter().map(|s| s.index).collect::<Vec<_>>(), [0, 1, 2]);
        assert!(slots.iter().all(|s| s.device == "cpu" && s.name.contains("core") && s.uuid.is_none()));
        assert_eq!(offered(1024).unwrap().slots.len(), 1024);
        for wrong in [0, 1025] {
            assert!(offered(wrong).unwrap_err().contains("from 1 to 1024"));
        }
        let gpus = Selection { device: Device::Cuda, ..Selection::default() };
        assert_eq!(Cpu.devices(gpus), Ok(Devices::default()));
    }
}
