//! Pictures in folders: `train/<class>/*` and, for validation, `val/<class>/*` or `test/<class>/*`. Other usual names
//! of these splits are accepted, in upper and lower case. Without a folder named like a split, `<class>/*` are training
//! pictures, as for torchvision's `ImageFolder`. Pictures may have any size. Their format is recognised by their first
//! bytes, not by their names.
//!
//! Files that cannot be read and files outside a class folder are reported: nothing that might be a picture is
//! ignored silently. Folders are listed unless the index shows that they have not changed (`index/folders.rs`). Files
//! that are not in the index are read.

use super::{
    Catalog, DataError, MAX_ENTRIES_READ, Samples, Split, broken_file, has_pictures,
    index::{self, CachedFolders, Folder, FolderStamp, FoundFile, IndexStore},
    label::normalise_nfc,
    listing::{ContainerKind, Listing},
    picture::{self, has_picture_extension},
};
use lockstep_host::files::{self, FileKind};
use lockstep_protocol::dataset::BrokenFile;
use lockstep_protocol::numbers::plural;
use rayon::prelude::*;
use std::{
    collections::{BTreeMap, btree_map::Entry},
    fs,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    time::SystemTime,
};

/// Folder names that always denote a split (in lower case), and the name of the split.
const SPLITS: [(&str, &str); 7] = [
    ("train", "train"),
    ("training", "train"),
    ("val", "val"),
    ("valid", "valid"),
    ("validation", "validation"),
    ("test", "test"),
    ("testing", "test"),
];

/// The split denoted by a folder's name, if any.
pub(super) fn split_of(folder: &Path) -> Option<&'static str> {
    let name = folder.file_name()?;
    SPLITS.iter().find(|(known, _)| name.eq_ignore_ascii_case(known)).map(|(_, split)| *split)
}

/// The folder of the training split, if there is one.
fn training_folder(dir: &Path) -> Option<PathBuf> {
    let all = entries(dir).ok()?.into_iter();
    let mut candidates: Vec<_> = all.filter(|path| split_of(path) == Some("train")).collect();
    // Prefer a folder that contains class folders, then the usual name.
    candidates.sort_by_key(|path| (!contains_folders(path), !path.ends_with("train")));
    candidates.into_iter().next()
}

fn contains_folders(dir: &Path) -> bool {
    entries(dir).is_ok_and(|all| all.iter().any(|path| path.is_dir()))
}

/// Finds the pictures below `dir`; `None` if there is no training folder with folders in it.
pub(super) fn find(dir: &Path, store: &IndexStore) -> Option<Result<Catalog, DataError>> {
    let train = training_folder(dir)?;
    match files::stat(&train) {
        Ok(FileKind::Folder) => contains_folders(&train).then(|| read(dir, &train, store)),
        Ok(FileKind::File { .. }) => None,
        // For example, a link whose target does not exist.
        Err(detail) => Some(Err(DataError::file(&train, detail))),
    }
}

/// Prefix of the names of folders that this program creates beside a job file (`lockstep-data`, `lockstep-demo`). These
/// folders are not classes.
const OWN_FOLDERS: &str = "lockstep-";

/// Whether a folder's name contains the name of a split, as in `train2017`, `testA` and `images_val`.
fn is_named_like_split(folder: &Path) -> bool {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    name.split(['_', '-', '.']).any(|part| {
        let part = part.trim_end_matches(|c: char| c.is_ascii_digit());
        [part, part.strip_suffix(['A', 'B']).unwrap_or(part)]
            .iter()
            .any(|part| split_of(Path::new(part)).is_some())
    })
}

/// Whether the pictures are in `dir/<class>/`: at least two folders contain pictures, and no folder is named like a
/// split.
fn is_plain(dir: &Path) -> bool {
    let all = entries(dir).unwrap_or_default();
    let with_pictures = all.iter().take(MAX_ENTRIES_READ).filter(|path| has_pictures(path));
    !all.iter().any(|path| is_named_like_split(path)) && with_pictures.take(2).count() == 2
}

/// Finds the pictures in `dir/<class>/`, all of them for training; `None` unless the folder is [plain](is_plain).
pub(super) fn find_plain(dir: &Path, store: &IndexStore) -> Option<Result<Catalog, DataError>> {
    let read = || {
        let began = SystemTime::now();
        let cached = index::load_cached(dir, store);
        let mut found = find_classes(dir)?;
        found.folders.retain(|name, _| !name.starts_with(OWN_FOLDERS));
        let classes: Vec<String> = found.folders.keys().cloned().collect();
        let train = list_split(dir, dir, ("train", found), &classes, &cached)?;
        let splits = examine(dir, vec![train], cached, store, began)?;
        Ok(Catalog { format: "image_folder", classes, splits, ..Catalog::default() })
    };
    is_plain(dir).then(read)
}

