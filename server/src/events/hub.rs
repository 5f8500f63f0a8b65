//! Publish/subscribe for live streams. For each watched job the hub keeps the newest events in memory, so that a live reader does not query
//! the store for each event. The store stays authoritative: a reader whose next event is not in memory reads the event from the store, so
//! slow readers miss nothing.

use crate::{
    store::{ChangedJob, EventRow},
    util::lock,
};
use lockstep_protocol::{
    job::{Job, JobId},
    stream::{Frame, Labels, Pace},
};
use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::sync::{Notify, broadcast, watch};

/// Maximum number of recent rows of events in memory for each watched job. Their total size is limited by [`MAX_RECENT_BYTES`].
const MAX_RECENT: usize = 512;
const MAX_RECENT_BYTES: usize = 4 << 20;
/// Interval between two updates of a job on the list, and between two updates of the job's pace on its stream.
pub(crate) const LIST_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum number of updates by which a reader of the list may lag. A reader that lags further is sent the whole list again.
const LIST_BACKLOG: usize = 1024;

/// The subscribers of each job and of the list of jobs.
#[derive(Debug)]
pub(crate) struct Hub {
    jobs: Mutex<HashMap<JobId, WatchedJob>>,
    list: broadcast::Sender<ListFrame>,
    /// Changes that are not yet sent to the list's readers.
    unpublished: Mutex<HashMap<JobId, Unpublished>>,
    wake: Notify,
    /// Held from reading a job's labels until they are published, so that the newest labels are published last.
    labels_lock: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
enum Unpublished {
    /// The newest state of the job.
    Changed(Box<Job>),
    /// The owner of a deleted job, and whether it was private.
    Deleted { owner: Option<String>, private: bool },
}

#[derive(Debug, Default)]
struct WatchedJob {
    /// Number of the newest event that was announced to readers.
    last_seq: watch::Sender<u64>,
    /// The newest events, without a gap.
    recent: VecDeque<Arc<EventRow>>,
    recent_bytes: usize,
    /// The pace as of the newest published event.
    pace: Option<Pace>,
    /// The labels, if they were changed since the first subscription.
    labels: watch::Sender<Option<Labels>>,
}

/// A frame of the list, with the facts that decide who may read the frame.
#[derive(Debug, Clone)]
pub(crate) struct ListFrame {
    pub(crate) text: Arc<str>,
    pub(crate) owner: Option<Arc<str>>,
    /// Whether only the owner and admins may read the frame.
    pub(crate) private: bool,
}

impl Hub {
    pub(crate) fn new() -> Self {
        Self {
            jobs: Mutex::default(),
            list: broadcast::channel(LIST_BACKLOG).0,
            unpublished: Mutex::default(),
            wake: Notify::new(),
            labels_lock: tokio::sync::Mutex::default(),
        }
    }

    /// Publishes stored events to subscribers. Changes of a job are published after their transactions, and not always in the order of the
    /// transactions. If a later change is published first, readers read the earlier change from the store.
    pub(crate) fn publish(&self, changed: &ChangedJob) {
        if let Some(last) = changed.events.last()
            && let Some(watched) = lock(&self.jobs).get_mut(&changed.job.id)
        {
            let newest = watched.recent.back().map(|e| e.seq);
            if newest.is_none_or(|seq| last.seq > seq) {
                // `recent` must not have a gap.
                if newest.is_some_and(|seq| changed.events.first().is_some_and(|e| e.first_seq() != seq + 1))
                {
                    watched.recent.clear();
                    watched.recent_bytes = 0;
                }
                watched.recent_bytes += changed.events.iter().map(EventRow::bytes).sum::<usize>();
                watched.recent.extend(changed.events.iter().cloned().map(Arc::new));
                while watched.recent.len() > MAX_RECENT || watched.recent_bytes > MAX_RECENT_BYTES {
                    let Some(oldest) = watched.recent.pop_front() else { break };
                    watched.recent_bytes -= oldest.bytes();
                }
                watched.pace = Some(Pace::from(&changed.job));
                watched.last_seq.send_replace(last.seq);
            }
        }
        self.queue_for_list(&changed.job, !changed.events.is_empty());
    }

    /// Queues a job's state for the list, unless a newer state is queued. Of two states with the same last event, the state after a change
    /// without new events, such as of labels, is newer.
    fn queue_for_list(&self, job: &Job, has_new_events: bool) {
        let mut unpublished = lock(&self.unpublished);
        let is_newer = match unpublished.get(&job.id) {
            Some(Unpublished::Changed(queued)) if has_new_events => queued.last_seq < job.last_seq,
            Some(Unpublished::Changed(queued)) => queued.last_seq <= job.last_seq,
            Some(Unpublished::Deleted { .. }) => false,
            None => true,
        };
        if is_newer {
            // Notes may be long, and no list shows them.
            let job = Job { notes: None, ..job.clone() };
            unpublished.insert(job.id.clone(), Unpublished::Changed(Box::new(job)));
            self.wake.notify_one();
        }
    }

