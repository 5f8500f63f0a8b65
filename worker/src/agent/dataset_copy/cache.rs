//! The folder with copies of datasets: which copies exist, which attempts use them, and which copies are evicted.
//!
//! The folder of a copy is named by the hash of its list. It has `about.json`, `list`, `used` (the time of the last
//! use), `uses/` (a file for each attempt that uses the copy), and the dataset's files: in `part/` until all have
//! arrived, then in `data/`. All of this is on disk, because ranks outlive their agent.

use super::{
    CopyError,
    list::{About, LIST_PREFIX, List},
    on_disk, run_blocking,
};
use crate::agent::size::{megabytes_down, megabytes_up};
use lockstep_host::{lock, open_lock};
use lockstep_protocol::agent::AttemptRef;
use std::{
    collections::HashMap,
    ffi::OsStr,
    fs::{self, DirBuilder, File, TryLockError},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

/// Prefix of the names of entries that are incomplete or about to be removed.
const HIDDEN_PREFIX: &str = ".";
/// The content of an attempt's file in `uses/` after the attempt has found the copy complete. The file is empty while the attempt
/// waits for the copy.
const READS: &str = "reads";
const NEW_PREFIX: &str = ".new-";
const GONE_PREFIX: &str = ".gone-";
/// The mode of folders. Other accounts of the machine may not be allowed to read the dataset.
const MODE: u32 = 0o700;

#[derive(Debug)]
pub(in crate::agent) struct Copies {
    dir: PathBuf,
    limit_bytes: u64,
    /// Held while a copy is added or removed.
    changes: Mutex<()>,
    /// The locks of the jobs that pull copies, by the folder of the copy.
    copy_locks: Mutex<HashMap<PathBuf, Arc<tokio::sync::Mutex<()>>>>,
    /// Locked while this agent runs.
    _lock: File,
}

/// The right to write to a copy, which one job has at a time. Blocking work keeps a clone, because the work continues
/// after the job is stopped.
#[derive(Debug, Clone)]
pub(super) struct CopyLock {
    _held: Arc<tokio::sync::OwnedMutexGuard<()>>,
}

impl CopyLock {
    /// Runs blocking work, and holds the lock until the work is done.
    pub(super) async fn run_blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, CopyError> + Send + 'static,
    ) -> Result<T, CopyError> {
        let copy_lock = self.clone();
        run_blocking(move || {
            let done = work();
            drop(copy_lock);
            done
        })
        .await
    }
}

/// A copy, complete or incomplete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DatasetCopy {
    dir: PathBuf,
}

impl DatasetCopy {
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The folder of the dataset's files after all have arrived.
    pub(super) fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    /// The folder of the files that have arrived so far.
    pub(super) fn part_dir(&self) -> PathBuf {
        self.dir.join("part")
    }

    pub(super) fn list(&self) -> PathBuf {
        self.dir.join("list")
    }

    fn use_path(&self, attempt: &AttemptRef) -> PathBuf {
        self.dir.join("uses").join(use_name(attempt))
    }

    pub(super) fn uses(&self) -> Vec<String> {
        let entries = fs::read_dir(self.dir.join("uses")).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }

    /// Whether ranks of an attempt have files of the copy open, or may be about to open them.
    pub(super) fn has_readers(&self) -> bool {
        let is_reader =
            |name| fs::read_to_string(self.dir.join("uses").join(name)).is_ok_and(|text| text == READS);
        self.uses().iter().any(is_reader)
    }

    /// Records that the attempt has found the copy complete and may read it.
    pub(super) fn record_read(&self, attempt: &AttemptRef) -> io::Result<()> {
        fs::write(self.use_path(attempt), READS)
    }

    fn about(&self) -> Option<About> {
        serde_json::from_slice(&fs::read(self.dir.join("about.json")).ok()?).ok()
    }

    fn record_use(&self) -> io::Result<()> {
        lockstep_host::write_atomically(
            &self.dir.join("used"),
            jiff::Timestamp::now().as_nanosecond().to_string().as_bytes(),
        )
    }

    /// The time of the last use in nanoseconds since 1970. 0 if it is unknown.
    fn last_used(&self) -> i128 {
        let text = fs::read_to_string(self.dir.join("used")).unwrap_or_default();
        text.trim().parse().unwrap_or_default()
    }
}

fn use_name(attempt: &AttemptRef) -> String {
    format!("{}-{}", attempt.job, attempt.folder_name())
}

