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
        // Under the lock, so that nobody is between checking and waiting.
        let _waits = self.waits();
        self.changed.notify_all();
    }

    pub(super) fn set(&self, waits: bool) {
        *self.waits() = waits;
        self.changed.notify_all();
    }

    /// Waits until a step waits, and is `true` then; or until `is_over`, which [`Demand::wake`] makes it ask.
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
