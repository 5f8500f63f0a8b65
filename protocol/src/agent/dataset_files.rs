//! How an agent copies a dataset from the server: a list of the dataset's files, and parts of these files.
//!
//! The list is JSON, one entry per line. A response to [`DatasetParts`] has, for each part in turn, [`PART_FOLLOWS`], the part's bytes and
//! their SHA-256. If a part cannot be sent, the response ends with [`PART_CHANGED`] or [`PART_REFUSED`], the length of a sentence in four
//! bytes (big-endian) and the sentence.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Maximum size of a part of a file, in bytes.
pub const DATASET_PART_BYTES: u64 = 4 << 20;
/// Maximum total size of the parts in one request, in bytes.
pub const DATASET_PARTS_BYTES: u64 = 64 << 20;
/// Maximum number of parts in one request.
pub const DATASET_PARTS: usize = 2000;
/// Precedes a part's bytes.
pub const PART_FOLLOWS: u8 = 0;
/// Precedes the reason why a part, and all parts after it, are not sent: the part's file has changed since the list was made. A new list
/// may help.
pub const PART_CHANGED: u8 = 1;
/// Precedes the reason why a part, and all parts after it, are not sent: the part's file cannot be read, or does not belong to the dataset.
pub const PART_REFUSED: u8 = 2;
/// Maximum length of [`DatasetParts::anew`], in bytes.
pub const ANEW_BYTES: usize = 4000;
/// Length of the SHA-256 after a part, in bytes.
pub const SUM_BYTES: usize = 32;

/// A line of the list of a dataset's files: first [`Begin`](Self::Begin), last [`End`](Self::End) or [`Failed`](Self::Failed).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DatasetEntry {
    /// The path to open, relative to the folder with the files: empty for the folder itself, otherwise a file's name or a pattern.
    Begin(String),
    /// A folder; its entries follow.
    Folder(String),
    /// A file: its path, its size, and its modification time (nanoseconds since 1970).
    File(String, u64, i64),
    /// The end of the list: number of files, and their total size in bytes.
    End(u64, u64),
    /// Why the dataset cannot be copied.
    Failed(String),
}

/// A part of a file. The file must not have changed since it was listed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DatasetPart {
    /// The file's path, from the list.
    pub path: String,
    /// Size of the whole file, in bytes.
    pub size_bytes: u64,
    /// The file's modification time, from the list.
    pub changed_ns: i64,
    /// Offset of the part in the file, in bytes.
    pub offset: u64,
    /// Length of the part, in bytes: at most 4 MiB.
    pub length: u64,
}

/// Requests parts of a dataset's files: at most 2000 parts, with at most 64 MiB together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DatasetParts {
    pub parts: Vec<DatasetPart>,
    /// Bytes of the dataset that this agent has, for the job's log.
    pub copied_bytes: u64,
    /// Bytes of the whole dataset.
    pub total_bytes: u64,
    /// Only in the first request of a copy that begins again because the dataset has changed: the reason, for the job's log. At most 4000
    /// bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub anew: Option<String>,
}