/// Whether this is the name of an entry that a killed agent left behind. Entries with other names are not removed.
fn is_leftover(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    [NEW_PREFIX, GONE_PREFIX, LIST_PREFIX].iter().any(|kind| name.starts_with(kind))
}

/// Creates a folder that other accounts cannot read. An existing folder is left unchanged.
fn create_private_dir(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(MODE).create(dir)
}

impl Copies {
    /// Opens or creates the folder. Removes the records of uses by attempts that are not in `live`.
    pub(in crate::agent) fn open(dir: &Path, limit_bytes: u64, live: &[&AttemptRef]) -> Result<Self, String> {
        let failed =
            |error: io::Error| format!("the folder for copies of datasets, {}: {error}", dir.display());
        fs::create_dir_all(dir.parent().unwrap_or(dir)).map_err(failed)?;
        create_private_dir(dir).map_err(failed)?;
        let dir = dir.canonicalize().map_err(failed)?;
        let lock = open_lock(&dir.join(".lock")).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(format!(
                    "{}: another agent keeps its copies of datasets in this folder; give this agent another folder with --dataset-cache",
                    dir.display()
                ));
            }
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        let copies =
            Self { dir, limit_bytes, changes: Mutex::default(), copy_locks: Mutex::default(), _lock: lock };
        let live: Vec<_> = live.iter().map(|attempt| use_name(attempt)).collect();
        for (copy, _) in copies.all().map_err(failed)? {
            for ended in copy.uses().iter().filter(|name| !live.contains(name)) {
                fs::remove_file(copy.dir.join("uses").join(ended)).map_err(failed)?;
            }
        }
        // The limit may have been lowered. Hidden entries are incomplete, or were about to be removed.
        let mut removed = copies.evict(0, None).map_err(failed)?.0;
        let found = fs::read_dir(&copies.dir).map_err(failed)?.flatten();
        removed.extend(found.filter(|found| is_leftover(&found.file_name())).map(|found| found.path()));
        // Removing large folders takes time, and nothing needs to wait for the removal.
        std::thread::spawn(move || {
            if let Err(error) = remove(&removed) {
                tracing::warn!(?error, "an old copy of a dataset cannot be removed");
            }
        });
        Ok(copies)
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Waits until no other job pulls this copy, and locks it.
    pub(super) async fn lock_copy(&self, copy: &DatasetCopy) -> CopyLock {
        let copy_lock = {
            let mut copy_locks = lock(&self.copy_locks);
            copy_locks.retain(|_, copy_lock| Arc::strong_count(copy_lock) > 1);
            copy_locks.entry(copy.dir.clone()).or_default().clone()
        };
        CopyLock { _held: Arc::new(copy_lock.lock_owned().await) }
    }

    fn all(&self) -> io::Result<Vec<(DatasetCopy, About)>> {
        let mut all = Vec::new();
        for found in fs::read_dir(&self.dir)? {
            let found = found?;
            let copy = DatasetCopy { dir: found.path() };
            if let Some(about) = copy.about()
                && !found.file_name().to_string_lossy().starts_with(HIDDEN_PREFIX)
            {
                all.push((copy, about));
            }
        }
        Ok(all)
    }

