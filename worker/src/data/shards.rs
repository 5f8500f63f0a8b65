//! WebDataset shards (github.com/webdataset/webdataset): tar files whose members of one basename are a sample, a picture
//! and its class (`000017.jpg`, `000017.cls`). A folder of them, one of them, or a pattern such as
//! `/data/train-{000..127}.tar`; the split is told by the names.

mod members;
mod pattern;
#[cfg(test)]
mod tests;

pub(super) use pattern::fixed_part;

use super::{
    Catalog, DataError, Format, MAX_NAMES_BYTES, Samples, Split,
    index::{self, IndexStore, Members, Stamp},
    listing::Listing,
    prepare,
};
use crate::files;
use lockstep_protocol::dataset::BrokenFile;
use rayon::prelude::*;
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

/// Shards of a dataset.
pub(super) const SHARDS: usize = 100_000;
/// Classes of a dataset whose labels are numbers: a large one is a mistake, not so many classes.
const CLASSES: u32 = 100_000;
/// Names in a shard's path that tell its split, as Hugging Face's `datasets` knows them.
const SPLITS: [&str; 10] =
    ["train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation"];

/// Shards that `path` names itself: a pattern or a tar file. `None` when it does not.
pub(super) fn named(path: &Path, store: &IndexStore) -> Option<Result<Catalog, DataError>> {
    if let Some((folder, rest)) = fixed_part(path) {
        let expanded = pattern::expand(&rest.to_string_lossy(), SHARDS);
        let wrong = |detail| DataError::File { path: path.display().to_string(), detail };
        let shards = expanded.map_err(wrong).map(|all| all.into_iter().map(PathBuf::from).collect());
        return Some(shards.and_then(|shards| read(path, &folder, shards, store)));
    }
    let folder = path.parent().filter(|_| is_tar(path) && path.is_file())?;
    Some(read(path, folder, vec![path.file_name()?.into()], store))
}

/// Shards in a folder, or in folders of it that are called as splits are; `None` when there are none.
pub(super) fn find(dir: &Path, store: &IndexStore) -> Option<Result<Catalog, DataError>> {
    let mut shards = Vec::new();
    for path in listed(dir) {
        if is_tar(&path) {
            shards.push(path);
        } else if path.file_name().and_then(|n| n.to_str()).is_some_and(|n| split_of(Path::new(n)).is_some())
        {
            shards.extend(listed(&path).into_iter().filter(|path| is_tar(path)));
        }
    }
    if shards.len() > SHARDS {
        let detail = format!("holds {} shards; up to {SHARDS} are read", shards.len());
        return Some(Err(DataError::File { path: dir.display().to_string(), detail }));
    }
    let relative = |path: PathBuf| path.strip_prefix(dir).map(Path::to_owned).unwrap_or(path);
    let shards: Vec<_> = shards.into_iter().map(relative).collect();
    (!shards.is_empty()).then(|| read(dir, dir, shards, store))
}

/// Whether `path` is a shard, or a folder that holds some itself.
pub(super) fn has_any(path: &Path) -> bool {
    is_tar(path) || listed(path).iter().any(|path| is_tar(path))
}

/// Whether there are shards, but none that is not compressed.
pub(super) fn only_compressed(dir: &Path) -> bool {
    let named = |path: &PathBuf| {
        let name = path.to_string_lossy();
        [".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2"].iter().any(|end| name.ends_with(end))
    };
    listed(dir).iter().any(named)
}

fn is_tar(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("tar"))
}

/// What lies in a folder, by name, hidden files left out; nothing when it cannot be listed.
fn listed(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let seen = entries.filter(|entry| !entry.file_name().as_encoded_bytes().starts_with(b"."));
    let mut all: Vec<_> = seen.map(|entry| entry.path()).collect();
    all.sort();
    all
}

