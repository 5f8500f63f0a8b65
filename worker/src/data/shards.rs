//! Files that hold many samples each. WebDataset shards (github.com/webdataset/webdataset) are tar files whose members of
//! one basename are a sample, a picture and its class (`000017.jpg`, `000017.cls`); in Parquet files a row is one. A folder
//! of them, one of them, or a pattern such as `/data/train-{000..127}.tar`; the split is told by the names.

mod members;
#[cfg(test)]
mod tests;

use super::{
    Catalog, DataError, Format, MAX_NAMES_BYTES, Samples, Split,
    copy::{damage, is_unfinished},
    index::{self, IndexStore, Members, Stamp},
    label::CLASSES,
    listing::{Listing, Place},
    parquet::{self, ParquetFile, Trouble},
    pattern::{self, SHARDS, fixed_part},
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
    if !dir.is_dir() {
        return None;
    }
    [Kind::Tar, Kind::Parquet].into_iter().find_map(|kind| find_kind(kind, dataset, dir, store))
}

fn find_kind(
    kind: Kind,
    dataset: &Path,
    dir: &Path,
    store: &IndexStore,
) -> Option<Result<Catalog, DataError>> {
    let wrong = |detail| DataError::File { path: dir.display().to_string(), detail };
    let Lying { shards, compressed, unread } = match lying(kind, dir) {
        Ok(found) => found,
        Err(detail) => return Some(Err(wrong(detail))),
    };
    if shards.len() > SHARDS {
        return Some(Err(wrong(format!("holds {} shards; up to {SHARDS} are read", shards.len()))));
    }
    if shards.is_empty() {
        let first = unread.into_iter().next();
        return first.map(|b| Err(DataError::File { path: b.file, detail: b.detail }));
    }
    let relative = |path: PathBuf| path.strip_prefix(dir).map(Path::to_owned).unwrap_or(path);
    let shards: Vec<_> = shards.into_iter().map(relative).collect();
    let left_out = compressed.iter().filter(|path| !is_unpacked(path)).map(|path| {
        let detail = "is compressed, and pictures are read from the middle of shards: unpack it to a .tar, or take it away";
        named_broken(path, detail.into())
    });
    Some(read(kind, dataset, dir, shards, store).map(|mut catalog| {
        catalog.broken.extend(unread.into_iter().chain(left_out));
        catalog
    }))
}

/// Whether `path` is a shard, or a folder in which [`find`] finds some.
pub(super) fn has_any(path: &Path) -> bool {
    let holds = |kind| lying(kind, path).is_ok_and(|found| !found.shards.is_empty());
    Kind::of(path).is_some() || holds(Kind::Tar) || holds(Kind::Parquet)
}

/// Whether there are shards, but none that is not compressed.
pub(super) fn only_compressed(dir: &Path) -> bool {
    lying(Kind::Tar, dir).is_ok_and(|found| found.shards.is_empty() && !found.compressed.is_empty())
}

/// Ends of the names of compressed archives, as their packers call them.
const COMPRESSED: [&str; 5] = [".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2"];

fn is_compressed(path: &Path) -> bool {
    let name = path.to_string_lossy();
    COMPRESSED.iter().any(|end| name.ends_with(end))
}

/// Whether what a compressed shard was packed from lies beside it.
fn is_unpacked(path: &Path) -> bool {
    let name = path.to_string_lossy();
    let stem = COMPRESSED.iter().find_map(|end| name.strip_suffix(end));
    stem.is_some_and(|stem| Path::new(&format!("{stem}.tar")).exists())
}

/// What lies in a folder and in folders of it that are called as splits are.
struct Lying {
    shards: Vec<PathBuf>,
    compressed: Vec<PathBuf>,
    /// Folders called as splits that cannot be listed.
    unread: Vec<BrokenFile>,
}

fn lying(kind: Kind, dir: &Path) -> Result<Lying, String> {
    let is_one = |path: &Path| Kind::of(path) == Some(kind);
    // Parquet files are compressed inside.
    let is_compressed = |path: &Path| kind == Kind::Tar && is_compressed(path);
    let mut found = Lying { shards: Vec::new(), compressed: Vec::new(), unread: Vec::new() };
    for path in listed(dir)? {
        if is_one(&path) {
            found.shards.push(path);
        } else if is_compressed(&path) {
            found.compressed.push(path);
        } else if path.file_name().and_then(|n| n.to_str()).is_some_and(|n| split_of(Path::new(n)).is_some())
        {
            let inside = match files::look(&path) {
                Ok(files::Found::Folder) => listed(&path),
                // A list of names, or a link that only looks like a folder of shards.
                Ok(files::Found::File { .. }) => continue,
                Err(_) if path.extension().is_some() => continue,
                Err(detail) => Err(detail),
            };
            match inside {
                Ok(inside) => {
                    let (compressed, others): (Vec<_>, _) =
                        inside.into_iter().partition(|p| is_compressed(p));
                    found.compressed.extend(compressed);
                    found.shards.extend(others.into_iter().filter(|path| is_one(path)));
                }
                Err(detail) => found.unread.push(named_broken(&path, detail)),
            }
        }
    }
    Ok(found)
}

