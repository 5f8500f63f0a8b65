//! Evaluations of checkpoints that are under way; who asks again joins one.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex, OnceLock},
};
use tokio::sync::watch;

/// Done or failed, in words; none while it runs.
pub(crate) type Outcome = Option<std::result::Result<(), String>>;

/// Evaluations under way, by the file that they are kept in.
#[derive(Debug, Default)]
pub(crate) struct Evaluations(pub(crate) Mutex<HashMap<PathBuf, Running>>);

/// One that is under way.
#[derive(Debug, Clone)]
pub(crate) struct Running {
    /// The question, once it is sent.
    pub(crate) request: Arc<OnceLock<u64>>,
    pub(crate) outcome: watch::Receiver<Outcome>,
}
