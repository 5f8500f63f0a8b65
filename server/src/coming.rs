//! How long jobs wait for checkpoints that other machines still upload.

use lockstep_protocol::job::JobId;
use std::{
    collections::{HashMap, HashSet},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// Since when each job waits for which checkpoints. An entry stays when its wait is over, until the job starts or none of its checkpoints
/// is on its way: a job for which slots were freed after a wait in vain must not begin to wait anew.
#[derive(Debug, Default)]
pub(crate) struct CheckpointWaits(Mutex<HashMap<JobId, HashMap<String, Instant>>>);

impl CheckpointWaits {
    fn lock(&self) -> MutexGuard<'_, HashMap<JobId, HashMap<String, Instant>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first of these checkpoints that the job has not waited for as long as `most`. The wait for all of them begins now, where it
    /// has not before.
    pub(crate) fn awaited(&self, job: &JobId, checkpoints: &[String], most: Duration) -> Option<usize> {
        if checkpoints.is_empty() {
            return None;
        }
        let mut coming = self.lock();
        let since = coming.entry(job.clone()).or_default();
        let now = Instant::now();
        for checkpoint in checkpoints {
            since.entry(checkpoint.clone()).or_insert(now);
        }
        checkpoints.iter().position(|checkpoint| since[checkpoint].elapsed() < most)
    }

    /// The job has started, or nothing of it is on its way.
    pub(crate) fn forget(&self, job: &JobId) {
        self.lock().remove(job);
    }

    /// Forgets jobs that do not wait any more.
    pub(crate) fn keep(&self, waiting: &[JobId]) {
        let mut coming = self.lock();
        if !coming.is_empty() {
            let waiting: HashSet<&JobId> = waiting.iter().collect();
            coming.retain(|job, _| waiting.contains(job));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_that_is_over_does_not_begin_anew_before_the_job_starts() {
        let (coming, job, none) = (CheckpointWaits::default(), JobId::generate(), Duration::ZERO);
        let long = Duration::from_secs(600);
        let newest = ["1-30".to_owned(), "1-20".to_owned()];
        assert_eq!(coming.awaited(&job, &[], long), None);
        assert_eq!(coming.awaited(&job, &newest, long), Some(0));
        assert_eq!(coming.awaited(&job, &newest, none), None, "for the older one no second wait");
        // Asked about again, also when its agent was away meanwhile.
        assert_eq!(coming.awaited(&job, &[], none), None);
        coming.keep(std::slice::from_ref(&job));
        let first = coming.lock()[&job]["1-30"];
        assert_eq!(coming.awaited(&job, &newest, none), None);
        assert_eq!(coming.lock()[&job]["1-30"], first);
        // What comes of a later attempt is another one.
        assert_eq!(coming.awaited(&job, &["2-40".to_owned()], long), Some(0));
        coming.keep(&[]);
        assert!(coming.lock().is_empty(), "what was cancelled is not kept");
    }
}
