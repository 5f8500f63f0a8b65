//! The configuration that NCCL is started with, and the status that it reports.

#![allow(unsafe_code)] // NCCL's calls take a communicator, which callers vouch for.

use super::MAX_BLOCKS;
use crate::CommError;
use cudarc::nccl::sys::{self, ncclComm_t, ncclConfig_t, ncclResult_t};
use std::{
    ffi::{CStr, c_int},
    mem::size_of,
    ptr::null_mut,
};

/// `ncclConfig_t.magic` of `nccl.h`.
const CONFIG_MAGIC: u32 = 0xcafe_beef;
/// The version whose `ncclConfig_t` is filled in here; later libraries take it as it is.
const CONFIG_VERSION: u32 = 2_27_00;
/// "Choose yourself" in `ncclConfig_t`.
const UNDEFINED: c_int = c_int::MIN;

/// `NCCL_CONFIG_INITIALIZER` of `nccl.h` (a macro there), but non-blocking and of at most [`MAX_BLOCKS`].
pub(super) fn config() -> ncclConfig_t {
    ncclConfig_t {
        size: size_of::<ncclConfig_t>(),
        magic: CONFIG_MAGIC,
        version: CONFIG_VERSION,
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: MAX_BLOCKS.cast_signed(),
        netName: null_mut(),
        splitShare: UNDEFINED,
        trafficClass: UNDEFINED,
        commName: null_mut(),
        collnetEnable: UNDEFINED,
        CTAPolicy: UNDEFINED,
        shrinkShare: UNDEFINED,
        nvlsCTAs: UNDEFINED,
    }
}

pub(super) fn asynchronous(comm: ncclComm_t) -> ncclResult_t {
    let mut status = ncclResult_t::ncclSuccess;
    // SAFETY: `comm` is alive: it is used under its owner's rule or by who took it.
    let asked = unsafe { sys::ncclCommGetAsyncError(comm, &mut status) };
    if asked == ncclResult_t::ncclSuccess { status } else { asked }
}

pub(super) fn failure(operation: &'static str, status: ncclResult_t, comm: ncclComm_t) -> CommError {
    CommError::Failed { operation, detail: error_text(status, comm) }
}

/// NCCL's words for a status, and what it knows beyond that.
pub(super) fn error_text(status: ncclResult_t, comm: ncclComm_t) -> String {
    let text = |words: *const std::ffi::c_char| -> String {
        if words.is_null() {
            return String::new();
        }
        // SAFETY: NCCL gives strings that end in a zero and live on.
        unsafe { CStr::from_ptr(words) }.to_string_lossy().trim().replace('\n', " ")
    };
    // SAFETY: takes any status; and a communicator, or null for the thread's own last error.
    let (words, more) = unsafe { (text(sys::ncclGetErrorString(status)), text(sys::ncclGetLastError(comm))) };
    if more.is_empty() { format!("NCCL: {words}") } else { format!("NCCL: {words}: {more}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kernels that wait for other ranks count on it.
    #[test]
    fn nccl_is_given_a_limit_of_blocks() {
        assert_eq!(config().maxCTAs, MAX_BLOCKS.cast_signed());
    }
}
