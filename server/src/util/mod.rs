//! Small tools that several folders of the server use.

use std::{
    collections::{HashMap, HashSet},
    error::Error,
    hash::Hash,
    io,
    sync::{Mutex, MutexGuard, PoisonError},
};

pub(crate) mod disk_space;
pub(crate) mod failure_log;
pub(crate) mod histogram;
pub(crate) mod http_client;
pub(crate) mod leb128;
pub(crate) mod pem_files;
pub(crate) mod private_files;
pub(crate) mod regular_files;
pub(crate) mod tasks;

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

/// Removes the oldest entry of a map, and returns its value. `time` is the time of an entry, or `None` if the entry must stay.
pub(crate) fn remove_oldest<K: Clone + Eq + Hash, V, T: Ord>(
    map: &mut HashMap<K, V>,
    time: impl Fn(&V) -> Option<T>,
) -> Option<V> {
    let timed = map.iter().filter_map(|(key, value)| Some((time(value)?, key)));
    let oldest = timed.min_by(|(a, _), (b, _)| a.cmp(b))?.1.clone();
    map.remove(&oldest)
}

/// Formats an error and its causes, separated by colons. Leaves out a cause whose text the result already contains.
pub fn with_causes(error: &dyn Error) -> String {
    let mut sentence = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let text = inner.to_string();
        if !sentence.contains(&text) {
            sentence = format!("{sentence}: {text}");
        }
        cause = inner.source();
    }
    sentence
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
