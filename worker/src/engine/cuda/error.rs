//! What can go wrong on a GPU, in words.

use cudarc::driver::result::DriverError;

/// A call that failed, with what it was for.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// The driver refused a call.
    #[error("{doing}: CUDA says {error}")]
    Driver { doing: &'static str, error: String },
    /// cuDNN refused a call.
    #[error("{doing}: cuDNN says {status}{detail}")]
    Cudnn { doing: String, status: String, detail: String },
    /// Our kernels did not compile.
    #[error("kernels for {target} did not compile (a bug in lockstep): {log}")]
    Compile { target: String, log: String },
    /// The memory of the GPU does not suffice.
    #[error(
        "cuda out of memory: {needed_mb} MB more were needed, {free_mb} of {total_mb} MB are free on this GPU. \
         Lower train.batch_size (train.accumulate keeps the global batch), or end what else runs there"
    )]
    OutOfMemory { needed_mb: u64, free_mb: u64, total_mb: u64 },
    /// A shape or setting that the engine does not run.
    #[error("{0}")]
    Unsupported(String),
    /// A library that is not there.
    #[error("{0}")]
    Missing(String),
    /// The kernels' results did not come back in time.
    #[error("the GPU has not finished a step for {secs:.0} s")]
    Hung { secs: f64 },
    /// A file of the cache.
    #[error("{path}: {error}")]
    Cache { path: String, error: std::io::Error },
}

impl CudaError {
    /// Turns a driver's answer into an error that says what was being done.
    pub(super) fn driver(doing: &'static str) -> impl FnOnce(DriverError) -> CudaError {
        move |error| {
            let name = error.error_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            let text = error.error_string().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            CudaError::Driver { doing, error: format!("{text} ({name})") }
        }
    }

    /// Whether another attempt may fare better.
    pub fn is_retriable(&self) -> bool {
        matches!(self, CudaError::Driver { .. } | CudaError::Hung { .. })
    }
}