    /// Reserves space for the copy of a list, and records that the attempt uses the copy. Also returns the folders of evicted
    /// copies, which are already hidden. The caller removes them.
    ///
    /// # Errors
    /// The limit does not allow the copy. The message tells what to change.
    pub(super) fn reserve(
        &self,
        List { file, key, about }: List,
        attempt: &AttemptRef,
    ) -> Result<(DatasetCopy, Vec<PathBuf>), CopyError> {
        let _changes = lock(&self.changes);
        let failed = on_disk(&self.dir);
        self.remove_uses(attempt).map_err(&failed)?;
        let copy = DatasetCopy { dir: self.dir.join(key) };
        let mut evicted = Vec::new();
        // Evict an older state of the same dataset that no attempt uses.
        for (old, old_about) in self.all().map_err(&failed)? {
            let is_same_dataset = old_about.path == about.path && old_about.dataset == about.dataset;
            if old != copy && is_same_dataset && old.uses().is_empty() {
                evicted.push(self.hide(&old).map_err(&failed)?);
            }
        }
        if !copy.data().exists() {
            let refused = |why: String| Err(CopyError::Unusable(why));
            let (bytes, limit) = (megabytes_up(about.bytes), megabytes_down(self.limit_bytes));
            if about.bytes > self.limit_bytes {
                return refused(format!(
                    "it has {bytes}, and the limit of all copies is {limit}: raise the agent's --dataset-cache-limit"
                ));
            }
            let (removed, remaining_bytes) = self.evict(about.bytes, Some(&copy)).map_err(&failed)?;
            evicted.extend(removed);
            if remaining_bytes.saturating_add(about.bytes) > self.limit_bytes {
                return refused(format!(
                    "it has {bytes}, and running jobs use {} of the limit of all copies, {limit}: raise the agent's \
                     --dataset-cache-limit, or retry the job when they have finished",
                    megabytes_up(remaining_bytes)
                ));
            }
        }
        let create = || -> io::Result<()> {
            if copy.about().is_none() {
                let new = self.dir.join(format!("{NEW_PREFIX}{}", uuid::Uuid::new_v4().simple()));
                create_private_dir(&new)?;
                fs::create_dir(new.join("uses"))?;
                file.persist(new.join("list"))?;
                lockstep_host::write_atomically(&new.join("about.json"), &serde_json::to_vec(&about)?)?;
                if copy.dir.exists() {
                    evicted.push(self.hide(&copy)?);
                }
                fs::rename(&new, &copy.dir)?;
            }
            fs::write(copy.use_path(attempt), "")?;
            copy.record_use()
        };
        create().map_err(&failed)?;
        Ok((copy, evicted))
    }

    /// Hides unused copies, least recently used first, until `bytes` more fit within the limit. Never hides `except`.
    /// Returns the hidden folders, and the size of the remaining copies.
    fn evict(&self, bytes: u64, except: Option<&DatasetCopy>) -> io::Result<(Vec<PathBuf>, u64)> {
        let mut all = self.all()?;
        all.retain(|(copy, _)| Some(copy) != except);
        all.sort_by_key(|(copy, _)| copy.last_used());
        let mut remaining_bytes = all.iter().fold(0, |sum: u64, (_, about)| sum.saturating_add(about.bytes));
        let mut evicted = Vec::new();
        for (copy, about) in all {
            if remaining_bytes.saturating_add(bytes) <= self.limit_bytes {
                break;
            }
            if copy.uses().is_empty() {
                evicted.push(self.hide(&copy)?);
                remaining_bytes -= about.bytes;
            }
        }
        Ok((evicted, remaining_bytes))
    }

    /// The size of the copies that no attempt uses, according to their lists.
    pub(super) fn unused_bytes(&self) -> io::Result<u64> {
        let unused = self.all()?.into_iter().filter(|(copy, _)| copy.uses().is_empty());
        Ok(unused.fold(0, |sum: u64, (_, about)| sum.saturating_add(about.bytes)))
    }

    /// Hides the least recently used copy and returns its folder. `None` if all copies are in use.
    pub(super) fn evict_oldest(&self) -> io::Result<Option<PathBuf>> {
        let _changes = lock(&self.changes);
        let all = self.all()?;
        let unused = all.into_iter().map(|(copy, _)| copy).filter(|copy| copy.uses().is_empty());
        unused.min_by_key(DatasetCopy::last_used).map(|copy| self.hide(&copy)).transpose()
    }

    /// Renames a copy to a hidden name, so that it disappears at once. Its files are removed later.
    fn hide(&self, copy: &DatasetCopy) -> io::Result<PathBuf> {
        let hidden = self.dir.join(format!("{GONE_PREFIX}{}", uuid::Uuid::new_v4().simple()));
        fs::rename(&copy.dir, &hidden)?;
        tracing::info!(path = %copy.dir.display(), "a copy of a dataset is evicted");
        Ok(hidden)
    }

    /// Releases the copy of an attempt whose ranks have ended.
    pub(in crate::agent) fn release(&self, attempt: &AttemptRef) {
        let _changes = lock(&self.changes);
        if let Err(error) = self.remove_uses(attempt) {
            tracing::warn!(%error, job = %attempt.job, "a copy of a dataset counts as used until the agent's next start");
        }
    }

    fn remove_uses(&self, attempt: &AttemptRef) -> io::Result<()> {
        for (copy, _) in self.all()? {
            match fs::remove_file(copy.use_path(attempt)) {
                Ok(()) => copy.record_use()?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Removes hidden folders and files.
pub(super) fn remove(paths: &[PathBuf]) -> Result<(), CopyError> {
    for path in paths {
        let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(on_disk(path)(error)),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
