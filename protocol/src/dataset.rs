//! The description of a dataset.

use crate::{
    limits::{BROKEN_FILE_CHARS, CLASS_NAME_BYTES, CLASS_NAMES_BYTES},
    numbers::plural,
    spec::{DataSpec, Validation},
};
use serde::{Deserialize, Serialize};
use std::{collections::HashSet, fmt};
use utoipa::ToSchema;

/// Maximum length of a fingerprint's hash, in bytes. A SHA-256 in hexadecimal has 64 bytes.
const HASH_BYTES: usize = 4 << 10;

/// The file in a job's folder with the [`DatasetNote`].
pub const DATASET_NOTE: &str = "dataset.json";

/// The result of inspecting a dataset's files.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DatasetInfo {
    /// `cifar10`, `cifar100`, `idx`, `image_folder`, `webdataset` or `parquet`.
    pub format: String,
    pub classes: Vec<String>,
    pub splits: Vec<SplitInfo>,
    /// Height of the pictures in pixels; 0 if the pictures differ in size.
    pub height: u32,
    /// Width of the pictures in pixels; 0 if the pictures differ in size.
    pub width: u32,
    /// Median of the pictures' shorter sides in pixels; 0 if it is unknown.
    #[serde(default)]
    pub median_side: u32,
    /// Number of channels: 1 for grey pictures, 3 for colour pictures.
    pub channels: u32,
    /// Mean of each channel over the training split (of a large split, over a sample that is always the same). Pixels are scaled to 0..1.
    pub mean: Vec<f32>,
    /// Standard deviation of each channel, like `mean`.
    pub std: Vec<f32>,
    /// Files that could not be read, with the reasons; at most 100 are listed.
    pub broken: Vec<BrokenFile>,
    /// Number of all files that could not be read.
    pub broken_count: u64,
    /// The suggested division of the training split, if no split validates jobs. Absent for CIFAR and IDX files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_out: Option<HeldOut>,
    /// Splits that are left out because their samples have no labels, such as a test split with secret labels.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unlabelled: Vec<String>,
    /// Identifies the inspected content: machines compare the fingerprint of their own copy with this fingerprint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub fingerprint: Option<PicturesFingerprint>,
    /// When the inspection began, by the server's clock. Absent if no server asked for the inspection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inspected_at: Option<jiff::Timestamp>,
}

impl DatasetInfo {
    /// The split with this name.
    pub fn split(&self, name: &str) -> Option<&SplitInfo> {
        self.splits.iter().find(|split| split.name == name)
    }

    /// Number of pictures in the training split; 0 without one.
    pub fn train_samples(&self) -> u64 {
        self.split("train").map_or(0, |split| split.samples)
    }

    /// Shorter side of the pictures in pixels, or its median if the pictures differ in size; 0 if it is unknown.
    pub fn short_side(&self) -> u32 {
        self.height.min(self.width).max(self.median_side)
    }

    /// Number of pictures that a job with this validation holds out, if an inspection has counted them. `None` also if there are broken
    /// files, because the job may find fewer or more of them.
    pub fn count_held_out(&self, validation: &Validation, validation_seed: u64) -> Option<u64> {
        let held_out = self.held_out.as_ref().filter(|_| self.broken_count == 0)?;
        let train = self.split("train")?;
        let is_counted = *validation == Validation::Fraction(held_out_share(train.samples))
            && validation_seed == held_out.validation_seed;
        is_counted.then(|| held_out.per_class.iter().sum())
    }

    /// The smallest and the largest number of pictures that a job may hold out with this fraction and seed. If an inspection has counted
    /// the pictures, broken files are the only uncertainty. Otherwise the number has a binomial distribution and is almost always within
    /// three standard deviations of its mean.
    pub fn held_out_bounds(&self, fraction: f64, validation_seed: u64) -> [f64; 2] {
        let samples = self.train_samples();
        let is_counted = |held_out: &&HeldOut| {
            held_out.validation_seed == validation_seed
                && held_out_share(samples + self.broken_count) == fraction
        };
        let (number, spread) = match self.held_out.as_ref().filter(is_counted) {
            Some(held_out) => (held_out.per_class.iter().sum::<u64>() as f64, self.broken_count as f64),
            None => {
                let mean = samples as f64 * fraction;
                (mean, 3.0 * (mean * (1.0 - fraction)).sqrt())
            }
        };
        [number - spread, number + spread]
    }

