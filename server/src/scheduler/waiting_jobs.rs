//! The queue in memory: a cache of the jobs that wait for slots. The store is the source of truth. Code that changes a job calls
//! [`JobQueue::note_change`], and the next reader of the queue reads the job again. Every few seconds [`JobQueue::mark_differences`]
//! compares all waiting jobs with the store. It finds changes that were stored but not noted, for example because the connection broke
//! after the commit.

use crate::{
    store::{JobRow, Result, Store, WaitingFingerprint},
    util::lock,
};
use lockstep_protocol::job::{Job, JobId, JobState};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, Mutex},
};

/// Number of jobs that are read at a time.
const READ_SIZE: usize = 1000;

/// The sort key of the queue: highest priority first, then the oldest job.
type SortKey = (Reverse<i32>, i64, JobId);

/// The queue in memory.
#[derive(Debug, Default)]
pub(crate) struct JobQueue {
    queue: Mutex<QueueState>,
    /// Held while jobs are read from the store.
    read_lock: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct QueueState {
    rows: BTreeMap<SortKey, Arc<JobRow>>,
    sort_keys: HashMap<JobId, SortKey>,
    /// Jobs to be read again.
    changed: HashSet<JobId>,
    /// Whether a task is reading from the store.
    is_reading: bool,
    /// Whether all waiting jobs have been read once, or are in `changed`.
    is_loaded: bool,
}

/// Jobs that are being read. If the read fails or its task is cancelled, dropping this value leaves the jobs to the next reader.
struct PendingRead<'a> {
    jobs: &'a JobQueue,
    changed: Vec<JobId>,
}

impl Drop for PendingRead<'_> {
    fn drop(&mut self) {
        let mut queue = lock(&self.jobs.queue);
        queue.is_reading = false;
        queue.changed.extend(std::mem::take(&mut self.changed));
    }
}

fn is_waiting(state: JobState) -> bool {
    // A lost job is restarted or fails next; until then it keeps its place.
    state.is_waiting() || state == JobState::Lost
}

fn fingerprint(row: &JobRow) -> WaitingFingerprint {
    let job = &row.job;
    WaitingFingerprint { last_seq: job.last_seq, priority: job.spec.priority, project: job.project.clone() }
}

impl QueueState {
    fn remove(&mut self, id: &JobId) {
        if let Some(key) = self.sort_keys.remove(id) {
            self.rows.remove(&key);
        }
    }

    /// Updates the queue with a job that was just read.
    fn put(&mut self, row: JobRow) {
        let id = row.job.id.clone();
        self.remove(&id);
        if is_waiting(row.job.state) {
            let key =
                (Reverse(row.job.spec.priority), row.job.created_at.as_millisecond(), row.job.id.clone());
            self.sort_keys.insert(id, key.clone());
            self.rows.insert(key, Arc::new(row));
        }
    }
}

impl JobQueue {
    /// Notes that a job was changed in the store.
    pub(crate) fn note_change(&self, job: &Job) {
        let mut queue = lock(&self.queue);
        // Running jobs change all the time, so only waiting jobs are noted. A read in progress may have read this job as waiting, although
        // `sort_keys` does not contain the job yet.
        let may_be_in_read = queue.is_reading && !job.state.is_active();
        if is_waiting(job.state) || queue.sort_keys.contains_key(&job.id) || may_be_in_read {
            queue.changed.insert(job.id.clone());
        }
    }

    /// Removes a job that has been given slots.
    pub(crate) fn remove(&self, id: &JobId) {
        lock(&self.queue).remove(id);
    }

    /// Reads changed jobs again, and returns the waiting jobs in order.
    ///
    /// # Errors
    /// Errors of the store. The next call then reads the same jobs again.
    pub(crate) async fn read(&self, store: &dyn Store) -> Result<Vec<Arc<JobRow>>> {
        let _guard = self.read_lock.lock().await;
        let is_loaded = lock(&self.queue).is_loaded;
        if !is_loaded {
            let waiting = store.waiting_fingerprints().await?;
            let mut queue = lock(&self.queue);
            queue.changed.extend(waiting.into_keys());
            queue.is_loaded = true;
        }
        let changed = {
            let mut queue = lock(&self.queue);
            queue.is_reading = true;
            queue.changed.drain().collect()
        };
        let mut pending = PendingRead { jobs: self, changed };
        for changed in pending.changed.chunks(READ_SIZE) {
            self.read_jobs(store, changed).await?;
        }
        pending.changed.clear();
        Ok(lock(&self.queue).rows.values().cloned().collect())
    }

    async fn read_jobs(&self, store: &dyn Store, changed: &[JobId]) -> Result<()> {
        // `jobs_by_id` leaves out jobs that were deleted or that this version of the program cannot read, so they leave the queue.
        let mut rows = store.jobs_by_id(changed).await?;
        let mut queue = lock(&self.queue);
        for id in changed {
            match rows.remove(id) {
                Some(row) => queue.put(row),
                None => queue.remove(id),
            }
        }
        Ok(())
    }

    /// Compares all waiting jobs with the store, and marks the jobs that differ as changed. Returns whether there are any.
    pub(crate) async fn mark_differences(&self, store: &dyn Store) -> Result<bool> {
        if !lock(&self.queue).is_loaded {
            return Ok(false);
        }
        let stored = store.waiting_fingerprints().await?;
        let mut queue = lock(&self.queue);
        let is_current = |(id, stored): &(&JobId, &WaitingFingerprint)| {
            let row = queue.sort_keys.get(*id).and_then(|key| queue.rows.get(key));
            row.is_some_and(|row| fingerprint(row) == **stored)
        };
        let changed = stored.iter().filter(|stored| !is_current(stored)).map(|(id, _)| id);
        let gone = queue.sort_keys.keys().filter(|id| !stored.contains_key(*id));
        let differ: Vec<_> = changed.chain(gone).cloned().collect();
        queue.changed.extend(differ.iter().cloned());
        Ok(!differ.is_empty())
    }
}
