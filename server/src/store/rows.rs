//! Rows and filters: the types that other modules exchange with the store.

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

pub use self::{
    access::*, attempts::*, events::*, history::*, job_groups::*, job_list::*, jobs::*, layers::*,
    machines::*, metrics::*, models::*, people::*, sweeps::*, webhooks::*,
};

use jiff::Timestamp;
use lockstep_protocol::{
    agent::{CheckpointInfo, Machine, Slot},
    job::{JobId, JobState},
    words,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// A complete checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckpointRow {
    /// An opaque id.
    pub id: String,
    pub job: JobId,
    pub attempt: u32,
    /// Step, size and validation results.
    pub info: CheckpointInfo,
    /// When the checkpoint was reported.
    pub created_at: Timestamp,
}

/// An agent that has a checkpoint on its own disk, not the server's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    pub agent_id: String,
    /// The agent's name when it was given the attempt.
    pub agent: String,
    /// Index of the agent's place in the attempt; the first place has rank 0.
    pub place: usize,
}

words! {
    /// The state of a copy of a checkpoint. A copy in an object store is `Copying` from its first object on, `Complete` once its manifest
    /// is uploaded, and `Damaged` if a job could not fetch it; it is `Copying` again while the checkpoint is uploaded again. A copy on an
    /// agent's disk is always `Complete`. A copy on the server's disk has a row only if it is `Damaged`.
    pub enum CopyState: "copy state" {
        /// The upload is not complete.
        Copying = "copying",
        Complete = "complete",
        /// Files of the copy are missing or differ from what was written.
        Damaged = "damaged",
    }
}

/// The copies of a checkpoint. Whether the server's disk has a copy is not stored, because only the copy's folder shows it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Copies {
    /// The agents that have the checkpoint on their own disk. The agent of rank 0, which most likely continues the job, is first.
    pub holders: Vec<Holder>,
    /// The state of the copy in the object store.
    pub object_store: Option<CopyState>,
    /// Whether the copy on the server's disk was found damaged.
    pub is_damaged_on_server: bool,
}

impl Copies {
    /// The location of copies on the server's disk.
    pub(crate) const SERVER: &str = "server";

    /// Whether the object store has a complete copy.
    pub(crate) fn is_stored(&self) -> bool {
        self.object_store == Some(CopyState::Complete)
    }

    /// Whether the checkpoint may be fetchable from the object store. A completed upload may not have been recorded yet.
    pub(crate) fn may_be_fetched(&self) -> bool {
        matches!(self.object_store, Some(CopyState::Copying | CopyState::Complete))
    }
}

/// The record of a checkpoint in an object store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredCheckpoint {
    pub id: String,
    /// SHA-256 of the manifest of a complete copy; `None` while the copy is being uploaded, or if it is damaged.
    pub manifest: Option<String>,
    /// The unfinished multipart upload of a file, if there is one.
    pub unfinished_upload: Option<String>,
}

impl StoredCheckpoint {
    pub(super) fn state(&self) -> CopyState {
        if self.manifest.is_some() { CopyState::Complete } else { CopyState::Copying }
    }
}

/// The marker that identifies an object store, regardless of its URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectStoreMarker {
    /// The text in the store's `LOCKSTEP.json`.
    pub marker: String,
    /// Whether the marker was restored from a backup. The server that was backed up may still use the store.
    pub is_restored: bool,
}

/// Notes and tags of a job.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Annotation {
    /// Free text; may be empty.
    pub notes: String,
    /// Sorted, without duplicates.
    pub tags: Vec<String>,
}

/// A page of jobs' notes and tags.
#[derive(Debug, Default)]
pub struct AnnotationPage {
    /// Notes and tags by job, except jobs whose notes and tags this version cannot read.
    pub jobs: BTreeMap<JobId, Annotation>,
    /// The job after which the next page begins; `None` on the last page.
    pub next: Option<String>,
}

/// An agent that has connected to the server.
#[derive(Debug, Clone, PartialEq)]
pub struct AgentRow {
    /// The agent's id, which it keeps over restarts.
    pub id: String,
    pub name: String,
    /// The agent's machine, as the agent last described it.
    pub machine: Machine,
    /// The machine's slots, by index.
    pub slots: Vec<Slot>,
    /// When the server last received a message of the agent.
    pub last_seen_at: Timestamp,
}

/// Numbers for monitoring.
#[derive(Debug, Clone, Default)]
pub struct Counts {
    /// Number of jobs in each state that at least one job has.
    pub jobs: Vec<(JobState, u64)>,
    /// Size of the database in bytes.
    pub database_bytes: u64,
}

/// The use of slots by an owner or a project. In fair share, the smallest value comes first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ShareUse {
    /// Number of slots in use.
    pub slots: u64,
    /// Number of the newest fencing token; 0 if none of the last 100 attempts belongs to the owner or project.
    pub newest_start: u64,
}
