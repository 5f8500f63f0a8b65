//! Fingerprints of datasets: names, sizes and contents of the files. They show whether a dataset has changed.
//!
//! The index has the content hashes of pictures in folders and shards, so a file is read only if its size or
//! modification time differs. With [`ChangeDetection::Folders`], files in unchanged folders are not examined. A copy of
//! a dataset has the same fingerprint. New modification times do not change the fingerprint.

use super::{Catalog, ChangeDetection, DataError, Format, Samples, pattern};
use lockstep_host::files::{self, FileKind};
use lockstep_protocol::{dataset::PicturesFingerprint, numbers::plural};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    fs,
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

/// Datasets of up to this many bytes are read completely. Of larger datasets, only the beginning and the end of each
/// file are read.
const MAX_WHOLE_BYTES: u64 = 1 << 30;
const EDGE_BYTES: u64 = 64 << 10;
/// Maximum depth of folders. Links can form a cycle.
const MAX_DEPTH: usize = 32;
const MAX_FILES: usize = 100_000_000;

/// The fingerprint of a file, or of all files in a folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint {
    pub files: u64,
    pub bytes: u64,
    /// The hash in hexadecimal.
    pub sha256: String,
}

/// A dataset's fingerprint, of one of two kinds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum DatasetFingerprint {
    /// A fingerprint of all files, computed by reading them.
    Files(Fingerprint),
    /// A fingerprint of the pictures, computed from the index.
    Pictures(PicturesFingerprint),
}

impl DatasetFingerprint {
    /// The fingerprint of a dataset that this process has just inspected. `None` if its files can no longer be read.
    pub fn of_inspected(path: &Path) -> Option<Self> {
        match of_pictures(path, ChangeDetection::Folders).ok()? {
            Some(found) => Some(Self::Pictures(found)),
            None => Fingerprint::of(path, &AtomicBool::new(false)).ok().map(Self::Files),
        }
    }

    /// A description, such as `640 pictures of 3 MB`.
    pub fn in_words(&self) -> String {
        let (count, what, bytes) = match self {
            Self::Files(found) => (found.files, "file", found.bytes),
            Self::Pictures(found) => (found.pictures, "picture", found.picture_bytes),
        };
        format!("{} of {:.0} MB", plural(count, what), bytes as f64 / 1e6)
    }
}

/// A file, or a folder that cannot be read. The reason why an entry cannot be read is part of the fingerprint: whether
/// a job can do without the entry is decided elsewhere.
struct Entry {
    path: PathBuf,
    size_bytes: Result<u64, String>,
}

impl Fingerprint {
    /// Examines every file below `path`, until `cancelled` is set.
    ///
    /// # Errors
    /// There is no file, there are too many files, or `path` itself cannot be read. The message names the path.
    pub fn of(path: &Path, cancelled: &AtomicBool) -> io::Result<Self> {
        let mut entries = Vec::new();
        collect(path, 0, &mut entries, cancelled)?;
        entries.sort_by(|a, b| a.path.cmp(&b.path));
        let bytes = entries.iter().map(|e| e.size_bytes.as_ref().unwrap_or(&0)).sum();
        if entries.is_empty() {
            return Err(io::Error::new(io::ErrorKind::NotFound, format!("{} holds no file", path.display())));
        }
        let mut hash = Sha256::new();
        for Entry { path: file, size_bytes } in &entries {
            let name = file.strip_prefix(path).unwrap_or(file);
            hash.update(name.as_os_str().as_encoded_bytes());
            hash.update([0]);
            let unread = match size_bytes {
                Ok(size) => {
                    hash.update(size.to_le_bytes());
                    content(file, *size, bytes <= MAX_WHOLE_BYTES, &mut hash, cancelled)
                }
                Err(detail) => Err(detail.clone()),
            };
            if let Err(detail) = unread {
                hash.update(detail.as_bytes());
            }
            check_cancelled(cancelled)?;
        }
        Ok(Self { files: entries.len() as u64, bytes, sha256: hex::encode(hash.finalize()) })
    }
}

