//! Errors of the CUDA engine.

use crate::{DeviceError, EngineError};
use cudarc::{
    cudnn::sys::cudnnStatus_t,
    driver::{result::DriverError, sys::CUresult},
};

/// The result of a call of the driver or of cuDNN.
pub(super) type Result<T = (), E = CudaError> = std::result::Result<T, E>;

/// An error of a call, with the call's purpose.
#[derive(Debug, thiserror::Error)]
pub(super) enum CudaError {
    /// The driver rejected a call, or reports the failure of an earlier kernel.
    #[error("{doing}: CUDA says {error}")]
    Driver { doing: &'static str, error: String, retriable: bool },
    #[error("{doing}: cuDNN says {status}{detail}")]
    Cudnn { doing: String, status: String, detail: String, retriable: bool },
    #[error("kernels for {target} did not compile (a bug in lockstep): {log}")]
    Compile { target: String, log: String },
    #[error(
        "cuda out of memory: {needed_mb} MB more were needed, {free_mb} of {total_mb} MB are free on this GPU. \
         Lower train.batch_size, or raise train.accumulate if the job gives train.global_batch_size, or end other programs that use \
         this GPU"
    )]
    OutOfMemory { needed_mb: u64, free_mb: u64, total_mb: u64 },
    /// The engine does not support a shape or setting.
    #[error("{0}")]
    Unsupported(String),
    /// `command::verify` found an error in a step's commands.
    #[error("the commands of a step are wrong (a bug in lockstep): {0}")]
    Commands(String),
    #[error("{0}")]
    Missing(String),
    #[error("the GPU has not finished {what} within {secs:.0} s")]
    Hung { secs: f64, what: &'static str },
}

impl CudaError {
    /// Adds the call's purpose, `doing`, to an error of the driver.
    pub(super) fn driver(doing: &'static str) -> impl FnOnce(DriverError) -> CudaError {
        move |error| {
            let name = error.error_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            let text = error.error_string().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            CudaError::Driver {
                doing,
                error: format!("{text} ({name})"),
                retriable: may_be_temporary(error.0),
            }
        }
    }

    /// Adds the call's purpose, `doing`, to an error of cuDNN. `detail` is cuDNN's message.
    pub(super) fn cudnn(doing: String, status: cudnnStatus_t, detail: String) -> CudaError {
        let status = format!("{status:?}");
        // A status begins with the name of its group (cuDNN 9). Errors of all other groups mean an invalid or unsupported request.
        let temporary = ["CUDNN_STATUS_EXECUTION_FAILED", "CUDNN_STATUS_INTERNAL_ERROR"];
        let retriable = temporary.iter().any(|group| status.starts_with(group));
        CudaError::Cudnn { doing, status, detail, retriable }
    }
}

impl DeviceError for CudaError {
    fn is_retriable(&self) -> bool {
        match self {
            CudaError::Driver { retriable, .. } | CudaError::Cudnn { retriable, .. } => *retriable,
            CudaError::Hung { .. } => true,
            // Another attempt would fail with the same error.
            CudaError::Compile { .. }
            | CudaError::OutOfMemory { .. }
            | CudaError::Unsupported(_)
            | CudaError::Commands(_)
            | CudaError::Missing(_) => false,
        }
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

/// Whether a driver's error may be temporary, and not caused by the request or the machine's configuration.
pub(super) fn may_be_temporary(error: CUresult) -> bool {
    use CUresult as E;
    matches!(
        error,
        E::CUDA_ERROR_DEVICE_UNAVAILABLE
            | E::CUDA_ERROR_ECC_UNCORRECTABLE
            | E::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | E::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | E::CUDA_ERROR_CONTAINED
            | E::CUDA_ERROR_ILLEGAL_ADDRESS
            | E::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | E::CUDA_ERROR_MISALIGNED_ADDRESS
            | E::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | E::CUDA_ERROR_INVALID_PC
            | E::CUDA_ERROR_HARDWARE_STACK_ERROR
            | E::CUDA_ERROR_ASSERT
            | E::CUDA_ERROR_LAUNCH_FAILED
            | E::CUDA_ERROR_LAUNCH_TIMEOUT
            | E::CUDA_ERROR_TENSOR_MEMORY_LEAK
            | E::CUDA_ERROR_EXTERNAL_DEVICE
            | E::CUDA_ERROR_MAP_FAILED
            | E::CUDA_ERROR_OPERATING_SYSTEM
            | E::CUDA_ERROR_SYSTEM_NOT_READY
            | E::CUDA_ERROR_TIMEOUT
            | E::CUDA_ERROR_UNKNOWN
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_retried(error: CudaError) -> bool {
        matches!(EngineError::from(error), EngineError::Backend(error) if error.is_retriable())
    }

    #[test]
    fn only_errors_that_another_attempt_may_avoid_are_retried() {
        let cudnn = |status| CudaError::cudnn("a step".into(), status, String::new());
        assert!(is_retried(cudnn(cudnnStatus_t::CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER)));
        assert!(!is_retried(cudnn(cudnnStatus_t::CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN)));
        assert!(is_retried(CudaError::Hung { secs: 600.0, what: "a step" }));
        assert!(!is_retried(CudaError::OutOfMemory { needed_mb: 1, free_mb: 0, total_mb: 1 }));
        assert!(!is_retried(CudaError::Missing("cuDNN was not found".into())));
        for (error, retried) in [
            (CUresult::CUDA_ERROR_LAUNCH_FAILED, true),
            (CUresult::CUDA_ERROR_ECC_UNCORRECTABLE, true),
            (CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, true),
            (CUresult::CUDA_ERROR_OUT_OF_MEMORY, false),
            (CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU, false),
            (CUresult::CUDA_ERROR_INVALID_VALUE, false),
            (CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, false),
        ] {
            assert_eq!(may_be_temporary(error), retried, "{error:?}");
        }
    }
}
