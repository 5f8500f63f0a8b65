//! Device memory that values in the host's memory are copied through.

#![allow(unsafe_code)] // Device memory by address; all of it is allocated here and outlives its use.

use cudarc::driver::{
    CudaContext, DriverError,
    result::{self, stream::StreamKind},
    sys::{CUdeviceptr, CUstream},
};
use std::sync::Arc;

/// Device memory that values pass through, and the stream that orders it.
pub(super) struct Staging {
    context: Arc<CudaContext>,
    pub(super) stream: CUstream,
    input: Memory,
    output: Memory,
}

// SAFETY: CUDA's streams and memory are not bound to threads; each user makes the context current first.
unsafe impl Send for Staging {}

impl Staging {
    pub(super) fn new(ordinal: i32) -> Result<Self, DriverError> {
        let context = CudaContext::new(usize::try_from(ordinal).unwrap_or(usize::MAX))?;
        let stream = result::stream::create(StreamKind::NonBlocking)?;
        Ok(Self { context, stream, input: Memory::default(), output: Memory::default() })
    }

    /// Addresses of the input, which is copied in the order of the stream, and of `output` bytes for the result.
    pub(super) fn copy_in(&mut self, input: &[u8], output: usize) -> Result<(u64, u64), DriverError> {
        self.context.bind_to_thread()?;
        let (from, to) = (self.input.of(input.len())?, self.output.of(output)?);
        if !input.is_empty() {
            // SAFETY: the memory is large enough; the host's bytes have been read when the call returns, as they are pageable.
            unsafe { result::memcpy_htod_async(from, input, self.stream)? };
        }
        Ok((from, to))
    }

    /// The stream has passed.
    pub(super) fn copy_out(&self, output: &mut [u8]) -> Result<(), DriverError> {
        if output.is_empty() {
            return Ok(());
        }
        // SAFETY: that many bytes are there.
        unsafe { result::memcpy_dtoh_sync(output, self.output.address) }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_err() {
            return;
        }
        // SAFETY: made by `new`; memory is freed after it, by the drop of the fields, with the context current.
        let _ = unsafe { result::stream::destroy(self.stream) };
    }
}

/// Device memory that grows.
#[derive(Default)]
struct Memory {
    address: CUdeviceptr,
    bytes: usize,
}

impl Memory {
    /// An address with at least `bytes` bytes; the previous content is lost.
    fn of(&mut self, bytes: usize) -> Result<CUdeviceptr, DriverError> {
        if self.bytes < bytes {
            let grown = bytes.next_power_of_two();
            // SAFETY: the context is current. Each user of the old memory has waited for its work.
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
