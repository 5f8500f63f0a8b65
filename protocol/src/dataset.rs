//! What is known of a dataset.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What looking at a dataset's files found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DatasetInfo {
    /// `cifar10`, `cifar100`, `idx` or `image_folder`.
    pub format: String,
    pub classes: Vec<String>,
    pub splits: Vec<SplitInfo>,
    /// Height, width and channels; height and width are 0 when the pictures differ.
    pub height: u32,
    pub width: u32,
    pub channels: u32,
    /// Per channel, of pixels scaled to 0..1, over the training split (a seeded sample of it when large).
    pub mean: Vec<f32>,
    pub std: Vec<f32>,
    /// Files that could not be read, with what is wrong; at most 100 are named.
    pub broken: Vec<BrokenFile>,
    pub broken_count: u64,
}

/// One split of a dataset.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SplitInfo {
    /// `train`, `test`, `val` ...
    pub name: String,
    pub samples: u64,
    /// Samples of each class, in the order of `classes`.
    pub per_class: Vec<u64>,
}

/// A file that could not be read.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BrokenFile {
    pub file: String,
    pub detail: String,
}

/// A dataset registered under a name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Dataset {
    pub name: String,
    /// Where it lies on the machines that train on it.
    pub path: String,
    pub info: DatasetInfo,
    #[schema(value_type = String)]
    pub added_at: jiff::Timestamp,
}