    /// A warning about classes that have no validation picture or no training picture in the suggested division; `None` without such
    /// classes. Also `None` if there are broken files, whose classes are not counted.
    pub fn uncovered_classes(&self) -> Option<String> {
        let held_out = self.held_out.as_ref().filter(|_| self.broken_count == 0)?;
        let train = self.split("train")?;
        let lacking = |lacks: fn(u64, u64) -> bool, kind: &str| {
            let counts = self.classes.iter().zip(train.per_class.iter().zip(&held_out.per_class));
            let without = counts.filter(|(_, (total, held_out))| **total > 0 && lacks(**total, **held_out));
            lacking_classes(&without.map(|(name, _)| name).collect::<Vec<_>>(), kind)
        };
        let parts = [
            lacking(|_, held_out| held_out == 0, "validation"),
            lacking(|total, held_out| total == held_out, "training"),
        ];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        (!parts.is_empty()).then(|| {
            format!(
                "{}. Pictures are held out at random, and a class needs pictures in both parts: add pictures to these classes",
                parts.join("; ")
            )
        })
    }

    /// Why there are too few training pictures, to be appended to the dataset's name; `None` if there are enough.
    pub fn too_few_pictures(&self) -> Option<String> {
        let samples = self.train_samples();
        if samples >= 2 {
            return None;
        }
        let advice = match self.broken.first() {
            Some(BrokenFile { file, detail }) => {
                format!("{} cannot be used, the first: {file} {detail}", plural(self.broken_count, "file"))
            }
            None => "put the pictures of each class into train/<class>/ or <class>/".into(),
        };
        let pictures = plural(samples, "picture");
        Some(format!("has {pictures} to train on, and at least 2 are needed: {advice}"))
    }

    /// Describes a part that is too long to be stored and shown; `None` if every part is short enough.
    pub fn too_long(&self) -> Option<String> {
        let long = |file: &BrokenFile| {
            [&file.file, &file.detail].into_iter().any(|text| text.chars().count() > BROKEN_FILE_CHARS)
        };
        if let mistake @ Some(_) = class_names_mistake(&self.classes) {
            return mistake;
        }
        if self.broken.iter().any(long) {
            return Some(format!("describes a broken file in more than {BROKEN_FILE_CHARS} characters"));
        }
        let has_long_hash = self.fingerprint.as_ref().is_some_and(|hash| hash.sha256.len() > HASH_BYTES);
        has_long_hash.then(|| format!("has a fingerprint of more than {HASH_BYTES} bytes"))
    }

    /// A sentence that names the splits without labels, which are left out, and the pictures that can validate jobs instead; `None` without
    /// such splits.
    pub fn unlabelled_note(&self) -> Option<String> {
        let (first, rest) = self.unlabelled.split_first()?;
        let names = rest.iter().fold(first.clone(), |all, name| format!("{all} and {name}"));
        let have = if rest.is_empty() { "has no labels and is" } else { "have no labels and are" };
        let other = self.splits.iter().find(|split| split.name != "train");
        let instead = other.map_or_else(
            || "pictures held out of the training split (data.validation = 0.2)".to_owned(),
            |split| format!("{} (data.validation = \"{}\")", split.name, split.name),
        );
        Some(format!("{names} {have} left out: measure jobs by {instead}"))
    }

    /// A warning about classes that have no validation picture or no training picture in a job with this data; `None` without such classes,
    /// or if an inspection has not counted the job's pictures.
    pub fn classes_lacking_pictures(&self, data: &DataSpec) -> Option<String> {
        match &data.validation {
            _ if data.folds.is_some() => None,
            Validation::Split(split) => self.unvalidated_classes(split),
            fraction => {
                self.count_held_out(fraction, data.validation_seed)?;
                self.uncovered_classes()
            }
        }
    }

    /// A warning about classes that have training pictures and none in `split`, which validates the network; `None` without such classes.
    pub fn unvalidated_classes(&self, split: &str) -> Option<String> {
        let [train, validation] = [self.split("train")?, self.split(split)?];
        unvalidated_classes(&self.classes, &train.per_class, &validation.per_class, split)
    }
}

impl fmt::Display for BrokenFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.file, self.detail)
    }
}

