//! Sweeps, as they are stored.

use super::Owned;
use jiff::Timestamp;
use lockstep_protocol::{job::TrialOf, spec::Setting, sweep::SweepState};
use serde_json::Value;

/// A sweep without its trials, which are jobs.
#[derive(Debug, Clone, PartialEq)]
pub struct SweepRow {
    /// Its id.
    pub id: String,
    /// The job file's.
    pub name: String,
    /// Likewise.
    pub project: String,
    /// Whether trials start.
    pub state: SweepState,
    /// Why the server has paused it.
    pub reason: Option<String>,
    /// The job file.
    pub spec: Value,
    /// Of each trial, in the order in which they start. Stored, so that another version starts the same trials.
    pub settings: Vec<Setting>,
    /// Epochs after which trials are compared; the last is the end of training.
    pub rungs: Vec<u32>,
    /// Who sees it.
    pub owned: Owned,
    /// When it was submitted.
    pub created_at: Timestamp,
    /// When its last trial was over.
    pub finished_at: Option<Timestamp>,
}

/// What a new job is for its sweep.
#[derive(Debug, Clone, PartialEq)]
pub struct NewTrial {
    /// Its sweep and its number. A sweep has one job of a number.
    pub of: TrialOf,
    /// The epoch after which it pauses for its sweep, if it does.
    pub pause_after: Option<u32>,
}
