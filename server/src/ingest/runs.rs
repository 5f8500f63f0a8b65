//! Runs from elsewhere: reports of their programs are stored, then published. A run whose program is silent for too long becomes failed,
//! until the program reports again.

use crate::{
    events::Events,
    lifecycle::external::{self, RunChange},
    store::{AppendResult, CreateResult, EventRow, JobRow, NewJob, Result, RunRecords, Store, StoreError},
    util::lock,
};
use axum::body::Body;
use futures_util::StreamExt;
use lockstep_protocol::{
    job::{Job, JobId, JobState},
    metric::MetricColumn,
};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, atomic::Ordering},
    time::{Duration, Instant},
};

/// Maximum interval between two checks for silent runs. The interval is a quarter of the allowed silence, if that is shorter.
const MAX_CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// Runs from elsewhere.
pub(crate) struct Runs {
    store: Arc<dyn Store>,
    events: Arc<Events>,
    /// Maximum time without a request of a run's program. A run that is silent for longer becomes failed.
    max_silence: Duration,
    /// The time of the last request about each run, or of the first check after the server's start.
    last_request_at: Mutex<HashMap<JobId, Instant>>,
}

impl Runs {
    pub(crate) fn new(store: Arc<dyn Store>, events: Arc<Events>, max_silence: Duration) -> Self {
        Self { store, events, max_silence, last_request_at: Mutex::default() }
    }

    fn note_request(&self, id: &JobId) {
        lock(&self.last_request_at).insert(id.clone(), Instant::now());
    }

    /// The body of an upload, each part of which counts as a sign of life of the run.
    pub(crate) fn observe_body(self: &Arc<Self>, id: &JobId, body: Body) -> Body {
        let (runs, id) = (self.clone(), id.clone());
        Body::from_stream(body.into_data_stream().inspect(move |_| runs.note_request(&id)))
    }

    /// Creates a run. Returns `None` if a run has the same id, or if rows of a deleted run with this id are left.
    pub(crate) async fn create(&self, new: NewJob) -> Result<Option<Job>> {
        let id = new.id.clone();
        match self.store.create_job(new).await {
            Ok(CreateResult::New(changed)) => {
                self.note_request(&id);
                self.events.publish(&changed);
                Ok(Some(changed.job))
            }
            Ok(CreateResult::Existing(_)) | Err(StoreError::Rejected(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Applies a change that a program reports about its run, without points.
    ///
    /// # Errors
    /// [`StoreError::Refused`] if the change does not fit the run, or another store error.
    pub(crate) async fn apply_change(&self, id: &JobId, change: RunChange) -> Result<Job> {
        self.note_request(id);
        let at = crate::now();
        let changed =
            self.events.change_job(id, Box::new(move |row| external::apply_change(row, &change, at))).await?;
        Ok(changed.job)
    }

    /// Stores records of a run. `columns_of(n)` returns the columns of all records except the first `n`, which are stored already.
    pub(crate) async fn append_records(
        &self,
        records: RunRecords,
        columns_of: impl Fn(u64) -> Vec<MetricColumn> + Send + Sync + 'static,
        change: RunChange,
    ) -> Result<AppendResult> {
        self.note_request(&records.job);
        let at = crate::now();
        let change = move |row: &mut JobRow, stored_count: u64| {
            external::apply_change(
                row,
                &RunChange { columns: columns_of(stored_count), ..change.clone() },
                at,
            )
        };
        let appended = self.store.append_records(&records, Box::new(change)).await?;
        if let AppendResult::Stored { changed, .. } = &appended {
            let events = changed.events.iter().map(EventRow::count).sum();
            self.events.stored_events.fetch_add(events, Ordering::Relaxed);
            self.events.publish(changed);
        }
        Ok(appended)
    }

    /// Fails runs whose programs are silent. Runs until dropped.
    pub(crate) async fn watch(&self) {
        loop {
            tokio::time::sleep((self.max_silence / 4).clamp(Duration::from_millis(20), MAX_CHECK_INTERVAL))
                .await;
            let mut jobs = match self.store.unfinished_jobs().await {
                Ok(jobs) => jobs,
                Err(error) => {
                    tracing::warn!(%error, "silent runs cannot be ended now; trying again");
                    continue;
                }
            };
            jobs.retain(|job| job.external.is_some() && job.state == JobState::Running);
            for id in self.find_silent(jobs.into_iter().map(|job| job.id).collect()) {
                let (secs, at) = (self.max_silence.as_secs_f64(), crate::now());
                let end = Box::new(move |row: &mut JobRow| external::fail_silent(row, secs, at));
                match self.events.change_job(&id, end).await {
                    Ok(_) | Err(StoreError::NotFound(_)) => {}
                    Err(error) => {
                        tracing::warn!(%error, job = %id, "a silent run cannot be ended now; trying again")
                    }
                }
            }
        }
    }

    /// Returns the running runs that have been silent for too long. Forgets runs that are not running.
    fn find_silent(&self, running: Vec<JobId>) -> Vec<JobId> {
        let mut last_request_at = lock(&self.last_request_at);
        let now = Instant::now();
        let known =
            running.iter().map(|id| (id.clone(), last_request_at.get(id).copied().unwrap_or(now))).collect();
        *last_request_at = known;
        running
            .into_iter()
            .filter(|id| last_request_at.get(id).is_some_and(|at| now - *at > self.max_silence))
            .collect()
    }
}
