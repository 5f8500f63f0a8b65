//! Memory of the GPU, and of the host where the GPU sees it.

#![allow(unsafe_code)] // As in `device.rs`.

use super::Ptr;
use crate::cuda::error::CudaError;
use cudarc::driver::{result, sys};
use std::ptr::NonNull;

/// Memory of the GPU.
#[derive(Debug)]
pub(in crate::cuda) struct Buffer {
    pub(in crate::cuda) ptr: Ptr,
    pub(in crate::cuda) bytes: usize,
}

impl Buffer {
    /// Copies `values` to the beginning, and waits until they are there.
    pub(in crate::cuda) fn write<T: bytemuck::NoUninit>(&self, values: &[T]) -> Result<(), CudaError> {
        self.write_at(0, values)
    }

    /// Copies `values` to `offset` bytes on.
    pub(in crate::cuda) fn write_at<T: bytemuck::NoUninit>(
        &self,
        offset: usize,
        values: &[T],
    ) -> Result<(), CudaError> {
        assert!(offset + size_of_val(values) <= self.bytes, "a copy past the end of a buffer");
        // SAFETY: checked above.
        unsafe { result::memcpy_htod_sync(self.ptr + offset as u64, values) }
            .map_err(CudaError::driver("copying to the GPU"))
    }

    /// Copies from `offset` bytes on into `values`.
    pub(in crate::cuda) fn read<T: bytemuck::AnyBitPattern>(
        &self,
        offset: usize,
        values: &mut [T],
    ) -> Result<(), CudaError> {
        assert!(offset + size_of_val(values) <= self.bytes, "a copy past the end of a buffer");
        // SAFETY: checked above; any bits are a value of the type.
        unsafe { result::memcpy_dtoh_sync(values, self.ptr + offset as u64) }
            .map_err(CudaError::driver("copying from the GPU"))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `Device::alloc`; what still uses it has been waited for by its owner.
        let _ = unsafe { result::free_sync(self.ptr) };
    }
}

/// Page-locked memory of the host that the GPU reads and writes, too. Cached, so that the host reads
/// it at full speed.
pub(in crate::cuda) struct Pinned {
    pub(super) host: NonNull<u8>,
    /// Where the GPU sees it.
    pub(in crate::cuda) device: Ptr,
    pub(super) bytes: usize,
}

// SAFETY: the memory is its own, and only reached through methods that copy.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// `bytes` zeros.
    pub(in crate::cuda) fn new(bytes: usize) -> Result<Self, CudaError> {
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: freed when this is dropped; the address is the driver's for it.
        unsafe {
            let host = result::malloc_host(bytes, flags)
                .map_err(CudaError::driver("page-locking memory of the host"))?;
            let mut device = 0;
            sys::cuMemHostGetDevicePointer_v2(&mut device, host, 0)
                .result()
                .map_err(CudaError::driver("mapping memory of the host"))?;
            std::ptr::write_bytes(host.cast::<u8>(), 0, bytes);
            let host =
                NonNull::new(host.cast()).ok_or(CudaError::Unsupported("no page-locked memory".into()))?;
            Ok(Self { host, device, bytes })
        }
    }

    /// Copies `values` to `offset` bytes on.
    pub(in crate::cuda) fn write<T: bytemuck::NoUninit>(&self, offset: usize, values: &[T]) {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        assert!(offset + bytes.len() <= self.bytes, "a copy past the end of page-locked memory");
        // SAFETY: checked above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.host.as_ptr().add(offset), bytes.len()) };
        std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
    }

    /// The first `bytes`, which the GPU must have written before and must not write meanwhile.
    pub(in crate::cuda) fn bytes(&self, bytes: usize) -> &[u8] {
        assert!(bytes <= self.bytes, "a read past page-locked memory");
        // SAFETY: checked above, and initialised by `new`.
        unsafe { std::slice::from_raw_parts(self.host.as_ptr(), bytes) }
    }

    pub(in crate::cuda) fn room(&self) -> usize {
        self.bytes
    }

    /// The `u32` at `offset` bytes, which the GPU may be writing.
    pub(in crate::cuda) fn load(&self, offset: usize) -> u32 {
        assert!(offset + 4 <= self.bytes && offset.is_multiple_of(4), "a read past page-locked memory");
        // SAFETY: inside and aligned; volatile, as the GPU changes it.
        let value = unsafe { self.host.as_ptr().add(offset).cast::<u32>().read_volatile() };
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        value
    }

    /// The value at `offset` bytes.
    pub(in crate::cuda) fn read<T: bytemuck::AnyBitPattern>(&self, offset: usize) -> T {
        assert!(offset + size_of::<T>() <= self.bytes, "a read past page-locked memory");
        // SAFETY: inside; any bits are a value of the type.
        unsafe { self.host.as_ptr().add(offset).cast::<T>().read_unaligned() }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`.
        let _ = unsafe { result::free_host(self.host.as_ptr().cast()) };
    }
}