/// The fingerprint of the pictures in the dataset at `path`. `None` for formats with few files: use [`Fingerprint`]
/// for them.
///
/// # Errors
/// `path` is no longer a dataset.
pub fn of_pictures(path: &Path, changes: ChangeDetection) -> Result<Option<PicturesFingerprint>, DataError> {
    Catalog::open_with(path, &changes.store()).map(|catalog| catalog.fingerprint(path))
}

/// Whether [`of_pictures`] has a fingerprint for `path`. Only a few directory entries are read.
pub fn has_pictures(path: &Path) -> bool {
    super::pattern::fixed_part(path).is_some()
        || super::image_folder::training_folder(path).is_some_and(|train| train.is_dir())
        || [path.to_owned(), path.join("data")].iter().any(|dir| super::shards::has_any(dir))
        || super::image_folder::is_plain(path)
}

impl Catalog {
    pub(super) fn fingerprint(&self, path: &Path) -> Option<PicturesFingerprint> {
        if !matches!(self.format, Format::ImageFolder | Format::Shards | Format::Parquet) {
            return None;
        }
        let (mut names, mut contents) = (Sha256::new(), Sha256::new());
        let mut add = |name: &[u8]| {
            names.update((name.len() as u64).to_le_bytes());
            names.update(name);
        };
        self.classes.iter().for_each(|class| add(class.as_bytes()));
        let (mut pictures, mut picture_bytes) = (0, 0);
        for split in &self.splits {
            let Samples::Listed(listing) = &split.samples else { continue };
            add(split.name.as_bytes());
            for (number, label) in split.labels.iter().enumerate() {
                let (name, size, hash) = listing.identity(number);
                add(name.as_os_str().as_encoded_bytes());
                add(&label.to_le_bytes());
                add(&size.to_le_bytes());
                contents.update(hash.to_le_bytes());
                pictures += 1;
                picture_bytes += size;
            }
        }
        // Broken files are not trained on. Their names are relative to the fixed part of a pattern.
        let folder = pattern::fixed_part(path).map_or_else(|| path.to_owned(), |(fixed, _)| fixed);
        for broken in self.broken.iter().chain(self.splits.iter().flat_map(|split| &split.broken)) {
            let name = Path::new(&broken.file);
            add(name.strip_prefix(&folder).unwrap_or(name).as_os_str().as_encoded_bytes());
        }
        Some(PicturesFingerprint {
            pictures,
            picture_bytes,
            names_sha256: hex::encode(names.finalize()),
            contents_sha256: hex::encode(contents.finalize()),
        })
    }
}

fn check_cancelled(cancelled: &AtomicBool) -> io::Result<()> {
    if cancelled.load(Ordering::Relaxed) { Err(io::Error::other("cancelled")) } else { Ok(()) }
}

fn collect(path: &Path, depth: usize, found: &mut Vec<Entry>, cancelled: &AtomicBool) -> io::Result<()> {
    check_cancelled(cancelled)?;
    let wrong = |what: String| io::Error::other(format!("{} {what}", path.display()));
    if depth > MAX_DEPTH {
        return Err(wrong(format!(
            "is deeper than {MAX_DEPTH} folders; does a link lead back to a folder that contains it?"
        )));
    }
    let listed = match files::stat(path) {
        Ok(FileKind::Folder) => fs::read_dir(path)
            .and_then(Iterator::collect::<io::Result<Vec<_>>>)
            .map_err(files::cannot_be_read),
        Ok(FileKind::File { size_bytes }) => {
            found.push(Entry { path: path.into(), size_bytes: Ok(size_bytes) });
            return Ok(());
        }
        Err(detail) => Err(detail),
    };
    match listed {
        Ok(inside) => {
            for entry in inside {
                if found.len() >= MAX_FILES {
                    return Err(wrong(format!("belongs to a dataset of more than {MAX_FILES} files")));
                }
                collect(&entry.path(), depth + 1, found, cancelled)?;
            }
        }
        // The dataset's path itself cannot be read.
        Err(detail) if depth == 0 => return Err(wrong(detail)),
        Err(detail) => found.push(Entry { path: path.into(), size_bytes: Err(detail) }),
    }
    Ok(())
}

