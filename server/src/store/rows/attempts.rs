//! Attempts: claims, those that may write, and the reports of their ranks.

use super::Changed;
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
    /// Its id.
    pub agent_id: String,
    /// Its name then.
    pub agent: String,
    /// Global rank and slot index.
    pub ranks: Vec<(u32, u32)>,
}

impl Place {
    /// Rank 0 writes the checkpoints.
    pub(crate) fn has_rank_0(&self) -> bool {
        self.ranks.iter().any(|(rank, _)| *rank == 0)
    }
}

/// What an agent was given of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GivenPlace {
    /// Rank 0, which writes the checkpoints.
    pub has_rank_0: bool,
    /// It has said that it keeps them on a disk of its own.
    pub has_own_disk: bool,
}

/// The wish to start a job's next attempt.
#[derive(Debug, Clone)]
pub struct Claim {
    /// The job.
    pub job: JobId,
    /// Its attempt so far, so that two claims of the same moment make one attempt.
    pub after_attempt: u32,
    /// Where.
    pub places: Vec<Place>,
    /// With how many ranks and why, where these are fewer than the job's.
    pub fewer: Option<Reason>,
    /// Now.
    pub at: Timestamp,
}

/// An attempt that was made.
#[derive(Debug, Clone)]
pub struct Claimed {
    /// With its fencing token.
    pub attempt: AttemptRef,
    /// The newest complete checkpoint, to continue from: `<epoch>-<step>`.
    pub resume: Option<String>,
    /// The job, now `starting`.
    pub changed: Changed,
}

/// An attempt that may write.
#[derive(Debug, Clone)]
pub struct AttemptRow {
    /// With its fencing token.
    pub attempt: AttemptRef,
    /// Where its ranks are.
    pub places: Vec<Place>,
    /// Its ranks are to end, at once or with a checkpoint; the job says why.
    pub ends: bool,
}

/// A place in the queue, behind a job; the default is before all of them.
#[derive(Debug, Clone)]
pub struct QueuePlace {
    /// That job's priority.
    pub(crate) priority: i64,
    /// When it was submitted, in milliseconds since 1970.
    pub(crate) created_at: i64,
    /// Its id.
    pub(crate) job: String,
}

impl Default for QueuePlace {
    fn default() -> Self {
        Self { priority: i64::MAX, created_at: 0, job: String::new() }
    }
}

/// By this it is seen whether a waiting job is still as it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitingVersion {
    /// The number of its newest event: every change but these two makes one.
    pub last_seq: u64,
    /// Its priority.
    pub priority: i32,
    /// Its project.
    pub project: String,
}

/// A job whose ranks hold slots.
#[derive(Debug, Clone)]
pub struct Occupant {
    /// Which.
    pub job: JobId,
    /// The job's priority now.
    pub priority: i32,
    /// It allows that a job of higher priority takes its slots, and it can be told to end.
    pub preemptible: bool,
    /// Its ranks are being ended already.
    pub ends: bool,
    /// They are being ended for the sake of a job of higher priority.
    pub preempted: bool,
}

/// Records of one source of an attempt, as they came.
#[derive(Debug, Clone)]
pub struct Report {
    /// Id of the agent that sends them, as its connection has proved: an attempt's records come from an agent that has its ranks.
    pub agent_id: String,
    /// The attempt.
    pub attempt: AttemptRef,
    /// The writer of the records.
    pub source: Source,
    /// The number of the first.
    pub first: u64,
    /// In order.
    pub events: Vec<AttemptEvent>,
    /// When they came.
    pub at: Timestamp,
    /// The agent is stopping in order, for this reason.
    pub leaving: Option<Reason>,
}

/// Records of a run from elsewhere.
#[derive(Debug, Clone)]
pub struct RunRecords {
    /// The run.
    pub job: JobId,
    /// The number of the first, from 1. `None`: they follow those that are stored.
    pub first: Option<u64>,
    /// How many there are.
    pub count: u64,
    /// When they were made.
    pub at: Timestamp,
}

/// What became of them.
#[derive(Debug, Clone)]
pub enum Appended {
    /// They are on disk.
    Stored {
        /// So many of the run are.
        records: u64,
        /// What those changed that were not there before.
        changed: Box<Changed>,
    },
    /// Records before them are missing.
    Gap {
        /// The number of the next.
        expected: u64,
    },
}

/// What became of a report.
#[derive(Debug, Clone)]
pub enum Ingested {
    /// Its records are on disk.
    Stored {
        /// Sent to the agent.
        acknowledged: Acknowledged,
        /// None when every record was there already.
        changed: Option<Box<Changed>>,
    },
    /// The attempt may not write (any more): fenced, ended or deleted.
    Stale,
    /// Records before it are missing: the connection lost some, or it is no honest agent.
    Gap {
        /// So many are stored.
        stored: u64,
    },
}
