//! The list of backends. A new backend is a folder and an entry of `BACKENDS`, or another crate [adds](add) it.

use super::{
    backend::{Backend, DeviceChoice, Devices, Selection},
    cpu::Cpu,
    cuda::Cuda,
};
use lockstep_host::gpu::RankGpu;
use lockstep_protocol::spec::Device;
use std::sync::OnceLock;

/// The built-in backends in order of precedence: a rank uses the first backend that has a device for it. The CPU
/// accepts every rank.
static BACKENDS: [&dyn Backend; 2] = [&Cuda, &Cpu];
static ADDED: OnceLock<&dyn Backend> = OnceLock::new();

/// Adds a backend with precedence over all others. Later calls have no effect.
pub fn add(backend: &'static dyn Backend) {
    let _ = ADDED.set(backend);
}

fn backends() -> impl Iterator<Item = &'static dyn Backend> {
    ADDED.get().into_iter().chain(&BACKENDS).copied()
}

pub fn named(name: &str) -> Option<&'static dyn Backend> {
    backends().find(|backend| backend.name() == name)
}

/// Chooses a rank's device from the GPU that the launcher assigned (`gpu`) and the device that the job requests (`requested`).
pub fn device_of(gpu: Option<&RankGpu>, requested: Device) -> DeviceChoice {
    let choice = |backend: &'static dyn Backend| {
        backend.device_of(gpu, requested).map(|ordinal| DeviceChoice { backend, ordinal })
    };
    backends().find_map(choice).unwrap_or(DeviceChoice { backend: &Cpu, ordinal: 0 })
}

/// The slots of this machine: the slots of the first backend that has selected devices. `why_no_gpus` says why an earlier backend
/// has none, or why the machine has no slot at all.
///
/// # Errors
/// A selected device does not exist. The error is a sentence.
pub fn offer(selection: Selection<'_>) -> Result<Devices, String> {
    let mut first_reason = None;
    for backend in backends() {
        let Devices { slots, why_no_gpus } = backend.devices(selection)?;
        first_reason = first_reason.or(why_no_gpus);
        if !slots.is_empty() {
            return Ok(Devices { slots, why_no_gpus: first_reason });
        }
    }
    Ok(Devices { slots: Vec::new(), why_no_gpus: first_reason })
}

/// The UUIDs of this machine's GPUs for ranks on `device`. Empty if the ranks compute on CPU cores: the second result then says why,
/// if `device` is automatic and GPUs cannot be used.
///
/// # Errors
/// The machine has no such device. The error is a sentence.
pub fn gpus(device: Device) -> Result<(Vec<String>, Option<String>), String> {
    let Devices { slots, why_no_gpus } = offer(Selection { device, ..Selection::default() })?;
    if slots.is_empty() {
        Err(why_no_gpus.unwrap_or_else(|| "this machine has no such device".into()))
    } else {
        Ok((slots.into_iter().filter_map(|slot| slot.uuid).collect(), why_no_gpus))
    }
}
