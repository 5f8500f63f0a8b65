//! The index of a dataset: facts about its pictures, so that opening the dataset need not read all files. Each file is
//! read once, and again if its size or modification time differs. The index only saves time: without it, all pictures
//! are read. It is written in parts, so that an interrupted run continues, and under a lock, so that one rank writes it
//! while the others wait.

mod file;
mod folders;
mod store;
#[cfg(test)]
mod tests;

pub(crate) use file::{Entry, Stamp, content_hash};
pub(super) use folders::{CachedFolders, FolderStamp, load_cached};
pub(crate) use store::IndexStore;
pub use store::Progress;

use super::picture;
use file::{Block, Facts};
use image::ImageFormat;
use lockstep_host::files;
use rayon::prelude::*;
use std::{
    collections::HashMap,
    ffi::OsString,
    io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    time::SystemTime,
};
use store::IndexBuilder;

/// Number of pictures that are read between two writes of results: about a second's work.
const PART_PICTURES: usize = 2048;
/// Estimated size of a picture in a shard that has not been read.
const ESTIMATED_PICTURE_BYTES: u64 = 64 << 10;

/// A folder of pictures, as found by listing it.
#[derive(Debug)]
pub(super) struct Folder {
    /// Path relative to the dataset.
    pub(super) path: PathBuf,
    /// The stamp from before the folder was listed. `None` if the folder must be listed each time.
    pub(super) stamp: Option<FolderStamp>,
    /// The files in the order of names. Empty if the folder was not listed because it is in [`CachedFolders`].
    pub(super) files: Vec<FoundFile>,
}

/// A regular file.
#[derive(Debug)]
pub(super) struct FoundFile {
    pub(super) name: OsString,
    pub(super) size: u64,
    pub(super) modified_ns: i64,
    /// Whether the file's first bytes must show if it is a picture, because its name has no picture's extension.
    pub(super) needs_check: bool,
}

/// The content of a shard.
#[derive(Debug, Default)]
pub(super) struct Members {
    pub(super) entries: Vec<Entry>,
    pub(super) error: Option<UnusableFile>,
}

impl Members {
    /// Whether something could not be read. The next attempt may succeed, so the result is not stored.
    fn is_transient(&self) -> bool {
        self.error.as_ref().is_some_and(|error| error.is_transient)
            || self.entries.iter().any(|entry| entry.is_transient)
    }
}

/// Why a shard as a whole cannot be used.
#[derive(Debug, Clone)]
pub(super) struct UnusableFile {
    /// The reason, as a phrase to follow the file's name.
    pub(super) detail: String,
    /// Whether the shard could not be read. The next attempt may succeed.
    pub(super) is_transient: bool,
}

impl UnusableFile {
    pub(super) fn permanent(detail: impl Into<String>) -> Self {
        Self { detail: detail.into(), is_transient: false }
    }

    pub(super) fn transient(detail: String) -> Self {
        Self { detail, is_transient: true }
    }
}

impl From<io::Error> for UnusableFile {
    fn from(error: io::Error) -> Self {
        Self::transient(files::cannot_be_read(error))
    }
}

impl From<UnusableFile> for Members {
    fn from(error: UnusableFile) -> Self {
        Self { error: Some(error), ..Self::default() }
    }
}

/// Describes the pictures of each folder, in the order of the files. Only unknown pictures are read. `began` is the
/// time when the first folder's stamp was taken.
pub(super) fn describe_files(
    root: &Path,
    folders: &[&Folder],
    cached: CachedFolders,
    store: &IndexStore,
    began: SystemTime,
) -> Vec<Vec<Entry>> {
    let CachedFolders { facts, folders: mut unchanged } = cached;
    let mut slots = match_files(&facts, root, folders);
    drop(facts);
    let missing = slots.iter().flatten().filter(|slot| matches!(slot, Slot::Unknown)).count();
    let mut builder = None;
    let files = folders.iter().map(|f| f.files.len()).sum::<usize>()
        + unchanged.values().map(|(_, entries)| entries.len()).sum::<usize>();
    if missing > 0
        && store.keeps(files, missing)
        && let Some((new_builder, facts)) = store.begin(root)
    {
        // Another process may have added facts before this process got the lock.
        slots = match_files(&facts, root, folders);
        builder = Some(new_builder);
    }
    for (folder, folder_slots) in folders.iter().zip(&mut slots) {
        if let Some((_, entries)) = unchanged.remove(&folder.path) {
            *folder_slots = entries.into_iter().map(Slot::Known).collect();
        }
    }
    if missing > 0 {
        read_unknown(root, folders, &mut slots, builder);
    }
    let entry = |slot| match slot {
        Slot::Known(entry) => Some(entry),
        Slot::Unknown | Slot::NoPicture => None,
    };
    let entries: Vec<Vec<Entry>> =
        slots.into_par_iter().map(|folder| folder.into_iter().filter_map(entry).collect()).collect();
    // The folders are stored even if no picture was unknown.
    if store.keeps(files, usize::MAX) {
        let examined = folders.iter().zip(&entries);
        let examined = examined.filter_map(|(f, all)| Some((f.path.as_path(), f.stamp?, &all[..])));
        store.store_folders(root, examined, began);
    }
    entries
}

