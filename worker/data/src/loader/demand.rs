//! Whether a step waits for the batch that is being made.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Whether a step waits for its batch.
#[derive(Debug, Default)]
pub(super) struct Demand {
    waits: Mutex<bool>,
    changed: Condvar,
}

impl Demand {
    fn waits(&self) -> MutexGuard<'_, bool> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_there(&self) -> bool {
        *self.waits()
    }

    /// Makes [`Demand::wait`] check its condition again.
    pub(super) fn wake(&self) {
        // Under the lock, so that no thread is between its check and its wait.
        let _waits = self.waits();
        self.changed.notify_all();
    }

    pub(super) fn set(&self, waits: bool) {
        *self.waits() = waits;
        self.changed.notify_all();
    }

    /// Returns true once a step waits for its batch, or false once `is_over`, which is checked at the beginning and after each
    /// [`Demand::wake`].
    pub(super) fn wait(&self, is_over: impl Fn() -> bool) -> bool {
        let mut waits = self.waits();
        loop {
            if is_over() {
                return false;
            }
            if *waits {
                return true;
            }
            waits = self.changed.wait(waits).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
