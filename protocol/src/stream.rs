//! Messages from server to browser: JSON text frames, one object per frame.

use crate::{
    agent::{CheckpointInfo, Evaluation, LogLine, RankReport},
    job::{Alert, Job, JobState},
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
    /// The first frame on a job's stream. Events `first_seq..=last_seq` are stored.
    Hello { job: Box<Job>, first_seq: u64, last_seq: u64 },
    /// The stored events, up to number `seq`, have been sent; later frames are new.
    Live { seq: u64 },
    /// Only on `/api/v1/stream`: a job's present state.
    Job { job: Box<Job> },
    /// Only on `/api/v1/stream`: the job was deleted.
    JobDeleted { id: String },
    /// Only on a job's stream, once it is live, at most four times a second: the job's speed and progress, as in `GET
    /// /jobs/{id}`. This frame is not an event and has no number.
    Progress(Pace),
    /// Only on a job's stream, once it is live: the job's labels were changed, or the job was forked. `notes` may have changed, too:
    /// `GET /jobs/{id}` has the notes, and `GET /jobs/{id}/history` has the forks. This frame is not an event and has no number.
    Changed(Labels),
    /// Every 20 seconds ([`HEARTBEAT_SECS`]), with the server's time. A reader that receives nothing for twice as long has a broken
    /// connection, even if its system does not say so, and should reconnect. This frame is not an event and has no number.
    Heartbeat { at: jiff::Timestamp },
    /// The last frame on a job's stream: the job is over, and every stored event was sent. The server closes the
    /// connection with code 1000. This frame is not an event and has no number.
    End { state: JobState },
    #[serde(untagged)]
    Event(Event),
}

/// A job's speed and progress: fields of [`Job`] that change with its steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Pace {
    pub step: u64,
    pub images_per_second: Option<f64>,
    pub eta_secs: Option<f64>,
}

/// Labels of a job, which people may change at any time: fields of [`Job`], and its `spec.priority`.
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
    pub at: jiff::Timestamp,
    #[serde(flatten)]
    pub body: EventBody,
}

/// The content of an event.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum EventBody {
    State {
        state: JobState,
        reason: Option<String>,
        /// The same reason as a code and facts.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cause: Option<Reason>,
        attempt: u32,
    },
    /// The run's length is known.
    Plan {
        attempt: u32,
        total_steps: u64,
        steps_per_epoch: u64,
        /// Number of optimizer steps done before this attempt.
        start_step: u64,
    },
    /// Points of one metric of one rank. `values[i]` belongs to `steps[i]`, and is null if it was not finite.
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
    /// The program of a run from elsewhere has raised an alert.
    Alert {
        attempt: u32,
        #[serde(flatten)]
        alert: Alert,
    },
}

/// Close code for a reader that fell behind; the close reason has the last sequence number that was sent.
pub const CLOSE_TOO_SLOW: u16 = 4008;

/// Close code for a connection whose token was revoked or has expired, or whose reader has signed out.
pub const CLOSE_SIGNED_OUT: u16 = 4401;
