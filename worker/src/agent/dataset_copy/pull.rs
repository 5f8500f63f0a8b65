//! Pulls the files of a copy from the server. A request asks for several small files or for a part of a large one.
//! Data that has arrived is kept if the connection breaks, and the next try continues at the same byte.

mod incoming;

use super::{
    CopyError, PullProgress,
    cache::{self, Copies, CopyLock, DatasetCopy},
    list::{About, Entries},
    on_disk, run_blocking,
};
use crate::agent::{
    remote::AttemptClient,
    size::{megabytes_down, megabytes_up},
};
use incoming::receive;
use lockstep_host::usage::disk_free;
use lockstep_protocol::agent::{
    DATASET_PART_BYTES, DATASET_PARTS, DATASET_PARTS_BYTES, DatasetEntry, DatasetPart, DatasetParts,
};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

/// Maximum size of the names in one request, which keeps the request below the server's size limit.
const NAMES_BYTES: usize = 256 << 10;
/// Maximum number of bytes that must be fetched again after the machine has lost power.
const SYNC_BYTES: u64 = 1 << 30;
/// The assumed allocation unit of a disk.
const BLOCK_BYTES: u64 = 4096;
/// The space on the disk that must stay free.
const MIN_FREE_BYTES: u64 = 64 << 20;

