//! The folder cache, `<key>.folders` next to the index: folders that have not changed since all of their files were
//! examined.
//!
//! Adding, removing, renaming or replacing a file changes the times of its folder, so an unchanged folder has the
//! files that are in the index. Overwriting a file in place does not change its folder. Such a change is noticed when
//! the file is read. The cache file is then removed, so the next start examines every file.

use super::{Entry, Facts, IndexStore};
use lockstep_host::files;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, HashMap},
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

/// The version of the file's format. Other versions are ignored.
const VERSION: u32 = 2;
/// Size limit of the cache file. The cache of a hundred thousand folders has 10 MB.
const MAX_BYTES: u64 = 256 << 20;

/// Identifies a folder and the set of its files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FolderStamp {
    inode: u64,
    /// Time of the last modification of the set of files, in seconds and nanoseconds.
    modified: (i64, i64),
    /// Time of the last change of the folder or of its metadata, in seconds and nanoseconds.
    changed: (i64, i64),
}

impl FolderStamp {
    /// The stamp of a folder, to be taken before the folder is listed. `None` on failure: the folder is then listed
    /// at every start.
    pub(crate) fn of(folder: &Path) -> Option<Self> {
        let found = fs::metadata(folder).ok()?;
        Some(Self {
            inode: found.ino(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        })
    }

    /// Whether the folder's last change is at least `min_age` before `now`, in whole seconds. A change after `now` then
    /// certainly changes the stamp.
    fn is_older_than(self, min_age: Duration, now: SystemTime) -> bool {
        let now = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let newest = self.modified.max(self.changed).0;
        u64::try_from(newest).is_ok_and(|secs| secs + min_age.as_secs() <= now.as_secs())
    }
}

/// A folder whose files are all in the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Known {
    stamp: FolderStamp,
    /// A checksum of the index entries, because the index may have been rebuilt since.
    check: u32,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Record {
    version: u32,
    /// The key is the path in the dataset.
    folders: BTreeMap<String, Known>,
}

fn checksum(entries: &[Entry]) -> u32 {
    let mut hash = crc32fast::Hasher::new();
    for entry in entries {
        hash.update(&(entry.name.len() as u64).to_le_bytes());
        hash.update(&entry.name);
        hash.update(&entry.size.to_le_bytes());
        hash.update(&entry.modified_ns.to_le_bytes());
        hash.update(&entry.hash.to_le_bytes());
    }
    hash.finalize()
}

/// The cached facts about a dataset, loaded before its class folders are listed.
#[derive(Debug, Default)]
pub(crate) struct CachedFolders {
    pub(super) facts: Facts,
    /// Folders that need not be listed, by path in the dataset: each folder's stamp, and all its pictures in the order of
    /// names.
    pub(super) folders: HashMap<PathBuf, (FolderStamp, Vec<Entry>)>,
}

impl CachedFolders {
    /// The stamp of a folder that need not be listed. `folder` is the path in the dataset.
    pub(crate) fn stamp(&self, folder: &Path) -> Option<FolderStamp> {
        self.folders.get(folder).map(|(stamp, _)| *stamp)
    }
}

/// Loads the cached facts about the dataset at `root`. Folders are included only if `store` trusts unchanged folders.
pub(crate) fn load_cached(root: &Path, store: &IndexStore) -> CachedFolders {
    let facts = store.load(root);
    let record = if store.trusts_folders { store.read_folders(root) } else { None };
    let unchanged = |(path, known): (&String, &Known)| {
        if FolderStamp::of(&root.join(path)) != Some(known.stamp) {
            return None;
        }
        let entries = ordered_entries(&facts, path.as_bytes());
        (checksum(&entries) == known.check).then(|| (PathBuf::from(path), (known.stamp, entries)))
    };
    let folders = record.unwrap_or_default().folders.par_iter().filter_map(unchanged).collect();
    CachedFolders { facts, folders }
}

/// The entries that the index has for a folder, sorted by name.
fn ordered_entries(facts: &Facts, container: &[u8]) -> Vec<Entry> {
    let mut blocks: Vec<_> = facts.of(container).collect();
    let is_ordered = |entries: &[Entry]| entries.is_sorted_by(|a, b| a.name < b.name);
    if let [block] = &mut blocks[..]
        && is_ordered(&block.entries)
    {
        return std::mem::take(&mut block.entries);
    }
    let all = blocks.into_iter().flat_map(|block| block.entries);
    // If a name occurs several times, the last entry is valid.
    all.map(|entry| (entry.name.clone(), entry)).collect::<BTreeMap<_, _>>().into_values().collect()
}

impl IndexStore {
    /// The file of a dataset's folder cache. `None` if nothing is stored.
    pub(crate) fn folder_cache(&self, dataset: &Path) -> Option<PathBuf> {
        self.file(dataset, "folders")
    }

    fn read_folders(&self, dataset: &Path) -> Option<Record> {
        let bytes = files::read(&self.folder_cache(dataset)?, MAX_BYTES).ok()?;
        rmp_serde::from_slice(&bytes).ok().filter(|record: &Record| record.version == VERSION)
    }

    /// Stores the examined folders: their stamps from before they were listed, and all their entries. Folders that
    /// could not be read or have changed recently are left out. `began` is the time when the first stamp was taken.
    pub(super) fn store_folders<'a>(
        &self,
        dataset: &Path,
        examined: impl Iterator<Item = (&'a Path, FolderStamp, &'a [Entry])>,
        began: SystemTime,
    ) {
        let Some(file) = self.folder_cache(dataset) else { return };
        let known = examined.filter_map(|(path, stamp, entries)| {
            // Folders with broken files are left out: a repair in place changes the file's size and time, but not the
            // folder.
            let is_intact = |entry: &Entry| !entry.is_transient && entry.broken.is_none();
            let is_complete = !entries.is_empty() && entries.iter().all(is_intact);
            let is_stored = is_complete && stamp.is_older_than(self.min_age, began);
            let known = || Known { stamp, check: checksum(entries) };
            Some((path.to_str().filter(|_| is_stored)?.to_owned(), known()))
        });
        let record = Record { version: VERSION, folders: known.collect() };
        let Ok(bytes) = rmp_serde::to_vec(&record) else { return };
        if fs::read(&file).is_ok_and(|before| before == bytes) {
            return;
        }
        // The cache only saves time.
        if let Err(error) = lockstep_host::write_atomically(&file, &bytes) {
            tracing::warn!("{error}; the dataset's files will be examined again at the next start");
        }
    }
}
