//! GPU memory, and page-locked host memory.

#![allow(unsafe_code)] // As in `device.rs`.

use super::Ptr;
use crate::cuda::error::{CudaError, Result};
use cudarc::driver::{result, sys};
use std::ptr::NonNull;

/// An owned range of GPU memory.
#[derive(Debug)]
pub(in crate::cuda) struct Buffer {
    pub(in crate::cuda) ptr: Ptr,
    pub(in crate::cuda) bytes: usize,
}

impl Buffer {
    /// Copies `values` to the beginning, synchronously.
    pub(in crate::cuda) fn write<T: bytemuck::NoUninit>(&self, values: &[T]) -> Result {
        self.write_at(0, values)
    }

    /// Copies `values` to byte offset `offset`, synchronously.
    pub(in crate::cuda) fn write_at<T: bytemuck::NoUninit>(&self, offset: usize, values: &[T]) -> Result {
        assert!(offset + size_of_val(values) <= self.bytes, "a copy past the end of a buffer");
        // A copy from memory that is not page-locked may return before its last bytes are on the GPU, and other streams do not wait for it.
        // SAFETY: checked above; null is the default stream, on which the copy runs.
        unsafe {
            result::memcpy_htod_sync(self.ptr + offset as u64, values)
                .and_then(|()| result::stream::synchronize(std::ptr::null_mut()))
        }
        .map_err(CudaError::driver("copying to the GPU"))
    }

    /// Copies from byte offset `offset` into `values`, synchronously.
    pub(in crate::cuda) fn read<T: bytemuck::AnyBitPattern>(
        &self,
        offset: usize,
        values: &mut [T],
    ) -> Result {
        assert!(offset + size_of_val(values) <= self.bytes, "a copy past the end of a buffer");
        // SAFETY: checked above; any bits are a value of the type.
        unsafe { result::memcpy_dtoh_sync(values, self.ptr + offset as u64) }
            .map_err(CudaError::driver("copying from the GPU"))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `Device::alloc`; the owner has waited for all work that uses it.
        let _ = unsafe { result::free_sync(self.ptr) };
    }
}

/// Page-locked host memory that the GPU can access. It is not write-combined, so that the host reads it at full speed.
pub(in crate::cuda) struct Pinned {
    pub(super) host: NonNull<u8>,
    /// Device address.
    pub(in crate::cuda) device: Ptr,
    pub(in crate::cuda) bytes: usize,
}

// SAFETY: this value owns the memory, which is only accessed through methods that copy.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Allocates `bytes` zeros.
    pub(in crate::cuda) fn new(bytes: usize) -> Result<Self> {
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: freed when this is dropped; the driver returned the address.
        unsafe {
            let host = result::malloc_host(bytes, flags)
                .map_err(CudaError::driver("allocating page-locked memory"))?;
            let mut device = 0;
            sys::cuMemHostGetDevicePointer_v2(&mut device, host, 0)
                .result()
                .map_err(CudaError::driver("mapping page-locked memory"))?;
            std::ptr::write_bytes(host.cast::<u8>(), 0, bytes);
            let host =
                NonNull::new(host.cast()).ok_or(CudaError::Unsupported("no page-locked memory".into()))?;
            Ok(Self { host, device, bytes })
        }
    }

    /// Copies `values` to byte offset `offset`.
    pub(in crate::cuda) fn write<T: bytemuck::NoUninit>(&self, offset: usize, values: &[T]) {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        assert!(offset + bytes.len() <= self.bytes, "a copy past the end of page-locked memory");
        // SAFETY: checked above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.host.as_ptr().add(offset), bytes.len()) };
        std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
    }

    /// The first `bytes` bytes. The GPU must not write them during the borrow.
    pub(in crate::cuda) fn bytes(&self, bytes: usize) -> &[u8] {
        assert!(bytes <= self.bytes, "a read past page-locked memory");
        // SAFETY: checked above, and initialised by `new`.
        unsafe { std::slice::from_raw_parts(self.host.as_ptr(), bytes) }
    }

    /// All of the memory, as values. The GPU must not use it during the borrow.
    pub(in crate::cuda) fn values<T: bytemuck::AnyBitPattern>(&mut self) -> &mut [T] {
        // SAFETY: initialised by `new`, aligned to pages; any bits are a value of the type.
        unsafe { std::slice::from_raw_parts_mut(self.host.as_ptr().cast(), self.bytes / size_of::<T>()) }
    }

    /// The `u32` at byte offset `offset`, which the GPU may write concurrently.
    pub(in crate::cuda) fn load(&self, offset: usize) -> u32 {
        assert!(offset + 4 <= self.bytes && offset.is_multiple_of(4), "a read past page-locked memory");
        // SAFETY: in bounds and aligned; volatile, because the GPU changes the value.
        let value = unsafe { self.host.as_ptr().add(offset).cast::<u32>().read_volatile() };
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        value
    }

    /// The value at byte offset `offset`.
    pub(in crate::cuda) fn read<T: bytemuck::AnyBitPattern>(&self, offset: usize) -> T {
        assert!(offset + size_of::<T>() <= self.bytes, "a read past page-locked memory");
        // SAFETY: in bounds; all bit patterns are valid.
        unsafe { self.host.as_ptr().add(offset).cast::<T>().read_unaligned() }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`.
        let _ = unsafe { result::free_host(self.host.as_ptr().cast()) };
    }
}