impl BrokenFile {
    /// Shortens name and reason to [`BROKEN_FILE_CHARS`] characters each.
    #[must_use]
    pub fn shortened(self) -> Self {
        let short = |text: String| match text.char_indices().nth(BROKEN_FILE_CHARS) {
            Some(_) => text.chars().take(BROKEN_FILE_CHARS - 3).chain("...".chars()).collect(),
            None => text,
        };
        Self { file: short(self.file), detail: short(self.detail) }
    }
}

/// Why there are too few classes for training, to be appended to the dataset's name; `None` if there are enough.
pub fn too_few_classes(classes: &[String]) -> Option<String> {
    match classes {
        [] => Some("has no class: there is nothing to tell apart".into()),
        [only] => Some(format!(
            "has one class, {only:?}: there is nothing to tell apart, and every prediction would be right. Add pictures of another class"
        )),
        _ => None,
    }
}

/// Describes class names that are too long; `None` if all names are short enough.
pub fn class_names_mistake(classes: &[String]) -> Option<String> {
    if let Some(name) = classes.iter().find(|name| name.len() > CLASS_NAME_BYTES) {
        let begin: String = name.chars().take(30).collect();
        let bytes = name.len();
        return Some(format!(
            "has a class whose name has {bytes} bytes ({begin}...); at most {CLASS_NAME_BYTES} are allowed: shorten the name"
        ));
    }
    let all: usize = classes.iter().map(String::len).sum();
    (all > CLASS_NAMES_BYTES).then(|| {
        format!(
            "has {} classes whose names have {all} bytes; at most {CLASS_NAMES_BYTES} are allowed",
            classes.len()
        )
    })
}

/// One split of a dataset.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SplitInfo {
    /// `train`, `test`, `val` ...
    pub name: String,
    pub samples: u64,
    /// Number of samples of each class, in the order of `classes`.
    pub per_class: Vec<u64>,
}

/// A suggested division of the training split, with the fraction 0.1 (0.2 of fewer than 1,000 pictures, 0.3 of fewer than 50).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HeldOut {
    /// Of the seeds 0 to 99, the seed whose held-out pictures cover the classes most evenly.
    pub validation_seed: u64,
    /// Number of held-out pictures of each class, in the order of `classes`.
    pub per_class: Vec<u64>,
}

/// Identifies the pictures that validate a network. Two accuracies can be compared if their validation sets are equal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ValidationSet {
    pub pictures: u64,
    /// Hash of the pictures' names, contents and classes, in hexadecimal. Training pictures have no influence.
    pub fingerprint: String,
}

/// Identifies the pictures of a dataset, to detect changes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PicturesFingerprint {
    pub pictures: u64,
    pub picture_bytes: u64,
    /// Hash of the classes, and of the pictures' names, classes and contents, in hexadecimal.
    pub sha256: String,
}

impl PicturesFingerprint {
    /// A description, such as `640 pictures of 3 MB`.
    pub fn in_words(&self) -> String {
        format!("{} of {:.0} MB", plural(self.pictures, "picture"), self.picture_bytes as f64 / 1e6)
    }
}

/// The dataset of a job's first start. Datasets of machines on which the job starts later are compared with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatasetNote {
    #[serde(flatten)]
    pub fingerprint: PicturesFingerprint,
    /// Name of the agent that had this dataset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
}

impl DatasetNote {
    /// A description, such as `node-2 has 640 pictures of 3 MB, or other content`.
    pub fn in_words(&self) -> String {
        let machine = self.machine.as_deref().unwrap_or("another machine");
        format!("{machine} has {}, or other content", self.fingerprint.in_words())
    }
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
    /// The dataset's path on the machines that train on it.
    pub path: String,
    pub info: DatasetInfo,
    pub added_at: jiff::Timestamp,
    /// The person who registered the dataset, or the name of the token that was used.
    pub owner: Option<String>,
    /// Only the owner and admins see the dataset.
    #[serde(default)]
    pub private: bool,
}

/// The folder in a server's data directory that contains uploaded datasets.
pub const UPLOADS: &str = "datasets/uploads";

impl Dataset {
    /// Whether the files were uploaded to the server. Uploaded files are removed with the dataset.
    pub fn is_uploaded(&self) -> bool {
        self.path.contains(&format!("/{UPLOADS}/"))
    }
}

