//! The record in the folder of a prepared copy: `unfinished.json` until the copy is complete, then `prepared.json`.
//! `prepare` writes the record, and it is read when the copy is opened.

use lockstep_host::files;
use lockstep_protocol::dataset::{BrokenFile, PicturesFingerprint};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, path::Path};

/// File name of the record of an incomplete copy.
pub(super) const UNFINISHED: &str = "unfinished.json";
/// File name of the record of a complete copy.
pub(super) const PREPARED: &str = "prepared.json";
/// The version of the copy's content. Another version may produce other bytes from the same pictures.
pub(super) const VERSION: u32 = 1;
/// Size limit of a record. The record of a hundred thousand shards has 10 MB.
pub(super) const MAX_BYTES: u64 = 256 << 20;

/// Whether a folder has an incomplete copy.
pub(super) fn is_unfinished(dir: &Path) -> bool {
    dir.join(UNFINISHED).is_file()
}

/// The content of the record.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) version: u32,
    pub(super) plan: Plan,
    /// The shards by file name.
    pub(super) shards: BTreeMap<String, FinishedShard>,
}

/// Everything that determines the bytes of a copy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Plan {
    pub(super) short_side: u32,
    pub(super) quality: u8,
    pub(super) source: PicturesFingerprint,
    /// Number of pictures in a shard, for each split.
    pub(super) per_shard: Vec<u32>,
}

/// A complete shard.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct FinishedShard {
    pub(super) pictures: u64,
    pub(super) bytes: u64,
    /// A checksum of some pieces of the file; see `prepare/record.rs`.
    pub(super) sampled: u32,
    /// Pictures that were left out.
    pub(super) broken: Vec<BrokenFile>,
}

/// Whether `bytes` are the record of a copy by another version of Lockstep. Every version's record has `version` and `shards`; a file
/// without `shards` is of another program. Other fields may differ.
pub(super) fn is_of_another_version(bytes: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Version {
        version: u32,
        #[serde(rename = "shards")]
        _shards: serde::de::IgnoredAny,
    }
    serde_json::from_slice::<Version>(bytes).is_ok_and(|found| found.version != VERSION)
}

/// How a complete copy differs from its record. `None` if it does not differ, or if `dir` has no copy. `size_of`
/// returns the size of a shard in bytes, or `None` for a shard that was not found; this is damage only if `needs_all`.
/// Only the record is opened.
pub(super) fn damage(dir: &Path, needs_all: bool, size_of: impl Fn(&str) -> Option<u64>) -> Option<String> {
    // The file may come from another program and only have the same name.
    let bytes = files::read(&dir.join(PREPARED), MAX_BYTES).ok()?;
    if is_of_another_version(&bytes) {
        return Some(format!(
            "has a {PREPARED} of another version of lockstep, so it is unknown whether the copy is complete. Create a new copy with \
             `lockstep dataset prepare`, or remove {PREPARED} to use the shards that exist"
        ));
    }
    let record = serde_json::from_slice::<Record>(&bytes).ok()?;
    let found = record.shards.iter().find_map(|(file, written)| match size_of(file) {
        Some(size) if size == written.bytes => None,
        Some(size) => Some(format!("{file} has {size} bytes and was written with {}", written.bytes)),
        None if needs_all => Some(format!("{file} is missing")),
        None => None,
    })?;
    Some(format!(
        "is an incomplete copy: {found}. Run `lockstep dataset prepare` again to create what is missing, or \
         remove {PREPARED} if that is intended"
    ))
}
