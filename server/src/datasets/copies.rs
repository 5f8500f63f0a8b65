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

/// A line to log.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CopyNotice {
    /// The number of tenths that are copied, 0 to 10.
    Tenths(u64),
    /// The copy starts again.
    Restarted,
}

impl CopyProgress {
    /// The line to log for an agent that has copied `copied` of `total` bytes. `None` if there is no progress. Fewer bytes than before are
    /// logged only if the agent reports that the copy starts again (`is_restart`).
    pub(crate) fn note_progress(
        &self,
        (job, attempt, agent): (&JobId, u32, &str),
        (copied, total): (u64, u64),
        is_restart: bool,
    ) -> Option<CopyNotice> {
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
        Some(if is_restart { CopyNotice::Restarted } else { CopyNotice::Tenths(tenths) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tenth_is_reported_once_per_machine() {
        let (progress, job) = (CopyProgress::default(), JobId::generate());
        let notice = |agent: &str, copied| progress.note_progress((&job, 1, agent), (copied, 100), false);
        assert_eq!(notice("a", 0), Some(CopyNotice::Tenths(0)));
        assert_eq!(notice("a", 9), None);
        assert_eq!(notice("b", 9), Some(CopyNotice::Tenths(0)));
        assert_eq!(notice("a", 30), Some(CopyNotice::Tenths(3)));
        assert_eq!(notice("a", 39), None);
        assert_eq!(notice("a", 20), None, "progress does not go back");
        assert_eq!(notice("a", 39), None);
        assert_eq!(notice("a", 200), Some(CopyNotice::Tenths(10)));
        let empty = progress.note_progress((&job, 2, "a"), (0, 0), false);
        assert_eq!(empty, Some(CopyNotice::Tenths(10)), "a dataset without bytes");
    }

    #[test]
    fn all_copies_are_forgotten_above_the_limit() {
        let (progress, job) = (CopyProgress::default(), JobId::generate());
        let notice = |agent: usize| progress.note_progress((&job, 1, &agent.to_string()), (10, 100), false);
        for agent in 0..MAX_REMEMBERED {
            assert_eq!(notice(agent), Some(CopyNotice::Tenths(1)));
        }
        assert_eq!(notice(0), None, "it was reported");
        assert_eq!(notice(MAX_REMEMBERED), Some(CopyNotice::Tenths(1)), "above the limit");
        assert_eq!(progress.0.lock().unwrap().len(), 1);
    }

    #[test]
    fn a_copy_that_starts_again_is_reported_from_its_beginning() {
        let (progress, job) = (CopyProgress::default(), JobId::generate());
        let notice = |copied, restarted| progress.note_progress((&job, 1, "a"), (copied, 100), restarted);
        assert_eq!(notice(70, false), Some(CopyNotice::Tenths(7)));
        assert_eq!(notice(0, true), Some(CopyNotice::Restarted));
        assert_eq!(notice(10, false), Some(CopyNotice::Tenths(1)));
    }
}
