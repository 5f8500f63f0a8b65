//! The queue in memory: jobs that wait for slots, as the store has them. The store stays the truth. Whoever changes a job says so
//! ([`WaitingJobs::note`]), and dispatch reads that job again; every few seconds it compares all of them with the store.

use crate::store::{JobRow, QueuePlace, Result, Store, WaitingVersion, quarantine};
use lockstep_protocol::job::{Job, JobId, JobState};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// How often all waiting jobs are compared with the store: what was stored without a word here (a connection may break at the end of a
/// transaction that was carried out) is found then.
const COMPARE_EVERY: Duration = Duration::from_secs(2);

/// Before whom a job comes: of the highest priority first, of equal ones the oldest.
type Place = (Reverse<i32>, i64, JobId);

/// All that wait.
#[derive(Debug, Default)]
pub(crate) struct WaitingJobs(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    rows: BTreeMap<Place, Arc<JobRow>>,
    places: HashMap<JobId, Place>,
    /// To be read again.
    changed: HashSet<JobId>,
    /// When all were compared with the store; none before the first time, and after an error.
    compared: Option<Instant>,
}

fn waits(state: JobState) -> bool {
    // One whose attempt was lost waits for its turn until somebody decides.
    state.is_waiting() || state == JobState::Lost
}

fn version(row: &JobRow) -> WaitingVersion {
    let job = &row.job;
    WaitingVersion { last_seq: job.last_seq, priority: job.spec.priority, project: job.project.clone() }
}

impl Known {
    fn remove(&mut self, id: &JobId) {
        if let Some(place) = self.places.remove(id) {
            self.rows.remove(&place);
        }
    }

    /// Takes in a job as it was just read.
    fn put(&mut self, row: JobRow) {
        let id = row.job.id.clone();
        self.remove(&id);
        if waits(row.job.state) {
            let place =
                (Reverse(row.job.spec.priority), row.job.created_at.as_millisecond(), row.job.id.clone());
            self.places.insert(id, place.clone());
            self.rows.insert(place, Arc::new(row));
        }
    }
}

impl WaitingJobs {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A job was changed, and that is stored.
    pub(crate) fn note(&self, job: &Job) {
        // Any that does not hold slots: one that is just being read may not be known yet. Jobs that run change all the time.
        let mut known = self.known();
        if !job.state.is_active() || known.places.contains_key(&job.id) {
            known.changed.insert(job.id.clone());
        }
    }

    /// A job has been given slots.
    pub(crate) fn remove(&self, id: &JobId) {
        self.known().remove(id);
    }

    /// The jobs that wait, in order, as the store has them by now.
    ///
    /// # Errors
    /// The store. What is not read yet is read by the next call.
    pub(crate) async fn read(&self, store: &dyn Store) -> Result<Vec<Arc<JobRow>>> {
        let (compared, changed) = {
            let mut known = self.known();
            (known.compared, std::mem::take(&mut known.changed))
        };
        let read = self.read_changed(store, compared, changed).await;
        let mut known = self.known();
        if let Err(error) = read {
            known.compared = None;
            return Err(error);
        }
        Ok(known.rows.values().cloned().collect())
    }

    async fn read_changed(
        &self,
        store: &dyn Store,
        compared: Option<Instant>,
        mut changed: HashSet<JobId>,
    ) -> Result<()> {
        if self.known().rows.is_empty() && compared.is_none() {
            let began = Instant::now();
            let mut from = Some(QueuePlace::default());
            while let Some(place) = from {
                let (page, next) = store.waiting(&place).await?;
                let mut known = self.known();
                page.into_iter().for_each(|row| known.put(row));
                from = next;
            }
            self.known().compared = Some(began);
        } else if compared.is_none_or(|at| at.elapsed() >= COMPARE_EVERY) {
            let began = Instant::now();
            let stored = store.waiting_versions().await?;
            let mut known = self.known();
            let is_new = |id: &JobId, of: &WaitingVersion| {
                let mine = known.places.get(id).and_then(|place| known.rows.get(place));
                mine.is_none_or(|row| version(row) != *of)
            };
            changed.extend(stored.iter().filter(|(id, of)| is_new(id, of)).map(|(id, _)| id.clone()));
            let gone = known.places.keys().filter(|id| !stored.contains_key(*id)).cloned();
            let gone: Vec<_> = gone.collect();
            gone.iter().for_each(|id| known.remove(id));
            known.compared = Some(began);
        }
        for id in changed {
            match store.job(&id).await {
                Ok(Some(row)) => self.known().put(row),
                Ok(None) => self.known().remove(&id),
                Err(error) if error.may_pass() => return Err(error),
                Err(error) => {
                    quarantine::log_once(&format!("job {id} cannot be dispatched: {error}"));
                    self.known().remove(&id);
                }
            }
        }
        Ok(())
    }
}
