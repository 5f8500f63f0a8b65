//! Why each waiting job waits, as the newest round of dispatch found it. A job's own reason may say how its last attempt ended
//! instead, which is worth more to whoever reads only one of them.

use lockstep_protocol::{job::JobId, reason::Reason};
use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// By job; nothing is stored, as the next round finds it again.
#[derive(Debug, Default)]
pub(crate) struct WaitReasons(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    reasons: HashMap<JobId, Reason>,
    /// Their places in the queue, from 1, where jobs take turns.
    places: HashMap<JobId, u64>,
}

impl WaitReasons {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set(&self, job: &JobId, reason: Reason) {
        self.lock().reasons.insert(job.clone(), reason);
    }

    pub(crate) fn of(&self, job: &JobId) -> Option<Reason> {
        self.lock().reasons.get(job).cloned()
    }

    /// Its place in the queue, from 1, as the newest round had it; none where jobs do not take turns, and each goes by its age.
    pub(crate) fn place(&self, job: &JobId) -> Option<u64> {
        self.lock().places.get(job).copied()
    }

    /// Forgets jobs that are not among those which wait, in the order in which the round looked at them.
    pub(crate) fn keep(&self, waiting: Vec<JobId>, in_turns: bool) {
        let places: HashMap<JobId, u64> = waiting.into_iter().zip(1..).collect();
        let mut known = self.lock();
        known.reasons.retain(|job, _| places.contains_key(job));
        known.places = if in_turns { places } else { HashMap::new() };
    }
}
