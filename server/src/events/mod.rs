//! Publish/subscribe: passes stored changes to the readers of streams and to the other parts of the server.

pub(crate) mod hub;

use crate::{
    lifecycle,
    store::{Change, ChangedJob, JobRow, Result, Store},
    util::{histogram::Histogram, lock, remember},
};
use hub::Hub;
use lockstep_protocol::{
    Job, JobId,
    agent::{AttemptEvent, LogLine},
};
use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicI64, AtomicU64},
    },
};

/// Called with each change after it is stored. Must not block.
pub(crate) type Subscriber = Box<dyn Fn(&ChangedJob) + Send + Sync>;

/// Passes stored changes to subscribers.
pub(crate) struct Events {
    store: Arc<dyn Store>,
    /// The readers of streams.
    pub(crate) hub: Arc<Hub>,
    subscribers: Vec<Subscriber>,
    /// Lines that [`Events::log_once`] has written: job, attempt and topic.
    written_lines: Mutex<HashSet<(JobId, u32, &'static str)>>,
    /// Why reports of jobs cannot be stored now; `None` if they are stored.
    pub(crate) store_failure: Mutex<Option<String>>,
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
            written_lines: Mutex::default(),
            store_failure: Mutex::default(),
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

    /// Replaces the reason of a job that has slots, if its reports cannot be stored now.
    pub(crate) fn show_store_failure(&self, job: &mut Job) {
        if job.state.is_active()
            && let Some(failure) = &*lock(&self.store_failure)
        {
            job.reason = Some(format!(
                "the server cannot store what the job reports: {failure}. The job continues; the values shown are older than this failure. Repair \
                 the database, or free space on its disk"
            ));
            job.eta_secs = None;
        }
    }

    /// Writes a line into a job's log, unless a line about this topic was already written for the attempt.
    pub(crate) async fn log_once(&self, job: &JobId, attempt: u32, topic: &'static str, text: String) {
        if remember(&self.written_lines, (job.clone(), attempt, topic)) {
            self.log(job, text).await;
        }
    }

    /// Writes a line into a job's log.
    pub(crate) async fn log(&self, job: &JobId, text: String) {
        // Lines of rank 0 are numbered from 1. Number 0 marks a line of the server.
        let line = LogLine { number: 0, at: crate::now(), text };
        let event = AttemptEvent::Log { rank: 0, lines: vec![line] };
        let change = move |row: &mut JobRow| lifecycle::report(row, event.clone(), None, crate::now());
        if let Err(error) = self.change_job(job, Box::new(change)).await {
            tracing::warn!(%error, %job, "a line of a job's log could not be stored");
        }
    }
}
