//! Shared memory backed by an anonymous file. The system frees it when the last process that maps it has ended, for
//! whatever reason.

#![allow(unsafe_code)] // Slices of mapped memory.

use lockstep_host::memory_file;
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{FallocateFlags, SealFlags};
use std::{
    fs::{File, OpenOptions},
    io,
    ops::{Deref, DerefMut, Range},
    os::fd::AsRawFd,
    ptr::NonNull,
    sync::Arc,
};

/// A multiple of every page size: 4 KiB on x86-64, up to 64 KiB elsewhere.
const PAGE: usize = 64 << 10;

pub(super) fn whole_pages(bytes: usize) -> usize {
    bytes.next_multiple_of(PAGE)
}

/// An anonymous file in memory (memfd).
#[derive(Debug)]
pub(super) struct MemFile(File);

impl MemFile {
    /// An empty file that is sealed against shrinking, so mapped pages cannot disappear.
    pub(super) fn create() -> io::Result<Self> {
        let file = memory_file()?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK)?;
        Ok(Self(file))
    }

    /// Opens the file that process `pid` of this user has as descriptor `fd`.
    pub(super) fn of_process(pid: u32, fd: i32) -> io::Result<Self> {
        OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/fd/{fd}")).map(Self)
    }

    pub(super) fn fd(&self) -> i32 {
        self.0.as_raw_fd()
    }

    /// Allocates `bytes` of zeros at `offset` now. Otherwise, the first access without free memory raises SIGBUS.
    pub(super) fn grow(&self, offset: usize, bytes: usize) -> io::Result<()> {
        Ok(rustix::fs::fallocate(&self.0, FallocateFlags::empty(), offset as u64, bytes as u64)?)
    }

    /// Maps `bytes` of the file, starting at `offset`. Both must be multiples of the page size.
    pub(super) fn map(&self, offset: usize, bytes: usize) -> io::Result<Arc<Mapping>> {
        if self.0.metadata()?.len() < (offset + bytes) as u64 {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the shared memory is shorter than described",
            ));
        }
        Ok(Arc::new(Mapping(MmapOptions::new().offset(offset as u64).len(bytes).map_raw(&self.0)?)))
    }
}

/// A mapped part of an anonymous file. The mapping stays valid because the file cannot shrink.
#[derive(Debug)]
pub(super) struct Mapping(MmapRaw);

impl Mapping {
    /// A slice of `len` values, which starts at byte `offset`.
    ///
    /// # Safety
    /// Any bits, including all zeros, must be a valid `T`. Ranks must agree on an order in which they read and write
    /// these values: holding a slice of values that another rank writes is undefined behaviour.
    ///
    /// # Panics
    /// The slice is not inside the mapping, or not aligned.
    pub(super) unsafe fn view<T>(self: &Arc<Self>, offset: usize, len: usize) -> SharedSlice<T> {
        let end = len.checked_mul(size_of::<T>()).and_then(|bytes| bytes.checked_add(offset));
        let bytes = self.0.len();
        assert!(end.is_some_and(|end| end <= bytes), "{len} values from byte {offset} of {bytes}");
        // SAFETY: the address is inside the mapping, as just checked, and a mapping never starts at address 0.
        let start: NonNull<T> = unsafe { NonNull::new_unchecked(self.0.as_mut_ptr().add(offset)) }.cast();
        assert!(start.is_aligned());
        SharedSlice { start, len, _owner: Owner::Shared { _mapping: self.clone() } }
    }
}

/// A slice in this process's memory or in shared memory, together with the owner that keeps the memory alive.
#[derive(Debug)]
pub struct SharedSlice<T> {
    start: NonNull<T>,
    len: usize,
    _owner: Owner<T>,
}

#[derive(Debug)]
enum Owner<T> {
    Own { _values: Vec<T> },
    Shared { _mapping: Arc<Mapping> },
}

// SAFETY: the owner is a vector or shared memory, neither of which is bound to a thread.
unsafe impl<T: Send> Send for SharedSlice<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for SharedSlice<T> {}

impl<T> From<Vec<T>> for SharedSlice<T> {
    fn from(mut values: Vec<T>) -> Self {
        let start = NonNull::new(values.as_mut_ptr()).unwrap_or(NonNull::dangling());
        Self { start, len: values.len(), _owner: Owner::Own { _values: values } }
    }
}

impl<T> Default for SharedSlice<T> {
    fn default() -> Self {
        Vec::new().into()
    }
}

impl<T> Deref for SharedSlice<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the owner keeps this many values alive at this address.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for SharedSlice<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T> SharedSlice<T> {
    /// A part of the values, which can be written while other parts are in use.
    ///
    /// # Safety
    /// No one else uses these values meanwhile.
    ///
    /// # Panics
    /// The range is not inside the slice.
    #[allow(clippy::mut_from_ref)] // The caller's promise is beyond what the borrow checker can verify.
    pub unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} values", self.len);
        // SAFETY: the range is inside, and no one else uses it, as promised by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(range.start), range.len()) }
    }
}
