//! Folders of pictures: `train/<class>/*` and, for validation, `val/<class>/*` or `test/<class>/*`.
//! JPEG and PNG, of any size; told by their first bytes, not by their names.

use super::{Catalog, DataError, Format, Samples, Split, picture::format_of};
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
    if !train.is_dir() || folders(&train).is_ok_and(|f| f.is_empty()) {
        return None;
    }
    Some(read(dir))
}

fn read(dir: &Path) -> Result<Catalog, DataError> {
    let classes: Vec<String> = folders(&dir.join("train"))?.into_keys().collect();
    let mut splits = Vec::new();
    for (split, path) in folders(dir)? {
        // Other folders may lie there: one is a split by its name, or because its classes are known.
        let inner = folders(&path)?;
        if !SPLITS.contains(&split.as_str()) && !inner.keys().all(|c| classes.contains(c)) {
            continue;
        }
        let mut files = Vec::new();
        let mut labels = Vec::new();
        for (class, folder) in inner {
            let Some(label) = classes.iter().position(|c| *c == class) else {
                return Err(DataError::Invalid(format!(
                    "{} is a class that the training split does not have: add {} or take it away",
                    folder.display(),
                    dir.join("train").join(&class).display()
                )));
            };
            let pictures = pictures(&folder)?;
            if pictures.is_empty() {
                return Err(DataError::Invalid(format!(
                    "class folder {} is empty: put JPEG or PNG pictures into it, or remove it",
                    folder.display()
                )));
            }
            labels.extend(std::iter::repeat_n(label as u32, pictures.len()));
            files.extend(pictures);
        }
        if !files.is_empty() {
            splits.push(Split { name: split, labels, samples: Samples::Files(files) });
        }
    }
    // `train` first, as everywhere.
    splits.sort_by_key(|s| s.name != "train");
    Ok(Catalog { format: Format::ImageFolder, classes, splits, broken: Vec::new() })
}

fn cannot_read(path: &Path, error: &std::io::Error) -> DataError {
    DataError::File { path: path.display().to_string(), detail: format!("cannot be read: {error}") }
}

/// The folders in `dir` by name, hidden ones left out.
fn folders(dir: &Path) -> Result<BTreeMap<String, PathBuf>, DataError> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir).map_err(|e| cannot_read(dir, &e))? {
        let path = entry.map_err(|e| cannot_read(dir, &e))?.path();
        if let Some(name) = path.file_name().and_then(|n| n.to_str())
            && !name.starts_with('.')
            && path.is_dir()
        {
            found.insert(name.to_owned(), path);
        }
    }
    Ok(found)
}

/// The picture files in `dir`, sorted: those named like one (broken or not), and others that are one.
fn pictures(dir: &Path) -> Result<Vec<PathBuf>, DataError> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(|e| cannot_read(dir, &e))? {
        let path = entry.map_err(|e| cannot_read(dir, &e))?.path();
        let hidden = path.file_name().is_some_and(|n| n.as_encoded_bytes().starts_with(b"."));
        let extension = path.extension().map(|e| e.to_string_lossy().to_lowercase()).unwrap_or_default();
        let named = ["jpg", "jpeg", "png"].contains(&extension.as_str());
        if !hidden && path.is_file() && (named || is_picture(&path)) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn is_picture(path: &Path) -> bool {
    let mut head = [0; 8];
    fs::File::open(path).and_then(|mut f| f.read_exact(&mut head)).is_ok() && format_of(&head).is_some()
}
