//! Files that hold many samples each. WebDataset shards (github.com/webdataset/webdataset) are tar files whose members of
//! one basename are a sample, a picture and its class (`000017.jpg`, `000017.cls`); in Parquet files a row is one. A folder
//! of them, one of them, or a pattern such as `/data/train-{000..127}.tar`; the split is told by the names.

mod members;
mod pattern;
#[cfg(test)]
mod tests;

pub(super) use members::{LABEL_BYTES, class_name};
pub(super) use pattern::fixed_part;

use super::{
    Catalog, DataError, Format, MAX_NAMES_BYTES, Samples, Split,
    index::{self, IndexStore, Members, Stamp},
    listing::{Listing, Place},
    parquet::{self, ParquetFile, Trouble},
    prepare,
};
use crate::files;
use lockstep_protocol::dataset::BrokenFile;
use rayon::prelude::*;
use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Shards of a dataset.
pub(super) const SHARDS: usize = 100_000;
/// Classes of a dataset whose labels are numbers: a large one is a mistake, not so many classes.
pub(super) const CLASSES: u32 = 100_000;
/// Names in a shard's path that tell its split, as Hugging Face's `datasets` knows them.
const SPLITS: [&str; 10] =
    ["train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation"];

/// Kinds of shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Tar,
    Parquet,
}

impl Kind {
    /// By the file's name.
    fn of(path: &Path) -> Option<Self> {
        let extension = path.extension()?;
        let kinds = [("tar", Kind::Tar), ("parquet", Kind::Parquet)];
        kinds.into_iter().find(|(name, _)| extension.eq_ignore_ascii_case(name)).map(|(_, kind)| kind)
    }

    fn format(self) -> Format {
        match self {
            Kind::Tar => Format::Shards,
            Kind::Parquet => Format::Parquet,
        }
    }

    /// What a sample is, for a sentence.
    fn sample(self) -> &'static str {
        match self {
            Kind::Tar => {
                "a sample is a picture and its class, such as 000017.jpg and 000017.cls or 000017.json with a \"label\""
            }
            Kind::Parquet => "a sample is a row with a picture (image) and its class (label)",
        }
    }
}

/// Shards that `path` names itself: a pattern, a tar or a Parquet file. `None` when it does not.
pub(super) fn named(path: &Path, store: &IndexStore) -> Option<Result<Catalog, DataError>> {
    if let Some((folder, rest)) = fixed_part(path) {
        let expanded = pattern::expand(&rest.to_string_lossy(), SHARDS);
        let wrong = |detail| DataError::File { path: path.display().to_string(), detail };
        let shards = expanded.map_err(wrong).map(|all| all.into_iter().map(PathBuf::from).collect());
        let kind = Kind::of(&rest).unwrap_or(Kind::Tar);
        return Some(shards.and_then(|shards| read(kind, path, &folder, shards, store)));
    }
    let kind = Kind::of(path).filter(|_| path.is_file())?;
    Some(read(kind, path, path.parent()?, vec![path.file_name()?.into()], store))
}

/// Shards in a folder, or in folders of it that are called as splits are; `None` when there are none. Parquet files beside
/// tar files are something else. `dataset` is what was named, `dir` or a folder around it.
pub(super) fn find(dataset: &Path, dir: &Path, store: &IndexStore) -> Option<Result<Catalog, DataError>> {
    [Kind::Tar, Kind::Parquet].into_iter().find_map(|kind| find_kind(kind, dataset, dir, store))
}

fn find_kind(
    kind: Kind,
    dataset: &Path,
    dir: &Path,
    store: &IndexStore,
) -> Option<Result<Catalog, DataError>> {
    let is_one = |path: &Path| Kind::of(path) == Some(kind);
    let mut shards = Vec::new();
    for path in listed(dir) {
        if is_one(&path) {
            shards.push(path);
        } else if path.file_name().and_then(|n| n.to_str()).is_some_and(|n| split_of(Path::new(n)).is_some())
        {
            shards.extend(listed(&path).into_iter().filter(|path| is_one(path)));
        }
    }
    if shards.len() > SHARDS {
        let detail = format!("holds {} shards; up to {SHARDS} are read", shards.len());
        return Some(Err(DataError::File { path: dir.display().to_string(), detail }));
    }
    let relative = |path: PathBuf| path.strip_prefix(dir).map(Path::to_owned).unwrap_or(path);
    let shards: Vec<_> = shards.into_iter().map(relative).collect();
    (!shards.is_empty()).then(|| read(kind, dataset, dir, shards, store))
}

