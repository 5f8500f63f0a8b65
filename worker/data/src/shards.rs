//! Shards: files with many samples each. WebDataset shards (github.com/webdataset/webdataset) are tar files. Their
//! members with the same basename form a sample, a picture and its class (`000017.jpg`, `000017.cls`). In Parquet
//! files a row is a sample. A dataset is a folder of shards, one shard, or a pattern such as
//! `/data/train-{000..127}.tar`. Names show to which split a file belongs.

mod classes;
mod folder;
mod members;
#[cfg(test)]
mod tests;

pub(super) use folder::{has_only_compressed, is_split_prefix};

use super::{
    Catalog, DataError, Samples, Split, broken_file,
    copy::{damage, is_unfinished},
    index::{self, IndexStore, Members, Stamp, UnusableFile},
    listing::{ContainerKind, Listing},
    parquet::{self, ParquetFile},
    pattern::{self, MAX_SHARDS, fixed_part},
};
use classes::{common_class_names, find_classes, is_negative, unknown_class};
use folder::{FolderContents, Kind, is_unpacked, list_contents, split_in_path};
use lockstep_host::files;
use lockstep_protocol::dataset::BrokenFile;
use rayon::prelude::*;
use std::{
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
    sync::Arc,
};

/// Opens the shards that `path` itself denotes: a pattern, a tar file or a Parquet file. `None` for other paths.
pub(super) fn open_named(path: &Path, store: &IndexStore) -> Option<Result<Catalog, DataError>> {
    if let Some((folder, rest)) = fixed_part(path) {
        let expanded = pattern::expand(&rest.to_string_lossy(), MAX_SHARDS);
        let shards = expanded.map_err(|detail| DataError::file(path, detail));
        let shards = shards.map(|all| all.into_iter().map(PathBuf::from).collect());
        let kind = Kind::of(&rest).unwrap_or(Kind::Tar);
        return Some(shards.and_then(|shards| read(kind, path, &folder, shards, store)));
    }
    let kind = Kind::of(path).filter(|_| path.is_file())?;
    Some(read(kind, path, path.parent()?, vec![path.file_name()?.into()], store))
}

/// Opens the shards in a folder, or in subfolders with names of splits. `None` if there are no shards. Parquet files
/// next to tar files are ignored. `dataset` is the given path: `dir`, or its parent folder.
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
    let wrong = |detail: String| DataError::file(dir, detail);
    let FolderContents { shards, compressed, unread } = match list_contents(kind, dir) {
        Ok(found) => found,
        Err(detail) => return Some(Err(wrong(detail))),
    };
    if shards.len() > MAX_SHARDS {
        return Some(Err(wrong(format!("holds {} shards; at most {MAX_SHARDS} are allowed", shards.len()))));
    }
    if shards.is_empty() {
        return unread.into_iter().next().map(|first| Err(DataError::File(first)));
    }
    let relative = |path: PathBuf| path.strip_prefix(dir).map(Path::to_owned).unwrap_or(path);
    let shards: Vec<_> = shards.into_iter().map(relative).collect();
    let left_out = compressed.iter().filter(|path| !is_unpacked(path)).map(|path| {
        let detail = "is compressed, but pictures are read at arbitrary offsets: decompress it to a .tar, or remove it";
        broken_file(path, detail)
    });
    Some(read(kind, dataset, dir, shards, store).map(|mut catalog| {
        catalog.broken.extend(unread.into_iter().chain(left_out));
        catalog
    }))
}

