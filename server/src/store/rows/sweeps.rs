//! Stored sweeps.

use super::Ownership;
use jiff::Timestamp;
use lockstep_protocol::{job::TrialOf, spec::Setting, sweep::SweepState};
use serde_json::Value;

/// A sweep without its trials, which are jobs.
#[derive(Debug, Clone, PartialEq)]
pub struct SweepRow {
    pub id: String,
    pub name: String,
    pub project: String,
    /// Running, paused, finished or cancelled. Trials start only while the sweep runs.
    pub state: SweepState,
    /// Why the server has paused the sweep.
    pub reason: Option<String>,
    /// The job file.
    pub spec: Value,
    /// The settings of each trial, in the order in which trials start. The settings are stored, so that another version of Lockstep
    /// starts the same trials.
    pub settings: Vec<Setting>,
    /// Epochs after which trials are compared; the last is the end of training.
    pub rungs: Vec<u32>,
    /// The owner, and whether the sweep is private.
    pub ownership: Ownership,
    /// When the sweep was submitted.
    pub created_at: Timestamp,
    /// When the last trial ended.
    pub finished_at: Option<Timestamp>,
}

/// A new job that is a trial of a sweep.
#[derive(Debug, Clone, PartialEq)]
pub struct NewTrial {
    /// The sweep and the trial's number. A sweep has one job for each number.
    pub id: TrialOf,
    /// The epoch after which the job pauses for its sweep, if it pauses.
    pub pause_after: Option<u32>,
}