/// Names of validation splits, in order of preference.
const VALIDATION_SPLITS: [&str; 7] = ["val", "validation", "valid", "dev", "test", "eval", "evaluation"];

/// The validation split of a job that does not name one, for a dataset with `splits`: the `preferred` split if it exists,
/// otherwise the first name of [`VALIDATION_SPLITS`] that is a split. `None` if no such split exists.
pub fn default_validation<'a>(preferred: &str, splits: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let splits: Vec<_> = splits.into_iter().collect();
    let existing = |name: &str| splits.iter().copied().find(|split| *split == name);
    existing(preferred).or_else(|| VALIDATION_SPLITS.into_iter().find_map(existing))
}

/// The share of the training pictures that validates a job without a validation split, if the dataset has `samples` pictures, all
/// for training. The accuracy of fewer than about 100 validation pictures is uncertain, so few pictures have a larger share.
pub fn held_out_share(samples: u64) -> f64 {
    match samples {
        ..50 => 0.3,
        50..1000 => 0.2,
        _ => 0.1,
    }
}

/// Maximum number of class names in a sentence.
const MAX_NAMES: usize = 5;

/// Names the classes `without` a picture of this kind: `2 classes have no validation picture: "cat", "dog"`. `None` for an empty list.
pub fn lacking_classes(without: &[&String], kind: &str) -> Option<String> {
    if without.is_empty() {
        return None;
    }
    let have = if without.len() == 1 { "has" } else { "have" };
    let classes = plural(without.len() as u64, "class");
    Some(format!("{classes} {have} no {kind} picture: {}", first_names(without)))
}

/// Lists at most [`MAX_NAMES`] names, and the number of the others: `"cat", "dog" and 3 more`.
fn first_names(names: &[&String]) -> String {
    let named: Vec<_> = names.iter().take(MAX_NAMES).map(|name| format!("{name:?}")).collect();
    let unnamed = names.len().saturating_sub(MAX_NAMES);
    let ending = if unnamed > 0 { format!(" and {unnamed} more") } else { String::new() };
    named.join(", ") + &ending
}

/// A warning about classes that have training pictures and none in `split`, which validates the network; `None` without such classes.
/// `training` and `validation`: the numbers of pictures of each class.
pub fn unvalidated_classes(
    classes: &[String],
    training: &[u64],
    validation: &[u64],
    split: &str,
) -> Option<String> {
    let counts = classes.iter().zip(training.iter().zip(validation));
    let without = counts.filter(|(_, (training, validation))| **training > 0 && **validation == 0);
    let lacking = lacking_classes(&without.map(|(name, _)| name).collect::<Vec<_>>(), "validation")?;
    Some(format!(
        "{lacking}. Validation accuracy does not cover such a class: move some of its pictures from train to {split}"
    ))
}

