//! Running inspections of datasets, by path. A second request for the same path joins the first.

use crate::{
    agents::{OnlineAgent, RequestError},
    util::lock,
};
use lockstep_protocol::dataset::DatasetInfo;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, OnceLock},
};
use tokio::sync::watch;

/// The inspections that are running or have just ended, by the path of the dataset.
#[derive(Debug, Default)]
pub(crate) struct Inspections(Mutex<HashMap<String, Inspection>>);

/// The dataset's path with its links resolved, and the dataset's description; or the error.
pub(crate) type Outcome = std::result::Result<(String, DatasetInfo), RequestError>;

/// An inspection that is running or has just ended.
#[derive(Debug, Clone)]
pub(crate) struct Inspection {
    /// The agent that inspects the dataset, and the id of the request to this agent, once the request is sent.
    pub(crate) request: Arc<OnceLock<(OnlineAgent, u64)>>,
    pub(crate) outcome: watch::Receiver<Option<Outcome>>,
}

impl Inspections {
    pub(crate) fn lock(&self) -> MutexGuard<'_, HashMap<String, Inspection>> {
        lock(&self.0)
    }

    /// Forgets an inspection that has ended, with or without an outcome.
    pub(crate) fn forget(&self, path: &str) {
        let mut known = self.lock();
        let has_ended = |inspection: &Inspection| {
            inspection.outcome.borrow().is_some() || inspection.outcome.has_changed().is_err()
        };
        if known.get(path).is_some_and(has_ended) {
            known.remove(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_inspections_that_were_interrupted_are_forgotten() {
        let inspections = Inspections::default();
        let (sender, outcome) = watch::channel(None);
        inspections.lock().insert("/data".into(), Inspection { request: Arc::default(), outcome });
        inspections.forget("/data");
        assert!(inspections.lock().contains_key("/data"));
        drop::<watch::Sender<Option<Outcome>>>(sender);
        inspections.forget("/data");
        assert!(inspections.lock().is_empty());
    }
}