/// What lies in a folder, by name, hidden files left out.
fn listed(dir: &Path) -> Result<Vec<PathBuf>, String> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir).map_err(files::cannot_be_read)? {
        let entry = entry.map_err(files::cannot_be_read)?;
        if !entry.file_name().as_encoded_bytes().starts_with(b".") {
            all.push(entry.path());
        }
    }
    all.sort();
    Ok(all)
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
    if is_unfinished(root) {
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
    let sizes: HashMap<&Path, u64> = shards
        .iter()
        .zip(&stamps)
        .filter_map(|(shard, stamp)| Some((shard.as_path(), stamp.as_ref().ok()?.size)))
        .collect();
    // One shard, or a pattern, may mean some of them.
    if let Some(detail) = damage(root, dataset.is_dir(), |shard| sizes.get(Path::new(shard)).copied()) {
        return Err(DataError::File { path: root.display().to_string(), detail });
    }
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
    // Who only publishes the pictures of a test split labels them so.
    for (_, found) in splits.iter_mut().filter(|(name, _)| **name != "train") {
        found.leave_out(|label| is_negative(label) && classes.number(label).is_none());
    }
    let (mut all, mut unlabelled) = (Vec::new(), Vec::new());
    for (name, found) in splits {
        if name != "train" && found.is_unlabelled() {
            unlabelled.push(name.to_owned());
            continue;
        }
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
    Ok(Catalog { format: kind.format(), classes: classes.names, splits: all, broken, unlabelled })
}

/// What the shards of a split hold.
struct Found {
    listing: Listing,
    /// As the shards have them.
    labels: Vec<String>,
    broken: Vec<BrokenFile>,
    /// So many are broken for nothing but that.
    without_label: usize,
}

impl Found {
    fn new(root: &Path) -> Self {
        Self { listing: Listing::new(root), labels: Vec::new(), broken: Vec::new(), without_label: 0 }
    }

    /// Whether there are samples, and all that is wrong with any is that it has no label.
    fn is_unlabelled(&self) -> bool {
        self.labels.is_empty() && self.without_label > 0 && self.without_label == self.broken.len()
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
                    if [members::NO_LABEL, parquet::NO_LABEL].contains(&detail.as_str()) {
                        self.without_label += 1;
                    }
                    self.broken.push(named_broken(&name, detail));
                }
            }
        }
    }

    /// Names as broken what has a label that is none.
    fn leave_out(&mut self, is_none: impl Fn(&str) -> bool) {
        let keep: Vec<bool> = self.labels.iter().map(|label| !is_none(label)).collect();
        for (number, label) in self.labels.iter().enumerate().filter(|(number, _)| !keep[*number]) {
            let detail = format!("has the label {label}, which is no class of the training split");
            self.broken.push(BrokenFile { file: self.listing.name(number), detail });
            self.without_label += 1;
        }
        self.listing.retain(&keep);
        let mut keep = keep.into_iter();
        self.labels.retain(|_| keep.next().unwrap_or(false));
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

fn is_number(label: &str) -> bool {
    label.parse::<u32>().is_ok()
}

fn is_negative(label: &str) -> bool {
    label.strip_prefix('-').is_some_and(is_number)
}

/// Numbers when all labels are (negative ones outside of the training split are none), with their `names`, or those of
/// `classes.txt` where it is there; else the names that the training split has, in alphabetical order.
fn classes(
    root: &Path,
    names: Option<Vec<String>>,
    splits: &BTreeMap<&str, Found>,
) -> Result<Classes, DataError> {
    let path = root.join("classes.txt");
    let wrong = |detail: String| DataError::File { path: path.display().to_string(), detail };
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
        (0..).zip(by_name.values_mut()).for_each(|(number, place)| *place = number);
        return Ok(Classes { names: by_name.keys().cloned().collect(), by_name: Some(by_name) });
    }
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
    if !has_names {
        return Ok(Classes { names: (0..count).map(|c| c.to_string()).collect(), by_name: None });
    }
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
