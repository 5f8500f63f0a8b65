//! How far machines have copied the datasets of their jobs: what a job's log says of it, a line for each tenth.

use lockstep_protocol::JobId;
use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

/// Copies of which it is remembered what was said. Beyond, something may be said a second time.
const REMEMBERED: usize = 4096;

/// The tenth that was said last, by job, attempt and agent.
#[derive(Debug, Default)]
pub(crate) struct CopyProgress(Mutex<HashMap<(JobId, u32, String), u64>>);

impl CopyProgress {
    /// The tenths that are copied, when that is more than was said; 0 is said, too.
    pub(crate) fn news(
        &self,
        job: &JobId,
        attempt: u32,
        agent: &str,
        copied: u64,
        total: u64,
    ) -> Option<u64> {
        let tenths = copied.saturating_mul(10).checked_div(total).unwrap_or(10).min(10);
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if said.len() >= REMEMBERED {
            said.clear();
        }
        let key = (job.clone(), attempt, agent.to_owned());
        let is_news = said.get(&key).is_none_or(|before| *before < tenths);
        if is_news {
            said.insert(key, tenths);
        }
        is_news.then_some(tenths)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tenth_is_said_once_by_each_machine() {
        let (progress, job) = (CopyProgress::default(), JobId::generate());
        let news = |agent: &str, copied| progress.news(&job, 1, agent, copied, 100);
        assert_eq!(news("a", 0), Some(0));
        assert_eq!(news("a", 9), None);
        assert_eq!(news("b", 9), Some(0));
        assert_eq!(news("a", 30), Some(3));
        assert_eq!(news("a", 39), None);
        assert_eq!(news("a", 200), Some(10));
        assert_eq!(progress.news(&job, 2, "a", 0, 0), Some(10), "a dataset without bytes");
    }
}
