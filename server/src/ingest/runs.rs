//! Runs from elsewhere: what their programs tell is stored, then published. A run whose program is silent for too long has failed, until
//! the program sends again.

use crate::{
    events::Events,
    lifecycle::external::{self, RunChange},
    store::{Appended, Created, EventRow, JobRow, NewJob, Result, RunRecords, Store, StoreError},
};
use lockstep_protocol::{
    job::{Job, JobId, JobState},
    metric::MetricColumn,
};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering},
    time::{Duration, Instant},
};

/// The longest pause between two looks at runs that may be silent; a quarter of the silence where that is shorter.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Runs from elsewhere.
pub(crate) struct Runs {
    store: Arc<dyn Store>,
    events: Arc<Events>,
    /// A run whose program sends nothing for this long has failed.
    silence: Duration,
    /// When each run was last heard of; after a start, since that start.
    heard: Mutex<HashMap<JobId, Instant>>,
}

/// What a request to log brought.
pub(crate) enum Logged {
    /// So many records of the run are stored.
    Stored(u64),
    /// Records are missing; the number of the next.
    Gap(u64),
}

impl Runs {
    pub(crate) fn new(store: Arc<dyn Store>, events: Arc<Events>, silence: Duration) -> Self {
        Self { store, events, silence, heard: Mutex::default() }
    }

    fn heard(&self) -> MutexGuard<'_, HashMap<JobId, Instant>> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, id: &JobId) {
        self.heard().insert(id.clone(), Instant::now());
    }

    /// Makes a run. `None`: there is one with its id, or rows of a deleted one.
    ///
    /// # Errors
    /// The store's.
    pub(crate) async fn create(&self, new: NewJob) -> Result<Option<Job>> {
        let id = new.id.clone();
        match self.store.create_job(new).await {
            Ok(Created::New(changed)) => {
                self.note(&id);
                self.events.publish(&changed);
                Ok(Some(changed.job))
            }
            Ok(Created::Before(_)) | Err(StoreError::Rejected(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Takes what a program tells of its run, apart from points.
    ///
    /// # Errors
    /// The store's; [`StoreError::Refused`]: what does not fit the run.
    pub(crate) async fn tell(&self, id: &JobId, change: RunChange) -> Result<Job> {
        self.note(id);
        let at = crate::now();
        let changed =
            self.events.change_job(id, Box::new(move |row| external::told(row, &change, at))).await?;
        Ok(changed.job)
    }

    /// Takes a run's records: `columns_of` has the columns of all but so many of the first ones. `first` is as in [`RunRecords`].
    ///
    /// # Errors
    /// As [`Runs::tell`].
    pub(crate) async fn log(
        &self,
        records: RunRecords,
        columns_of: impl Fn(u64) -> Vec<MetricColumn> + Send + Sync + 'static,
        change: RunChange,
    ) -> Result<Logged> {
        self.note(&records.job);
        let at = crate::now();
        let change = move |row: &mut JobRow, known: u64| {
            external::told(row, &RunChange { columns: columns_of(known), ..change.clone() }, at)
        };
        match self.store.append_records(&records, Box::new(change)).await? {
            Appended::Gap { expected } => Ok(Logged::Gap(expected)),
            Appended::Stored { records, changed } => {
                let events = changed.events.iter().map(EventRow::count).sum();
                self.events.stored.fetch_add(events, Ordering::Relaxed);
                self.events.publish(&changed);
                Ok(Logged::Stored(records))
            }
        }
    }

    /// Ends runs that are silent, until dropped.
    pub(crate) async fn watch(&self) {
        loop {
            tokio::time::sleep((self.silence / 4).clamp(Duration::from_millis(20), LONGEST_PAUSE)).await;
            let mut jobs = match self.store.unfinished().await {
                Ok(jobs) => jobs,
                Err(error) => {
                    tracing::warn!(%error, "runs that are silent stay as they are for now");
                    continue;
                }
            };
            jobs.retain(|job| job.external.is_some() && job.state == JobState::Running);
            for id in self.silent(jobs.into_iter().map(|job| job.id).collect()) {
                let (secs, at) = (self.silence.as_secs_f64(), crate::now());
                let end = Box::new(move |row: &mut JobRow| external::silent(row, secs, at));
                match self.events.change_job(&id, end).await {
                    Ok(_) | Err(StoreError::NotFound(_)) => {}
                    Err(error) => {
                        tracing::warn!(%error, job = %id, "a run that is silent stays as it is for now")
                    }
                }
            }
        }
    }

    /// Those of the running runs that have been silent for too long. The others are forgotten.
    fn silent(&self, running: Vec<JobId>) -> Vec<JobId> {
        let mut heard = self.heard();
        let now = Instant::now();
        let known = running.iter().map(|id| (id.clone(), heard.get(id).copied().unwrap_or(now))).collect();
        *heard = known;
        running.into_iter().filter(|id| heard.get(id).is_some_and(|at| now - *at > self.silence)).collect()
    }
}
