//! The object store of this server, and its state in memory: the queue of `object_store_sync.rs`, running fetches, and failures. The database
//! has the list of the copies in the object store.

mod confirm;

use crate::{
    checkpoints::object_storage::ObjectStorage,
    util::{lock, remember},
};
use hashlink::LinkedHashSet;
use lockstep_protocol::{JobId, backoff::Backoff};
use std::{
    collections::{HashMap, HashSet},
    sync::Mutex,
    time::{Duration, Instant},
};
use tokio::sync::{Notify, OnceCell, Semaphore, watch};

/// Minimum pauses between a failed fetch and the next: after the first failure, and the longest. Each failure doubles the pause.
const FETCH_RETRY: Backoff = Backoff::new(Duration::from_secs(3), Duration::from_secs(60));
/// Maximum number of checkpoints that are fetched at the same time. Others wait.
const CONCURRENT_FETCHES: usize = 2;
/// Maximum number of copies on the disk that are checked at the same time. A check reads every byte. After an outage, hundreds of jobs
/// restart, and the first of them should not wait until all checkpoints are checked.
const CONCURRENT_CHECKS: usize = 2;

/// Why a checkpoint could not be fetched from the object store.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FetchError {
    #[error("the store does not have the complete checkpoint")]
    Missing,
    /// The files in the store do not match the manifest.
    #[error("the checkpoint in the store is damaged: {0}")]
    Damaged(String),
    /// The store does not respond, or refuses the request.
    #[error("the store cannot be used: {0}")]
    ObjectStoreUnavailable(String),
    #[error("the checkpoint cannot be written to the server's disk: {0}")]
    Disk(String),
}

/// The outcome of a fetch. `None` while the fetch runs.
pub(crate) type FetchOutcome = Option<Result<(), FetchError>>;

/// A fetch that runs or has ended.
#[derive(Debug, Clone)]
pub(crate) struct Fetch {
    pub(crate) outcome: watch::Receiver<FetchOutcome>,
    /// When the fetch began, or ended.
    changed_at: Instant,
    /// Number of consecutive failures.
    failures: u32,
}

/// The object store of this server, with its queue of uploads and deletions and its fetches.
#[derive(Debug)]
pub(crate) struct ObjectStoreState {
    pub(crate) storage: ObjectStorage,
    /// Whether the store may be taken over from another server (`--artifacts-adopt`).
    adopts: bool,
    /// Set after a check has shown that the store can be used.
    usable: OnceCell<()>,
    /// The identity that the store's `LOCKSTEP.json` must have, once the identity is known.
    marker: OnceCell<String>,
    queue: Mutex<Queue>,
    fetches: Mutex<HashMap<String, Fetch>>,
    /// Checks that have found a copy on the disk undamaged: the job that starts from the copy, the newest attempt of this job at the check,
    /// and the checkpoint.
    checked: Mutex<HashSet<(JobId, u32, String)>>,
    /// A permit for each checkpoint that is being fetched.
    pub(crate) fetch_permits: Semaphore,
    /// A permit for each copy on the disk that is being checked.
    pub(crate) check_permits: Semaphore,
    /// Notified when a checkpoint is queued, or is no longer being processed.
    pub(crate) queue_changed: Notify,
    /// The kinds of requests that have failed and not succeeded since.
    failing_kinds: Mutex<HashSet<RequestKind>>,
}

/// The kind of a request to the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum RequestKind {
    /// A write, which fails if the store is full.
    Write,
    /// Any other request, which a full store still answers.
    Other,
}

/// The checkpoints that were written or deleted, and whose upload or deletion is not completed.
#[derive(Debug, Default)]
struct Queue {
    /// The waiting checkpoints. The last entry is processed first, because a job would continue from the newest checkpoint.
    waiting: LinkedHashSet<String>,
    /// The checkpoints that are being processed, or wait for their next try.
    busy: HashSet<String>,
}

impl ObjectStoreState {
    /// Creates the state of a store, without a request to the store.
    pub(crate) fn new(storage: ObjectStorage, adopts: bool) -> Self {
        Self {
            storage,
            adopts,
            usable: OnceCell::new(),
            marker: OnceCell::new(),
            queue: Mutex::default(),
            fetches: Mutex::default(),
            checked: Mutex::default(),
            fetch_permits: Semaphore::new(CONCURRENT_FETCHES),
            check_permits: Semaphore::new(CONCURRENT_CHECKS),
            queue_changed: Notify::new(),
            failing_kinds: Mutex::default(),
        }
    }

    /// Whether an existing checkpoint is being uploaded, or waits for its upload. Deleted checkpoints wait in the same queue.
    pub(crate) fn is_uploading(&self, id: &str) -> bool {
        let queue = lock(&self.queue);
        queue.waiting.contains(id) || queue.busy.contains(id)
    }