/// A file of a folder.
enum Slot {
    /// The index has the file.
    Known(Entry),
    /// The file must be read.
    Unknown,
    NoPicture,
}

fn match_files(facts: &Facts, root: &Path, folders: &[&Folder]) -> Vec<Vec<Slot>> {
    let slots_of = |folder: &&Folder| -> Vec<Slot> {
        let mut by_name: HashMap<Vec<u8>, Entry> = HashMap::with_capacity(folder.files.len());
        for block in facts.of(folder.path.as_os_str().as_bytes()) {
            by_name.extend(block.entries.into_iter().map(|entry| (entry.name.clone(), entry)));
        }
        let slot = |file: &FoundFile| match by_name.remove(file.name.as_bytes()) {
            Some(entry) if entry.size == file.size && entry.modified_ns == file.modified_ns => {
                Slot::Known(entry)
            }
            _ if file.needs_check && picture::is_not_a_picture(&root.join(&folder.path).join(&file.name)) => {
                Slot::NoPicture
            }
            _ => Slot::Unknown,
        };
        folder.files.iter().map(slot).collect()
    };
    folders.par_iter().map(slots_of).collect()
}

/// Reads the unknown pictures in parts, and stores the results.
fn read_unknown(
    root: &Path,
    folders: &[&Folder],
    slots: &mut [Vec<Slot>],
    mut builder: Option<IndexBuilder>,
) {
    let unknown_of_folder = |(folder, files): (usize, &Vec<Slot>)| -> Vec<(usize, usize)> {
        let unknown = files.iter().enumerate().filter(|(_, slot)| matches!(slot, Slot::Unknown));
        unknown.map(|(file, _)| (folder, file)).collect()
    };
    let unknown: Vec<_> = slots.iter().enumerate().flat_map(unknown_of_folder).collect();
    let total: u64 = slots.iter().map(|files| files.len() as u64).sum();
    let mut done = total - unknown.len() as u64;
    for part in unknown.chunks(PART_PICTURES) {
        let examine_file = |&(folder, file): &(usize, usize)| {
            let Folder { path, files, .. } = folders[folder];
            examine(&root.join(path).join(&files[file].name), &files[file])
        };
        let examined: Vec<Entry> = part.par_iter().map(examine_file).collect();
        done += part.len() as u64;
        // After a failure, `append` returns `None`: reading continues, and no index is written.
        builder = builder.and_then(|mut index| {
            index.publish(Progress { done, total });
            let mut rest = &examined[..];
            for group in part.chunk_by(|a, b| a.0 == b.0) {
                let (entries, after) = rest.split_at(group.len());
                rest = after;
                let container = folders[group[0].0].path.as_os_str().as_bytes();
                let block = Block::of(None, None, entries);
                if !block.entries.is_empty() {
                    index = index.append(container, &block)?;
                }
            }
            Some(index)
        });
        for ((folder, file), entry) in part.iter().zip(examined) {
            slots[*folder][*file] = Slot::Known(entry);
        }
    }
    if let Some(builder) = builder {
        builder.finish(folders.iter().zip(slots.iter()).map(|(folder, files)| {
            let entries = files.iter().filter_map(|slot| match slot {
                Slot::Known(entry) => Some(entry),
                Slot::Unknown | Slot::NoPicture => None,
            });
            (folder.path.as_os_str().as_bytes(), Block::of(None, None, entries))
        }));
    }
}

