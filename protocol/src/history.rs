//! What has happened to a job, as `GET /jobs/{id}/history` lists it. Times are RFC 3339 UTC.

use crate::{
    attempt::AttemptState,
    job::{JobState, Waiting},
    reason::Reason,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The history of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct History {
    /// The job that it was forked from; absent for a job that was none, and where that is private to others.
    pub parent: Option<Relative>,
    /// Jobs that were forked from it, the oldest first; at most 1000.
    pub forks: Vec<Relative>,
    /// Where it waits; absent unless it does.
    pub queue: Option<Waiting>,
    /// In the order of time, the oldest first.
    pub entries: Vec<Entry>,
    /// Give it as `cursor` for the entries that follow; null with the last ones.
    pub next_cursor: Option<String>,
    /// With `count=true`: how many entries there are in all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total: Option<u64>,
}

/// The other end of a fork.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Relative {
    pub job: String,
    /// Absent when it was deleted.
    pub name: Option<String>,
    pub state: Option<JobState>,
    /// Id of the checkpoint that the fork began from.
    pub checkpoint: String,
    /// Who submitted or forked this job: its owner. Absent when it was deleted, and where nobody is asked who they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub who: Option<String>,
    /// When that was; absent when it was deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub at: Option<jiff::Timestamp>,
}

/// What happened at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Entry {
    #[schema(value_type = String)]
    pub at: jiff::Timestamp,
    #[serde(flatten)]
    pub what: What,
    /// Who asked for it: the person, or the name of the token. Of `submitted` and `forked` it is the job's owner; of all else only
    /// answers to that owner and to admins have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub who: Option<String>,
}

/// Kinds of entries.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum What {
    Submitted,
    /// It was made as a fork.
    Forked {
        /// Id of the checkpoint that it begins from: the other job's, or its own copy where the other job is private to others.
        checkpoint: String,
    },
    /// An attempt began.
    Started {
        attempt: u32,
        /// Id of the checkpoint that it continues from; absent when it began from the start.
        checkpoint: Option<String>,
        /// Names of the agents that had its ranks.
        agents: Vec<String>,
        /// With how many ranks and why, where it had fewer than the job.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<Reason>,
    },
    /// An attempt ended.
    Ended {
        attempt: u32,
        state: AttemptState,
        /// Why; absent when it succeeded.
        reason: Option<Reason>,
        /// The rank that it began with, where one rank's end was the cause.
        rank: Option<u32>,
        /// Optimizer steps of the run that were done.
        step: Option<u64>,
        /// Id of the checkpoint that the next attempt continued from; absent when it began from the start, or there is none.
        next_checkpoint: Option<String>,
    },
    /// Somebody asked to pause it while it ran.
    PauseRequested,
    /// It was paused while it waited.
    Paused,
    Resumed,
    Retried,
    /// Somebody asked to cancel it while it ran.
    CancelRequested,
    /// It was cancelled while it waited or was paused.
    Cancelled,
    /// It failed before an attempt could start.
    Failed {
        reason: Option<Reason>,
    },
    /// Training continued in bfloat16, as float16 did not hold its numbers.
    PrecisionChanged {
        reason: Option<Reason>,
    },
}
