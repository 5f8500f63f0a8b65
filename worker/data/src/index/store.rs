//! The cache directory of indexes: which file belongs to a dataset, who may write it, and when it is removed.

use super::file::{BlockRef, Facts, MAGIC, encoded, write_block, write_head};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    fs::{self, File},
    io::{self, BufWriter, Seek, SeekFrom, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime},
};

/// Raise it when files that were found broken may now be readable: files that another version found broken are read again.
const READER: u32 = 1;
/// Datasets of fewer pictures get no index: reading them takes no time.
const WORTH: usize = 1000;
/// Up to so many unknown pictures are read without storing the result.
const FEW: usize = 64;
/// Indexes that are kept for one path, at which different folders were.
const COPIES: usize = 64;
/// Indexes that were not used for this long are removed.
const UNUSED: Duration = Duration::from_secs(30 * 24 * 3600);
const DAY: Duration = Duration::from_secs(24 * 3600);
/// File systems' times have steps, of two seconds at most; a change within one is not seen.
const MIN_AGE: Duration = Duration::from_secs(3);
const PROGRESS_EVERY: Duration = Duration::from_millis(300);

/// Where indexes are kept.
#[derive(Debug, Clone)]
pub(crate) struct IndexStore {
    /// None: nothing is kept.
    dir: Option<PathBuf>,
    worth: usize,
    few: usize,
    reader: u32,
    /// Folders that are the same are not listed.
    trusts_folders: bool,
    min_age: Option<Duration>,
}

impl IndexStore {
    /// The user's.
    pub(crate) fn of_user() -> Self {
        let dir = lockstep_host::cache::dir().map(|dir| dir.join("datasets"));
        Self { dir, worth: WORTH, few: FEW, reader: READER, trusts_folders: false, min_age: Some(MIN_AGE) }
    }

    /// Folders that have not changed since all their files were examined are neither listed nor examined (see `folders.rs`).
    pub(crate) fn trusting_folders(self) -> Self {
        Self { trusts_folders: true, ..self }
    }

    pub(super) fn trusts_folders(&self) -> bool {
        self.trusts_folders
    }

    /// How long a folder must not have changed to be known; `None`: no time at all.
    pub(super) fn min_age(&self) -> Option<Duration> {
        self.min_age
    }

    /// In `dir`, of datasets of `worth` pictures or more.
    #[cfg(test)]
    pub(crate) fn at(dir: &Path, worth: usize) -> Self {
        Self {
            dir: Some(dir.to_owned()),
            worth,
            few: 1,
            reader: READER,
            trusts_folders: false,
            min_age: None,
        }
    }

    /// As another version of the program.
    #[cfg(test)]
    pub(super) fn of_reader(self, reader: u32) -> Self {
        Self { reader, ..self }
    }

    /// Folders must not have changed for so long.
    #[cfg(test)]
    pub(super) fn with_min_age(self, min_age: Duration) -> Self {
        Self { min_age: Some(min_age), ..self }
    }

    /// Stores only when so many pictures are unknown.
    #[cfg(test)]
    pub(super) fn of_few(self, few: usize) -> Self {
        Self { few, ..self }
    }

    /// Whether what is found is kept, of a dataset of so many pictures, so many of them unknown.
    pub(super) fn keeps(&self, pictures: usize, unknown: usize) -> bool {
        self.dir.is_some() && pictures >= self.worth && unknown >= self.few
    }

    pub(super) fn file(&self, dataset: &Path, extension: &str) -> Option<PathBuf> {
        let folder = folder_of(dataset).map(|folder| format!("-{folder}")).unwrap_or_default();
        Some(self.dir.as_ref()?.join(format!("{}{folder}.{extension}", path_key(dataset))))
    }

    /// What is known of a dataset: its index, and what an interrupted run has found.
    pub(super) fn load(&self, dataset: &Path) -> Facts {
        let mut facts = Facts::default();
        for extension in ["index", "part"] {
            if let Some(file) = self.file(dataset, extension) {
                facts.add(&file, dataset, self.reader);
                mark_used(&file);
            }
        }
        facts
    }