/// `dataset` is the given path; `shards` are relative to `root`.
fn read(
    kind: Kind,
    dataset: &Path,
    root: &Path,
    shards: Vec<PathBuf>,
    store: &IndexStore,
) -> Result<Catalog, DataError> {
    if is_unfinished(root) {
        let detail = "is an incomplete copy: run its `lockstep dataset prepare` again to continue it";
        return Err(DataError::file(root, detail));
    }
    let has_named_splits = shards.iter().any(|shard| split_in_path(shard).is_some());
    let (mut broken, mut found_shards) = (Vec::new(), Vec::<FoundShard>::new());
    let stamps: Vec<_> = shards.par_iter().map(|shard| stamp(&root.join(shard))).collect();
    let sizes: HashMap<&Path, u64> = shards
        .iter()
        .zip(&stamps)
        .filter_map(|(shard, stamp)| Some((shard.as_path(), stamp.as_ref().ok()?.size)))
        .collect();
    // If the path is one shard or a pattern, the user may want only some shards.
    if let Some(detail) = damage(root, dataset.is_dir(), |shard| sizes.get(Path::new(shard)).copied()) {
        return Err(DataError::file(root, detail));
    }
    for (shard, stamp) in shards.into_iter().zip(stamps) {
        match (stamp, split_in_path(&shard)) {
            (Err(detail), _) => broken.push(broken_file(&root.join(shard), detail)),
            // The folder may have other archives, but a job must not silently ignore what could be training data.
            (Ok(_), None) if has_named_splits => broken.push(broken_file(
                &root.join(shard),
                "has no split in its name as other shards have: rename it to train-..., val-... or test-..., or remove it",
            )),
            (Ok(stamp), split) => {
                let split = split.unwrap_or("train");
                found_shards.push(FoundShard { split, path: shard, stamp, footer: None });
            }
        }
    }
    let stamped: Vec<_> = found_shards.iter().map(|shard| (shard.path.clone(), shard.stamp)).collect();
    if kind == Kind::Parquet {
        found_shards.par_iter_mut().for_each(|shard| {
            shard.footer = Some(ParquetFile::open(&root.join(&shard.path)).map(Arc::new));
        });
    }
    let read_shard = |index: usize| {
        let FoundShard { path, footer, .. } = &found_shards[index];
        let path = root.join(path);
        match footer {
            None => members::read_members(&path),
            Some(Ok(file)) => parquet::read_members(file, &path),
            Some(Err(error)) => error.clone().into(),
        }
    };
    let members = index::describe_shards(dataset, &stamped, store, read_shard);
    let mut splits: BTreeMap<&str, SplitContents> = BTreeMap::new();
    for (FoundShard { split, path, stamp, footer }, members) in found_shards.iter().zip(members) {
        let found = splits.entry(*split).or_insert_with(|| SplitContents::new(root));
        match footer {
            None => found.add(root, path, ContainerKind::Tar(*stamp), members),
            Some(Ok(file)) => {
                found.add(root, path, ContainerKind::Parquet(*stamp, Arc::clone(file)), members)
            }
            // The members are from the index, but the footer cannot be read now.
            Some(Err(error)) => found.broken.push(broken_file(&root.join(path), error.detail.clone())),
        }
    }
    let named = found_shards.iter().filter_map(|shard| {
        Some((shard.path.as_path(), shard.footer.as_ref()?.as_ref().ok()?.class_names()?))
    });
    let names = common_class_names(root, named)?;
    let classes = find_classes(root, names, &splits)?;
    // Negative labels mark the pictures of a test split that is published without labels.
    for (_, found) in splits.iter_mut().filter(|(name, _)| **name != "train") {
        found.leave_out(|label| is_negative(label) && classes.number(label).is_none());
    }
    let (mut all, mut unlabelled) = (Vec::new(), Vec::new());
    for (name, found) in splits {
        if name != "train" && found.is_unlabelled() {
            unlabelled.push(name.to_owned());
            continue;
        }
        let label = |label: &String| classes.number(label).ok_or_else(|| unknown_class(root, name, label));
        let labels = found.labels.iter().map(label).collect::<Result<Vec<_>, _>>()?;
        if !labels.is_empty() || !found.broken.is_empty() {
            let samples = Samples::Listed(found.listing);
            all.push(Split { name: name.into(), labels, samples, broken: found.broken });
        }
    }
    all.sort_by_key(|split| split.name != "train");
    if all.iter().all(|split| split.labels.is_empty()) {
        let why = broken.iter().chain(all.iter().flat_map(|split| &split.broken)).take(5);
        let why: Vec<_> = why.map(ToString::to_string).collect();
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

/// A shard that exists.
struct FoundShard {
    split: &'static str,
    /// The path relative to the root.
    path: PathBuf,
    stamp: Stamp,
    /// The footer, if the shard is a Parquet file. It is small, and has the names of classes and the offsets of pages.
    footer: Option<Result<Arc<ParquetFile>, UnusableFile>>,
}

/// The content of a split's shards.
struct SplitContents {
    listing: Listing,
    /// The labels as in the shards: numbers or names.
    labels: Vec<String>,
    broken: Vec<BrokenFile>,
    /// The number of samples that are broken only because they have no label.
    without_label: usize,
}

impl SplitContents {
    fn new(root: &Path) -> Self {
        Self { listing: Listing::new(root), labels: Vec::new(), broken: Vec::new(), without_label: 0 }
    }

    /// Whether the split has samples that are all broken only because they have no label.
    fn is_unlabelled(&self) -> bool {
        self.labels.is_empty() && self.without_label > 0 && self.without_label == self.broken.len()
    }

    fn add(&mut self, root: &Path, shard: &Path, kind: ContainerKind, members: Members) {
        let path = root.join(shard);
        self.broken.extend(members.error.map(|error| broken_file(&path, error.detail)));
        self.listing.add_container(shard, kind);
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
                    self.broken.push(broken_file(&name, detail));
                }
            }
        }
    }

    /// Moves samples to the broken files if `is_no_class` is true for their labels.
    fn leave_out(&mut self, is_no_class: impl Fn(&str) -> bool) {
        let keep: Vec<bool> = self.labels.iter().map(|label| !is_no_class(label)).collect();
        for (index, label) in self.labels.iter().enumerate().filter(|(index, _)| !keep[*index]) {
            let detail = format!("has the label {label}, which is not a class of the training split");
            self.broken.push(BrokenFile { file: self.listing.name(index), detail });
            self.without_label += 1;
        }
        self.listing.retain(&mut self.labels, &keep);
    }
}

fn stamp(path: &Path) -> Result<Stamp, String> {
    match files::stat(path)? {
        files::FileKind::File { size_bytes, modified_ns } => Ok(Stamp { size: size_bytes, modified_ns }),
        files::FileKind::Folder => Err("is a folder, not a file".into()),
    }
}