    /// Reads a job with `read`, and publishes the job's labels to the list and the job's stream.
    pub(crate) async fn send_labels<E>(&self, read: impl Future<Output = Result<Job, E>>) -> Result<Job, E> {
        let _guard = self.labels_lock.lock().await;
        let job = read.await?;
        if let Some(watched) = lock(&self.jobs).get(&job.id) {
            watched.labels.send_replace(Some(Labels::from(&job)));
        }
        let has_new_events = false;
        self.queue_for_list(&job, has_new_events);
        Ok(job)
    }

    /// Notifies subscribers that events up to `job.last_seq` are stored. Readers read unpublished events from the store.
    pub(crate) fn catch_up(&self, job: &Job) {
        if let Some(watched) = lock(&self.jobs).get_mut(&job.id) {
            let newest = watched.recent.back().map(|e| e.seq);
            if newest.is_none_or(|seq| seq < job.last_seq) {
                watched.recent.clear();
                watched.recent_bytes = 0;
            }
            let has_advanced = watched.last_seq.send_if_modified(|last| {
                let is_behind = *last < job.last_seq;
                *last = job.last_seq.max(*last);
                is_behind
            });
            if has_advanced {
                watched.pace = Some(Pace::from(job));
            }
        }
    }

    /// Publishes the deletion of a job to the readers of the list who could see it, and ends the job's streams.
    pub(crate) fn publish_deletion(&self, job: Job) {
        lock(&self.jobs).remove(&job.id);
        let deleted = Unpublished::Deleted { owner: job.owner, private: job.spec.private };
        lock(&self.unpublished).insert(job.id, deleted);
        self.wake.notify_one();
    }

    /// Subscribes to a job. Subscribe before reading the store, so that no event is missed in between.
    pub(crate) fn subscribe(self: &Arc<Self>, id: &JobId) -> Subscription {
        let mut jobs = lock(&self.jobs);
        let watched = jobs.entry(id.clone()).or_default();
        let (last_seq, labels) = (watched.last_seq.subscribe(), watched.labels.subscribe());
        Subscription { hub: self.clone(), id: id.clone(), last_seq, labels }
    }

    /// Whether anybody reads a job's stream.
    pub(crate) fn is_watched(&self, id: &JobId) -> bool {
        lock(&self.jobs).contains_key(id)
    }

    pub(crate) fn subscribe_to_list(&self) -> broadcast::Receiver<ListFrame> {
        self.list.subscribe()
    }

    /// Sends changes to the list's readers, each job at most once in [`LIST_INTERVAL`]. Runs until dropped.
    pub(crate) async fn publish_list(&self) {
        loop {
            self.wake.notified().await;
            for (id, change) in std::mem::take(&mut *lock(&self.unpublished)) {
                let (owner, private, frame) = match change {
                    Unpublished::Changed(job) => (job.owner.clone(), job.spec.private, Frame::Job { job }),
                    Unpublished::Deleted { owner, private } => {
                        (owner, private, Frame::JobDeleted { id: id.to_string() })
                    }
                };
                let owner = owner.map(Arc::from);
                if let Ok(text) = serde_json::to_string(&frame) {
                    // Sending fails if there are no readers, which is no error.
                    let _ = self.list.send(ListFrame { text: text.into(), owner, private });
                }
            }
            tokio::time::sleep(LIST_INTERVAL).await;
        }
    }
}

/// An update for a reader of a job.
#[derive(Debug)]
pub(crate) enum JobUpdate {
    Events,
    Labels(Labels),
    Deleted,
}

/// A reader's subscription to a job.
#[derive(Debug)]
pub(crate) struct Subscription {
    hub: Arc<Hub>,
    id: JobId,
    last_seq: watch::Receiver<u64>,
    labels: watch::Receiver<Option<Labels>>,
}

impl Subscription {
    /// The rows with events after `seq`. `None` if there are none, or if the hub does not have all of them. The caller then reads the
    /// store.
    pub(crate) fn rows_after(&self, seq: u64) -> Option<Vec<Arc<EventRow>>> {
        let jobs = lock(&self.hub.jobs);
        let recent = &jobs.get(&self.id)?.recent;
        if recent.front()?.first_seq() > seq + 1 {
            return None;
        }
        let skip = recent.partition_point(|row| row.seq <= seq);
        (skip < recent.len()).then(|| recent.iter().skip(skip).cloned().collect())
    }

    /// The job's pace and progress. `None` if nothing was published since the first subscription.
    pub(crate) fn pace(&self) -> Option<Pace> {
        lock(&self.hub.jobs).get(&self.id)?.pace
    }

    /// Waits until there is an event after `seq`, or the job's labels have changed.
    pub(crate) async fn wait(&mut self, seq: u64) -> JobUpdate {
        tokio::select! {
            known = self.last_seq.wait_for(|last| *last > seq) => match known {
                Ok(_) => JobUpdate::Events,
                Err(_) => JobUpdate::Deleted,
            },
            changed = self.labels.changed() => match (changed, self.labels.borrow().clone()) {
                (Ok(()), Some(labels)) => JobUpdate::Labels(labels),
                (Ok(()), None) => JobUpdate::Events,
                (Err(_), _) => JobUpdate::Deleted,
            },
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut jobs = lock(&self.hub.jobs);
        // The count includes this subscription.
        if jobs.get(&self.id).is_some_and(|w| w.last_seq.receiver_count() <= 1) {
            jobs.remove(&self.id);
        }
    }
}