fn examine(path: &Path, found: &FoundFile) -> Entry {
    let entry = Entry {
        name: found.name.as_bytes().to_vec(),
        size: found.size,
        modified_ns: found.modified_ns,
        ..Entry::default()
    };
    match files::read(path, picture::MAX_BYTES) {
        // A different size means that the file is being written, so the result may already be outdated.
        Ok(bytes) => {
            let size = bytes.len() as u64;
            Entry { size, is_transient: size != found.size, ..describe(path, &bytes, entry) }
        }
        Err(detail) => Entry { broken: Some(detail), is_transient: true, ..entry },
    }
}

/// Completes `entry` with the facts that the picture's bytes show. `name` helps to recognise unsupported formats.
pub(super) fn describe(name: &Path, bytes: &[u8], entry: Entry) -> Entry {
    match picture::dimensions(name, bytes) {
        Ok((width, height)) => {
            let is_jpeg = picture::format_of(bytes) == Some(ImageFormat::Jpeg);
            Entry { is_jpeg, hash: content_hash(bytes), width, height, ..entry }
        }
        Err(detail) => Entry { broken: Some(detail), ..entry },
    }
}

/// Describes the members of each shard (named relative to the dataset's root). `read` reads the shard at an index.
/// `dataset` is the path to which the index belongs.
pub(super) fn describe_shards(
    dataset: &Path,
    shards: &[(PathBuf, Stamp)],
    store: &IndexStore,
    read: impl Fn(usize) -> Members + Sync,
) -> Vec<Members> {
    let block_of = |stamp: Stamp, members: &Members| {
        let shard_error = members.error.as_ref().map(|error| error.detail.clone());
        Block::of(Some(stamp), shard_error, &members.entries)
    };
    let recall = |facts: &Facts| -> Vec<Option<Members>> {
        let stored_members = |(path, stamp): &(PathBuf, Stamp)| {
            let blocks = facts.of(path.as_os_str().as_bytes());
            let valid = blocks.filter(|block: &Block| block.stamp == Some(*stamp)).last()?;
            let error = valid.shard_error.map(UnusableFile::permanent);
            Some(Members { entries: valid.entries, error })
        };
        shards.par_iter().map(stored_members).collect()
    };
    let mut known = recall(&store.load(dataset));
    if known.iter().any(Option::is_none) {
        let estimated_pictures = |bytes: u64| (bytes / ESTIMATED_PICTURE_BYTES) as usize;
        let all_bytes = shards.iter().map(|(_, stamp)| stamp.size).sum();
        let missing = shards.iter().zip(&known).filter(|(_, known)| known.is_none());
        let missing_bytes = missing.map(|((_, stamp), _)| stamp.size).sum();
        let mut builder = None;
        if store.keeps(estimated_pictures(all_bytes), estimated_pictures(missing_bytes))
            && let Some((new_builder, facts)) = store.begin(dataset)
        {
            // Another process may have added facts before this process got the lock.
            known = recall(&facts);
            builder = Some(new_builder);
        }
        let unknown: Vec<usize> = (0..shards.len()).filter(|i| known[*i].is_none()).collect();
        let mut done = (shards.len() - unknown.len()) as u64;
        for part in unknown.chunks(rayon::current_num_threads().max(1)) {
            let examined: Vec<Members> = part.par_iter().map(|i| read(*i)).collect();
            done += part.len() as u64;
            for (i, members) in part.iter().zip(examined) {
                let (path, stamp) = &shards[*i];
                if !members.is_transient() {
                    builder = builder.and_then(|mut index| {
                        index.publish(Progress { done, total: shards.len() as u64 });
                        index.append(path.as_os_str().as_bytes(), &block_of(*stamp, &members))
                    });
                }
                known[*i] = Some(members);
            }
        }
        if let Some(builder) = builder {
            builder.finish(shards.iter().zip(&known).filter_map(|((path, stamp), members)| {
                let members = members.as_ref().filter(|members| !members.is_transient())?;
                Some((path.as_os_str().as_bytes(), block_of(*stamp, members)))
            }));
        }
    }
    known.into_iter().map(Option::unwrap_or_default).collect()
}
