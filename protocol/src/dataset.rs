//! What is known of a dataset.

use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use utoipa::ToSchema;

/// What looking at a dataset's files found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DatasetInfo {
    /// `cifar10`, `cifar100`, `idx`, `image_folder`, `webdataset` or `parquet`.
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
    /// Splits whose samples have no labels, as of a test split whose labels are kept secret: left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unlabelled: Vec<String>,
}

impl DatasetInfo {
    /// Says which splits are left out as they have no labels, and what measures a job instead; `None` where there is none.
    pub fn unlabelled_note(&self) -> Option<String> {
        let (first, rest) = self.unlabelled.split_first()?;
        let names = rest.iter().fold(first.clone(), |all, name| format!("{all} and {name}"));
        let have = if rest.is_empty() { "has no labels and is" } else { "have no labels and are" };
        let other = self.splits.iter().find(|split| split.name != "train");
        let instead = other.map_or_else(
            || "pictures held out of the training split (data.validation = 0.1)".to_owned(),
            |split| format!("{} (data.validation = \"{}\")", split.name, split.name),
        );
        Some(format!("{names} {have} left out: measure jobs by {instead}"))
    }
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

/// Which pictures a dataset holds, told from its index: whether it is still the one that it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PicturesFingerprint {
    pub pictures: u64,
    pub picture_bytes: u64,
    /// Of classes, labels, names and sizes; hexadecimal.
    pub names_sha256: String,
    /// Of what the pictures hold, in the order of the names; hexadecimal.
    pub contents_sha256: String,
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

/// Class names of a kind that are named in a sentence.
const NAMED: usize = 5;

/// How the classes that a model was trained on differ from a dataset's, in words; `None` when they are the same ones in
/// the same order. A model tells classes by their numbers, so another order is other classes.
pub fn classes_differ(trained: &[String], dataset: &[String]) -> Option<String> {
    if trained == dataset {
        return None;
    }
    let lacking = |all: &[String], of: &[String]| -> Option<String> {
        let there: HashSet<&String> = of.iter().collect();
        let missing: Vec<_> = all.iter().filter(|name| !there.contains(name)).collect();
        let named: Vec<_> = missing.iter().take(NAMED).map(|name| format!("{name:?}")).collect();
        let more = missing.len().saturating_sub(NAMED);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        (!missing.is_empty()).then(|| format!("{}{more}", named.join(", ")))
    };
    let mut parts = Vec::new();
    if trained.len() != dataset.len() {
        parts.push(format!("the model has {} classes, the dataset {}", trained.len(), dataset.len()));
    }
    parts.extend(lacking(trained, dataset).map(|names| format!("the dataset lacks the model's {names}")));
    parts.extend(lacking(dataset, trained).map(|names| format!("the model does not know {names}")));
    if parts.is_empty() {
        let place = trained.iter().zip(dataset).position(|(a, b)| a != b).unwrap_or(0);
        parts.push(format!(
            "the classes are in another order: class {place} is {:?} for the model and {:?} in the dataset",
            trained[place], dataset[place]
        ));
    }
    Some(parts.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn classes_that_differ_are_named() {
        let differ = |a: &str, b: &str| classes_differ(&names(a), &names(b));
        assert_eq!(differ("cat dog", "cat dog"), None);
        assert_eq!(
            differ("cat dog", "dog cat").unwrap(),
            "the classes are in another order: class 0 is \"cat\" for the model and \"dog\" in the dataset"
        );
        assert_eq!(
            differ("cat dog", "cat fox").unwrap(),
            "the dataset lacks the model's \"dog\"; the model does not know \"fox\""
        );
        let fewer = differ("a b c d e f g h", "a").unwrap();
        assert_eq!(
            fewer,
            "the model has 8 classes, the dataset 1; the dataset lacks the model's \"b\", \"c\", \"d\", \"e\", \"f\" and \
             2 more"
        );
        assert!(differ("a a", "a").unwrap().contains("has 2 classes"), "a name that occurs twice");
    }
}