    /// Waits until no other process builds the dataset's index, and starts to build it. Another process may have completed it meanwhile.
    ///
    /// # Errors
    /// The cache directory cannot be written.
    pub(super) fn begin(&self, dataset: &Path) -> io::Result<Option<(IndexBuilder, Facts)>> {
        let Some(dir) = &self.dir else { return Ok(None) };
        let named = |path: &Path, e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
        fs::create_dir_all(dir).map_err(|e| named(dir, e))?;
        let file = |extension| self.file(dataset, extension).unwrap_or_default();
        let lock_path = file("lock");
        let lock = File::options().create(true).truncate(false).write(true).open(&lock_path);
        let lock = lock.map_err(|e| named(&lock_path, e))?;
        // Where files cannot be locked, several may do the same work at the same time; each file appears whole.
        let _ = lock.lock();
        let mut facts = Facts::default();
        facts.add(&file("index"), dataset, self.reader);
        let part_path = file("part");
        let whole = facts.add(&part_path, dataset, self.reader);
        // Left by a process that was killed.
        let _ = fs::remove_file(file("progress"));
        let open = || -> io::Result<File> {
            let mut part = File::options().create(true).truncate(false).write(true).open(&part_path)?;
            part.set_len(whole)?;
            part.seek(SeekFrom::End(0))?;
            if whole == 0 {
                write_head(&mut part, dataset, self.reader)?;
            }
            Ok(part)
        };
        let part = open().map_err(|e| named(&part_path, e))?;
        let builder = IndexBuilder {
            dataset: dataset.to_owned(),
            reader: self.reader,
            index: file("index"),
            part_path,
            part,
            progress_path: file("progress"),
            published: None,
            _lock: lock,
        };
        Ok(Some((builder, facts)))
    }

    /// The progress of building a dataset's index; `None` if it is not being built.
    pub(crate) fn progress(&self, dataset: &Path) -> Option<Progress> {
        let text = fs::read(self.file(dataset, "progress")?).ok()?;
        // The lock is held while an index is made; a process that was killed leaves its progress file.
        let lock = File::open(self.file(dataset, "lock")?).ok()?;
        if lock.try_lock_shared().is_ok() {
            return None;
        }
        serde_json::from_slice(&text).ok()
    }
}

fn path_key(dataset: &Path) -> String {
    hex::encode(&Sha256::digest(dataset.as_os_str().as_encoded_bytes())[..16])
}

/// Distinguishes the dataset's folder from another at the same path on another machine. None where the file system reports no
/// time of creation: those are mostly network file systems, which are the same on all machines.
fn folder_of(dataset: &Path) -> Option<String> {
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

/// Indexes that nobody uses are removed some day.
fn mark_used(file: &Path) {
    let old = |found: fs::Metadata| found.modified().is_ok_and(|t| t.elapsed().is_ok_and(|t| t > DAY));
    if fs::metadata(file).is_ok_and(old) {
        // One of another user's is theirs to keep.
        let _ = File::options().write(true).open(file).and_then(|file| file.set_modified(SystemTime::now()));
    }
}

/// Removes indexes of other folders that lay at a dataset's path: a dataset that is copied anew for each job is another
/// folder each time.
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
    for (number, (used, path)) in others.into_iter().enumerate() {
        if number + 1 >= COPIES || used.elapsed().is_ok_and(|since| since > UNUSED) {
            for extension in ["index", "folders", "part", "lock", "progress"] {
                let _ = fs::remove_file(path.with_extension(extension));
            }
        }
    }
}

/// How many of a dataset's pictures have been read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    pub done: u64,
    pub total: u64,
}

/// Builds an index, under a lock: no other process builds one of this dataset meanwhile.
#[derive(Debug)]
pub(super) struct IndexBuilder {
    dataset: PathBuf,
    reader: u32,
    index: PathBuf,
    part_path: PathBuf,
    part: File,
    progress_path: PathBuf,
    published: Option<Instant>,
    _lock: File,
}

impl IndexBuilder {
    /// Keeps what was found, for a run that is interrupted.
    ///
    /// # Errors
    /// The disk does not take it.
    pub(super) fn append(&mut self, container: &[u8], block: BlockRef<'_>) -> io::Result<()> {
        let mut bytes = Vec::new();
        write_block(&mut bytes, container, &encoded(&block)?)?;
        self.part.write_all(&bytes)
    }

    /// Publishes the progress, a few times a second.
    pub(super) fn publish(&mut self, progress: Progress) {
        if self.published.is_none_or(|published| published.elapsed() >= PROGRESS_EVERY) {
            self.published = Some(Instant::now());
            // Nothing depends on it.
            let text = serde_json::to_vec(&progress).unwrap_or_default();
            let _ = lockstep_host::write_whole(&self.progress_path, &text);
        }
    }

    /// Writes the index: all of it, or nothing.
    ///
    /// # Errors
    /// The disk does not take it.
    pub(super) fn finish<'a>(self, blocks: impl Iterator<Item = (&'a [u8], BlockRef<'a>)>) -> io::Result<()> {
        let folder = self.index.parent().unwrap_or(Path::new("."));
        let mut file = BufWriter::with_capacity(1 << 20, tempfile::NamedTempFile::new_in(folder)?);
        write_head(&mut file, &self.dataset, self.reader)?;
        for (container, block) in blocks {
            write_block(&mut file, container, &encoded(&block)?)?;
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
        let _ = fs::remove_file(&self.progress_path);
        // Nothing but its head.
        let head = MAGIC.len() + 16 + self.dataset.as_os_str().len();
        if self.part.metadata().is_ok_and(|found| found.len() <= head as u64) {
            let _ = fs::remove_file(&self.part_path);
        }
    }
}
