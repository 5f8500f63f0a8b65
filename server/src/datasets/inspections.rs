//! Running inspections of datasets, by path. A second request for the same path joins the first.

use crate::{
    agents::{Online, RequestError},
    util::lock,
};
use lockstep_protocol::dataset::DatasetInfo;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, OnceLock},
};
use tokio::sync::watch;

/// The running inspections, by the path of the dataset.
#[derive(Debug, Default)]
pub(crate) struct Inspections(Mutex<Known>);

/// The inspections that are running or have just ended, and the number of inspections that were begun.
#[derive(Debug, Default)]
pub(crate) struct Known {
    pub(crate) inspections: HashMap<String, Inspection>,
    /// Number of inspections begun since the server's start.
    pub(crate) begun: u64,
}

/// The dataset's path without links and its description, or the error.
pub(crate) type Outcome = std::result::Result<(String, DatasetInfo), RequestError>;

/// An inspection that is running or has just ended.
#[derive(Debug, Clone)]
pub(crate) struct Inspection {
    /// Inspections are numbered in the order in which they begin.
    pub(crate) number: u64,
    /// The agent that inspects, once it is chosen.
    pub(crate) agent: Arc<OnceLock<Online>>,
    pub(crate) outcome: watch::Receiver<Option<Outcome>>,
}

impl Inspections {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Known> {
        lock(&self.0)
    }

    /// Forgets an inspection that has ended, with or without an outcome.
    pub(crate) fn forget(&self, path: &str) {
        let mut known = self.lock();
        if known.inspections.get(path).is_some_and(Inspection::has_ended) {
            known.inspections.remove(path);
        }
    }

    /// The number of running inspections of the same agent that were begun before the inspection of `path`.
    pub(crate) fn ahead(&self, path: &str, agent: &Online) -> usize {
        let known = self.lock();
        let Some(own) = known.inspections.get(path) else { return 0 };
        let is_same_agent = |inspection: &&Inspection| {
            inspection.agent.get().is_some_and(|other| other.connection == agent.connection)
        };
        let before = known
            .inspections
            .values()
            .filter(|inspection| inspection.number < own.number && !inspection.has_ended());
        before.filter(is_same_agent).count()
    }
}

impl Inspection {
    fn has_ended(&self) -> bool {
        self.outcome.borrow().is_some() || self.outcome.has_changed().is_err()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_inspections_that_were_interrupted_are_forgotten() {
        let inspections = Inspections::default();
        let (sender, outcome) = watch::channel(None);
        let inspection = Inspection { number: 1, agent: Arc::default(), outcome };
        inspections.lock().inspections.insert("/data".into(), inspection);
        inspections.forget("/data");
        assert!(inspections.lock().inspections.contains_key("/data"));
        drop::<watch::Sender<Option<Outcome>>>(sender);
        inspections.forget("/data");
        assert!(inspections.lock().inspections.is_empty());
    }
}
