//! Datasets, sharding, augmentation and batches.

// Callers need to know how a call can fail.
#![warn(clippy::missing_errors_doc)]
// Ranks on different machines must draw the same numbers. Therefore the mathematical functions of the system's C library are forbidden
// (`clippy.toml`).
#![warn(clippy::disallowed_methods)]

mod cifar;
mod copy;
pub mod device;
mod fingerprint;
pub mod held_out;
mod idx;
mod image_folder;
mod index;
mod inspect;
mod label;
mod listing;
pub mod loader;
mod packed;
mod parquet;
mod pattern;
mod picture;
mod prepare;
mod random;
mod shard;
mod shards;
mod stored;
#[cfg(test)]
mod test_catalog;
mod transform;

pub use fingerprint::fingerprint;
pub use index::Progress;
pub use inspect::{classes, inspect, splits};
pub use picture::{Picture, has_picture_extension};
pub use prepare::{PrepareSettings, Prepared, QUALITIES, SHORT_SIDES, prepare};
pub use random::Random;
pub use stored::{StoredPicture, StoredPictures, read_stored};

use index::IndexStore;
use listing::Listing;
use lockstep_host::files::{self, allowed::is_allowed};
use lockstep_protocol::{
    agent::AllowedFolders,
    dataset::{BrokenFile, class_names_mistake},
};
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Why data cannot be read. Messages name the file and what to change.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// An error that concerns the dataset, or the dataset together with the job.
    #[error("{0}")]
    Invalid(String),
    /// An error that concerns one file.
    #[error("{0}")]
    File(BrokenFile),
}

impl DataError {
    fn file(path: &Path, detail: impl Into<String>) -> Self {
        Self::File(broken_file(path, detail))
    }
}

fn broken_file(path: &Path, detail: impl Into<String>) -> BrokenFile {
    BrokenFile { file: path.display().to_string(), detail: detail.into() }
}

/// How changes of a dataset of class folders are detected when it is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeDetection {
    /// By each file's size and modification time.
    Files,
    /// By the times of the folders. Files that were added, removed, renamed or replaced are noticed when the dataset
    /// is opened, and a file that was overwritten in place is noticed when it is read.
    Folders,
}

/// The content of a dataset.
#[derive(Debug, Default)]
pub(crate) struct Catalog {
    /// The name of the format: `cifar10`, `image_folder`, `webdataset`.
    format: &'static str,
    classes: Vec<String>,
    /// The splits, `train` first.
    splits: Vec<Split>,
    /// Files and folders that look like splits but are not usable.
    broken: Vec<BrokenFile>,
    /// Splits that were left out because none of their samples has a label.
    unlabelled: Vec<String>,
}

/// One split. It has as many labels as samples.
#[derive(Debug)]
pub(crate) struct Split {
    name: String,
    labels: Vec<u32>,
    samples: Samples,
    /// Files and folders that were left out, in a fixed order.
    broken: Vec<BrokenFile>,
}

/// Where and how a split's pictures are stored.
#[derive(Debug)]
pub(crate) enum Samples {
    /// Uncompressed pictures in memory, one after another, as height, width, channels.
    Memory { pixels: Vec<u8>, height: u32, width: u32, channels: u32 },
    /// Encoded pictures in files or shards, which are read as RGB.
    Listed(Listing),
}

impl Catalog {
    /// As [`Catalog::open_with`], with the user's index.
    fn open(path: &Path) -> Result<Self, DataError> {
        Self::open_with(path, &IndexStore::of_user(ChangeDetection::Files))
    }

    /// Opens the dataset at `path`. Reads CIFAR and IDX files, and in other formats the pictures that the index in `store` lacks.
    fn open_with(path: &Path, store: &IndexStore) -> Result<Self, DataError> {
        let catalog = Self::find(path, store)?;
        let names: Vec<_> = catalog.splits.iter().map(|split| split.name.as_str()).collect();
        let mistake = if names.contains(&"train") {
            class_names_mistake(&catalog.classes)
        } else {
            Some(format!(
                "has no training split, only {}: a dataset needs training pictures, in files whose names begin with train",
                names.join(", ")
            ))
        };
        match mistake {
            None => Ok(catalog),
            Some(mistake) => Err(DataError::Invalid(format!("{} {mistake}", path.display()))),
        }
    }

    /// Tries the formats in order.
    fn find(path: &Path, store: &IndexStore) -> Result<Self, DataError> {
        if let Some(named) = shards::open_named(path, store) {
            return named;
        }
        if !path.is_dir() {
            let what = match path.extension() {
                _ if !path.exists() => "does not exist",
                Some(extension) if extension.eq_ignore_ascii_case("zip") => {
                    "is a zip file; unpack it and give the folder, or use \"Upload pictures\" on the page Datasets"
                }
                _ => "is a file; give its folder",
            };
            return Err(DataError::file(path, what));
        }
        // An archive unpacks into its own folder. Accept that folder and its parent.
        let unpacked = [path.to_owned(), path.join("cifar-10-batches-bin"), path.join("cifar-100-binary")];
        let in_files = |dir: &PathBuf| {
            cifar::find(dir).or_else(|| idx::find(dir)).or_else(|| image_folder::find(dir, store))
        };
        // Shards are checked last, because files of other formats may be next to the archive from which they were
        // unpacked. A repository of the Hugging Face hub has its shards in `data`.
        let in_shards =
            || [path, &path.join("data")].into_iter().find_map(|dir| shards::find(path, dir, store));
        let found = unpacked.iter().find_map(in_files).or_else(in_shards);
        found.or_else(|| image_folder::find_plain(path, store)).unwrap_or_else(|| Err(not_a_dataset(path)))
    }

