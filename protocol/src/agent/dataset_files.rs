//! How an agent copies a dataset from the server: a list of the dataset's files, and parts of them.
//!
//! The list is JSON, an entry a line. An answer to [`DatasetParts`] has, for each part in turn, [`PART_FOLLOWS`], the part's bytes and
//! their SHA-256; or [`PART_CHANGED`] or [`PART_REFUSED`], the length of a sentence in four bytes (big-endian) and the sentence, which ends it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The largest part of a file.
pub const DATASET_PART_BYTES: u64 = 4 << 20;
/// What the parts of one request may have together.
pub const DATASET_PARTS_BYTES: u64 = 64 << 20;
/// How many parts one request may name.
pub const DATASET_PARTS: usize = 2000;
/// Before a part's bytes.
pub const PART_FOLLOWS: u8 = 0;
/// Before the reason why a part, and what was to follow it, does not come: its file is not as it was listed. Another list may do.
pub const PART_CHANGED: u8 = 1;
/// The same for a file that cannot be read, or is none of the dataset's.
pub const PART_REFUSED: u8 = 2;
/// The longest reason for which a copy is begun anew, in bytes.
pub const ANEW_BYTES: usize = 4000;
/// Of the SHA-256 after a part.
pub const SUM_BYTES: usize = 32;

/// A line of the list of a dataset's files: first [`Begin`](Self::Begin), last [`End`](Self::End) or [`Failed`](Self::Failed).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DatasetEntry {
    /// What is to be opened, seen from the folder with the files: empty for that folder itself, else a file's name or a pattern.
    Begin(String),
    /// A folder, before what lies in it.
    Folder(String),
    /// A file: its path, its size, and when it was last changed (nanoseconds since 1970).
    File(String, u64, i64),
    /// That was all: how many files, and their bytes.
    End(u64, u64),
    /// The dataset cannot be copied, and why.
    Failed(String),
}

/// A part of a file, which must be as the list had it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DatasetPart {
    /// As in the list.
    pub path: String,
    /// Of the whole file.
    pub size_bytes: u64,
    /// As in the list.
    pub changed_ns: i64,
    pub offset: u64,
    /// At most 4 MiB.
    pub length: u64,
}

/// Asks for parts of a dataset's files: at most 2000, of 64 MiB together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DatasetParts {
    pub parts: Vec<DatasetPart>,
    /// How much this agent has of the dataset, for the job's log.
    pub copied_bytes: u64,
    /// How much there is.
    pub total_bytes: u64,
    /// Why the copy is begun anew, in the first request of one that is: the dataset has changed. At most 4000 bytes, for the job's log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub anew: Option<String>,
}