/// The split that a shard's path tells, the file's name before its folders'.
fn split_of(path: &Path) -> Option<&'static str> {
    let words = |part: &str| -> Option<&'static str> {
        let word = |word: &str| {
            let word = word.trim_end_matches(|c: char| c.is_ascii_digit()).to_ascii_lowercase();
            SPLITS.iter().find(|split| **split == word)
        };
        part.split(|c: char| !c.is_ascii_alphanumeric()).find_map(word).copied()
    };
    let found = path.iter().rev().filter_map(|part| part.to_str()).find_map(words)?;
    Some(match found {
        "training" => "train",
        "testing" => "test",
        other => other,
    })
}

/// Whether shards that begin with a split's name are read as this split's.
pub(super) fn tells_split(name: &str) -> bool {
    split_of(Path::new(name)) == Some(name)
}

/// `dataset`: as it was named; `shards` are relative to `root`.
fn read(dataset: &Path, root: &Path, shards: Vec<PathBuf>, store: &IndexStore) -> Result<Catalog, DataError> {
    if prepare::is_unfinished(root) {
        return Err(DataError::File {
            path: root.display().to_string(),
            detail:
                "is a copy that is not whole: run its `lockstep dataset prepare` again, which goes on with it"
                    .into(),
        });
    }
    let any = shards.iter().any(|shard| split_of(shard).is_some());
    let (mut broken, mut there) = (Vec::new(), Vec::new());
    let stamps: Vec<_> = shards.par_iter().map(|shard| stamp(&root.join(shard))).collect();
    for (shard, stamp) in shards.into_iter().zip(stamps) {
        match (stamp, split_of(&shard)) {
            (Err(detail), _) => broken.push(named_broken(&root.join(shard), detail)),
            // Other archives may lie there, but a job should not leave out in silence what it could train on.
            (Ok(_), None) if any => broken.push(named_broken(
                &root.join(shard),
                "has no split in its name as other shards have: call it train-..., val-... or test-..., or take it away"
                    .into(),
            )),
            (Ok(stamp), split) => there.push((split.unwrap_or("train"), shard, stamp)),
        }
    }
    let stamped: Vec<_> = there.iter().map(|(_, shard, stamp)| (shard.clone(), *stamp)).collect();
    let look = |shard: &Path| members::of(&root.join(shard));
    let members = index::of_shards(dataset, &stamped, store, look);
    let mut splits: BTreeMap<&str, Found> = BTreeMap::new();
    for ((split, shard, stamp), members) in there.iter().zip(members) {
        let found = splits.entry(*split).or_insert_with(|| Found::new(root));
        found.add(root, shard, *stamp, members);
    }
    let classes = classes(root, &splits)?;
    let mut all = Vec::new();
    for (name, found) in splits {
        let label = |label: &String| classes.number(label).ok_or_else(|| unknown(root, name, label));
        let labels = found.labels.iter().map(label).collect::<Result<Vec<_>, _>>()?;
        if !labels.is_empty() || !found.broken.is_empty() {
            let samples = Samples::Listed(found.listing);
            all.push(Split { name: name.into(), labels, samples, broken: found.broken });
        }
    }
    all.sort_by_key(|split| split.name != "train");
    if all.iter().all(|split| split.labels.is_empty()) {
        let why = broken.iter().chain(all.iter().flat_map(|split| &split.broken)).take(5);
        let why: Vec<_> = why.map(|b| format!("{} {}", b.file, b.detail)).collect();
        return Err(DataError::Invalid(format!(
            "{} holds no sample that can be used: a sample is a picture and its class, such as 000017.jpg and \
             000017.cls or 000017.json with a \"label\"{}{}",
            dataset.display(),
            if why.is_empty() { "" } else { ". " },
            why.join("; ")
        )));
    }
    Ok(Catalog { format: Format::Shards, classes: classes.names, splits: all, broken })
}

/// What the shards of a split hold.
struct Found {
    listing: Listing,
    /// As the shards have them.
    labels: Vec<String>,
    broken: Vec<BrokenFile>,
}

