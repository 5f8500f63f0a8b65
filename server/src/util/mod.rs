//! What several folders of the server need and no folder owns.

use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) mod disk_space;
pub(crate) mod failure_log;
pub(crate) mod histogram;
pub(crate) mod leb128;
pub(crate) mod private_files;
pub(crate) mod regular_files;
pub(crate) mod tasks;

/// Locks a mutex, even if a thread has panicked while it held the lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
