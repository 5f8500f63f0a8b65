//! Looks at datasets that are under way, by path; who asks again joins one.

use crate::agents::{AskError, Online};
use lockstep_protocol::dataset::DatasetInfo;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};
use tokio::sync::watch;

/// By path.
#[derive(Debug, Default)]
pub(crate) struct Looks(Mutex<Known>);

/// The looks that are known, and how many there were.
#[derive(Debug, Default)]
pub(crate) struct Known {
    pub(crate) looks: HashMap<String, Look>,
    /// How many were begun.
    pub(crate) begun: u64,
}

/// Path and description, or why there is none.
pub(crate) type Outcome = std::result::Result<(String, DatasetInfo), AskError>;

/// One that is under way or has just ended.
#[derive(Debug, Clone)]
pub(crate) struct Look {
    /// Smaller of one that was begun before.
    pub(crate) number: u64,
    /// Once one is chosen.
    pub(crate) agent: Arc<OnceLock<Online>>,
    pub(crate) outcome: watch::Receiver<Option<Outcome>>,
}

impl Looks {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets a look that has ended, be it without an outcome.
    pub(crate) fn forget(&self, path: &str) {
        let mut all = self.lock();
        if all.looks.get(path).is_some_and(Look::has_ended) {
            all.looks.remove(path);
        }
    }

    /// How many looks of the same agent were begun before the one at `path` and go on.
    pub(crate) fn ahead(&self, path: &str, agent: &Online) -> usize {
        let all = self.lock();
        let Some(own) = all.looks.get(path) else { return 0 };
        let same = |look: &&Look| look.agent.get().is_some_and(|other| other.connection == agent.connection);
        let before = all.looks.values().filter(|look| look.number < own.number && !look.has_ended());
        before.filter(same).count()
    }
}

impl Look {
    fn has_ended(&self) -> bool {
        self.outcome.borrow().is_some() || self.outcome.has_changed().is_err()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_that_broke_off_is_forgotten_and_one_that_goes_on_is_not() {
        let looks = Looks::default();
        let (tell, outcome) = watch::channel(None);
        let look = Look { number: 1, agent: Arc::default(), outcome };
        looks.lock().looks.insert("/data".into(), look);
        looks.forget("/data");
        assert!(looks.lock().looks.contains_key("/data"));
        drop::<watch::Sender<Option<Outcome>>>(tell);
        looks.forget("/data");
        assert!(looks.lock().looks.is_empty());
    }
}
