//! Aborts communicators: one, or all of this process.

#![allow(unsafe_code)] // NCCL frees a communicator by its pointer.

use super::{State, owner::Handle};
use cudarc::nccl::sys::{self, ncclComm_t};
use std::{
    sync::{Condvar, Mutex, PoisonError, Weak},
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

/// Communicators of this process, which is one rank.
pub(super) static LIVE: Mutex<Vec<Weak<State>>> = Mutex::new(Vec::new());

/// What else must end then.
type Hook = Box<dyn Fn() + Send>;
static HOOKS: Mutex<Vec<Hook>> = Mutex::new(Vec::new());

/// Has `hook` called by [`abort_all`]: for kernels that wait for other GPUs without NCCL.
pub fn on_abort(hook: impl Fn() + Send + 'static) {
    HOOKS.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(hook));
}

/// Ends what is under way in all groups of this process, from any thread: waiting calls return with
/// [`CommError::Aborted`], collectives that run on the GPU end, and streams behind them come free.
pub fn abort_all(reason: &str) {
    HOOKS.lock().unwrap_or_else(PoisonError::into_inner).iter().for_each(|hook| hook());
    let live: Vec<_> = std::mem::take(&mut *LIVE.lock().unwrap_or_else(PoisonError::into_inner));
    live.iter().filter_map(Weak::upgrade).for_each(|state| state.comm.abort(reason));
}
