//! Running evaluations of checkpoints. A second request for the same evaluation joins the first.

use crate::agents::RequestError;
use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex, OnceLock},
};
use tokio::sync::watch;

/// The outcome; `None` while the evaluation runs.
pub(crate) type Outcome = Option<std::result::Result<(), Failure>>;

/// Why an evaluation failed. All waiting requests get a copy.
#[derive(Debug, Clone)]
pub(crate) enum Failure {
    /// No agent could be asked, or the agent refused or disconnected.
    Agent(RequestError),
    /// The result was lost. Another request may succeed.
    Lost(String),
}

/// Running evaluations, by the file of their result.
#[derive(Debug, Default)]
pub(crate) struct Evaluations(pub(crate) Mutex<HashMap<PathBuf, RunningEvaluation>>);

/// A running evaluation.
#[derive(Debug, Clone)]
pub(crate) struct RunningEvaluation {
    /// The id of the request to the agent, once it is sent.
    pub(crate) request: Arc<OnceLock<u64>>,
    pub(crate) outcome: watch::Receiver<Outcome>,
}
