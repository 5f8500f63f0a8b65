//! The history of a job, as `GET /jobs/{id}/history` lists it. Times are RFC 3339 UTC.

use crate::{
    attempt::AttemptState,
    job::{Alert, JobState, Waiting},
    reason::Reason,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The history of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct History {
    /// The job from which this job was forked; absent if it is not a fork, or if that job is private and the reader may
    /// not see it.
    pub parent: Option<Relative>,
    /// Jobs that were forked from this job, the oldest first; at most 1000.
    pub forks: Vec<Relative>,
    /// The job's place in the queue; absent unless the job waits and the scheduler has considered it.
    pub queue: Option<Waiting>,
    /// Entries in order of time, the oldest first.
    pub entries: Vec<Entry>,
    /// Pass it as `cursor` for the following entries; null after the last entry.
    pub next_cursor: Option<String>,
    /// With `count=true`: the number of all entries.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total: Option<u64>,
}

/// A job related by a fork: the job from which this job was forked, or a fork of this job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Relative {
    pub job: String,
    /// Name of the job; absent if the job was deleted.
    pub name: Option<String>,
    pub state: Option<JobState>,
    /// Id of the checkpoint from which the fork began.
    pub checkpoint: String,
    /// The owner, who submitted or forked the job. Absent if the job was deleted, or if the server has no sign-in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub who: Option<String>,
    /// Time of the submission; absent if the job was deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<jiff::Timestamp>,
}

/// An event in a job's history.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Entry {
    pub at: jiff::Timestamp,
    #[serde(flatten)]
    pub what: What,
    /// The person who made the request, or the name of the token. For `submitted` and `forked` it is the job's owner. For
    /// other entries, only responses to the owner and to admins contain it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub who: Option<String>,
}

/// Kinds of entries.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum What {
    Submitted,
    /// The job was made as a fork.
    Forked {
        /// Id of the checkpoint from which the fork begins: the other job's, or the fork's own copy if the reader may not
        /// see the other job.
        checkpoint: String,
    },
    /// An attempt began.
    Started {
        attempt: u32,
        /// Id of the checkpoint from which the attempt continues; absent if it began from the start.
        checkpoint: Option<String>,
        /// Names of the agents that had the attempt's ranks.
        agents: Vec<String>,
        /// Why the attempt had fewer ranks than the job, and how many; absent if it had all ranks.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<Reason>,
    },
    /// An attempt ended.
    Ended {
        attempt: u32,
        state: AttemptState,
        /// Why the attempt ended; absent if it succeeded.
        reason: Option<Reason>,
        /// The rank that failed first, if one rank's end was the cause.
        rank: Option<u32>,
        /// Number of optimizer steps that the job had done when the attempt ended, counted from the start of the job's training;
        /// absent if the attempt ended before training.
        step: Option<u64>,
        /// Id of the checkpoint from which the next attempt continued; absent if it began from the start, or if there is no next attempt.
        next_checkpoint: Option<String>,
    },
    /// A request to pause the running job.
    PauseRequested,
    /// The job was paused while it waited.
    Paused,
    Resumed,
    Retried,
    /// A request to cancel the running job.
    CancelRequested,
    /// The job was cancelled while it waited or was paused.
    Cancelled,
    /// The job failed before an attempt could start.
    Failed {
        reason: Option<Reason>,
    },
    /// Training continued in bfloat16, because float16 could not represent its numbers.
    PrecisionChanged {
        reason: Option<Reason>,
    },
    /// The program of a run from elsewhere has raised an alert.
    Alert(Alert),
}
