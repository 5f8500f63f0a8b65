//! What several folders of the server need and no folder owns.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Free space on the disk.
pub(crate) mod disk_space;
/// Log lines of repeated failures.
pub(crate) mod failure_log;
/// Histograms of durations.
pub(crate) mod histogram;
/// Integers in binary rows.
pub(crate) mod leb128;
/// Permissions of files.
pub(crate) mod private_files;
/// Opens only regular files.
pub(crate) mod regular_files;
/// The server's background tasks.
pub(crate) mod tasks;

/// Locks a mutex, even if a thread has panicked while it held the lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
