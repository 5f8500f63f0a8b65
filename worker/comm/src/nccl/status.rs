//! The configuration of a communicator, and NCCL's status codes.

#![allow(unsafe_code)] // NCCL's calls take a communicator; callers guarantee that it is alive.

use super::MAX_BLOCKS;
use crate::CommError;
use cudarc::nccl::sys::{self, ncclComm_t, ncclConfig_t, ncclResult_t};
use std::{
    ffi::{CStr, c_int},
    mem::size_of,
    ptr::null_mut,
};

/// The value of `ncclConfig_t.magic` in `nccl.h`.
const CONFIG_MAGIC: u32 = 0xcafe_beef;
/// The NCCL version that defines this layout of `ncclConfig_t`. Later versions accept it.
const CONFIG_VERSION: u32 = 2_27_00;
/// The value in `ncclConfig_t` that leaves a setting to NCCL.
const UNDEFINED: c_int = c_int::MIN;

/// `NCCL_CONFIG_INITIALIZER`, a macro of `nccl.h`, but non-blocking and with at most [`MAX_BLOCKS`] blocks.
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

/// The status of the communicator's calls, which do not block.
pub(super) fn async_status(comm: ncclComm_t) -> ncclResult_t {
    let mut status = ncclResult_t::ncclSuccess;
    // SAFETY: `comm` is alive: the caller has it from its owner, exclusively.
    let asked = unsafe { sys::ncclCommGetAsyncError(comm, &mut status) };
    if asked == ncclResult_t::ncclSuccess { status } else { asked }
}

pub(super) fn failure(operation: &'static str, status: ncclResult_t, comm: ncclComm_t) -> CommError {
    CommError::Failed { operation, detail: error_text(status, comm) }
}

/// NCCL's description of a status, and its last error message.
pub(super) fn error_text(status: ncclResult_t, comm: ncclComm_t) -> String {
    let to_string = |text: *const std::ffi::c_char| -> String {
        if text.is_null() {
            return String::new();
        }
        // SAFETY: NCCL returns static strings that end with a null byte.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().replace('\n', " ")
    };
    // SAFETY: the calls accept any status, and a communicator or null (for the thread's last error).
    let (description, last_error) =
        unsafe { (to_string(sys::ncclGetErrorString(status)), to_string(sys::ncclGetLastError(comm))) };
    if last_error.is_empty() {
        format!("NCCL: {description}")
    } else {
        format!("NCCL: {description}: {last_error}")
    }
}
