//! Attempts: claims, attempts that may write, and reports of ranks.

use super::ChangedJob;
use jiff::Timestamp;
use lockstep_protocol::{
    agent::{Acknowledged, AttemptEvent, AttemptRef, Source},
    job::JobId,
    reason::Reason,
};
use serde::{Deserialize, Serialize};

/// The ranks of an attempt on one agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    pub agent_id: String,
    /// The agent's name when the attempt was created.
    pub agent: String,
    /// Global rank and slot index of each rank.
    pub ranks: Vec<(u32, u32)>,
}

impl Place {
    /// Whether the place has rank 0, which writes the checkpoints.
    pub(crate) fn has_rank_0(&self) -> bool {
        self.ranks.iter().any(|(rank, _)| *rank == 0)
    }
}

/// An agent's part of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AgentPlace {
    /// Whether the agent has rank 0, which writes the checkpoints.
    pub has_rank_0: bool,
    /// Whether the agent has reported that it keeps checkpoints on its own disk.
    pub has_own_disk: bool,
}

/// A request to create a job's next attempt.
#[derive(Debug, Clone)]
pub struct Claim {
    pub job: JobId,
    /// Number of the job's newest attempt, so that only one of two concurrent claims succeeds.
    pub after_attempt: u32,
    /// The agents and slots of the attempt's ranks.
    pub places: Vec<Place>,
    /// The reason if the attempt has fewer ranks than the job.
    pub fewer_ranks_reason: Option<Reason>,
    pub at: Timestamp,
}

/// A created attempt.
#[derive(Debug, Clone)]
pub struct ClaimedAttempt {
    /// The attempt, with its fencing token.
    pub attempt: AttemptRef,
    /// The newest complete checkpoint, from which the attempt continues: `<epoch>-<step>`.
    pub resume_checkpoint: Option<String>,
    /// The job, now `starting`.
    pub changed: ChangedJob,
}

/// An attempt that may write.
#[derive(Debug, Clone)]
pub struct AttemptRow {
    /// The attempt, with its fencing token.
    pub attempt: AttemptRef,
    /// The agents and slots of the attempt's ranks.
    pub places: Vec<Place>,
}

/// The fields by which the queue in memory notices that a waiting job has changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitingFingerprint {
    /// Sequence number of the job's newest event. All changes except changes of priority and project store an event.
    pub last_seq: u64,
    pub priority: i32,
    pub project: String,
}

/// A job whose ranks hold slots.
#[derive(Debug, Clone)]
pub struct Occupant {
    pub job: JobId,
    pub priority: i32,
    /// Whether a job of higher priority may take the slots.
    pub preemptible: bool,
    /// Whether the ranks must end, because the job is being cancelled, paused or preempted.
    pub must_end: bool,
    /// Whether the ranks must end in favour of a job of higher priority.
    pub is_being_preempted: bool,
}

/// Records of one source of an attempt, as received.
#[derive(Debug, Clone)]
pub struct Report {
    /// Id of the sending agent, authenticated by its connection. Only agents of the attempt may send records.
    pub agent_id: String,
    pub attempt: AttemptRef,
    pub source: Source,
    /// Index of the first record of this report among the source's records, from 0.
    pub first: u64,
    /// The records, in order.
    pub events: Vec<AttemptEvent>,
    /// When the records were received.
    pub at: Timestamp,
    /// The reason if the agent is being stopped in an orderly way.
    pub leaving: Option<Reason>,
}

/// Records of a run from elsewhere.
#[derive(Debug, Clone)]
pub struct RunRecords {
    pub job: JobId,
    /// Number of the first record, from 1. `None` if the records follow the stored records.
    pub first: Option<u64>,
    pub count: u64,
    /// The time of the records.
    pub at: Timestamp,
}

/// The result of storing records of a run from elsewhere.
#[derive(Debug, Clone)]
pub enum AppendResult {
    /// The records are on disk.
    Stored {
        /// Number of stored records of the run.
        records: u64,
        /// The changes by the new records.
        changed: Box<ChangedJob>,
    },
    /// Earlier records are missing.
    Gap {
        /// Number of the next expected record.
        expected: u64,
    },
}

/// The result of storing a report.
#[derive(Debug, Clone)]
pub enum IngestResult {
    /// The report's records are on disk.
    Stored {
        acknowledged: Acknowledged,
        /// All changes of the job by the transaction, in the result of the job's first new report. `None` in other results.
        changed: Option<Box<ChangedJob>>,
    },
    /// The attempt may not write: it was fenced, has ended, or its job was deleted.
    Stale,
    /// Earlier records are missing: the connection lost them, or the agent is faulty.
    Gap {
        /// Number of stored records of the source.
        stored: u64,
    },
}
