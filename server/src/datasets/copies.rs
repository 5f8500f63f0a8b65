//! Progress of machines that copy a job's dataset, as lines of the job's log: a line for each tenth, and a line each time the copy starts
//! again because the dataset has changed.

use crate::util::lock;
use lockstep_protocol::JobId;
use std::{collections::HashMap, sync::Mutex};

/// Maximum number of copies that are remembered. With more copies, a line may be logged twice.
const MAX_REMEMBERED: usize = 4096;

/// The number of tenths that was logged last, by job, attempt and agent.
#[derive(Debug, Default)]
pub(crate) struct CopyProgress(Mutex<HashMap<(JobId, u32, String), u64>>);

impl CopyProgress {
    /// The number of tenths to log, 0 to 10, for an agent that has copied `copied` of `total` bytes. `None` if nothing is to be logged:
    /// there is no progress, and the agent does not report that the copy starts again (`is_restart`).
    pub(crate) fn note_progress(
        &self,
        (job, attempt, agent): (&JobId, u32, &str),
        (copied, total): (u64, u64),
        is_restart: bool,
    ) -> Option<u64> {
        let tenths = copied.saturating_mul(10).checked_div(total).unwrap_or(10).min(10);
        let mut progress = lock(&self.0);
        let key = (job.clone(), attempt, agent.to_owned());
        if progress.len() >= MAX_REMEMBERED && !progress.contains_key(&key) {
            progress.clear();
        }
        if !is_restart && progress.get(&key).is_some_and(|before| *before >= tenths) {
            return None;
        }
        progress.insert(key, tenths);
        Some(tenths)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tenth_is_reported_once_per_machine() {
        let (progress, job) = (CopyProgress::default(), JobId::generate());
        let note = |agent: &str, copied| progress.note_progress((&job, 1, agent), (copied, 100), false);
        assert_eq!(note("a", 0), Some(0));
        assert_eq!(note("a", 9), None);
        assert_eq!(note("b", 9), Some(0));
        assert_eq!(note("a", 30), Some(3));
        assert_eq!(note("a", 39), None);
        assert_eq!(note("a", 200), Some(10));
        let empty = progress.note_progress((&job, 2, "a"), (0, 0), false);
        assert_eq!(empty, Some(10), "a dataset without bytes");
    }

    #[test]
    fn all_copies_are_forgotten_above_the_limit() {
        let (progress, job) = (CopyProgress::default(), JobId::generate());
        let note = |agent: usize| progress.note_progress((&job, 1, &agent.to_string()), (10, 100), false);
        for agent in 0..MAX_REMEMBERED {
            assert_eq!(note(agent), Some(1));
        }
        assert_eq!(note(0), None, "it was reported");
        assert_eq!(note(MAX_REMEMBERED), Some(1), "above the limit");
        assert_eq!(progress.0.lock().unwrap().len(), 1);
    }
}
