//! Aborts communicators.

#![allow(unsafe_code)] // NCCL frees a communicator by its pointer.

use super::owner::Handle;
use cudarc::nccl::sys::{self, ncclComm_t};
use lockstep_host::lock;
use std::{
    sync::{Condvar, Mutex},
    time::Duration,
};

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
            ABORTS.update(|pending| *pending -= 1);
        };
        ABORTS.update(|pending| *pending += 1);
        // If no thread can be started, the end of the process frees the communicator.
        if std::thread::Builder::new().name("nccl abort".into()).spawn(abort).is_err() {
            ABORTS.update(|pending| *pending -= 1);
        }
    }
}

/// The number of aborts that NCCL has not finished.
struct Aborts {
    pending: Mutex<usize>,
    changed: Condvar,
}

static ABORTS: Aborts = Aborts { pending: Mutex::new(0), changed: Condvar::new() };

impl Aborts {
    fn update(&self, change: impl FnOnce(&mut usize)) {
        change(&mut lock(&self.pending));
        self.changed.notify_all();
    }
}

/// Waits until all aborts have finished, at most `limit`. Returns whether they have.
pub fn wait_for_aborts(limit: Duration) -> bool {
    let pending = lock(&ABORTS.pending);
    match ABORTS.changed.wait_timeout_while(pending, limit, |pending| *pending > 0) {
        Ok((pending, _)) => *pending == 0,
        Err(poisoned) => *poisoned.into_inner().0 == 0,
    }
}