fn read(dir: &Path, training: &Path, store: &IndexStore) -> Result<Catalog, DataError> {
    let mut broken = Vec::new();
    let mut splits: Vec<ListedSplit> = Vec::new();
    let began = SystemTime::now();
    let cached = index::load_cached(dir, store);
    let train = find_classes(training)?;
    let names: Vec<String> = train.folders.keys().cloned().collect();
    if names.is_empty() {
        let why: Vec<_> = train.broken.iter().take(5).map(ToString::to_string).collect();
        return Err(DataError::Invalid(format!(
            "{} contains no usable class folder: {}",
            training.display(),
            why.join("; ")
        )));
    }
    let mut folders = entries(dir).map_err(|detail| DataError::file(dir, detail))?;
    // `train` first, as everywhere.
    folders.sort_by_key(|path| path != training);
    for path in folders {
        let Some(name) = path.file_name().and_then(|n| n.to_str()) else { continue };
        let split = split_of(&path).unwrap_or(name);
        let is_named_split = split_of(&path).is_some();
        match files::stat(&path) {
            Ok(FileKind::Folder) => {}
            Err(detail) if is_named_split => {
                broken.push(broken_file(&path, detail));
                continue;
            }
            // The dataset's folder may also have other content.
            _ => continue,
        }
        let found = match find_classes(&path) {
            Ok(found) => found,
            Err(error) if is_named_split => return Err(error),
            Err(_) => continue,
        };
        // Other folders are ignored. A folder is a split if it has the name of a split, or if the training split has
        // all of its classes.
        if !is_named_split && (found.folders.is_empty() || !found.folders.keys().all(|c| names.contains(c))) {
            continue;
        }
        if splits.iter().any(|before| before.name == split) {
            if found.folders.is_empty() {
                broken.extend(found.broken);
                continue;
            }
            return Err(DataError::Invalid(format!(
                "{} has a second folder for the split {split:?}, {name}/: merge the two, or rename one of them",
                dir.display()
            )));
        }
        splits.push(list_split(dir, training, (split, found), &names, &cached)?);
    }
    let splits = examine(dir, splits, cached, store, began)?;
    Ok(Catalog { format: "image_folder", classes: names, splits, broken, ..Catalog::default() })
}

/// A split whose folders have been listed.
struct ListedSplit {
    name: String,
    /// Each folder with its class.
    folders: Vec<(u32, Folder)>,
    broken: Vec<BrokenFile>,
}

/// Describes all pictures, using the index for known pictures.
fn examine(
    dir: &Path,
    splits: Vec<ListedSplit>,
    cached: CachedFolders,
    store: &IndexStore,
    began: SystemTime,
) -> Result<Vec<Split>, DataError> {
    let all = splits.iter().flat_map(|split| split.folders.iter().map(|(_, folder)| folder));
    let mut described =
        index::describe_files(dir, &all.collect::<Vec<_>>(), cached, store, began).into_iter();
    let mut found = Vec::new();
    for ListedSplit { name, folders, mut broken } in splits {
        let mut listing = Listing::new(dir);
        listing.folder_cache = store.folder_cache(dir);
        let mut labels = Vec::new();
        for ((label, folder), entries) in folders.into_iter().zip(described.by_ref()) {
            let (class, labels_before) = (dir.join(&folder.path), labels.len());
            listing.add_container(&folder.path, ContainerKind::Folder);
            for entry in entries {
                match entry.broken {
                    Some(detail) => {
                        let name = std::ffi::OsStr::from_bytes(&entry.name);
                        broken.push(broken_file(&class.join(name), detail));
                    }
                    None => {
                        listing.push(&entry);
                        labels.push(label);
                    }
                }
            }
            if labels.len() == labels_before {
                return Err(empty_class(&class, &broken));
            }
        }
        if !labels.is_empty() || !broken.is_empty() {
            found.push(Split { name, labels, samples: Samples::Listed(listing), broken });
        }
    }
    Ok(found)
}

/// The error for a class folder without a usable picture. It names the first of the `broken` files in the folder.
fn empty_class(folder: &Path, broken: &[BrokenFile]) -> DataError {
    if let Some(first) = broken.iter().find(|broken| Path::new(&broken.file).starts_with(folder)) {
        let detail = format!("class folder {} has no usable picture: {first}", folder.display());
        return DataError::Invalid(detail);
    }
    DataError::Invalid(format!(
        "class folder {} has no picture: add pictures ({}), or move the folder out of the dataset",
        folder.display(),
        picture::FORMATS
    ))
}

