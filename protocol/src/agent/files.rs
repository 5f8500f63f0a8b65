//! Messages about files between a server and an agent with a disk of its own. Checkpoints go from the agent to the
//! server, and from the server to the next machine.

use crate::{
    allowed::AllowedFolders,
    dataset::{DatasetNote, PicturesFingerprint},
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// A file in a job's folder with the random mark of the newest start. An agent that finds the server's mark in this
/// file shares the server's disk.
pub const MARK: &str = "mark";

/// The part of `StartAttempt` that says which files an agent may lack.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StartFiles {
    /// The content of [`MARK`] in the job's folder on the server's disk. `None` from a server that cannot write the file.
    pub mark: Option<String>,
    /// The dataset at the job's first start, if there was a start.
    pub dataset: Option<DatasetNote>,
    /// The registered dataset's fingerprint at its last inspection. An agent that uses the server's own files ignores it.
    pub registered: Option<PicturesFingerprint>,
    /// The id of the checkpoint whose folder `model.pretrained` names on the server's disk.
    pub pretrained: Option<String>,
    /// Folders in which the file of `model.pretrained` may be; `None` if it may be anywhere, is a checkpoint, or has a name of
    /// downloaded weights.
    pub weights_in: Option<AllowedFolders>,
    /// Folders to which the server's path of the dataset may lead if it has links. An agent that uses another path ignores this.
    pub dataset_in: Option<AllowedFolders>,
}

/// The response to an agent that asks whether an attempt's files are still needed. `folder`: the job's folder, because the
/// job may continue on this agent. `nothing`: the agent may remove the job's folder. `unknown`: the server's database has
/// neither the attempt nor the job's deletion, as after the restore of an older backup, so the agent keeps the folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "needed", rename_all = "snake_case")]
pub enum WhatIsNeeded {
    Folder,
    Nothing,
    Unknown,
}

/// The part of a checkpoint that the server has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UploadState {
    /// The SHA-256 of the complete checkpoint's `MANIFEST.json`, if the server has a complete checkpoint.
    pub stored: Option<String>,
    /// The SHA-256 of the `MANIFEST.json` of an unfinished upload.
    pub manifest: Option<String>,
    /// Bytes of each file that have been received.
    pub received: BTreeMap<String, u64>,
}
