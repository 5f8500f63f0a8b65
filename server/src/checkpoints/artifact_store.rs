//! The object store of this server, and what is done with it now: which checkpoints wait for the mover, which are fetched from there, and
//! what it fails at. The database has what is there.

mod confirm;

use crate::checkpoints::object_storage::ObjectStorage;
use lockstep_protocol::{JobId, backoff::Backoff};
use serde::Serialize;
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fmt,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::sync::{Notify, OnceCell, Semaphore, watch};
use utoipa::ToSchema;

/// A fetch that has failed is not tried again sooner: after its first failure, and at most. Each failure doubles it.
const FETCH_AGAIN: Backoff = Backoff::new(Duration::from_secs(3), Duration::from_secs(60));
/// Checkpoints that are fetched at a time; others wait.
const FETCHED_AT_ONCE: usize = 2;
/// Copies on the disk that are checked at a time, each of which reads every byte: after an outage hundreds of jobs restart at once, and the
/// first of them is not to wait for the disk until all are checked.
const CHECKED_AT_ONCE: usize = 2;

/// Copies on the disk of which it is remembered that they were whole. Beyond, one may be checked a second time.
const CHECKED: usize = 4096;

/// Where a checkpoint is on its way into the object store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum StoredState {
    /// It is uploaded, or waits for that.
    Uploading,
    /// It is there.
    Stored,
}

impl StoredState {
    /// As it is in JSON.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Uploading => "uploading",
            Self::Stored => "stored",
        }
    }
}

/// Why a checkpoint could not be fetched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NotFetched {
    /// The store does not have it whole.
    Missing,
    /// What came is not what was written.
    Damaged(String),
    /// The store does not answer, or refuses.
    Away(String),
    /// This server's disk.
    Disk(String),
}

impl fmt::Display for NotFetched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("the store does not have it whole"),
            Self::Damaged(how) => write!(f, "it is damaged there: {how}"),
            Self::Away(why) => write!(f, "the store cannot be asked: {why}"),
            Self::Disk(why) => write!(f, "the server's disk does not take it: {why}"),
        }
    }
}

/// How a fetch has ended; `None` while it runs.
pub(crate) type Fetched = Option<Result<(), NotFetched>>;

/// A fetch that runs or has ended.
#[derive(Debug, Clone)]
pub(crate) struct Fetch {
    pub(crate) outcome: watch::Receiver<Fetched>,
    since: Instant,
    /// Failures in a row.
    failures: u32,
}

/// The store, and what is done with it.
#[derive(Debug)]
pub(crate) struct ArtifactStore {
    pub(crate) storage: ObjectStorage,
    /// Whether a store may be taken over from the server that a backup was made of.
    adopts: bool,
    /// Set once a check has shown that the store can be used.
    usable: OnceCell<()>,
    /// The identity that its `LOCKSTEP.json` must have, once that is known.
    marker: OnceCell<String>,
    queue: Mutex<Queue>,
    fetches: Mutex<HashMap<String, Fetch>>,
    /// Copies on the disk that were found whole: the job that starts from it, that job's newest attempt then, and the checkpoint.
    checked: Mutex<HashSet<(JobId, u32, String)>>,
    /// A permit for each checkpoint that is being fetched.
    pub(crate) fetching: Semaphore,
    /// A permit for each copy on the disk that is being checked.
    pub(crate) checking: Semaphore,
    /// Notified when a checkpoint waits for the mover.
    pub(crate) waiting: Notify,
    failing: Mutex<Failing>,
}

/// What is asked of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    /// To take something, which one that is full cannot while it does everything else.
    Write,
    /// Anything else.
    Other,
}

/// What the store has failed at, and not done since.
#[derive(Debug, Default)]
struct Failing {
    write: bool,
    other: bool,
}

impl Failing {
    /// Notes a failure; whether it is the first.
    fn fails(&mut self, what: Asked) -> bool {
        let is_first = !self.write && !self.other;
        match what {
            Asked::Write => self.write = true,
            Asked::Other => self.other = true,
        }
        is_first
    }

    /// Notes that something was done; whether nothing fails any more, as it did before.
    fn works(&mut self, what: Asked) -> bool {
        let failed = self.write || self.other;
        self.other = false;
        if what == Asked::Write {
            self.write = false;
        }
        failed && !self.write
    }
}

/// The checkpoints that wait for the mover: those that were written, and those that were deleted.
#[derive(Debug, Default)]
struct Queue {
    /// The one that was noted last comes first, since a job would continue from that one.
    order: BTreeMap<i64, String>,
    places: HashMap<String, i64>,
    /// Those that the mover works on, or tries again after a pause.
    busy: HashSet<String>,
}

impl Queue {
    /// `place`: the largest comes first.
    fn enter(&mut self, id: &str, place: i64) {
        self.order.insert(place, id.to_owned());
        self.places.insert(id.to_owned(), place);
    }

