//! The backends. Another one is a folder and a line here, or is [added](add) by another crate.

use super::{
    backend::{Backend, DeviceChoice, Devices, Selection},
    cpu::Cpu,
    cuda::Cuda,
};
use lockstep_host::gpu::RankGpu;
use lockstep_protocol::spec::Device;
use std::{sync::OnceLock, time::Duration};

/// In the order in which they are asked whether a rank is theirs; the CPU takes all that are nobody's.
static BACKENDS: [&dyn Backend; 2] = [&Cuda, &Cpu];
static ADDED: OnceLock<&dyn Backend> = OnceLock::new();

/// Adds a backend that is asked before the others; only the first one counts.
pub fn add(backend: &'static dyn Backend) {
    let _ = ADDED.set(backend);
}

fn backends() -> impl Iterator<Item = &'static dyn Backend> {
    ADDED.get().into_iter().chain(&BACKENDS).copied()
}

/// The backend of that name.
pub fn named(name: &str) -> Option<&'static dyn Backend> {
    backends().find(|backend| backend.name() == name)
}

/// Where a rank computes that its launcher has given `given`, for a job that asks for `asked`.
pub fn device_of(given: Option<&RankGpu>, asked: Device) -> DeviceChoice {
    let theirs = |backend: &'static dyn Backend| {
        backend.device_of(given, asked).map(|ordinal| DeviceChoice { backend, ordinal })
    };
    backends().find_map(theirs).unwrap_or(DeviceChoice { backend: &Cpu, ordinal: 0 })
}

/// What this machine offers: of the first backend that has what is selected. `hindrance` is why those before it have
/// nothing, or, without any slot, why there is none.
///
/// # Errors
/// What is selected is not there; a sentence.
pub fn offer(selection: Selection<'_>) -> Result<Devices, String> {
    let mut why = None;
    for backend in backends() {
        let Devices { slots, hindrance } = backend.devices(selection)?;
        why = why.or(hindrance);
        if !slots.is_empty() {
            return Ok(Devices { slots, hindrance: why });
        }
    }
    Ok(Devices { slots: Vec::new(), hindrance: why })
}

/// Says that this process is about to end, from any thread, while its devices may wait for other ranks.
pub fn about_to_exit(reason: &str) {
    backends().for_each(|backend| backend.about_to_exit(reason));
}

/// Waits until the process's exit handlers may run; false: `limit` has passed, or they would wait for a device.
pub fn may_run_exit_handlers(limit: Duration) -> bool {
    backends().all(|backend| backend.may_run_exit_handlers(limit))
}

/// Exits. Exit handlers free what aborts use (NCCL's do), and a process that ran them meanwhile would end with a segmentation
/// fault instead of its status: aborts have `limit` to finish, and handlers do not run where one has not. Nor do they where a GPU
/// may wait for ranks that are gone: CUDA's wait for the GPU.
pub fn exit(status: i32, limit: Duration) -> ! {
    if may_run_exit_handlers(limit) {
        std::process::exit(status)
    }
    lockstep_host::exit_without_handlers(status)
}
