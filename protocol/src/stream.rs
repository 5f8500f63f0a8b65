//! Messages from server to browser: JSON text frames, one object per frame.

use crate::{
    agent::{CheckpointInfo, Evaluation, LogLine, RankReport},
    job::{Job, JobState},
    reason::Reason,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Seconds between two heartbeats of a stream.
pub const HEARTBEAT_SECS: u64 = 20;

/// A frame of a stream.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Frame {
    /// First on a job's stream. Events `first_seq..=last_seq` are stored.
    Hello { job: Box<Job>, first_seq: u64, last_seq: u64 },
    /// The replay is over; what follows is new.
    Live { seq: u64 },
    /// On `/api/v1/stream` only: a job as it now is.
    Job { job: Box<Job> },
    /// On `/api/v1/stream` only: the job is no more.
    JobDeleted { id: String },
    /// On a job's stream only, once it is live and at most four times a second: how fast and how far the job is, as
    /// `GET /jobs/{id}` says it. It is no event and has no number.
    Progress(Pace),
    /// On a job's stream only, once it is live: somebody changed what people write on the job, or forked it. `notes` may have
    /// changed, too; `GET /jobs/{id}` has them, and `GET /jobs/{id}/history` its forks. It is no event and has no number.
    Changed(Labels),
    /// Every 20 seconds ([`HEARTBEAT_SECS`]), with the server's clock: a reader that hears nothing for twice as long has a dead
    /// connection, whatever its system believes, and should make another one. It is no event and has no number.
    Heartbeat {
        #[schema(value_type = String)]
        at: jiff::Timestamp,
    },
    /// Last on a job's stream: the job is over, and every stored event was sent. The server closes the connection with code 1000.
    /// It is no event and has no number.
    End { state: JobState },
    #[serde(untagged)]
    Event(Event),
}

/// How fast and how far a job is: fields of [`Job`] that change with its steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Pace {
    pub step: u64,
    pub images_per_second: Option<f64>,
    pub eta_secs: Option<f64>,
}

/// What people sort a job by and may change at any time: fields of [`Job`], and its `spec.priority`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Labels {
    pub project: String,
    pub tags: Vec<String>,
    pub priority: i32,
}

impl From<&Job> for Labels {
    fn from(job: &Job) -> Self {
        Self { project: job.project.clone(), tags: job.tags.clone(), priority: job.spec.priority }
    }
}

impl From<&Job> for Pace {
    fn from(job: &Job) -> Self {
        Self { step: job.step, images_per_second: job.images_per_second, eta_secs: job.eta_secs }
    }
}

/// A stored event of a job. Sequence numbers start at 1 and have no gap.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    pub seq: u64,
    #[schema(value_type = String)]
    pub at: jiff::Timestamp,
    #[serde(flatten)]
    pub body: EventBody,
}

/// What an event says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum EventBody {
    State {
        state: JobState,
        reason: Option<String>,
        /// The same as a code and facts.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cause: Option<Reason>,
        attempt: u32,
    },
    /// The run's length is known.
    Plan {
        attempt: u32,
        total_steps: u64,
        steps_per_epoch: u64,
        start_step: u64,
    },
    /// One metric of one rank; `values[i]` belongs to `steps[i]`, and is null where it was not finite.
    Metrics {
        attempt: u32,
        rank: u32,
        name: String,
        steps: Vec<u64>,
        values: Vec<Option<f32>>,
    },
    Log {
        attempt: u32,
        rank: u32,
        lines: Vec<LogLine>,
    },
    Checkpoint {
        attempt: u32,
        id: String,
        #[serde(flatten)]
        checkpoint: CheckpointInfo,
    },
    CheckpointRemoved {
        attempt: u32,
        id: String,
    },
    Evaluation {
        attempt: u32,
        #[serde(flatten)]
        evaluation: Evaluation,
    },
    Rank {
        attempt: u32,
        rank: u32,
        #[serde(flatten)]
        report: RankReport,
    },
    /// Histograms of a step are stored: `GET /jobs/{id}/histograms` has them.
    Histograms {
        attempt: u32,
        step: u64,
    },
    /// The network's description is stored: `GET /jobs/{id}/network` has it.
    Network {
        attempt: u32,
    },
}

/// Close code of a reader that fell behind; the close reason holds the last sequence number it was sent.
pub const CLOSE_TOO_SLOW: u16 = 4008;

/// Close code of a connection whose token was revoked or has expired, or whose reader has signed out.
pub const CLOSE_SIGNED_OUT: u16 = 4401;