    fn leave(&mut self, id: &str) {
        if let Some(place) = self.places.remove(id) {
            self.order.remove(&place);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ArtifactStore {
    /// Nothing is asked of it yet.
    pub(crate) fn new(storage: ObjectStorage, adopts: bool) -> Self {
        Self {
            storage,
            adopts,
            usable: OnceCell::new(),
            marker: OnceCell::new(),
            queue: Mutex::default(),
            fetches: Mutex::default(),
            checked: Mutex::default(),
            fetching: Semaphore::new(FETCHED_AT_ONCE),
            checking: Semaphore::new(CHECKED_AT_ONCE),
            waiting: Notify::new(),
            failing: Mutex::default(),
        }
    }

    /// Whether a checkpoint is being uploaded, or waits for that. Only a deleted one waits for its deletion.
    pub(crate) fn is_uploading(&self, id: &str) -> bool {
        let queue = lock(&self.queue);
        queue.places.contains_key(id) || queue.busy.contains(id)
    }

    /// A checkpoint is new on the disk, or another than before, or was deleted.
    pub(crate) fn note(&self, id: &str) {
        {
            let mut queue = lock(&self.queue);
            queue.leave(id);
            let place = queue.order.last_key_value().map_or(0, |(last, _)| last + 1);
            queue.enter(id, place);
        }
        self.waiting.notify_waiters();
    }

    /// It could not be moved: later, after all others, so that one that never can be holds up none.
    pub(crate) fn note_again(&self, id: &str) {
        let mut queue = lock(&self.queue);
        if !queue.places.contains_key(id) {
            let place = queue.order.first_key_value().map_or(0, |(first, _)| first - 1);
            queue.enter(id, place);
        }
    }

    /// The next one to move, which is this caller's until [`ArtifactStore::done`].
    pub(crate) fn take(&self) -> Option<String> {
        let mut queue = lock(&self.queue);
        let id = queue.order.values().rev().find(|id| !queue.busy.contains(*id))?.clone();
        queue.leave(&id);
        queue.busy.insert(id.clone());
        Some(id)
    }

    /// What was taken is no longer being worked on.
    pub(crate) fn done(&self, id: &str) {
        lock(&self.queue).busy.remove(id);
        self.waiting.notify_waiters();
    }

    /// The database has nothing of it any more.
    pub(crate) fn forget(&self, id: &str) {
        lock(&self.fetches).remove(id);
    }

    /// The fetch of a checkpoint that runs or has just failed, or a new one, which the caller carries out and ends with the sender.
    pub(crate) fn fetch(&self, id: &str) -> (Fetch, Option<watch::Sender<Fetched>>) {
        let mut fetches = lock(&self.fetches);
        let failures = fetches.get(id).map_or(0, |fetch| fetch.failures);
        if let Some(fetch) = fetches.get(id) {
            let (ended, is_lost) = (fetch.outcome.borrow().clone(), fetch.outcome.has_changed().is_err());
            let counts = match ended {
                None => !is_lost,
                Some(Ok(())) => false,
                Some(Err(_)) => fetch.since.elapsed() < FETCH_AGAIN.after(fetch.failures),
            };
            if counts {
                return (fetch.clone(), None);
            }
        }
        let (sender, outcome) = watch::channel(None);
        let fetch = Fetch { outcome, since: Instant::now(), failures };
        fetches.insert(id.to_owned(), fetch.clone());
        (fetch, Some(sender))
    }

    /// Whether a copy on the disk was found whole for a job's next attempt.
    pub(crate) fn is_checked(&self, id: &str, job: &JobId, attempt: u32) -> bool {
        lock(&self.checked).contains(&(job.clone(), attempt, id.to_owned()))
    }

    /// Notes that a copy was found whole, for the attempt that follows `attempt`.
    pub(crate) fn checked(&self, id: &str, (job, attempt): (JobId, u32)) {
        let mut checked = lock(&self.checked);
        if checked.len() >= CHECKED {
            checked.clear();
        }
        checked.insert((job, attempt, id.to_owned()));
    }

    /// Ends a fetch: those who wait for it get the outcome, and a failure is remembered for a moment.
    pub(crate) fn fetched(&self, id: &str, sender: &watch::Sender<Fetched>, outcome: Result<(), NotFetched>) {
        if let Some(fetch) = lock(&self.fetches).get_mut(id) {
            fetch.since = Instant::now();
            fetch.failures = if outcome.is_ok() { 0 } else { fetch.failures.saturating_add(1) };
        }
        sender.send_replace(Some(outcome));
    }

    /// The store fails at `what`, for the reason `error`. Logged once until it works again.
    pub(crate) fn is_away(&self, what: Asked, error: &str) {
        if lock(&self.failing).fails(what) {
            let url = self.storage.url();
            tracing::warn!(
                url,
                error,
                "the object store cannot be used; trying again until it can, and training continues"
            );
        }
    }

    /// The store has done this.
    pub(crate) fn answers(&self, what: Asked) {
        if lock(&self.failing).works(what) {
            tracing::info!(url = self.storage.url(), "the object store can be used again");
        }
    }
}

#[cfg(test)]
mod tests;
