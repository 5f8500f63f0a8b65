//! The place of each waiting job in the queue and the reason that it waits, as of the newest round of dispatch. A job's own `reason` may
//! say how its last attempt ended instead, which is more useful where only one is shown.

use crate::lifecycle;
use lockstep_protocol::{
    job::{Job, JobId, Waiting},
    reason::Reason,
};
use std::{
    collections::{BTreeMap, HashMap},
    sync::{Mutex, MutexGuard, PoisonError},
};
use tokio::sync::Notify;

/// By job. Not stored: the next round finds all of it again.
#[derive(Debug, Default)]
pub(crate) struct WaitReasons {
    jobs: Mutex<HashMap<JobId, Waiting>>,
    /// Reasons that are to be stored as events of their jobs, by job: the oldest jobs first.
    unstored: Mutex<BTreeMap<JobId, Reason>>,
    wake: Notify,
}

impl WaitReasons {
    fn lock(&self) -> MutexGuard<'_, HashMap<JobId, Waiting>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unstored(&self) -> MutexGuard<'_, BTreeMap<JobId, Reason>> {
        self.unstored.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes why a job waits; an event of the job is stored, too.
    pub(crate) fn set(&self, job: &JobId, reason: &Reason, is_event: bool) {
        if is_event {
            self.unstored().insert(job.clone(), reason.clone());
            self.wake.notify_one();
        }
        let mut known = self.lock();
        match known.get_mut(job) {
            Some(waiting) if waiting.reason.as_ref() == Some(reason) => {}
            Some(waiting) => waiting.reason = Some(reason.clone()),
            None => {
                known.insert(job.clone(), Waiting { place: 0, reason: Some(reason.clone()) });
            }
        }
    }

    /// Takes up to `most` jobs with the reasons to store; waits until there is one.
    pub(crate) async fn next_unstored(&self, most: usize) -> Vec<(JobId, Reason)> {
        loop {
            let next: Vec<_> = {
                let mut unstored = self.unstored();
                std::iter::from_fn(|| unstored.pop_first()).take(most).collect()
            };
            if !next.is_empty() {
                return next;
            }
            self.wake.notified().await;
        }
    }

    pub(crate) fn of(&self, job: &JobId) -> Option<Reason> {
        self.lock().get(job).and_then(|waiting| waiting.reason.clone())
    }

    /// Its place in the queue, from 1, as the newest round had it; none before its first round is over.
    pub(crate) fn place(&self, job: &JobId) -> Option<u64> {
        self.lock().get(job).map(|waiting| waiting.place).filter(|place| *place > 0)
    }

    /// Sorts jobs by their place in the newest round. Jobs that were queued since then keep their order, at the end.
    pub(crate) fn sort<T>(&self, jobs: &mut [T], id: impl Fn(&T) -> &JobId) {
        let known = self.lock();
        let place = |job: &T| known.get(id(job)).map(|waiting| waiting.place).filter(|place| *place > 0);
        // Stable.
        jobs.sort_by_cached_key(|job| place(job).unwrap_or(u64::MAX));
    }

    /// Sets the waiting jobs in the order of a round; others are forgotten.
    pub(crate) fn keep(&self, queue: Vec<JobId>) {
        let mut known = self.lock();
        let mut before = std::mem::take(&mut *known);
        let placed = queue.into_iter().zip(1..).map(|(job, place)| {
            let reason = before.remove(&job).and_then(|waiting| waiting.reason);
            (job, Waiting { place, reason })
        });
        *known = placed.collect();
    }

    /// Fills in a waiting job's place and current reason. The number of free slots changes without an event of the job, so the stored reason
    /// may be outdated.
    pub(crate) fn tell(&self, job: &mut Job) {
        if !job.state.is_waiting() {
            return;
        }
        job.queue = self.lock().get(&job.id).filter(|waiting| waiting.place > 0).cloned();
        let reason = job.queue.as_ref().and_then(|waiting| waiting.reason.clone());
        if let Some(reason) = reason.filter(|reason| lifecycle::tells_wait(job, reason)) {
            job.set_reason(Some(reason));
        }
    }
}
