//! Aborts communicators.

#![allow(unsafe_code)] // NCCL frees a communicator by its pointer.

use super::owner::Handle;
use cudarc::nccl::sys::{self, ncclComm_t};

#[derive(Debug, Clone, Copy)]
pub(super) struct Comm(pub(super) ncclComm_t);

// SAFETY: NCCL's communicators are not bound to a thread.
unsafe impl Send for Comm {}

impl Handle for Comm {
    fn abort(self) {
        // On a separate thread, because an abort may take long and the caller may have more groups to abort.
        let abort = move || {
            // Moves all of `self` into the closure, because the pointer in it is not `Send`.
            let Self(comm) = { self };
            // SAFETY: the owner passes the handle on once, while no call uses it.
            unsafe { sys::ncclCommAbort(comm) };
        };
        // If no thread can be started, the end of the process frees the communicator.
        let _ = std::thread::Builder::new().name("nccl abort".into()).spawn(abort);
    }
}
