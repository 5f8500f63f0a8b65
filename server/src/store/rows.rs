//! Rows and filters of the store: what handlers, dispatch and ingest exchange with it.

mod access;
mod attempts;
mod events;
mod history;
mod job_groups;
mod job_list;
mod jobs;
mod layers;
mod machines;
mod metrics;
mod people;

pub use access::{AuditEntry, SessionRow, TokenRow};
pub use attempts::{
    Appended, AttemptRow, Claim, Claimed, GivenPlace, Ingested, Occupant, Place, QueuePlace, Report,
    RunRecords, WaitingVersion,
};
pub(super) use events::ROW_COST;
pub use events::{EventRow, LogFilter, LogPage, Stored};
pub use history::HistoryRows;
pub use job_groups::{GroupBy, GroupRow, GroupValue, SettingKind, Spread};
pub use job_list::{
    Comparison, Condition, Cursor, JobFilter, JobSort, Page, ProjectRow, SettingValue, SortBy, SortValue,
};
pub use jobs::{Changed, Created, NewJob};
pub use layers::{HistogramFilter, HistogramIndex, HistogramRow, PanelsOf};
pub use machines::MinuteRow;
pub use metrics::{MetricChunk, MetricFilter, MetricPage};
pub(crate) use people::principal;
pub use people::{Owned, PersonRow};

use jiff::Timestamp;
use lockstep_protocol::{
    agent::{CheckpointInfo, Machine, Slot},
    job::{JobId, JobState},
};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use utoipa::ToSchema;

/// A complete checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckpointRow {
    /// Opaque.
    pub id: String,
    /// The job.
    pub job: JobId,
    /// Written by this attempt.
    pub attempt: u32,
    /// What is known of it.
    pub info: CheckpointInfo,
    /// When it was reported.
    pub created_at: Timestamp,
}

/// An agent that has a checkpoint on a disk of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Its id.
    pub agent_id: String,
    /// Its name when it was given the attempt.
    pub agent: String,
}

/// By the checkpoint's id; the agent of rank 0, which most likely continues the job, is the first.
pub type Holders = HashMap<String, Vec<Holder>>;

/// What of a checkpoint is in an object store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredCheckpoint {
    /// The checkpoint's id.
    pub id: String,
    /// SHA-256 of the manifest by which it is whole there; none while it is uploaded.
    pub manifest: Option<String>,
    /// The upload of a file in parts that has not ended.
    pub parts: Option<String>,
}

/// By what an object store is known again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArtifactMarker {
    /// What its `LOCKSTEP.json` says.
    pub marker: String,
    /// It came with a backup: the server that this was made of may have the store yet.
    pub is_restored: bool,
}

/// What people wrote on a job.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Annotation {
    /// Free text; may be empty.
    pub notes: String,
    /// Sorted, each once.
    pub tags: Vec<String>,
}

/// Jobs' notes and tags, by job, in the order of their ids.
#[derive(Debug, Default)]
pub struct AnnotationPage {
    /// Without those that this version cannot read.
    pub jobs: BTreeMap<JobId, Annotation>,
    /// Behind which job the next page begins; none on the last.
    pub next: Option<String>,
}

/// A machine that has introduced itself.
#[derive(Debug, Clone, PartialEq)]
pub struct AgentRow {
    /// Kept by the agent over restarts.
    pub id: String,
    /// As shown.
    pub name: String,
    /// As it introduced itself.
    pub machine: Machine,
    /// In index order.
    pub slots: Vec<Slot>,
    /// When it last said anything.
    pub last_seen_at: Timestamp,
}

/// Numbers for monitoring.
#[derive(Debug, Clone, Default)]
pub struct Counts {
    /// Jobs in each state that any job is in.
    pub jobs: Vec<(JobState, u64)>,
}
