//! Versions of registered models.

use super::Ownership;
use jiff::Timestamp;
use lockstep_protocol::{dataset::DatasetNote, job::JobId, models::ModelVersion};
use std::collections::BTreeMap;

/// A new version of a model.
#[derive(Debug, Clone)]
pub struct NewVersion {
    pub model: String,
    pub job: JobId,
    pub checkpoint: String,
    /// Fingerprint of the dataset's content at the job's first start, if known.
    pub dataset_fingerprint: Option<DatasetNote>,
    /// Versions of the programs that wrote the checkpoint.
    pub programs: BTreeMap<String, String>,
    pub description: String,
    /// Name of the person or token that registers the version.
    pub registered_by: Option<String>,
    pub at: Timestamp,
}

/// A version, and the owner of its job.
#[derive(Debug, Clone)]
pub struct VersionRow {
    pub version: ModelVersion,
    /// The job's owner and privacy, which also apply to the version.
    pub ownership: Ownership,
}
