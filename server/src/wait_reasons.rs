//! Why each waiting job waits, as the newest round of dispatch found it. A job's own reason may say how its last attempt ended
//! instead, which is worth more to whoever reads only one of them.

use lockstep_protocol::{job::JobId, reason::Reason};
use std::{
    collections::{HashMap, HashSet},
    sync::{Mutex, PoisonError},
};

/// By job; nothing is stored, as the next round finds it again.
#[derive(Debug, Default)]
pub(crate) struct WaitReasons(Mutex<HashMap<JobId, Reason>>);

impl WaitReasons {
    pub(crate) fn set(&self, job: &JobId, reason: Reason) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(job.clone(), reason);
    }

    pub(crate) fn of(&self, job: &JobId) -> Option<Reason> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(job).cloned()
    }

    /// Forgets jobs that do not wait any more.
    pub(crate) fn keep(&self, waiting: &HashSet<JobId>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).retain(|job, _| waiting.contains(job));
    }
}
