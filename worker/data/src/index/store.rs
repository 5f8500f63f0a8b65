//! The cache directory of indexes: which files belong to a dataset, which process may write them, and when they are
//! removed.

use super::file::{Block, Facts, write_block, write_head};
use crate::ChangeDetection;
use lockstep_host::{open_lock, with_path};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    fs::{self, File},
    io::{self, BufWriter, Seek, SeekFrom, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime},
};

/// Minimum number of pictures of a dataset with an index. Reading fewer pictures takes little time.
const MIN_PICTURES: usize = 1000;
/// If the index lacks fewer pictures than this, the start of a job reads them each time and stores no results.
const MIN_UNKNOWN: usize = 64;
/// Maximum number of indexes kept for one path. Different folders that were at the path have different indexes.
const MAX_INDEXES_PER_PATH: usize = 64;
/// An index of another folder at the same path is removed after this time without use.
const MAX_UNUSED: Duration = Duration::from_secs(30 * 24 * 3600);
const DAY: Duration = Duration::from_secs(24 * 3600);
/// A folder is trusted only if its last change is at least this old, in whole seconds. File systems store times with a granularity of
/// up to two seconds, so a second change shortly after the first may not change the time.
const MIN_AGE: Duration = Duration::from_secs(4);
/// Minimum time between two writes of the progress.
const PROGRESS_EVERY: Duration = Duration::from_millis(300);

/// Where indexes are stored.
#[derive(Debug, Clone)]
pub(crate) struct IndexStore {
    /// The cache directory. `None` if nothing is stored.
    pub(super) dir: Option<PathBuf>,
    pub(super) min_pictures: usize,
    pub(super) min_unknown: usize,
    /// Whether folders that have not changed since all their files were examined are neither listed nor examined (see
    /// `folders.rs`).
    pub(super) trusts_folders: bool,
    /// How long a folder must be unchanged to be trusted.
    pub(super) min_age: Duration,
}

impl IndexStore {
    /// The store in the user's cache directory.
    pub(crate) fn of_user(changes: ChangeDetection) -> Self {
        Self {
            dir: lockstep_host::cache::dir().map(|dir| dir.join("datasets")),
            min_pictures: MIN_PICTURES,
            min_unknown: MIN_UNKNOWN,
            trusts_folders: changes == ChangeDetection::Folders,
            min_age: MIN_AGE,
        }
    }

    /// A store in `dir`, for datasets of at least `min_pictures` pictures.
    #[cfg(test)]
    pub(crate) fn at(dir: &Path, min_pictures: usize) -> Self {
        let (dir, min_unknown, min_age) = (Some(dir.to_owned()), 1, Duration::ZERO);
        Self { dir, min_pictures, min_unknown, min_age, ..Self::of_user(ChangeDetection::Files) }
    }

    /// Whether results are stored for a dataset with this number of pictures, `unknown` of which are not in the
    /// index.
    pub(super) fn keeps(&self, pictures: usize, unknown: usize) -> bool {
        self.dir.is_some() && pictures >= self.min_pictures && unknown >= self.min_unknown
    }

    /// The path of the dataset's file with this extension. `None` if nothing is stored.
    pub(super) fn file(&self, dataset: &Path, extension: &str) -> Option<PathBuf> {
        let folder = folder_key(dataset).map(|folder| format!("-{folder}")).unwrap_or_default();
        Some(self.dir.as_ref()?.join(format!("{}{folder}.{extension}", path_key(dataset))))
    }

    /// The known facts about a dataset: its index, and the results of an interrupted run.
    pub(super) fn load(&self, dataset: &Path) -> Facts {
        let mut facts = Facts::default();
        for extension in ["index", "part"] {
            if let Some(file) = self.file(dataset, extension) {
                facts.add(&file, dataset);
                mark_used(&file);
            }
        }
        facts
    }

    /// Waits until no other process builds the dataset's index, and starts to build it. `None` if nothing is stored, or if
    /// the cache directory is not writable.
    pub(super) fn begin(&self, dataset: &Path) -> Option<(IndexBuilder, Facts)> {
        self.try_begin(self.dir.as_ref()?, dataset).inspect_err(log_not_stored).ok()
    }

    fn try_begin(&self, dir: &Path, dataset: &Path) -> io::Result<(IndexBuilder, Facts)> {
        fs::create_dir_all(dir).map_err(|e| with_path(dir, e))?;
        let index = self.file(dataset, "index").unwrap_or_default();
        let file = |extension| index.with_extension(extension);
        let lock_path = file("lock");
        let lock = open_lock(&lock_path).map_err(|e| with_path(&lock_path, e))?;
        // If the file system does not support locks, several processes may do the same work. Each file is still
        // written atomically.
        let _ = lock.lock();
        let mut facts = Facts::default();
        facts.add(&index, dataset);
        let part_path = file("part");
        // A killed process may have left an incomplete block at the end.
        let complete_bytes = facts.add(&part_path, dataset);
        // A killed process may have left the file behind.
        let _ = fs::remove_file(file("progress"));
        let open_part = || -> io::Result<File> {
            let mut part = File::options().create(true).truncate(false).write(true).open(&part_path)?;
            part.set_len(complete_bytes)?;
            part.seek(SeekFrom::End(0))?;
            Ok(part)
        };
        let part = open_part().map_err(|e| with_path(&part_path, e))?;
        let builder = IndexBuilder {
            dataset: dataset.to_owned(),
            index,
            part,
            last_published: None,
            has_results: false,
            _lock: lock,
        };
        Ok((builder, facts))
    }