/// Whether `path` is a shard, or a folder that holds some itself.
pub(super) fn has_any(path: &Path) -> bool {
    Kind::of(path).is_some() || listed(path).iter().any(|path| Kind::of(path).is_some())
}

/// Whether there are shards, but none that is not compressed.
pub(super) fn only_compressed(dir: &Path) -> bool {
    let named = |path: &PathBuf| {
        let name = path.to_string_lossy();
        [".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2"].iter().any(|end| name.ends_with(end))
    };
    listed(dir).iter().any(named)
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
fn read(
    kind: Kind,
    dataset: &Path,
    root: &Path,
    shards: Vec<PathBuf>,
    store: &IndexStore,
) -> Result<Catalog, DataError> {
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
    // Footers are small, and say what classes are called and where to read.
    let opened: HashMap<&Path, Result<Arc<ParquetFile>, Trouble>> = match kind {
        Kind::Tar => HashMap::new(),
        Kind::Parquet => {
            let open =
                |(_, shard, _): &(&str, PathBuf, Stamp)| ParquetFile::open(&root.join(shard)).map(Arc::new);
            let opened: Vec<_> = there.par_iter().map(open).collect();
            there.iter().map(|(_, shard, _)| shard.as_path()).zip(opened).collect()
        }
    };
    let look = |shard: &Path| match opened.get(shard) {
        None => members::of(&root.join(shard)),
        Some(Ok(file)) => parquet::members(file, &root.join(shard)),
        Some(Err(trouble)) => trouble.clone().into(),
    };
    let members = index::of_shards(dataset, &stamped, store, look);
    let mut splits: BTreeMap<&str, Found> = BTreeMap::new();
    for ((split, shard, stamp), members) in there.iter().zip(members) {
        let found = splits.entry(*split).or_insert_with(|| Found::new(root));
        match opened.get(shard.as_path()) {
            None => found.add(root, shard, Place::Tar(*stamp), members),
            Some(Ok(file)) => found.add(root, shard, Place::Parquet(*stamp, Arc::clone(file)), members),
            // It could be read once, and not now.
            Some(Err(trouble)) => found.broken.push(named_broken(&root.join(shard), trouble.detail.clone())),
        }
    }
    let names = class_names(
        root,
        there.iter().filter_map(|(_, shard, _)| {
            let file = opened.get(shard.as_path())?.as_ref().ok()?;
            Some((shard.as_path(), file.class_names()?))
        }),
    )?;
    let classes = classes(root, names, &splits)?;
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
            "{} holds no sample that can be used: {}{}{}",
            dataset.display(),
            kind.sample(),
            if why.is_empty() { "" } else { ". " },
            why.join("; ")
        )));
    }
    Ok(Catalog { format: kind.format(), classes: classes.names, splits: all, broken })
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

    fn add(&mut self, root: &Path, shard: &Path, place: Place, members: Members) {
        let path = root.join(shard);
        self.broken.extend(members.trouble.map(|detail| named_broken(&path, detail)));
        self.listing.add_container(shard, place);
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

/// The names that the files themselves give their classes, which must be the same ones in all.
fn class_names<'a>(
    root: &Path,
    mut named: impl Iterator<Item = (&'a Path, &'a [String])>,
) -> Result<Option<Vec<String>>, DataError> {
    let Some((first, names)) = named.next() else { return Ok(None) };
    match named.find(|(_, others)| *others != names) {
        None => Ok(Some(names.to_vec())),
        Some((other, _)) => Err(DataError::Invalid(format!(
            "{} and {} name their classes differently, so their labels mean different things: write them anew, with one list",
            root.join(first).display(),
            root.join(other).display()
        ))),
    }
}

/// Numbers when all labels are, with their `names`, or those of `classes.txt` where it is there; else the names that the
/// training split has, in alphabetical order.
fn classes(
    root: &Path,
    names: Option<Vec<String>>,
    splits: &BTreeMap<&str, Found>,
) -> Result<Classes, DataError> {
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
    if let Some(names) = names {
        return if names.len() < count as usize {
            let of = root.display();
            Err(DataError::Invalid(format!(
                "{of} names {} classes, but has a label {}",
                names.len(),
                count - 1
            )))
        } else {
            Ok(Classes { names, by_name: None })
        };
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
        (files::Found::Folder, _) => Err("is a folder, not a file".into()),
    }
}

fn named_broken(path: &Path, detail: String) -> BrokenFile {
    BrokenFile { file: path.display().to_string(), detail }
}