/// Adds the content of a file to `hash`, or the reason why it cannot be read.
fn content(
    path: &Path,
    size: u64,
    whole: bool,
    hash: &mut Sha256,
    cancelled: &AtomicBool,
) -> Result<(), String> {
    let (mut file, _) = files::open(path)?;
    if whole || size <= 2 * EDGE_BYTES {
        let mut block = vec![0; 1 << 18];
        loop {
            match file.read(&mut block).map_err(files::cannot_be_read)? {
                0 => return Ok(()),
                n => hash.update(&block[..n]),
            }
            // The caller checks for cancellation again.
            if cancelled.load(Ordering::Relaxed) {
                return Ok(());
            }
        }
    }
    let mut edge = vec![0; EDGE_BYTES as usize];
    file.read_exact(&mut edge).map_err(files::cannot_be_read)?;
    hash.update(&edge);
    file.seek(SeekFrom::End(-(EDGE_BYTES as i64))).map_err(files::cannot_be_read)?;
    file.read_exact(&mut edge).map_err(files::cannot_be_read)?;
    hash.update(&edge);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fingerprint(path: &Path) -> io::Result<Fingerprint> {
        Fingerprint::of(path, &AtomicBool::new(false))
    }

    #[test]
    fn unreadable_entries_are_part_of_the_fingerprint() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("x"), "one").unwrap();
        let without = fingerprint(dir.path()).unwrap();
        let odd = dir.path().join("odd");
        let mode = rustix::fs::Mode::RUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &odd, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let pipe = fingerprint(dir.path()).unwrap();
        assert_eq!((pipe.files, pipe.bytes), (2, 3));
        let mut seen = vec![without.sha256, pipe.sha256];
        for target in ["odd", "gone", "/proc/self/mem", ".."] {
            fs::remove_file(&odd).unwrap();
            std::os::unix::fs::symlink(target, &odd).unwrap();
            let found = fingerprint(dir.path()).unwrap();
            assert!(!seen.contains(&found.sha256), "{target}");
            seen.push(found.sha256);
        }
        assert!(Fingerprint::of(dir.path(), &AtomicBool::new(true)).is_err(), "cancelled");
    }

    #[test]
    fn nested_folders_have_a_maximum_depth() {
        let dir = tempfile::tempdir().unwrap();
        let mut inner = dir.path().to_path_buf();
        for _ in 0..MAX_DEPTH - 1 {
            inner.push("d");
        }
        fs::create_dir_all(&inner).unwrap();
        fs::write(inner.join("x"), "one").unwrap();
        assert_eq!(fingerprint(dir.path()).unwrap().files, 1);
        inner.push("d");
        fs::create_dir(&inner).unwrap();
        fs::write(inner.join("x"), "two").unwrap();
        let message = fingerprint(dir.path()).unwrap_err().to_string();
        assert!(message.contains("deeper than 32 folders"), "{message}");
    }

    #[test]
    fn the_fingerprint_depends_on_names_sizes_and_content_only() {
        let dir = tempfile::tempdir().unwrap();
        assert!(fingerprint(dir.path()).is_err(), "an empty folder");
        assert!(fingerprint(&dir.path().join("gone")).unwrap_err().to_string().contains("gone"));
        fs::create_dir(dir.path().join("a")).unwrap();
        fs::write(dir.path().join("a/x"), "one").unwrap();
        fs::write(dir.path().join("y"), "two").unwrap();
        let first = fingerprint(dir.path()).unwrap();
        assert_eq!((first.files, first.bytes), (2, 6));
        // The same content in another folder, written at another time.
        let other = tempfile::tempdir().unwrap();
        fs::write(other.path().join("y"), "two").unwrap();
        fs::create_dir(other.path().join("a")).unwrap();
        fs::write(other.path().join("a/x"), "one").unwrap();
        assert_eq!(fingerprint(other.path()).unwrap(), first);
        fs::write(other.path().join("a/x"), "onE").unwrap();
        assert_ne!(fingerprint(other.path()).unwrap(), first);
        fs::rename(dir.path().join("y"), dir.path().join("z")).unwrap();
        assert_ne!(fingerprint(dir.path()).unwrap(), first);
    }
}
