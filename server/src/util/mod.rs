//! Small tools that several folders of the server use.

use std::{
    io,
    sync::{Mutex, MutexGuard, PoisonError},
};

pub(crate) mod disk_space;
pub(crate) mod failure_log;
pub(crate) mod histogram;
pub(crate) mod leb128;
pub(crate) mod pem_files;
pub(crate) mod private_files;
pub(crate) mod regular_files;
pub(crate) mod tasks;
pub(crate) mod tls_client;

/// Locks a mutex, even if a thread has panicked while it held the lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns `None` in place of the error that a file or folder does not exist.
pub(crate) fn if_exists<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(None)
        }
        result => result.map(Some),
    }
}