    /// Queues a checkpoint that is new on the disk, was replaced, or was deleted.
    pub(crate) fn queue(&self, id: &str) {
        // A checkpoint that waits already moves to the end.
        lock(&self.queue).waiting.insert(id.to_owned());
        self.queue_changed.notify_waiters();
    }

    /// Queues a checkpoint again after a failure, behind all others, so that a permanent failure does not delay other checkpoints.
    pub(crate) fn requeue(&self, id: &str) {
        let mut queue = lock(&self.queue);
        if !queue.waiting.contains(id) {
            queue.waiting.insert(id.to_owned());
            queue.waiting.to_front(id);
        }
    }

    /// Takes the next checkpoint from the queue. No other caller gets the checkpoint before [`ObjectStoreState::finish`].
    pub(crate) fn take_next(&self) -> Option<String> {
        let mut queue = lock(&self.queue);
        let id = queue.waiting.iter().rev().find(|id| !queue.busy.contains(*id))?.clone();
        queue.waiting.remove(&id);
        queue.busy.insert(id.clone());
        Some(id)
    }

    /// Notes that a checkpoint from [`ObjectStoreState::take_next`] is no longer being processed.
    pub(crate) fn finish(&self, id: &str) {
        lock(&self.queue).busy.remove(id);
        self.queue_changed.notify_waiters();
    }

    /// Forgets a checkpoint that is no longer in the database.
    pub(crate) fn forget(&self, id: &str) {
        lock(&self.fetches).remove(id);
    }

    /// The fetch of a checkpoint that runs or has just failed. Otherwise a new fetch, with a sender. The caller must then run the fetch and
    /// end it with [`ObjectStoreState::end_fetch`].
    pub(crate) fn join_or_start_fetch(&self, id: &str) -> (Fetch, Option<watch::Sender<FetchOutcome>>) {
        let mut fetches = lock(&self.fetches);
        let failures = fetches.get(id).map_or(0, |fetch| fetch.failures);
        if let Some(fetch) = fetches.get(id) {
            let outcome = fetch.outcome.borrow().clone();
            let is_interrupted = fetch.outcome.has_changed().is_err();
            let is_current = match outcome {
                None => !is_interrupted,
                Some(Ok(())) => false,
                Some(Err(_)) => fetch.changed_at.elapsed() < FETCH_RETRY.pause_after(fetch.failures),
            };
            if is_current {
                return (fetch.clone(), None);
            }
        }
        let (sender, outcome) = watch::channel(None);
        let fetch = Fetch { outcome, changed_at: Instant::now(), failures };
        fetches.insert(id.to_owned(), fetch.clone());
        (fetch, Some(sender))
    }

    /// Whether a copy on the disk was checked for a job's next attempt and is undamaged.
    pub(crate) fn is_checked(&self, id: &str, job: &JobId, attempt: u32) -> bool {
        lock(&self.checked).contains(&(job.clone(), attempt, id.to_owned()))
    }

    /// Notes that a copy is undamaged, for the attempt that follows `attempt`.
    pub(crate) fn note_checked(&self, id: &str, (job, attempt): (JobId, u32)) {
        remember(&self.checked, (job, attempt, id.to_owned()));
    }

    /// Ends a fetch. Waiting requests get the outcome. A failure is remembered for a while.
    pub(crate) fn end_fetch(
        &self,
        id: &str,
        sender: &watch::Sender<FetchOutcome>,
        outcome: Result<(), FetchError>,
    ) {
        if let Some(fetch) = lock(&self.fetches).get_mut(id) {
            fetch.changed_at = Instant::now();
            fetch.failures = if outcome.is_ok() { 0 } else { fetch.failures.saturating_add(1) };
        }
        sender.send_replace(Some(outcome));
    }

    /// Notes that a request has failed, for the reason `error`. Logged once until the store works again. Returns whether it was logged.
    pub(crate) fn note_failure(&self, kind: RequestKind, error: &str) -> bool {
        let mut failing = lock(&self.failing_kinds);
        let is_first = failing.is_empty();
        failing.insert(kind);
        if is_first {
            let url = self.storage.url();
            tracing::warn!(
                url,
                error,
                "the object store cannot be used; trying again, and training continues"
            );
        }
        is_first
    }

    /// Notes that the store has handled a request. Returns whether requests failed before and none fail now, which is logged.
    pub(crate) fn note_success(&self, kind: RequestKind) -> bool {
        let mut failing = lock(&self.failing_kinds);
        let has_failed = !failing.is_empty();
        // A write that succeeds shows that the store answers other requests, too.
        failing.retain(|failed| kind == RequestKind::Other && *failed == RequestKind::Write);
        let is_usable_again = has_failed && failing.is_empty();
        if is_usable_again {
            tracing::info!(url = self.storage.url(), "the object store can be used again");
        }
        is_usable_again
    }
}

#[cfg(test)]
mod tests;
