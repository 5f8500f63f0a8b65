//! Publish and subscribe: what is stored reaches the readers of streams and the other parts of the server.

pub(crate) mod hub;
mod job_log;

use crate::{
    store::{Change, Changed, Result, Store},
    util::histogram::Histogram,
};
use hub::Hub;
use job_log::WrittenLines;
use lockstep_protocol::JobId;
use std::sync::{
    Arc,
    atomic::{AtomicI64, AtomicU64},
};

/// Is called with each change once it is stored. It must return at once.
pub(crate) type Subscriber = Box<dyn Fn(&Changed) + Send + Sync>;

/// Stored changes on their way to those who follow them.
pub(crate) struct Events {
    store: Arc<dyn Store>,
    /// Feeds the streams.
    pub(crate) hub: Arc<Hub>,
    subscribers: Vec<Subscriber>,
    written_lines: WrittenLines,
    /// Events that reports of ranks have brought since the start.
    pub(crate) stored: AtomicU64,
    /// Steps of jobs that these reports have brought.
    pub(crate) steps: AtomicU64,
    /// From a rank's log line to the end of the transaction that stores it: of each report, its first line.
    pub(crate) ingest_lag: Histogram,
    /// Open streams of dashboards.
    pub(crate) stream_clients: AtomicI64,
}

impl Events {
    /// `subscribers` are called in this order. The hub must be among them.
    pub(crate) fn new(store: Arc<dyn Store>, hub: Arc<Hub>, subscribers: Vec<Subscriber>) -> Self {
        Self {
            store,
            hub,
            subscribers,
            written_lines: WrittenLines::default(),
            stored: AtomicU64::new(0),
            steps: AtomicU64::new(0),
            ingest_lag: Histogram::default(),
            stream_clients: AtomicI64::new(0),
        }
    }

    /// Changes a job in the store, then publishes the change.
    ///
    /// # Errors
    /// There is no such job, the change is refused, or the store's.
    pub(crate) async fn change_job(&self, id: &JobId, change: Change) -> Result<Changed> {
        let changed = self.store.change_job(id, change).await?;
        self.publish(&changed);
        Ok(changed)
    }

    /// Publishes a stored change to all who follow it.
    pub(crate) fn publish(&self, changed: &Changed) {
        self.subscribers.iter().for_each(|subscriber| subscriber(changed));
    }
}