    /// The progress of building a dataset's index. `None` if no index is being built.
    pub(crate) fn progress(&self, dataset: &Path) -> Option<Progress> {
        let bytes = fs::read(self.file(dataset, "progress")?).ok()?;
        // The lock is held while an index is built. A killed process leaves its progress file behind.
        let lock = File::open(self.file(dataset, "lock")?).ok()?;
        if lock.try_lock_shared().is_ok() {
            return None;
        }
        serde_json::from_slice(&bytes).ok()
    }
}

fn path_key(dataset: &Path) -> String {
    hex::encode(&Sha256::digest(dataset.as_os_str().as_encoded_bytes())[..16])
}

/// Distinguishes the dataset's folder from another machine's folder at the same path. `None` if the file system
/// reports no birth time. Such file systems are mostly network file systems, which all machines share.
fn folder_key(dataset: &Path) -> Option<String> {
    let fixed = crate::pattern::fixed_part(dataset).map(|(folder, _)| folder);
    let mut found = fs::metadata(fixed.as_deref().unwrap_or(dataset)).ok()?;
    if found.is_file() {
        found = fs::metadata(dataset.parent()?).ok()?;
    }
    let born = found.created().ok()?.duration_since(SystemTime::UNIX_EPOCH).ok()?.as_nanos();
    let mut key = Sha256::new();
    key.update(found.ino().to_le_bytes());
    key.update(born.to_le_bytes());
    Some(hex::encode(&key.finalize()[..8]))
}

/// Sets a file's modification time to now, unless it is less than a day old. [`remove_unused`] recognises unused indexes
/// by this time.
fn mark_used(file: &Path) {
    let is_old = |found: fs::Metadata| found.modified().is_ok_and(|t| t.elapsed().is_ok_and(|t| t > DAY));
    if fs::metadata(file).is_ok_and(is_old) {
        // Fails for another user's index, which is left to its user.
        let _ = File::options().write(true).open(file).and_then(|file| file.set_modified(SystemTime::now()));
    }
}

/// Removes unused indexes of other folders at the dataset's path. A dataset that is copied again for each job is
/// another folder each time.
fn remove_unused(index: &Path, dataset: &Path) {
    let (Some(dir), key) = (index.parent(), path_key(dataset)) else { return };
    let mut others: Vec<(SystemTime, PathBuf)> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(&key))
        .map(|entry| entry.path())
        .filter(|path| path != index && path.extension().is_some_and(|e| e == "index"))
        .filter_map(|path| Some((fs::metadata(&path).ok()?.modified().ok()?, path)))
        .collect();
    others.sort_by(|a, b| b.cmp(a));
    for (newer_others, (used, path)) in others.into_iter().enumerate() {
        if newer_others + 1 >= MAX_INDEXES_PER_PATH || used.elapsed().is_ok_and(|since| since > MAX_UNUSED) {
            for extension in ["index", "folders", "part", "lock", "progress"] {
                let _ = fs::remove_file(path.with_extension(extension));
            }
        }
    }
}

/// The progress of building an index: the number of pictures (or shards) examined so far, and the number of all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    pub done: u64,
    pub total: u64,
}

/// Builds an index under a lock: no other process builds an index of this dataset meanwhile.
#[derive(Debug)]
pub(super) struct IndexBuilder {
    dataset: PathBuf,
    /// The path of the index. The other files are beside it, with other extensions.
    index: PathBuf,
    part: File,
    last_published: Option<Instant>,
    /// Whether results were stored.
    has_results: bool,
    _lock: File,
}

fn log_not_stored(error: &io::Error) {
    tracing::warn!("{error}; the dataset's files will be read again at the next start");
}

impl IndexBuilder {
    /// Stores results, so that they survive an interruption. `None` after a failure: the index is then given up, which
    /// frees its lock.
    pub(super) fn append(mut self, container: &[u8], block: &Block) -> Option<Self> {
        let mut write = || -> io::Result<()> {
            let mut bytes = Vec::new();
            if self.part.stream_position()? == 0 {
                write_head(&mut bytes, &self.dataset)?;
            }
            write_block(&mut bytes, container, block)?;
            self.part.write_all(&bytes)
        };
        write().inspect_err(log_not_stored).ok()?;
        self.has_results = true;
        Some(self)
    }

    /// Publishes the progress, at most a few times per second.
    pub(super) fn publish(&mut self, progress: Progress) {
        if self.last_published.is_none_or(|published| published.elapsed() >= PROGRESS_EVERY) {
            self.last_published = Some(Instant::now());
            // The progress is only informative, so errors are ignored.
            let bytes = serde_json::to_vec(&progress).unwrap_or_default();
            let _ = lockstep_host::write_atomically(&self.index.with_extension("progress"), &bytes);
        }
    }

    /// Writes the index, unless no results were stored: files that could not be read are retried at each start, and do not
    /// need a new index.
    pub(super) fn finish<'a>(self, blocks: impl Iterator<Item = (&'a [u8], Block)>) {
        if self.has_results {
            let _ = self.write(blocks).inspect_err(log_not_stored);
        }
    }

    /// Writes the index atomically.
    pub(super) fn write<'a>(&self, blocks: impl Iterator<Item = (&'a [u8], Block)>) -> io::Result<()> {
        let folder = self.index.parent().unwrap_or(Path::new("."));
        let mut file = BufWriter::with_capacity(1 << 20, tempfile::NamedTempFile::new_in(folder)?);
        write_head(&mut file, &self.dataset)?;
        for (container, block) in blocks {
            write_block(&mut file, container, &block)?;
        }
        let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.as_file().sync_all()?;
        file.persist(&self.index)?;
        remove_unused(&self.index, &self.dataset);
        self.part.set_len(0)
    }
}

impl Drop for IndexBuilder {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.index.with_extension("progress"));
        if self.part.metadata().is_ok_and(|found| found.len() == 0) {
            let _ = fs::remove_file(self.index.with_extension("part"));
        }
    }
}