impl Found {
    fn new(root: &Path) -> Self {
        Self { listing: Listing::new(root), labels: Vec::new(), broken: Vec::new() }
    }

    fn add(&mut self, root: &Path, shard: &Path, stamp: Stamp, members: Members) {
        let path = root.join(shard);
        self.broken.extend(members.trouble.map(|detail| named_broken(&path, detail)));
        self.listing.add_container(shard, Some(stamp));
        for entry in members.entries {
            match (&entry.broken, &entry.label) {
                (None, Some(label)) => {
                    self.listing.push(&entry);
                    self.labels.push(label.clone());
                }
                (broken, _) => {
                    let name = path.join(String::from_utf8_lossy(&entry.name).as_ref());
                    let detail = broken.clone().unwrap_or_else(|| members::NO_LABEL.into());
                    self.broken.push(named_broken(&name, detail));
                }
            }
        }
    }
}

/// The names of classes, and how labels name them.
struct Classes {
    names: Vec<String>,
    by_name: Option<BTreeMap<String, u32>>,
}

impl Classes {
    fn number(&self, label: &str) -> Option<u32> {
        match &self.by_name {
            Some(by_name) => by_name.get(label).copied(),
            None => label.parse().ok().filter(|number| (*number as usize) < self.names.len()),
        }
    }
}

/// Numbers when all labels are, with names from `classes.txt` where it is there; else the names that the training split
/// has, in alphabetical order.
fn classes(root: &Path, splits: &BTreeMap<&str, Found>) -> Result<Classes, DataError> {
    let all = || splits.values().flat_map(|found| &found.labels);
    let numbers: Option<Vec<u32>> = all().map(|label| label.parse().ok()).collect();
    let Some(numbers) = numbers else {
        let mut by_name: BTreeMap<String, u32> =
            splits.get("train").into_iter().flat_map(|t| &t.labels).map(|label| (label.clone(), 0)).collect();
        (0..).zip(by_name.values_mut()).for_each(|(number, place)| *place = number);
        return Ok(Classes { names: by_name.keys().cloned().collect(), by_name: Some(by_name) });
    };
    let count = numbers.into_iter().max().map_or(0, |most| most.saturating_add(1));
    if count > CLASSES {
        return Err(DataError::Invalid(format!(
            "a label of {} is {}; classes are numbered from 0, up to {}",
            root.display(),
            count - 1,
            CLASSES - 1
        )));
    }
    let path = root.join("classes.txt");
    if fs::symlink_metadata(&path).is_err() {
        return Ok(Classes { names: (0..count).map(|c| c.to_string()).collect(), by_name: None });
    }
    let wrong = |detail: String| DataError::File { path: path.display().to_string(), detail };
    let text = files::read(&path, MAX_NAMES_BYTES).map_err(wrong)?;
    let text = String::from_utf8(text).map_err(|_| wrong("is not UTF-8".into()))?;
    let names: Vec<String> =
        text.lines().map(str::trim).filter(|l| !l.is_empty()).map(str::to_owned).collect();
    // A few shards need not have a sample of every class.
    if names.len() < count as usize || names.len() > CLASSES as usize {
        return Err(wrong(format!("names {} classes, but the data has {count}", names.len())));
    }
    Ok(Classes { names, by_name: None })
}

fn unknown(root: &Path, split: &str, label: &str) -> DataError {
    DataError::Invalid(format!(
        "{}: split {split:?} has the class {label:?}, which the training split does not have",
        root.display()
    ))
}

fn stamp(path: &Path) -> Result<Stamp, String> {
    match files::look_with_time(path)? {
        (files::Found::File { size_bytes }, modified_ns) => Ok(Stamp { size: size_bytes, modified_ns }),
        (files::Found::Folder, _) => Err("is a folder, not a tar file".into()),
    }
}

fn named_broken(path: &Path, detail: String) -> BrokenFile {
    BrokenFile { file: path.display().to_string(), detail }
}
