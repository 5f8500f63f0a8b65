//! This rank's GPU: owners of memory, streams, events and graphs, as thin wrappers around the driver's handles.

#![allow(unsafe_code)] // The driver API is C; each owner keeps its handle valid until the owner is dropped.

use super::error::{CudaError, Result};
use cudarc::driver::{result, sys};

mod memory;
mod stream;

pub(super) use memory::{Buffer, Pinned};
pub(super) use stream::{Event, Graph, OwnedStream, Stream};

/// An address in GPU memory; 0 for an absent operand.
pub(super) type Ptr = u64;

/// A GPU whose primary context this process uses.
pub(super) struct Device {
    device: sys::CUdevice,
    context: sys::CUcontext,
    pub(super) name: String,
    pub(super) multiprocessors: u32,
    /// Compute capability times 10: 90 for Hopper.
    pub(super) capability: u32,
    /// Maximum shared memory per block, in bytes (opt-in).
    pub(super) shared_bytes: u32,
}

// SAFETY: a context may be used from any thread that makes it current, as `bind` does.
unsafe impl Send for Device {}
// SAFETY: as above; the driver synchronises threads.
unsafe impl Sync for Device {}

impl Device {
    /// Opens GPU `ordinal` (CUDA's number in this process) and makes it current on the calling thread.
    pub(super) fn open(ordinal: i32) -> Result<Self> {
        result::init().map_err(CudaError::driver("starting CUDA"))?;
        let device = result::device::get(ordinal).map_err(CudaError::driver("opening the GPU"))?;
        let name = result::device::get_name(device).map_err(CudaError::driver("querying the GPU's name"))?;
        let query = |attribute| {
            // SAFETY: `device` came from the driver.
            unsafe { result::device::get_attribute(device, attribute) }
                .map_err(CudaError::driver("querying the GPU's attributes"))
        };
        use sys::CUdevice_attribute_enum as A;
        let multiprocessors = query(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
        let major = query(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = query(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if major < 8 {
            return Err(CudaError::Unsupported(format!(
                "{name} has compute capability {major}.{minor}; lockstep needs 8.0 (Ampere) or newer. \
                 Use parallel.device = \"cpu\" on this machine"
            )));
        }
        // SAFETY: released when this is dropped.
        let context = unsafe { result::primary_ctx::retain(device) }
            .map_err(CudaError::driver("opening a context on the GPU"))?;
        let shared_bytes = query(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as u32;
        let capability = (10 * major + minor) as u32;
        let this = Self { device, context, name, multiprocessors, capability, shared_bytes };
        this.bind()?;
        Ok(this)
    }

    /// Makes this GPU current on the calling thread.
    pub(super) fn bind(&self) -> Result {
        // SAFETY: the context is retained.
        unsafe { result::ctx::set_current(self.context) }.map_err(CudaError::driver("making the GPU current"))
    }

    /// Free and total memory in bytes; zeros if the driver does not report them.
    pub(super) fn free_and_total_bytes(&self) -> (u64, u64) {
        result::mem_get_info().map_or((0, 0), |(free, total)| (free as u64, total as u64))
    }

    /// Allocates `bytes` of uninitialised memory.
    pub(super) fn alloc(&self, bytes: usize) -> Result<Buffer> {
        // SAFETY: freed when the buffer is dropped.
        match unsafe { result::malloc_sync(bytes.max(256)) } {
            Ok(ptr) => Ok(Buffer { ptr, bytes }),
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                Err(self.out_of_memory(bytes))
            }
            // Allocations also fail after an earlier kernel has failed.
            Err(error) => Err(CudaError::driver("allocating GPU memory")(error)),
        }
    }

    /// Checks that `bytes` of memory are free, as far as the driver reports it.
    pub(super) fn check_free(&self, bytes: usize) -> Result {
        let (free, total) = self.free_and_total_bytes();
        if total == 0 || bytes as u64 <= free { Ok(()) } else { Err(self.out_of_memory(bytes)) }
    }

    fn out_of_memory(&self, bytes: usize) -> CudaError {
        let (free, total) = self.free_and_total_bytes();
        CudaError::OutOfMemory { needed_mb: bytes as u64 >> 20, free_mb: free >> 20, total_mb: total >> 20 }
    }

    pub(super) fn zeros(&self, bytes: usize) -> Result<Buffer> {
        self.filled(bytes, 0)
    }

    pub(super) fn filled(&self, bytes: usize, value: u8) -> Result<Buffer> {
        let buffer = self.alloc(bytes)?;
        // SAFETY: the buffer has that many bytes.
        unsafe { result::memset_d8_sync(buffer.ptr, value, bytes) }
            .map_err(CudaError::driver("clearing memory"))?;
        // Despite its name, memset_d8_sync is asynchronous, on the default stream, for which our streams do not wait.
        Stream(std::ptr::null_mut()).synchronize()?;
        Ok(buffer)
    }

    /// Allocates memory with a copy of `values`.
    pub(super) fn upload<T: bytemuck::NoUninit>(&self, values: &[T]) -> Result<Buffer> {
        let buffer = self.alloc(size_of_val(values))?;
        buffer.write(values)?;
        Ok(buffer)
    }

    /// Makes this GPU current on the calling thread, and waits for all of its work.
    pub(super) fn wait_idle(&self) -> Result {
        self.bind()?;
        self.synchronize()
    }

    /// Waits for all work on this GPU.
    pub(super) fn synchronize(&self) -> Result {
        result::ctx::synchronize().map_err(CudaError::driver("waiting for the GPU"))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: retained by `open`.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}