/// How the classes of a trained model differ from a dataset's classes, in words; `None` if they are the same classes in
/// the same order. A model identifies classes by number, so another order means other classes.
pub fn classes_differ(trained: &[String], dataset: &[String]) -> Option<String> {
    if trained == dataset {
        return None;
    }
    let missing_names = |classes: &[String], others: &[String]| -> Option<String> {
        let known: HashSet<&String> = others.iter().collect();
        let missing: Vec<_> = classes.iter().filter(|name| !known.contains(name)).collect();
        (!missing.is_empty()).then(|| first_names(&missing))
    };
    let mut parts = Vec::new();
    if trained.len() != dataset.len() {
        parts.push(format!("the model has {} classes, the dataset {}", trained.len(), dataset.len()));
    }
    parts.extend(
        missing_names(trained, dataset).map(|names| format!("the dataset lacks the model's {names}")),
    );
    parts.extend(missing_names(dataset, trained).map(|names| format!("the model does not know {names}")));
    if parts.is_empty() {
        let index = trained.iter().zip(dataset).position(|(a, b)| a != b).unwrap_or(0);
        parts.push(format!(
            "the classes are in another order: class {index} is {:?} for the model and {:?} in the dataset",
            trained[index], dataset[index]
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
    fn class_names_and_broken_files_have_a_maximum_length() {
        let name = |bytes: usize| "n".repeat(bytes);
        assert_eq!(class_names_mistake(&[name(CLASS_NAME_BYTES)]), None);
        let message = class_names_mistake(&["a".into(), name(CLASS_NAME_BYTES + 1)]).unwrap();
        assert!(message.contains("256 bytes (nnnn") && message.len() < 200, "{message}");
        let mut all = vec![name(128); CLASS_NAMES_BYTES / 128];
        assert_eq!(class_names_mistake(&all), None);
        all.push(name(1));
        assert!(class_names_mistake(&all).unwrap().contains("have 4194305 bytes"));

        let file = |chars: usize| BrokenFile { file: "\u{e9}".repeat(chars), detail: "is empty".into() };
        assert_eq!(file(BROKEN_FILE_CHARS).shortened(), file(BROKEN_FILE_CHARS));
        let short = file(BROKEN_FILE_CHARS + 1).shortened();
        assert!(short.file.chars().count() == BROKEN_FILE_CHARS && short.file.ends_with("\u{e9}..."));
    }

    #[test]
    fn parts_of_an_inspection_have_a_maximum_length() {
        let info = |broken: usize, hash: usize| DatasetInfo {
            broken: vec![BrokenFile { file: "a".into(), detail: "\u{e9}".repeat(broken) }],
            fingerprint: Some(PicturesFingerprint { sha256: "f".repeat(hash), ..Default::default() }),
            ..DatasetInfo::default()
        };
        assert_eq!(info(BROKEN_FILE_CHARS, HASH_BYTES).too_long(), None);
        let words = info(BROKEN_FILE_CHARS + 1, HASH_BYTES).too_long().unwrap();
        assert!(words.contains("broken file in more than 1000 characters"), "{words}");
        let words = info(BROKEN_FILE_CHARS, HASH_BYTES + 1).too_long().unwrap();
        assert!(words.contains("fingerprint of more than 4096 bytes"), "{words}");
    }

    #[test]
    fn classes_without_validation_pictures_are_named() {
        let words = |training: &[u64], validation: &[u64]| {
            unvalidated_classes(&names("cat dog fox"), training, validation, "val")
        };
        assert_eq!(words(&[9, 9, 0], &[1, 1, 0]), None, "fox has no training picture");
        let one = words(&[9, 9, 9], &[0, 1, 1]).unwrap();
        assert!(
            one.starts_with("1 class has no validation picture: \"cat\". ") && one.ends_with("to val"),
            "{one}"
        );
        assert!(
            words(&[9, 9, 9], &[0, 1, 0])
                .unwrap()
                .starts_with("2 classes have no validation picture: \"cat\", \"fox\". ")
        );
        // One picture of each class: one class lacks a validation picture, and the other a training picture.
        let train = SplitInfo { name: "train".into(), samples: 2, per_class: vec![1, 1] };
        let held_out = Some(HeldOut { validation_seed: 7, per_class: vec![0, 1] });
        let info =
            DatasetInfo { classes: names("a b"), splits: vec![train], held_out, ..DatasetInfo::default() };
        let lacking = |seed, folds| {
            info.classes_lacking_pictures(&DataSpec {
                validation: Validation::Fraction(held_out_share(2)),
                validation_seed: seed,
                folds,
                ..DataSpec::default()
            })
        };
        let words = lacking(7, None).unwrap();
        let expected = "1 class has no validation picture: \"a\"; 1 class has no training picture: \"b\". Pictures are held out";
        assert!(words.starts_with(expected), "{words}");
        assert_eq!((lacking(8, None), lacking(7, Some(2))), (None, None), "not counted");
        let many = names("a b c d e f g");
        let words = lacking_classes(&many.iter().collect::<Vec<_>>(), "training").unwrap();
        assert!(
            words.ends_with("no training picture: \"a\", \"b\", \"c\", \"d\", \"e\" and 2 more"),
            "{words}"
        );
    }

    #[test]
    fn the_usual_split_is_preferred_for_validation() {
        let chosen =
            |usual: &str, splits: &str| default_validation(usual, splits.split(' ')).map(str::to_owned);
        for (usual, splits, found) in [
            ("test", "train test val", Some("test")),
            ("val", "train test val", Some("val")),
            ("test", "train dev valid", Some("valid")),
            ("val", "train eval test", Some("test")),
            ("test", "train holdout", None),
            ("holdout", "train holdout val", Some("holdout")),
        ] {
            assert_eq!(chosen(usual, splits).as_deref(), found, "{usual} of {splits}");
        }
    }

    #[test]
    fn differences_between_classes_are_named() {
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
