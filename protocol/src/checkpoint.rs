//! Checkpoints, as the server lists them.

use crate::agent::CheckpointInfo;
use jiff::Timestamp;
use serde::Serialize;
use utoipa::ToSchema;

/// A complete checkpoint.
#[derive(Debug, Clone, Default, Serialize, ToSchema)]
pub struct Checkpoint {
    pub id: String,
    pub attempt: u32,
    #[serde(flatten)]
    pub info: CheckpointInfo,
    pub created_at: Timestamp,
    /// The machine from which the checkpoint is still being uploaded. Until the end of the upload, the files are not available.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uploading_from: Option<String>,
    /// Whether the files are neither on the server's disk nor in the object store, and no machine uploads them. Absent if false.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub missing: bool,
    /// State of the copy in the object store; absent if the server has no object store (`serve --artifacts`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stored: Option<StoredState>,
}

impl Checkpoint {
    /// Whether the checkpoint is being copied to the object store.
    pub fn is_being_stored(&self) -> bool {
        self.stored == Some(StoredState::Uploading)
    }
}

/// The state of a checkpoint's copy in the object store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum StoredState {
    /// The checkpoint is being uploaded, or waits for its upload.
    Uploading,
    /// The checkpoint is in the object store.
    Stored,
}
