//! The folder into which a copy of a dataset is written, and the copy's record.

use super::DataError;
use crate::{
    copy::{FinishedShard, MAX_BYTES, PREPARED, Plan, Record, UNFINISHED, VERSION, is_of_another_version},
    pattern,
};
use lockstep_host::{files, write_atomically};
use std::{
    collections::BTreeMap,
    fs::{self, File, TryLockError},
    io,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
};

/// Number of pieces of a shard that are checked, including the first and the last piece. The last piece shows whether a
/// file was truncated and extended again (an interrupted copy, a disk that lost writes).
const PIECES: u64 = 16;
const PIECE_BYTES: u64 = 4096;

/// CRC-32 of pieces at even intervals in a file, to detect changes without reading the whole file.
pub(super) fn sample_checksum(file: &File) -> io::Result<u32> {
    let last = file.metadata()?.len().saturating_sub(PIECE_BYTES);
    let (mut sum, mut piece) = (crc32fast::Hasher::new(), vec![0; PIECE_BYTES as usize]);
    for index in 0..PIECES {
        let offset = if index == PIECES - 1 { last } else { last / (PIECES - 1) * index };
        let read = file.read_at(&mut piece, offset)?;
        sum.update(&piece[..read]);
    }
    Ok(sum.finalize())
}

/// How to proceed if the folder has another copy.
const ADVICE: &str = "give another folder, or remove this one";

/// Fails if a copy was begun with other settings or of another dataset than in `plan`.
fn check_same(begun: &Plan, plan: &Plan) -> Result<(), String> {
    for (what, begun, given) in [
        ("a short side", begun.short_side, plan.short_side),
        ("a quality", begun.quality.into(), plan.quality.into()),
    ] {
        if begun != given {
            return Err(format!(
                "contains a copy with {what} of {begun}, not {given}: give {begun} to continue it, or another folder"
            ));
        }
    }
    if begun.source != plan.source {
        return Err(format!(
            "contains a copy of another dataset, or the dataset's files have changed; {ADVICE}"
        ));
    }
    Ok(())
}

/// The folder of a copy, locked against other processes.
pub(super) struct Destination {
    dir: PathBuf,
    record: Record,
    _lock: File,
}

impl Destination {
    /// Opens or creates the folder `to`, for a copy of the dataset at `source`. A copy in the folder, complete or not, is
    /// continued. `per_shard` returns [`Plan::per_shard`] of a new copy.
    ///
    /// # Errors
    /// The folder is inside the dataset, another process is writing to it, or it cannot be used. The folder has other
    /// content, or a copy with other settings or of another dataset; the error names the difference.
    pub(super) fn open(
        source: &Path,
        to: &Path,
        plan: Plan,
        per_shard: impl FnOnce() -> Vec<u32>,
    ) -> Result<Self, DataError> {
        let wrong = |detail: String| DataError::file(to, detail);
        let io = |error| wrong(format!("cannot be used: {error}"));
        let is_new = !to.exists();
        fs::create_dir_all(to).map_err(io)?;
        let dir = to.canonicalize().map_err(io)?;
        let source = pattern::fixed_part(source).map_or_else(|| source.to_owned(), |(folder, _)| folder);
        if source.canonicalize().is_ok_and(|source| dir.starts_with(source)) {
            if is_new {
                let _ = fs::remove_dir(&dir);
            }
            return Err(wrong("is inside the dataset to be copied; give another folder".into()));
        }
        let lock = File::open(&dir).map_err(io)?;
        // If the file system does not support locks, the user must avoid concurrent copies.
        if matches!(lock.try_lock(), Err(TryLockError::WouldBlock)) {
            return Err(wrong("is being written by another `lockstep dataset prepare`".into()));
        }
        let record_name = [UNFINISHED, PREPARED].into_iter().find(|name| dir.join(name).exists());
        let record = match record_name {
            Some(name) => {
                let bytes = files::read(&dir.join(name), MAX_BYTES).map_err(wrong)?;
                if is_of_another_version(&bytes) {
                    return Err(wrong(format!("contains a copy by another version of lockstep; {ADVICE}")));
                }
                let record = serde_json::from_slice::<Record>(&bytes).map_err(|error| {
                    wrong(format!("has a {name} that cannot be read ({error}); give another folder"))
                })?;
                check_same(&record.plan, &plan).map_err(wrong)?;
                record
            }
            None => {
                for entry in fs::read_dir(&dir).map_err(io)? {
                    let name = entry.map_err(io)?.file_name().to_string_lossy().into_owned();
                    if !name.starts_with('.') && !name.starts_with(UNFINISHED) {
                        let detail = "and no copy of a dataset; give an empty folder";
                        return Err(wrong(format!("contains other files ({name}) {detail}")));
                    }
                }
                let plan = Plan { per_shard: per_shard(), ..plan };
                Record { version: VERSION, plan, shards: BTreeMap::new() }
            }
        };
        let destination = Self { dir, record, _lock: lock };
        if record_name.is_none() {
            destination.save()?;
        }
        Ok(destination)
    }

    pub(super) fn per_shard(&self, split: usize) -> u32 {
        self.record.plan.per_shard.get(split).copied().unwrap_or(1)
    }

    /// The record of a shard, if the shard exists and is complete.
    pub(super) fn find_finished(&self, file: &str) -> Option<FinishedShard> {
        let found = self.record.shards.get(file)?;
        let shard = File::open(self.dir.join(file)).ok()?;
        let has_size = shard.metadata().is_ok_and(|status| status.is_file() && status.len() == found.bytes);
        let has_checksum = || sample_checksum(&shard).is_ok_and(|sampled| sampled == found.sampled);
        (has_size && has_checksum()).then(|| found.clone())
    }

    pub(super) fn add(&mut self, file: &str, shard: FinishedShard) -> Result<(), DataError> {
        self.record.shards.insert(file.to_owned(), shard);
        self.save()
    }

    /// Marks the copy as complete.
    pub(super) fn finish(self) -> Result<(), DataError> {
        let (from, to) = (self.dir.join(UNFINISHED), self.dir.join(PREPARED));
        if !from.exists() {
            return Ok(());
        }
        fs::rename(&from, &to).map_err(|error| super::cannot_be_written(&to, &error))
    }

    fn save(&self) -> Result<(), DataError> {
        let path = self.dir.join(UNFINISHED);
        let bytes = serde_json::to_vec(&self.record).unwrap_or_default();
        write_atomically(&path, &bytes).map_err(|error| super::cannot_be_written(&path, &error))
    }
}
