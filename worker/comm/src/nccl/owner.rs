//! Ownership of a communicator: which thread may use it, and which thread frees it.
//!
//! NCCL allows one thread at a time to use a communicator, and `ncclCommAbort` frees it. Any thread may abort at any
//! time, also while another thread is inside a call. The abort must not wait for that call, because the call may
//! hang. The rules are therefore:
//!
//! - An abort rejects new calls at once.
//! - If no call is in progress, the abort frees the communicator. Otherwise the thread that makes the call frees it
//!   when the call returns.
//! - If the call never returns, the communicator is not freed. Its process is killed anyway.

use lockstep_host::lock;
use std::sync::{Condvar, Mutex, PoisonError};

/// A handle (NCCL's communicator) that can be aborted once.
pub(super) trait Handle: Copy + Send {
    /// Aborts the calls in progress and frees the handle. Does not block.
    fn abort(self);
}

#[derive(Debug)]
pub(super) struct Owner<H: Handle> {
    /// Never locked during a call of NCCL, so waiting for the lock is short.
    state: Mutex<State<H>>,
    not_busy: Condvar,
}

#[derive(Debug)]
struct State<H> {
    /// `None` after the handle has been taken or aborted.
    handle: Option<H>,
    is_busy: bool,
    /// `None` if the handle was not aborted.
    abort_reason: Option<String>,
}

/// Exclusive use of the handle for one call, until this is dropped.
#[derive(Debug)]
pub(super) struct HandleGuard<'a, H: Handle> {
    owner: &'a Owner<H>,
    pub(super) handle: H,
}

impl<H: Handle> Owner<H> {
    pub(super) fn new(handle: H) -> Self {
        Self {
            state: Mutex::new(State { handle: Some(handle), is_busy: false, abort_reason: None }),
            not_busy: Condvar::new(),
        }
    }

