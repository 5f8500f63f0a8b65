//! The parts of a GPU's setup that do not depend on the network: the context, our kernels, and cuDNN. A thread opens
//! them in advance, during the rendezvous and while the dataset is opened, or before a job is known.

use super::{
    convolution::Convolution,
    cudnn::{Cudnn, FAST_ENGINES},
    device::Device,
    dtype::DType,
    error::{CudaError, Result},
    kernels::Kernels,
};
use lockstep_comm::nccl;
use lockstep_host::{
    gpu::libraries::{self, Library},
    lock,
};
use std::{
    mem,
    sync::Mutex,
    thread::{self, JoinHandle},
};

/// What an engine needs of a GPU, except what depends on the network.
pub(super) struct GpuParts {
    // Fields are dropped in this order: everything uses the device.
    pub(super) kernels: Kernels,
    pub(super) cudnn: Cudnn,
    pub(super) device: Device,
    /// Free GPU memory in bytes before kernels and cuDNN were loaded.
    pub(super) free_before: u64,
    ordinal: i32,
    dtype: DType,
}

/// The parts that were opened in advance and that no engine has taken yet.
enum EarlyParts {
    Nothing,
    Opening(JoinHandle<Result<GpuParts>>),
    Open(Box<GpuParts>),
}

impl EarlyParts {
    /// Waits for the thread. `None` if there are no parts, or if the thread failed: [`open`] then tries again and reports the error.
    fn wait(self) -> Option<GpuParts> {
        match self {
            Self::Nothing => None,
            Self::Opening(thread) => thread.join().ok()?.ok(),
            Self::Open(parts) => Some(*parts),
        }
    }
}

static EARLY_PARTS: Mutex<EarlyParts> = Mutex::new(EarlyParts::Nothing);

/// Starts to open GPU `ordinal` for a job of `ranks` ranks. `dtype` is the format in which the job computes; `None` if no job is known yet.
pub(super) fn start_opening(ordinal: i32, ranks: u32, dtype: Option<DType>) {
    let mut early_parts = lock(&EARLY_PARTS);
    let earlier = mem::replace(&mut *early_parts, EarlyParts::Nothing);
    let open = move || -> Result<GpuParts> {
        libraries::check_loadable(&[Library::Driver, Library::Cudnn]).map_err(CudaError::Missing)?;
        // float16 is the format of `train.precision = "auto"`.
        let parts = open_missing(earlier.wait(), ordinal, dtype.unwrap_or(DType::F16))?;
        if dtype.is_none() {
            load_engines(&parts.cudnn);
        }
        if ranks > 1 && libraries::check_loadable(&[Library::Nccl]).is_ok() {
            match dtype {
                None => nccl::load(ordinal),
                // Loads only the library, as the job waits.
                Some(_) => _ = cudarc::nccl::result::get_nccl_version(),
            }
        }
        Ok(parts)
    };
    if let Ok(thread) = thread::Builder::new().name("warm-up".into()).spawn(open) {
        *early_parts = EarlyParts::Opening(thread);
    }
}

/// Opens GPU `ordinal` and makes it current on the calling thread. Takes the parts that were opened in advance, and opens the rest.
pub(super) fn open(ordinal: i32, dtype: DType) -> Result<GpuParts> {
    // The lock is released before the wait for the thread.
    let earlier = mem::replace(&mut *lock(&EARLY_PARTS), EarlyParts::Nothing);
    open_missing(earlier.wait(), ordinal, dtype)
}

/// Whether the GPU can be used: it was opened, and has not been reset since then. True while it is being opened.
pub(super) fn is_sound() -> bool {
    let mut early_parts = lock(&EARLY_PARTS);
    if matches!(&*early_parts, EarlyParts::Opening(thread) if !thread.is_finished()) {
        return true;
    }
    let Some(parts) = mem::replace(&mut *early_parts, EarlyParts::Nothing).wait() else { return false };
    let is_usable = parts.device.bind().and_then(|()| parts.device.zeros(256)).is_ok();
    *early_parts = EarlyParts::Open(Box::new(parts));
    is_usable
}

/// Opens the parts that `earlier` does not have.
fn open_missing(earlier: Option<GpuParts>, ordinal: i32, dtype: DType) -> Result<GpuParts> {
    let Some(parts) = earlier.filter(|parts| parts.ordinal == ordinal) else {
        let device = Device::open(ordinal)?;
        let (free_before, _) = device.free_and_total_bytes();
        let kernels = Kernels::load(&device, dtype)?;
        return Ok(GpuParts { kernels, cudnn: Cudnn::new()?, device, free_before, ordinal, dtype });
    };
    parts.device.bind()?;
    if parts.dtype == dtype {
        return Ok(parts);
    }
    let kernels = Kernels::load(&parts.device, dtype)?;
    Ok(GpuParts { kernels, dtype, ..parts })
}

/// Makes cuDNN load the libraries of its engines, by building a plan for a convolution.
fn load_engines(cudnn: &Cudnn) {
    let (max_workspace_bytes, is_deterministic) = (usize::MAX, false);
    let plans = cudnn.candidates(&Convolution::EXAMPLE, max_workspace_bytes, is_deterministic, FAST_ENGINES);
    if let Ok(mut plans) = plans {
        drop(plans.next());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If parts are opened twice, the second call uses the parts of the first, also for another floating-point format.
    #[test]
    #[ignore = "needs a GPU"]
    fn gpu_parts_opened_in_advance_are_valid_and_used() {
        assert!(!is_sound(), "no parts were opened");
        start_opening(0, 2, None);
        assert!(is_sound(), "parts are being opened");
        drop(open(0, DType::F16).unwrap());
        assert!(!is_sound(), "the parts were taken");
        start_opening(0, 1, None);
        start_opening(0, 1, Some(DType::Bf16));
        let opened = open(0, DType::Bf16).unwrap();
        assert!(opened.device.zeros(256).is_ok());
    }
}
