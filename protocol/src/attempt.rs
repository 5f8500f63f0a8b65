//! An attempt, as `GET /jobs/{id}/attempts` lists it: one start of a job's ranks, and how it ended.

use crate::{reason::Reason, spec::named::words};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

words! {
    /// The state of an attempt.
    #[derive(Hash, ToSchema)]
    pub enum AttemptState: "attempt state" {
        Starting = "starting",
        Running = "running",
        Pausing = "pausing",
        Succeeded = "succeeded",
        Failed = "failed",
        /// The attempt's agent was silent past the lease.
        Lost = "lost",
        Cancelled = "cancelled",
        Paused = "paused",
        /// The attempt's agent was shut down, not killed; the job waits for another attempt.
        Stopped = "stopped",
        /// A state that another version wrote and this version does not know.
        #[serde(other)]
        Unknown = "unknown",
    }
}

/// One start of a job's ranks. Later attempts do not change these fields. Times are RFC 3339 UTC.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Attempt {
    /// Number of the attempt, from 1.
    pub attempt: u32,
    pub state: AttemptState,
    /// Why the attempt ended, or is ending; absent if it did all steps.
    pub reason: Option<Reason>,
    /// Id of the checkpoint from which the attempt began; absent if it began from the start.
    pub checkpoint: Option<String>,
    /// Number of optimizer steps that the job had done when the attempt ended, counted from the start of the job's training;
    /// absent if the attempt ended before training.
    pub step: Option<u64>,
    /// Names of the agents that had the attempt's ranks, in rank order, without repetition.
    pub agents: Vec<String>,
    /// Number of the attempt's ranks, which is smaller than the job's if `recovery.min_ranks` allowed it; 0 for a run from elsewhere.
    pub ranks: u32,
    pub started_at: jiff::Timestamp,
    pub ended_at: Option<jiff::Timestamp>,
}
