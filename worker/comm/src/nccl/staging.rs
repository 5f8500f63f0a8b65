//! Device buffers for calls with values in host memory.

#![allow(unsafe_code)] // Raw device addresses; all device memory is allocated here and outlives its use.

use cudarc::driver::{
    CudaContext, DriverError,
    result::{self, stream::StreamKind},
    sys::{CUdeviceptr, CUstream},
};
use std::sync::Arc;

/// Device memory for the input and output of a call, and the stream that orders its use.
pub(super) struct Staging {
    context: Arc<CudaContext>,
    pub(super) stream: CUstream,
    input: Memory,
    output: Memory,
}

// SAFETY: CUDA streams and memory are not bound to a thread; each user makes the context current first.
unsafe impl Send for Staging {}

impl Staging {
    pub(super) fn new(ordinal: i32) -> Result<Self, DriverError> {
        let context = CudaContext::new(usize::try_from(ordinal).unwrap_or(usize::MAX))?;
        let stream = result::stream::create(StreamKind::NonBlocking)?;
        Ok(Self { context, stream, input: Memory::default(), output: Memory::default() })
    }

    /// Copies `input` to the GPU in the order of the stream. Returns the address of the input, and the address of
    /// `output` bytes for the result.
    pub(super) fn copy_in(&mut self, input: &[u8], output: usize) -> Result<(u64, u64), DriverError> {
        self.context.bind_to_thread()?;
        let (from, to) = (self.input.of(input.len())?, self.output.of(output)?);
        if !input.is_empty() {
            // SAFETY: the allocation is large enough. Host memory is pageable, so it has been read when the call
            // returns.
            unsafe { result::memcpy_htod_async(from, input, self.stream)? };
        }
        Ok((from, to))
    }

    /// Copies the result to the host. The stream must have completed the call.
    pub(super) fn copy_out(&self, output: &mut [u8]) -> Result<(), DriverError> {
        if output.is_empty() {
            return Ok(());
        }
        // SAFETY: `copy_in` has allocated that many bytes.
        unsafe { result::memcpy_dtoh_sync(output, self.output.address) }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_err() {
            return;
        }
        // SAFETY: created by `new`. The fields free their memory afterwards, with the context current.
        let _ = unsafe { result::stream::destroy(self.stream) };
    }
}

/// A device allocation that grows on demand.
#[derive(Default)]
struct Memory {
    address: CUdeviceptr,
    bytes: usize,
}

impl Memory {
    /// Returns the address of at least `bytes` bytes. The previous content is lost.
    fn of(&mut self, bytes: usize) -> Result<CUdeviceptr, DriverError> {
        if self.bytes < bytes {
            let grown = bytes.next_power_of_two();
            // SAFETY: the context is current. The user of the old allocation has waited for its work.
            let address = unsafe { result::malloc_sync(grown)? };
            *self = Self { address, bytes: grown };
        }
        Ok(self.address)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: allocated by `of`.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}
