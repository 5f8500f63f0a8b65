//! Evaluations of checkpoints that are running; a second request joins the first.

use crate::{agents::RequestError, error::Error};
use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex, OnceLock},
};
use tokio::sync::watch;

/// Done or failed; none while it runs.
pub(crate) type Outcome = Option<std::result::Result<(), Failure>>;

/// Why there is no evaluation. All waiting requests get a copy.
#[derive(Debug, Clone)]
pub(crate) enum Failure {
    /// Nobody could be asked, or the agent has refused, or is gone.
    Agent(RequestError),
    /// It was made, or was being made, and this server has none; another try may have one.
    Lost(String),
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Agent(error) => error.without_pointer(),
            Failure::Lost(detail) => Error::Unavailable(detail),
        }
    }
}

/// Evaluations under way, by the file that they are kept in.
#[derive(Debug, Default)]
pub(crate) struct Evaluations(pub(crate) Mutex<HashMap<PathBuf, Running>>);

/// One that is under way.
#[derive(Debug, Clone)]
pub(crate) struct Running {
    /// The id of the request to the agent, once it is sent.
    pub(crate) request: Arc<OnceLock<u64>>,
    pub(crate) outcome: watch::Receiver<Outcome>,
}
