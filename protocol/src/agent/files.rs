//! Messages about files between a server and an agent with a disk of its own. Checkpoints go from the agent to the server, and from there
//! to the next machine.

use crate::allowed::AllowedFolders;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// The file in a job's folder with the random word of the newest start. An agent that reads the word there that the server has sent has the
/// server's disk.
pub const MARK: &str = "mark";

/// The part of `StartAttempt` that says which files an agent may lack.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StartFiles {
    /// What [`MARK`] holds in the job's folder on the server's disk. None from a server that could not write it, or does not yet.
    pub mark: Option<String>,
    /// The dataset's fingerprint at the job's first start (`dataset.json`), once there was one.
    pub dataset: Option<Value>,
    /// The dataset's fingerprint when it was registered. An agent forgets it where it uses the server's own files.
    pub registered: Option<Value>,
    /// The id of the checkpoint whose folder `model.pretrained` names on the server's disk.
    pub pretrained: Option<String>,
    /// Where the file may be that `model.pretrained` names; none where it may be anywhere, or is a checkpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weights_in: Option<AllowedFolders>,
    /// Where the dataset may be that the server's path leads to, if that has links by now. An agent forgets it where it uses another path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dataset_in: Option<AllowedFolders>,
}

/// Answers an agent that asks what became of an attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WhatIsNeeded {
    /// The job may be continued on this agent: its folder is worth keeping.
    pub keep: bool,
}

/// How much of a checkpoint the server has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UploadState {
    /// The SHA-256 of the `MANIFEST.json` of the complete checkpoint, when the server has one.
    pub stored: Option<String>,
    /// The SHA-256 of the `MANIFEST.json` of which an upload was begun.
    pub manifest: Option<String>,
    /// Bytes of each file that have come.
    pub received: BTreeMap<String, u64>,
}