fn list_split(
    dir: &Path,
    training: &Path,
    (split, found): (&str, Classes),
    names: &[String],
    cached: &CachedFolders,
) -> Result<ListedSplit, DataError> {
    let Classes { folders, mut broken } = found;
    let mut labelled = Vec::new();
    for (class, folder) in folders {
        let Some(label) = names.iter().position(|c| *c == class) else {
            return Err(DataError::Invalid(format!(
                "{} is a class that the training split does not have: add {} or remove the folder",
                folder.display(),
                training.join(&class).display()
            )));
        };
        labelled.push((label as u32, folder));
    }
    let list = |(label, class): &(u32, PathBuf)| -> Result<(u32, Folder, Vec<BrokenFile>), DataError> {
        let path = class.strip_prefix(dir).unwrap_or(class).to_owned();
        if let Some(stamp) = cached.stamp(&path) {
            let folder = Folder { path, stamp: Some(stamp), files: Vec::new() };
            return Ok((*label, folder, Vec::new()));
        }
        let stamp = FolderStamp::of(class);
        let (files, unexpected) = list_class(class);
        if files.is_empty() {
            return Err(empty_class(class, &unexpected));
        }
        // Unexpected entries can become pictures without a change of the folder's times.
        let stamp = stamp.filter(|_| unexpected.is_empty());
        let folder = Folder { path, stamp, files };
        Ok((*label, folder, unexpected))
    };
    let listed: Vec<_> = labelled.par_iter().map(list).collect();
    let mut folders = Vec::new();
    // The first error in the order of the classes is returned, so that it does not depend on timing.
    for class in listed {
        let (label, folder, unexpected) = class?;
        folders.push((label, folder));
        broken.extend(unexpected);
    }
    Ok(ListedSplit { name: split.into(), folders, broken })
}

/// The content of a split's folder.
struct Classes {
    folders: BTreeMap<String, PathBuf>,
    broken: Vec<BrokenFile>,
}

fn find_classes(split: &Path) -> Result<Classes, DataError> {
    let mut found = Classes { folders: BTreeMap::new(), broken: Vec::new() };
    for path in entries(split).map_err(|detail| DataError::file(split, detail))? {
        match files::stat(&path) {
            Ok(FileKind::Folder) => match path.file_name().and_then(|n| n.to_str()) {
                Some(name) => match found.folders.entry(normalise_nfc(name)) {
                    Entry::Vacant(class) => drop(class.insert(path)),
                    Entry::Occupied(first) => {
                        let detail = format!(
                            "has the name of {} in another Unicode normalisation; put their pictures into one folder",
                            first.get().display()
                        );
                        found.broken.push(broken_file(&path, detail));
                    }
                },
                None => {
                    let inside = plural(entries(&path).map_or(0, |all| all.len() as u64), "file");
                    let detail =
                        format!("is a class folder whose name is not UTF-8 ({inside} in it); rename it");
                    found.broken.push(broken_file(&path, detail));
                }
            },
            Ok(FileKind::File { .. }) => {
                if has_picture_extension(&path) || !picture::is_not_a_picture(&path) {
                    let detail = "is not in a class folder; move it into one, or out of the dataset";
                    found.broken.push(broken_file(&path, detail));
                }
            }
            Err(detail) => found.broken.push(broken_file(&path, detail)),
        }
    }
    Ok(found)
}

/// The files of a class that may be pictures, and the entries that are not allowed in a class folder.
fn list_class(folder: &Path) -> (Vec<FoundFile>, Vec<BrokenFile>) {
    let all = match entries(folder) {
        Ok(all) => all,
        Err(detail) => return (Vec::new(), vec![broken_file(folder, detail)]),
    };
    let examine = |path: &PathBuf| match files::stat(path)? {
        FileKind::File { size_bytes, modified_ns } => Ok(path.file_name().map(|name| FoundFile {
            name: name.to_owned(),
            size: size_bytes,
            modified_ns,
            needs_check: !has_picture_extension(path),
        })),
        FileKind::Folder => match entries(path)?.len() {
            0 => Ok(None),
            inside => Err(format!(
                "is a folder inside a class folder ({} in it); move its pictures up, or move the folder out of the dataset",
                plural(inside as u64, "file")
            )),
        },
    };
    let examined: Vec<Result<Option<FoundFile>, String>> = all.par_iter().map(examine).collect();
    let (mut files, mut broken) = (Vec::new(), Vec::new());
    for (path, found) in all.iter().zip(examined) {
        match found {
            Ok(file) => files.extend(file),
            Err(detail) => broken.push(broken_file(path, detail)),
        }
    }
    (files, broken)
}

/// The entries of a folder in sorted order, without hidden files.
pub(super) fn entries(dir: &Path) -> Result<Vec<PathBuf>, String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(files::cannot_be_read)? {
        let entry = entry.map_err(files::cannot_be_read)?;
        if !entry.file_name().as_encoded_bytes().starts_with(b".") {
            found.push(entry.path());
        }
    }
    // Within one folder this is the order of the paths, and faster to compute.
    found.sort_unstable_by(|a, b| a.as_os_str().cmp(b.as_os_str()));
    Ok(found)
}
