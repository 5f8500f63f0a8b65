//! Folders of pictures: `train/<class>/*` and, for validation, `val/<class>/*` or `test/<class>/*`.
//! Of any size; told by their first bytes, not by their names.
//!
//! What cannot be read, or lies where no class is, is named: nothing that looks like a picture is left out in silence.

use super::{
    Catalog, DataError, Format, Samples, Split,
    picture::{self, HEAD_BYTES, is_named_like_one},
};
use crate::files::{self, Found};
use lockstep_protocol::dataset::BrokenFile;
use std::{
    collections::BTreeMap,
    fs,
    io::Read,
    path::{Path, PathBuf},
};

/// Names that always mean a split.
const SPLITS: [&str; 5] = ["train", "val", "valid", "validation", "test"];

/// Finds the files under `dir`; `None` when there is no folder `train` with folders in it.
pub(super) fn find(dir: &Path) -> Option<Result<Catalog, DataError>> {
    let train = dir.join("train");
    match files::look(&train) {
        Ok(Found::Folder) => {
            let holds_folders = entries(&train).is_ok_and(|all| all.iter().any(|path| path.is_dir()));
            holds_folders.then(|| read(dir))
        }
        Ok(Found::File { .. }) => None,
        // A link that leads nowhere, and the like.
        Err(detail) if fs::symlink_metadata(&train).is_ok() => {
            Some(Err(DataError::File { path: train.display().to_string(), detail }))
        }
        Err(_) => None,
    }
}

fn read(dir: &Path) -> Result<Catalog, DataError> {
    let mut broken = Vec::new();
    let mut splits = Vec::new();
    let train = classes(&dir.join("train"))?;
    let names: Vec<String> = train.folders.keys().cloned().collect();
    if names.is_empty() {
        let why: Vec<_> = train.broken.iter().map(|b| format!("{} {}", b.file, b.detail)).collect();
        return Err(DataError::Invalid(format!(
            "{} holds no class folder that can be used: {}",
            dir.join("train").display(),
            why.join("; ")
        )));
    }
    for path in entries(dir).map_err(|detail| at(dir, detail))? {
        let Some(split) = path.file_name().and_then(|n| n.to_str()) else { continue };
        let always = SPLITS.contains(&split);
        match files::look(&path) {
            Ok(Found::Folder) => {}
            Err(detail) if always => {
                broken.push(named(&path, detail));
                continue;
            }
            // Other things may lie there.
            _ => continue,
        }
        let found = match classes(&path) {
            Ok(found) => found,
            Err(error) if always => return Err(error),
            Err(_) => continue,
        };
        // So may other folders: one is a split by its name, or because its classes are known.
        if !always && (found.folders.is_empty() || !found.folders.keys().all(|c| names.contains(c))) {
            continue;
        }
        let split = read_split(dir, split, found, &names)?;
        if !split.labels.is_empty() || !split.broken.is_empty() {
            splits.push(split);
        }
    }
    // `train` first, as everywhere.
    splits.sort_by_key(|s| s.name != "train");
    Ok(Catalog { format: Format::ImageFolder, classes: names, splits, broken })
}

fn read_split(dir: &Path, split: &str, found: Classes, names: &[String]) -> Result<Split, DataError> {
    let Classes { folders, mut broken } = found;
    let (mut pictures, mut labels) = (Vec::new(), Vec::new());
    for (class, folder) in folders {
        let Some(label) = names.iter().position(|c| *c == class) else {
            return Err(DataError::Invalid(format!(
                "{} is a class that the training split does not have: add {} or take it away",
                folder.display(),
                dir.join("train").join(&class).display()
            )));
        };
        let before = (pictures.len(), broken.len());
        read_class(&folder, &mut pictures, &mut broken);
        if (pictures.len(), broken.len()) == before {
            return Err(DataError::Invalid(format!(
                "class folder {} is empty: put pictures ({}) into it, or remove it",
                folder.display(),
                picture::FORMATS
            )));
        }
        labels.resize(pictures.len(), label as u32);
    }
    Ok(Split { name: split.into(), labels, samples: Samples::Files(pictures), broken })
}

/// What lies in a split's folder.
struct Classes {
    folders: BTreeMap<String, PathBuf>,
    broken: Vec<BrokenFile>,
}

fn classes(split: &Path) -> Result<Classes, DataError> {
    let mut found = Classes { folders: BTreeMap::new(), broken: Vec::new() };
    for path in entries(split).map_err(|detail| at(split, detail))? {
        match files::look(&path) {
            Ok(Found::Folder) => match path.file_name().and_then(|n| n.to_str()) {
                Some(name) => drop(found.folders.insert(name.to_owned(), path)),
                None => {
                    let inside = entries(&path).map_or(0, |all| all.len());
                    found.broken.push(named(
                        &path,
                        format!(
                            "is a class folder whose name is not UTF-8 ({inside} files in it); rename it"
                        ),
                    ));
                }
            },
            Ok(Found::File { .. }) => {
                if is_picture(&path).unwrap_or(true) {
                    let detail = "lies in no class folder; move it into one, or remove it".into();
                    found.broken.push(named(&path, detail));
                }
            }
            Err(detail) => found.broken.push(named(&path, detail)),
        }
    }
    Ok(found)
}

/// The picture files of a class: those named like one (broken or not), and others that are one.
fn read_class(folder: &Path, pictures: &mut Vec<PathBuf>, broken: &mut Vec<BrokenFile>) {
    let all = match entries(folder) {
        Ok(all) => all,
        Err(detail) => return broken.push(named(folder, detail)),
    };
    for path in all {
        let taken = files::look(&path).and_then(|found| match found {
            Found::File { .. } => is_picture(&path),
            Found::Folder => match entries(&path)?.len() {
                0 => Ok(false),
                inside => Err(format!(
                    "is a folder inside a class folder ({inside} files in it); move its pictures up, or remove it"
                )),
            },
        });
        match taken {
            Ok(true) => pictures.push(path),
            Ok(false) => {}
            Err(detail) => broken.push(named(&path, detail)),
        }
    }
}

/// Whether a file is named like a picture, or is one.
fn is_picture(path: &Path) -> Result<bool, String> {
    if is_named_like_one(path) {
        return Ok(true);
    }
    let mut head = Vec::new();
    let (file, _) = files::open(path)?;
    file.take(HEAD_BYTES).read_to_end(&mut head).map_err(files::cannot_be_read)?;
    Ok(picture::format_of(&head).is_some())
}

/// What lies in a folder, sorted, hidden files left out.
fn entries(dir: &Path) -> Result<Vec<PathBuf>, String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(files::cannot_be_read)? {
        let entry = entry.map_err(files::cannot_be_read)?;
        if !entry.file_name().as_encoded_bytes().starts_with(b".") {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

fn named(path: &Path, detail: String) -> BrokenFile {
    BrokenFile { file: path.display().to_string(), detail }
}

fn at(path: &Path, detail: String) -> DataError {
    DataError::File { path: path.display().to_string(), detail }
}
