//! Small tools that several folders of the server use.

use std::{
    collections::HashSet,
    hash::Hash,
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

/// Maximum number of entries of a set for [`remember`].
const MAX_REMEMBERED: usize = 4096;

/// Adds an entry to a set of completed work. A set that is too large is cleared first, after which work may be done again. Returns whether
/// the entry is new.
pub(crate) fn remember<T: Eq + Hash>(set: &Mutex<HashSet<T>>, entry: T) -> bool {
    let mut set = lock(set);
    if set.len() >= MAX_REMEMBERED {
        set.clear();
    }
    set.insert(entry)
}

/// Runs blocking work on files on a separate thread.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
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