    /// All files and folders that were left out.
    fn all_broken(&self) -> impl Iterator<Item = &BrokenFile> {
        self.broken.iter().chain(self.splits.iter().flat_map(|split| &split.broken))
    }

    fn split(&self, name: &str) -> Option<&Split> {
        self.splits.iter().find(|s| s.name == name)
    }
}

/// Why a folder is not a dataset, and what to do.
fn not_a_dataset(path: &Path) -> DataError {
    let entries = image_folder::entries(path).unwrap_or_default();
    let unreadable =
        |folder: &Path| image_folder::entries(folder).err().map(|why| DataError::file(folder, why));
    let folders = entries.iter().map(PathBuf::as_path).filter(|path| path.is_dir());
    let advice = if let Some(error) = std::iter::once(path).chain(folders).find_map(unreadable) {
        error.to_string()
    } else if path.join("data_batch_1").is_file() || path.join("cifar-10-batches-py").is_dir() {
        "this is CIFAR's Python version, which contains pickles: download the binary version".into()
    } else if shards::has_only_compressed(path) {
        "its shards are compressed, but pictures are read at arbitrary offsets: decompress the shards (gunzip) to *.tar".into()
    } else {
        "a picture's class is the name of its folder: put the training pictures of each class directly into a folder \
         train/<class>/, for at least two classes, and give the folder that contains train/"
            .into()
    };
    let contents = if entries.is_empty() {
        "the folder is empty".into()
    } else {
        format!("it has {}", list_names(&entries))
    };
    DataError::Invalid(format!(
        "{} holds no known dataset; {contents}; {advice}; looked for data_batch_1.bin (CIFAR-10), train.bin (CIFAR-100), \
         train-images-idx3-ubyte (IDX, .gz or not), train/<class>/ or two and more <class>/ (pictures), *.tar (WebDataset) and \
         *.parquet",
        path.display()
    ))
}

/// Maximum number of entries read in a folder that is not a dataset. The first entries are representative.
const MAX_ENTRIES_READ: usize = 1000;

/// Whether some files of a folder have the names of pictures.
fn has_pictures(folder: &Path) -> bool {
    let files = fs::read_dir(folder).into_iter().flatten().flatten().take(MAX_ENTRIES_READ);
    files.map(|file| file.path()).any(|path| has_picture_extension(&path))
}

/// The names of the first files and folders, and the number of the others.
fn list_names(paths: &[impl AsRef<Path>]) -> String {
    const NAMED: usize = 5;
    let name = |path: &Path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_dir() { format!("{name}/") } else { name.into_owned() }
    };
    let named: Vec<_> = paths.iter().take(NAMED).map(|path| name(path.as_ref())).collect();
    let unnamed = paths.len().saturating_sub(NAMED);
    let rest = if unnamed > 0 { format!(" and {unnamed} more") } else { String::new() };
    format!("{}{rest}", named.join(", "))
}

/// A dataset's path with all links resolved. It may be a pattern of shards (`train-{000..127}.tar`).
///
/// # Errors
/// The path does not exist.
pub fn canonical(path: &Path) -> io::Result<PathBuf> {
    match pattern::fixed_part(path) {
        Some((folder, rest)) => Ok(Path::new(".").join(folder).canonicalize()?.join(rest)),
        None => path.canonicalize(),
    }
}

/// Resolves all links in the path of a registered dataset, which must lead to an allowed folder. The path had no links when it was
/// registered, but links may have been created since. Open only the returned path. A path that does not exist is returned unchanged.
///
/// # Errors
/// The path leads outside the allowed folders, or cannot be read.
pub fn resolve(path: &Path, allowed: Option<&AllowedFolders>) -> Result<PathBuf, String> {
    let Some(allowed) = allowed else { return Ok(path.to_owned()) };
    match canonical(path) {
        Ok(real) if real == path || is_allowed(allowed, &real) => Ok(real),
        Ok(_) => Err(allowed.refusal(&path.display().to_string())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(path.to_owned()),
        Err(error) => Err(format!("{} cannot be read: {error}", path.display())),
    }
}

/// Whether a dataset's path exists or, for a pattern, at least one shard.
pub fn exists(path: &Path) -> bool {
    pattern::fixed_part(path).map_or_else(|| path.exists(), |(folder, rest)| pattern::exists(&folder, &rest))
}

/// The progress of building a dataset's index. `None` if no index is being built, or the dataset is small.
pub fn index_progress(path: &Path) -> Option<Progress> {
    IndexStore::of_user(ChangeDetection::Files).progress(path)
}

/// Size limit of a file of class names. Such a file normally has a few kilobytes.
const MAX_NAMES_BYTES: u64 = 16 << 20;

/// Class names from a text file with one name per line. If there is no such file, the classes are named by their numbers.
fn names_from(path: &Path, classes: usize) -> Result<Vec<String>, DataError> {
    if fs::symlink_metadata(path).is_err() {
        return Ok((0..classes).map(|c| c.to_string()).collect());
    }
    let names = read_names(path)?;
    if names.len() != classes {
        let detail = format!("names {} classes, but the data has {classes}", names.len());
        return Err(DataError::file(path, detail));
    }
    Ok(names)
}

/// The lines of a file of class names, without empty lines.
fn read_names(path: &Path) -> Result<Vec<String>, DataError> {
    let bytes = files::read(path, MAX_NAMES_BYTES).map_err(|detail| DataError::file(path, detail))?;
    let text = String::from_utf8(bytes).map_err(|_| DataError::file(path, "is not UTF-8"))?;
    Ok(text.lines().map(str::trim).filter(|l| !l.is_empty()).map(str::to_owned).collect())
}