/// Pulls the missing parts of a copy, and renames the copy to its final name. Returns whether anything was missing. If the copy
/// starts again, the first request contains `restart_reason`, which is then cleared.
pub(super) async fn pull_missing(
    client: &AttemptClient<'_>,
    (copy, copy_lock): (&DatasetCopy, &CopyLock),
    about: &About,
    copies: &Copies,
    (progress, restart_reason): (&mut PullProgress, &mut Option<String>),
) -> Result<bool, CopyError> {
    let missing = {
        let copy = copy.clone();
        copy_lock.run_blocking(move || begin(&copy)).await?
    };
    let Some(missing) = missing else { return Ok(false) };
    check_disk(copy, about, &missing, copies).await?;
    tracing::info!(
        dataset = about.dataset,
        files = about.files,
        bytes = missing.bytes,
        "copying the dataset"
    );
    let mut copied_bytes = about.bytes.saturating_sub(missing.bytes);
    let mut batches = PartBatches::new(copy)?;
    let mut unsynced = 0;
    loop {
        let parts;
        (batches, parts) = copy_lock
            .run_blocking(move || {
                let parts = batches.next_batch()?;
                Ok((batches, parts))
            })
            .await?;
        if parts.is_empty() {
            break;
        }
        let bytes: u64 = parts.iter().map(|part| part.length).sum();
        let request =
            DatasetParts { parts, copied_bytes, total_bytes: about.bytes, anew: restart_reason.clone() };
        let download = client.dataset_parts(&request).await?;
        progress.has_answered = true;
        *restart_reason = None;
        receive(download, request.parts, (&copy.part_dir(), copy_lock), progress).await?;
        copied_bytes += bytes;
        unsynced += bytes;
        if unsynced >= SYNC_BYTES {
            let (copy, lines) = (copy.clone(), batches.complete_lines());
            copy_lock
                .run_blocking(move || sync(&copy).and_then(|()| Synced::in_this_boot(lines).store(&copy)))
                .await?;
            unsynced = 0;
        }
    }
    let copy = copy.clone();
    copy_lock.run_blocking(move || finish(&copy)).await?;
    tracing::info!(dataset = about.dataset, "copied");
    Ok(true)
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Missing {
    /// The number of missing or incomplete files, and of missing folders.
    files: u64,
    bytes: u64,
    /// The disk space for the missing part.
    disk_bytes: u64,
}

/// How much of a copy is certainly on disk, even after a loss of power.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
struct Synced {
    /// The boot in which further files of the list have arrived. These files are valid until the machine restarts.
    boot_id: String,
    /// The number of lines of the list whose files are synced.
    lines: u64,
}

impl Synced {
    fn in_this_boot(lines: u64) -> Self {
        Self { boot_id: lockstep_host::boot_id(), lines }
    }

    fn path(copy: &DatasetCopy) -> PathBuf {
        copy.dir().join("synced.json")
    }

    fn of(copy: &DatasetCopy) -> Self {
        let read = fs::read(Self::path(copy)).ok();
        read.and_then(|json| serde_json::from_slice(&json).ok()).unwrap_or_default()
    }

    fn store(&self, copy: &DatasetCopy) -> Result<(), CopyError> {
        let json = serde_json::to_vec(self).unwrap_or_default();
        lockstep_host::write_atomically(&Self::path(copy), &json).map_err(on_disk(copy.dir()))
    }
}

/// Prepares the copy to be continued, and returns its missing part. `None` if the copy is complete.
fn begin(copy: &DatasetCopy) -> Result<Option<Missing>, CopyError> {
    let (data, part_dir) = (copy.data(), copy.part_dir());
    if data.exists() {
        if missing_of(copy, &data)? == Missing::default() {
            return Ok(None);
        }
        // Files of the complete copy were removed or changed.
        if copy.has_readers() {
            let why = format!(
                "files of its copy in {} were changed, and other jobs use it; retry the job when they have finished",
                copy.dir().display()
            );
            return Err(CopyError::Unusable(why));
        }
        fs::rename(&data, &part_dir).map_err(on_disk(&data))?;
    }
    fs::create_dir_all(&part_dir).map_err(on_disk(&part_dir))?;
    let synced = Synced::of(copy);
    if synced.boot_id != lockstep_host::boot_id() {
        // The machine has restarted, so a file that was not synced may have the right size and wrong content.
        for (line, found) in (1..).zip(entries(copy)?) {
            if let DatasetEntry::File(path, ..) = found.map_err(on_disk(copy.dir()))?
                && line > synced.lines
            {
                cache::remove(&[part_dir.join(path)])?;
            }
        }
        Synced::in_this_boot(synced.lines).store(copy)?;
    }
    missing_of(copy, &part_dir).map(Some)
}

fn entries(copy: &DatasetCopy) -> Result<Entries, CopyError> {
    let list = copy.list();
    Entries::open(&list).map_err(on_disk(&list))
}

/// The number of bytes of a file that have arrived. `None` if the file does not exist or is too long.
fn received_bytes(path: &Path, size: u64) -> Option<u64> {
    fs::symlink_metadata(path).ok().filter(fs::Metadata::is_file).map(|m| m.len()).filter(|len| *len <= size)
}

fn missing_of(copy: &DatasetCopy, folder: &Path) -> Result<Missing, CopyError> {
    let mut missing = Missing::default();
    for found in entries(copy)? {
        match found.map_err(on_disk(copy.dir()))? {
            DatasetEntry::File(path, size, _) => {
                let received_bytes = received_bytes(&folder.join(path), size);
                if received_bytes != Some(size) {
                    let remaining_bytes = size - received_bytes.unwrap_or(0);
                    missing.files += 1;
                    missing.bytes += remaining_bytes;
                    missing.disk_bytes += remaining_bytes.next_multiple_of(BLOCK_BYTES);
                }
            }
            DatasetEntry::Folder(path) if !folder.join(&path).is_dir() => missing.files += 1,
            _ => {}
        }
    }
    Ok(missing)
}

/// Checks that the disk has space for the missing part. Evicts unused copies if this frees enough space.
async fn check_disk(
    copy: &DatasetCopy,
    about: &About,
    missing: &Missing,
    copies: &Copies,
) -> Result<(), CopyError> {
    let needed = missing.disk_bytes.saturating_add(MIN_FREE_BYTES);
    loop {
        let unused = copies.unused_bytes().map_err(on_disk(copy.dir()))?;
        let free = disk_free(copy.dir()).map_err(on_disk(copy.dir()))?;
        if free >= needed {
            return Ok(());
        }
        let evicted = match free.saturating_add(unused) >= needed {
            true => copies.evict_oldest().map_err(on_disk(copy.dir()))?,
            false => None,
        };
        let Some(evicted) = evicted else {
            let why = describe_lack_of_space(copies.dir(), &about.dataset, missing, free);
            return Err(CopyError::NoSpace(why));
        };
        run_blocking(move || cache::remove(&[evicted])).await?;
    }
}

/// Why the disk has too little space: the space that is needed, the free space, and what to change.
fn describe_lack_of_space(folder: &Path, dataset: &str, missing: &Missing, free: u64) -> String {
    let needed = missing.disk_bytes.saturating_add(MIN_FREE_BYTES);
    // Rounded up, so that freeing the named amount is enough.
    let [missing_size, min_free, to_free] =
        [missing.disk_bytes, MIN_FREE_BYTES, needed.saturating_sub(free)].map(megabytes_up);
    format!(
        "the copy of the dataset {dataset} needs {missing_size} more on the disk of {}, where {min_free} must stay free, but only \
         {} are free: free {to_free} there, or give the agent a folder on another disk with --dataset-cache, and retry the job",
        folder.display(),
        megabytes_down(free),
    )
}

/// The parts of a copy that are still to be requested, in batches of one request.
struct PartBatches {
    list: PathBuf,
    entries: Entries,
    part_dir: PathBuf,
    /// The number of lines of the list that have been read.
    lines: u64,
    /// The file that is requested in parts, and the offset of its next part.
    current: Option<(DatasetEntry, u64)>,
}

impl PartBatches {
    fn new(copy: &DatasetCopy) -> Result<Self, CopyError> {
        let entries = entries(copy)?;
        Ok(Self { list: copy.list(), entries, part_dir: copy.part_dir(), lines: 0, current: None })
    }

    /// The number of lines of the list whose files are complete.
    fn complete_lines(&self) -> u64 {
        self.lines - u64::from(self.current.is_some())
    }

    /// The parts for the next request, up to its limits. Empty at the end. Also creates their folders, and empty files.
    fn next_batch(&mut self) -> Result<Vec<DatasetPart>, CopyError> {
        let (mut parts, mut bytes, mut names) = (Vec::new(), 0, 0);
        while parts.len() < DATASET_PARTS && bytes < DATASET_PARTS_BYTES && names < NAMES_BYTES {
            let (entry, offset) = match self.current.take() {
                Some(current) => current,
                None => {
                    let Some(entry) = self.entries.next() else { break };
                    self.lines += 1;
                    let entry = entry.map_err(on_disk(&self.list))?;
                    let offset = self.prepare(&entry)?;
                    (entry, offset)
                }
            };
            let DatasetEntry::File(path, size_bytes, changed_ns) = entry else { continue };
            let length = (size_bytes - offset).min(DATASET_PART_BYTES).min(DATASET_PARTS_BYTES - bytes);
            if length == 0 {
                continue;
            }
            bytes += length;
            names += path.len();
            if offset + length < size_bytes {
                let rest = DatasetEntry::File(path.clone(), size_bytes, changed_ns);
                self.current = Some((rest, offset + length));
            }
            parts.push(DatasetPart { path, size_bytes, changed_ns, offset, length });
        }
        Ok(parts)
    }

    /// Creates an entry's folder or empty file, and returns the number of the file's bytes that have arrived.
    fn prepare(&self, entry: &DatasetEntry) -> Result<u64, CopyError> {
        match entry {
            DatasetEntry::Folder(path) => {
                let path = self.part_dir.join(path);
                fs::create_dir_all(&path).map_err(on_disk(&path)).map(|()| 0)
            }
            DatasetEntry::File(path, size, _) => {
                let path = self.part_dir.join(path);
                let received_bytes = received_bytes(&path, *size);
                if received_bytes.is_none() {
                    // If the dataset's path is a glob pattern, files may be in folders that are not in the list.
                    if let Some(folder) = path.parent() {
                        fs::create_dir_all(folder).map_err(on_disk(folder))?;
                    }
                    cache::remove(std::slice::from_ref(&path))?;
                    File::create_new(&path).map_err(on_disk(&path))?;
                }
                Ok(received_bytes.unwrap_or(0))
            }
            _ => Ok(0),
        }
    }
}

/// Syncs the whole file system with one call, because there may be a million files.
fn sync(copy: &DatasetCopy) -> Result<(), CopyError> {
    let part_dir = copy.part_dir();
    let folder = File::open(&part_dir).map_err(on_disk(&part_dir))?;
    rustix::fs::syncfs(&folder).map_err(|e| on_disk(&part_dir)(io::Error::from(e)))
}

/// Checks that all files are complete, and renames the copy to its final name, unless it has that name already.
fn finish(copy: &DatasetCopy) -> Result<(), CopyError> {
    if copy.data().exists() {
        return Ok(());
    }
    let part_dir = copy.part_dir();
    let missing = missing_of(copy, &part_dir)?;
    if missing != Missing::default() {
        return Err(CopyError::Damaged(format!("{} files of its copy are incomplete", missing.files)));
    }
    sync(copy)?;
    fs::rename(&part_dir, copy.data()).map_err(on_disk(&part_dir))?;
    let folder = File::open(copy.dir()).and_then(|folder| folder.sync_all());
    folder.map_err(on_disk(copy.dir()))
}

#[cfg(test)]
mod tests;
