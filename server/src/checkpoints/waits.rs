//! The times for which jobs have waited for checkpoints that other machines are uploading.

use crate::util::lock;
use lockstep_protocol::{job::JobId, reason::Reason};
use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

/// The reason why a job waits.
#[derive(Debug, Clone)]
pub(crate) struct Wait {
    pub(crate) why: Arc<Reason>,
    /// Whether slots are kept for the job while it waits.
    pub(crate) keeps_slots: bool,
}

/// For each job, the checkpoints for which it waits and the beginning of each wait. An entry stays after its wait has timed out, until the
/// job starts or none of its checkpoints is being uploaded. So a job that waits for slots afterwards does not wait for the checkpoint a
/// second time.
#[derive(Debug, Default)]
pub(crate) struct CheckpointWaits(Mutex<HashMap<JobId, HashMap<String, Instant>>>);

impl CheckpointWaits {
    /// The index of the first of these checkpoints for which the job has waited less than `limit`. Starts the wait for checkpoints that are
    /// new.
    pub(crate) fn first_awaited(
        &self,
        job: &JobId,
        checkpoints: &[String],
        limit: Duration,
    ) -> Option<usize> {
        if checkpoints.is_empty() {
            return None;
        }
        let mut waits = lock(&self.0);
        let since = waits.entry(job.clone()).or_default();
        let now = Instant::now();
        for checkpoint in checkpoints {
            since.entry(checkpoint.clone()).or_insert(now);
        }
        checkpoints.iter().position(|checkpoint| since[checkpoint].elapsed() < limit)
    }

    /// Forgets a job that has started, or whose checkpoints are not being uploaded.
    pub(crate) fn forget(&self, job: &JobId) {
        lock(&self.0).remove(job);
    }

    /// Forgets all jobs except those that still wait.
    pub(crate) fn retain(&self, waiting: &HashSet<&JobId>) {
        lock(&self.0).retain(|job, _| waiting.contains(job));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_that_has_ended_is_not_repeated_before_the_job_starts() {
        let (waits, job, zero) = (CheckpointWaits::default(), JobId::generate(), Duration::ZERO);
        let long = Duration::from_secs(600);
        let newest = ["1-30".to_owned(), "1-20".to_owned()];
        assert_eq!(waits.first_awaited(&job, &[], long), None);
        assert_eq!(waits.first_awaited(&job, &newest, long), Some(0));
        // There is no second wait for the older checkpoint.
        assert_eq!(waits.first_awaited(&job, &newest, zero), None);
        // The wait continues when the job is checked again, also if its agent was offline meanwhile.
        assert_eq!(waits.first_awaited(&job, &[], zero), None);
        waits.retain(&HashSet::from([&job]));
        let first = lock(&waits.0)[&job]["1-30"];
        assert_eq!(waits.first_awaited(&job, &newest, zero), None);
        assert_eq!(lock(&waits.0)[&job]["1-30"], first);
        // A checkpoint of a later attempt is waited for again.
        assert_eq!(waits.first_awaited(&job, &["2-40".to_owned()], long), Some(0));
        waits.retain(&HashSet::new());
        assert!(lock(&waits.0).is_empty(), "waits of cancelled jobs are removed");
    }
}