    /// Waits until no other thread uses the handle, and borrows it for one call.
    ///
    /// # Errors
    /// The reason of the abort, or that the handle has been taken ("the group has ended").
    pub(super) fn acquire(&self) -> Result<HandleGuard<'_, H>, String> {
        let mut state = lock(&self.state);
        loop {
            match (&state.abort_reason, state.handle) {
                (Some(reason), _) => return Err(reason.clone()),
                (None, None) => return Err("the group has ended".into()),
                (None, Some(handle)) if !state.is_busy => {
                    state.is_busy = true;
                    return Ok(HandleGuard { owner: self, handle });
                }
                _ => state = self.not_busy.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Rejects further calls. Frees the handle now, or when the call in progress returns. Only the first reason is
    /// kept. Does not block.
    pub(super) fn abort(&self, reason: &str) {
        let mut state = lock(&self.state);
        if state.abort_reason.is_some() {
            return;
        }
        state.abort_reason = Some(reason.into());
        let handle = if state.is_busy { None } else { state.handle.take() };
        drop(state);
        self.not_busy.notify_all();
        if let Some(handle) = handle {
            handle.abort();
        }
    }

    /// Takes the handle, so that the caller can destroy it with `ncclCommDestroy`. `None` if it was taken or aborted, or is
    /// in use.
    pub(super) fn take(&self) -> Option<H> {
        let mut state = lock(&self.state);
        if state.is_busy || state.abort_reason.is_some() { None } else { state.handle.take() }
    }
}

impl<H: Handle> Drop for HandleGuard<'_, H> {
    fn drop(&mut self) {
        let mut state = lock(&self.owner.state);
        state.is_busy = false;
        // An abort during this call has left the handle for this thread to free.
        let handle = if state.abort_reason.is_some() { state.handle.take() } else { None };
        drop(state);
        self.owner.not_busy.notify_one();
        if let Some(handle) = handle {
            handle.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        sync::{
            atomic::{AtomicBool, AtomicUsize, Ordering},
            mpsc,
        },
        time::{Duration, Instant},
    };

    /// A fake communicator that records a use after free, where NCCL would crash.
    #[derive(Debug, Default)]
    struct Fake {
        inside: AtomicUsize,
        calls: AtomicUsize,
        freed: AtomicUsize,
        misused: AtomicBool,
    }

    impl Handle for &Fake {
        fn abort(self) {
            if self.freed.fetch_add(1, Ordering::SeqCst) > 0 || self.inside.load(Ordering::SeqCst) > 0 {
                self.misused.store(true, Ordering::SeqCst);
            }
        }
    }

    impl Fake {
        /// Like `ncclCommGetAsyncError`: reads memory that an abort frees.
        fn call(&self) {
            let others = self.inside.fetch_add(1, Ordering::SeqCst);
            for _ in 0..20 {
                if others > 0 || self.freed.load(Ordering::SeqCst) > 0 {
                    self.misused.store(true, Ordering::SeqCst);
                }
                std::hint::spin_loop();
            }
            self.calls.fetch_add(1, Ordering::SeqCst);
            self.inside.fetch_sub(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn calls_of_many_threads_and_an_abort_never_overlap() {
        for round in 0..300 {
            let fake = Fake::default();
            let owner = Owner::new(&fake);
            let reasons: Vec<String> = std::thread::scope(|scope| {
                let callers: Vec<_> = (0..4)
                    .map(|_| {
                        scope.spawn(|| {
                            loop {
                                match owner.acquire() {
                                    Ok(guard) => guard.handle.call(),
                                    Err(reason) => return reason,
                                }
                            }
                        })
                    })
                    .collect();
                for reason in ["first", "second"] {
                    let (owner, fake) = (&owner, &fake);
                    scope.spawn(move || {
                        while fake.calls.load(Ordering::SeqCst) < round % 7 {
                            std::thread::yield_now();
                        }
                        owner.abort(reason);
                    });
                }
                callers.into_iter().map(|caller| caller.join().unwrap()).collect()
            });
            assert!(
                !fake.misused.load(Ordering::SeqCst),
                "round {round}: used after it was freed, or by two threads at a time"
            );
            assert_eq!(fake.freed.load(Ordering::SeqCst), 1, "round {round}: freed once");
            assert!(reasons.iter().all(|r| *r == reasons[0]), "{reasons:?}");
            assert!(owner.take().is_none(), "an aborted handle cannot be taken");
        }
    }

    #[test]
    fn an_abort_does_not_wait_for_a_hung_call_and_frees_waiting_callers() {
        let fake = Fake::default();
        let owner = Owner::new(&fake);
        let (come_back, hang) = mpsc::channel::<()>();
        let (inside, is_inside) = mpsc::channel();
        std::thread::scope(|scope| {
            let owner = &owner;
            let hanging = scope.spawn(move || {
                let guard = owner.acquire().unwrap();
                inside.send(()).unwrap();
                let _ = hang.recv_timeout(Duration::from_secs(60));
                guard.handle.call();
            });
            is_inside.recv_timeout(Duration::from_secs(20)).unwrap();
            let waiting = scope.spawn(move || owner.acquire().map(drop));
            let began = Instant::now();
            owner.abort("enough");
            assert!(began.elapsed() < Duration::from_secs(5));
            assert_eq!(waiting.join().unwrap().unwrap_err(), "enough");
            assert_eq!(fake.freed.load(Ordering::SeqCst), 0, "somebody is inside");
            come_back.send(()).unwrap();
            hanging.join().unwrap();
        });
        assert_eq!(fake.freed.load(Ordering::SeqCst), 1, "freed by the call that returned");
        assert!(!fake.misused.load(Ordering::SeqCst));
    }

    #[test]
    fn a_taken_handle_is_not_freed_by_abort() {
        let fake = Fake::default();
        let owner = Owner::new(&fake);
        let guard = owner.acquire().unwrap();
        assert!(owner.take().is_none(), "the handle is in use");
        drop(guard);
        assert!(owner.take().is_some());
        owner.abort("too late");
        assert_eq!(fake.freed.load(Ordering::SeqCst), 0, "the caller of `take` frees it");
        assert_eq!(owner.acquire().unwrap_err(), "too late");
    }
}
