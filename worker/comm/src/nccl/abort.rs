//! Aborts communicators.

#![allow(unsafe_code)] // NCCL frees a communicator by its pointer.

use super::owner::Handle;
use cudarc::nccl::sys::{self, ncclComm_t};
use std::{
    sync::{Condvar, Mutex, PoisonError},
    time::Duration,
};

/// NCCL's pointer to a communicator.
#[derive(Debug, Clone, Copy)]
pub(super) struct Comm(pub(super) ncclComm_t);

// SAFETY: NCCL's communicators are not bound to threads.
unsafe impl Send for Comm {}

impl Handle for Comm {
    fn abort(self) {
        // Ending everything may take a while, and the caller has other things to abort as well.
        let abort = move || {
            let Self(comm) = { self };
            // SAFETY: the owner gave it away for this, once, when no call was being made.
            unsafe { sys::ncclCommAbort(comm) };
            ABORTS.with(|under_way| *under_way -= 1);
        };
        ABORTS.with(|under_way| *under_way += 1);
        // Without a thread it goes with the process.
        if std::thread::Builder::new().name("nccl abort".into()).spawn(abort).is_err() {
            ABORTS.with(|under_way| *under_way -= 1);
        }
    }
}

/// Aborts that NCCL has not finished.
struct Aborts {
    under_way: Mutex<usize>,
    changed: Condvar,
}

static ABORTS: Aborts = Aborts { under_way: Mutex::new(0), changed: Condvar::new() };

impl Aborts {
    fn with(&self, change: impl FnOnce(&mut usize)) {
        change(&mut self.under_way.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }
}

/// Waits until every abort that was begun is finished, at most `limit`; says whether they are.
pub fn wait_for_aborts(limit: Duration) -> bool {
    let under_way = ABORTS.under_way.lock().unwrap_or_else(PoisonError::into_inner);
    match ABORTS.changed.wait_timeout_while(under_way, limit, |under_way| *under_way > 0) {
        Ok((under_way, _)) => *under_way == 0,
        Err(poisoned) => *poisoned.into_inner().0 == 0,
    }
}
