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
mod models;
mod people;
mod sweeps;
mod webhooks;

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
pub use models::{NewVersion, VersionRow};
pub(crate) use people::principal;
pub use people::{Owned, PersonRow};
pub use sweeps::{NewTrial, SweepRow};
pub use webhooks::{Delivery, DeliveryAttempt, Webhook, WebhookEvent, WebhookForm, WebhookRow};

use jiff::Timestamp;
use lockstep_protocol::{
    agent::{CheckpointInfo, Machine, Slot},
    job::{JobId, JobState},
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
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
    /// The index of its place in the attempt; rank 0 is in the first.
    pub place: usize,
}

/// The state of a copy of a checkpoint. One in an object store is `Copying` from its first object on, `Complete` once its manifest is there,
/// and `Damaged` when a job could not fetch it; it is `Copying` again when the checkpoint is written and uploaded anew. The server's disk and
/// disks of agents have whole copies, or the server's a damaged one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyState {
    /// It is being made.
    Copying,
    /// It is whole.
    Complete,
    /// It is missing, or not what was written.
    Damaged,
}

impl CopyState {
    /// As the database has it.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Copying => "copying",
            Self::Complete => "complete",
            Self::Damaged => "damaged",
        }
    }

    /// None of what another version wrote.
    pub(super) fn of(text: &str) -> Option<Self> {
        [Self::Copying, Self::Complete, Self::Damaged].into_iter().find(|state| state.as_str() == text)
    }
}

/// The copies of a checkpoint. The server's disk says whether it has one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Copies {
    /// The agents that have it; that of rank 0, which most likely continues the job, is the first.
    pub holders: Vec<Holder>,
    /// That in the object store.
    pub object_store: Option<CopyState>,
    /// That on the server's disk was found damaged.
    pub is_damaged_here: bool,
}

impl Copies {
    /// The server's disk, as a location.
    pub(crate) const SERVER: &str = "server";

    /// Whether the object store has it whole.
    pub(crate) fn is_stored(&self) -> bool {
        self.object_store == Some(CopyState::Complete)
    }

    /// Whether it may be fetched from the object store. That it is whole there may not have been recorded.
    pub(crate) fn may_be_fetched(&self) -> bool {
        matches!(self.object_store, Some(CopyState::Copying | CopyState::Complete))
    }
}

/// What of a checkpoint is in an object store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredCheckpoint {
    /// The checkpoint's id.
    pub id: String,
    /// SHA-256 of the manifest by which it is whole there; none while it is uploaded, or if it is damaged.
    pub manifest: Option<String>,
    /// The upload of a file in parts that has not ended.
    pub parts: Option<String>,
}

impl StoredCheckpoint {
    pub(super) fn state(&self) -> CopyState {
        if self.manifest.is_some() { CopyState::Complete } else { CopyState::Copying }
    }
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
    /// Size of the database.
    pub database_bytes: u64,
}
