//! The record in the folder of a prepared copy, for readers of the dataset: `prepare` writes it.

use lockstep_host::files;
use serde::Deserialize;
use std::{collections::BTreeMap, path::Path};

/// The record of a copy until it is whole.
pub(super) const UNFINISHED: &str = "unfinished.json";
/// The record of one that is.
pub(super) const PREPARED: &str = "prepared.json";
/// Limit of a record: that of a hundred thousand shards has 10 MB.
pub(super) const MAX_BYTES: u64 = 256 << 20;

/// Whether a folder holds a copy that is not whole.
pub(super) fn is_unfinished(dir: &Path) -> bool {
    dir.join(UNFINISHED).is_file()
}

/// What is read of a record.
#[derive(Deserialize)]
struct Record {
    /// By file.
    shards: BTreeMap<String, Shard>,
}

#[derive(Deserialize)]
struct Shard {
    bytes: u64,
}

/// How a copy that was whole differs from its record; none where it does not, or `dir` holds no copy. `size_of` returns the size
/// of a shard in bytes, or none for shards that are not read; with `all`, every shard must exist. Only the record is opened.
pub(super) fn damage(dir: &Path, all: bool, size_of: impl Fn(&str) -> Option<u64>) -> Option<String> {
    // What lies there may be somebody else's file of that name.
    let text = files::read(&dir.join(PREPARED), MAX_BYTES).ok()?;
    let record = serde_json::from_slice::<Record>(&text).ok()?;
    let found = record.shards.iter().find_map(|(file, written)| match size_of(file) {
        Some(size) if size == written.bytes => None,
        Some(size) => Some(format!("{file} has {size} bytes and was written with {}", written.bytes)),
        None if all => Some(format!("{file} is not there")),
        None => None,
    })?;
    Some(format!(
        "is a copy that is no longer whole: {found}. Run its `lockstep dataset prepare` again, which makes what is missing, or \
         take {PREPARED} away if that is meant"
    ))
}
