//! Publish/subscribe: passes stored changes to the readers of streams and to the other parts of the server.

pub(crate) mod hub;
mod job_log;

use crate::{
    store::{Change, ChangedJob, Result, Store},
    util::histogram::Histogram,
};
use hub::Hub;
use job_log::WrittenLines;
use lockstep_protocol::JobId;
use std::sync::{
    Arc,
    atomic::{AtomicI64, AtomicU64},
};

/// Called with each change after it is stored. Must not block.
pub(crate) type Subscriber = Box<dyn Fn(&ChangedJob) + Send + Sync>;

/// Passes stored changes to subscribers.
pub(crate) struct Events {
    store: Arc<dyn Store>,
    /// The readers of streams.
    pub(crate) hub: Arc<Hub>,
    subscribers: Vec<Subscriber>,
    written_lines: WrittenLines,
    /// Number of events stored from reports since the server's start.
    pub(crate) stored_events: AtomicU64,
    /// Number of steps of jobs in these reports.
    pub(crate) reported_steps: AtomicU64,
    /// Time from the writing of a log line by a rank until the line is stored, for the first line of each report.
    pub(crate) ingest_lag: Histogram,
    /// Number of open streams.
    pub(crate) stream_clients: AtomicI64,
}

impl Events {
    /// Creates the events. `subscribers` are called in this order, and must include the hub.
    pub(crate) fn new(store: Arc<dyn Store>, hub: Arc<Hub>, subscribers: Vec<Subscriber>) -> Self {
        Self {
            store,
            hub,
            subscribers,
            written_lines: WrittenLines::default(),
            stored_events: AtomicU64::new(0),
            reported_steps: AtomicU64::new(0),
            ingest_lag: Histogram::default(),
            stream_clients: AtomicI64::new(0),
        }
    }

    /// Changes a job in the store, then publishes the change.
    ///
    /// # Errors
    /// The job does not exist, the change is refused, or a store error.
    pub(crate) async fn change_job(&self, id: &JobId, change: Change) -> Result<ChangedJob> {
        let changed = self.store.change_job(id, change).await?;
        self.publish(&changed);
        Ok(changed)
    }

    /// Passes a stored change to all subscribers.
    pub(crate) fn publish(&self, changed: &ChangedJob) {
        self.subscribers.iter().for_each(|subscriber| subscriber(changed));
    }
}
