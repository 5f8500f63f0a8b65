//! Versions of registered models.

use super::Owned;
use jiff::Timestamp;
use lockstep_protocol::{job::JobId, models::ModelVersion};
use serde_json::Value;
use std::collections::BTreeMap;

/// A checkpoint about to be registered.
#[derive(Debug, Clone)]
pub struct NewVersion {
    /// The model's name.
    pub model: String,
    /// The checkpoint's job.
    pub job: JobId,
    /// The checkpoint's id.
    pub checkpoint: String,
    /// The dataset's content at the job's first start, if known.
    pub dataset_fingerprint: Option<Value>,
    /// Versions of the programs that wrote the checkpoint.
    pub programs: BTreeMap<String, String>,
    /// What a person says of it.
    pub description: String,
    /// Who registers it: a person's or a token's name.
    pub by: Option<String>,
    /// Now.
    pub at: Timestamp,
}

/// A version, and whose its job is.
#[derive(Debug, Clone)]
pub struct VersionRow {
    /// As it is shown.
    pub version: ModelVersion,
    /// Who sees the job sees the version.
    pub owned: Owned,
}
