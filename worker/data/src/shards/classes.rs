//! The classes of a dataset of shards. The labels of samples are numbers or names.

use super::SplitContents;
use crate::{DataError, label::MAX_CLASSES, read_names};
use std::{collections::BTreeMap, fs, path::Path};

/// The names of the classes, and whether labels are numbers or names.
pub(super) struct Classes {
    pub(super) names: Vec<String>,
    /// The number of each name. `None` if labels are numbers.
    by_name: Option<BTreeMap<String, u32>>,
}

impl Classes {
    pub(super) fn number(&self, label: &str) -> Option<u32> {
        match &self.by_name {
            Some(by_name) => by_name.get(label).copied(),
            None => label.parse().ok().filter(|number| (*number as usize) < self.names.len()),
        }
    }
}

/// The class names stored in the files, which must be equal in all files.
pub(super) fn common_class_names<'a>(
    root: &Path,
    mut named: impl Iterator<Item = (&'a Path, &'a [String])>,
) -> Result<Option<Vec<String>>, DataError> {
    let Some((first, names)) = named.next() else { return Ok(None) };
    match named.find(|(_, others)| *others != names) {
        None => Ok(Some(names.to_vec())),
        Some((other, _)) => Err(DataError::Invalid(format!(
            "{} and {} name their classes differently, so their labels mean different things: write the files again with the same list",
            root.join(first).display(),
            root.join(other).display()
        ))),
    }
}

pub(super) fn is_negative(label: &str) -> bool {
    label.strip_prefix('-').is_some_and(|digits| digits.parse::<u32>().is_ok())
}

/// If all labels are numbers (outside the training split, negative numbers are ignored), classes are numbered, and
/// named by `names` or `classes.txt` if either exists. Otherwise the classes are the names in the training split, in
/// alphabetical order.
pub(super) fn find_classes(
    root: &Path,
    names: Option<Vec<String>>,
    splits: &BTreeMap<&str, SplitContents>,
) -> Result<Classes, DataError> {
    let path = root.join("classes.txt");
    let wrong = |detail: String| DataError::file(&path, detail);
    let has_names = fs::symlink_metadata(&path).is_ok();
    let (mut numbers, mut other) = (Vec::<u32>::new(), None);
    for (split, label) in splits.iter().flat_map(|(split, f)| f.labels.iter().map(move |l| (*split, l))) {
        match label.parse() {
            Ok(number) => numbers.push(number),
            Err(_) if split != "train" && is_negative(label) => {}
            Err(_) => other = other.or(Some(label)),
        }
    }
    if let Some(label) = other {
        if has_names && !numbers.is_empty() {
            return Err(wrong(format!(
                "names classes by their numbers, but one sample has the label {label:?}: give it a number from 0, or \
                 remove classes.txt if labels are names"
            )));
        }
        let mut by_name: BTreeMap<String, u32> =
            splits.get("train").into_iter().flat_map(|t| &t.labels).map(|label| (label.clone(), 0)).collect();
        (0..).zip(by_name.values_mut()).for_each(|(number, number_of_name)| *number_of_name = number);
        return Ok(Classes { names: by_name.keys().cloned().collect(), by_name: Some(by_name) });
    }
    let count = numbers.into_iter().max().map_or(0, |max| max.saturating_add(1));
    if count > MAX_CLASSES {
        return Err(DataError::Invalid(format!(
            "a label of {} is {}; classes are numbered from 0, up to {}",
            root.display(),
            count - 1,
            MAX_CLASSES - 1
        )));
    }
    if let Some(names) = names {
        return if names.len() < count as usize {
            Err(DataError::Invalid(format!(
                "{} names {} classes, but has a label {}",
                root.display(),
                names.len(),
                count - 1
            )))
        } else {
            Ok(Classes { names, by_name: None })
        };
    }
    if !has_names {
        return Ok(Classes { names: (0..count).map(|c| c.to_string()).collect(), by_name: None });
    }
    let names = read_names(&path)?;
    // A few shards need not have samples of every class.
    if names.len() < count as usize || names.len() > MAX_CLASSES as usize {
        return Err(wrong(format!("names {} classes, but the data has {count}", names.len())));
    }
    Ok(Classes { names, by_name: None })
}

pub(super) fn unknown_class(root: &Path, split: &str, label: &str) -> DataError {
    DataError::Invalid(format!(
        "{}: split {split:?} has the class {label:?}, which the training split does not have",
        root.display()
    ))
}
