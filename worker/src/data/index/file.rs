//! The index of a dataset on disk: what is known of each picture, so that a job's start need not read them all.
//!
//! `datasets/<key>.index` in the cache directory, where `key` is of the dataset's path and, where the file system tells a
//! folder's birth, of the folder: machines that share the cache directory may have copies of their own at one path. Others
//! share the index; what is said of a file holds only while its size and time of change are the same.
//!
//! ```text
//! 8 bytes           "LSINDEX" and the format's version, 2
//! then blocks:      u32 length of the payload, u32 its CRC-32 (both little-endian), payload
//! payload:          u32 length of the container's name, the name, then MessagePack:
//!                   [stamp, trouble, [entry, ...]]
//! entry:            [name, size, modified_ns, offset, format, width, height, hash, label, broken]
//! ```
//!
//! A container is a class folder (`train/cat`) or a shard (`train-000.tar`), named relative to the dataset. The first
//! block's container is the dataset's own path, its body the number of the [`READER`] (u32). Of several entries of one name the last counts. `<key>.part` has the
//! same format: blocks are appended to it as they are made, and one that an interrupted run left is read before work
//! begins. `<key>.lock` is held by whoever makes an index, `<key>.folders` is described in `folders.rs`, `<key>.progress` says how far that is.

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    collections::HashMap,
    fs::{self, File},
    io::{self, BufWriter, Seek, SeekFrom, Write},
    ops::Range,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime},
};

const MAGIC: &[u8; 8] = b"LSINDEX\x02";
/// To be raised when what was found broken may be found whole: what another reader found broken is looked at again.
const READER: u32 = 1;
/// Larger index files are taken for damage: that of fourteen million pictures has 800 MB.
const MAX_BYTES: u64 = 8 << 30;
/// Datasets of fewer pictures get no index: looking at them takes no time.
const WORTH: usize = 1000;
/// So few unknown pictures are looked at without keeping what is found.
const FEW: usize = 64;
/// Indexes of one path, of folders that lay there, that are kept.
const COPIES: usize = 64;
/// Nor those that nobody has used for so long.
const UNUSED: Duration = Duration::from_secs(30 * 24 * 3600);
const DAY: Duration = Duration::from_secs(24 * 3600);
/// File systems' times have steps, of two seconds at most; a change within one is not seen.
const SETTLED: Duration = Duration::from_secs(3);
const PROGRESS_EVERY: Duration = Duration::from_millis(300);

/// What is known of one picture.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entry {
    /// File name, or the member's path in its shard.
    #[serde(with = "serde_bytes")]
    pub(crate) name: Vec<u8>,
    /// In bytes.
    pub(crate) size: u64,
    /// When the file was last changed, see [`crate::files::modified_ns`]; 0 in a shard, which has its own.
    pub(crate) modified_ns: i64,
    /// Where its bytes begin in the shard; 0 of a file.
    pub(crate) offset: u64,
    /// 1 JPEG, 2 PNG, 3 WebP, 4 GIF, 5 BMP, 6 TIFF; 0 none of these.
    pub(crate) format: u8,
    /// In pixels; 0 when it is broken.
    pub(crate) width: u32,
    /// In pixels; 0 when it is broken.
    pub(crate) height: u32,
    /// Of its bytes, see [`content_hash`]; 0 when it is broken.
    pub(crate) hash: u64,
    /// In a shard: the class, a number or a name.
    pub(crate) label: Option<String>,
    /// What is wrong with it, to stand after its name.
    pub(crate) broken: Option<String>,
    /// It could not be read, which may be over at the next look: this is not kept.
    #[serde(skip)]
    pub(crate) passing: bool,
}

/// Size and time of change of a shard.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stamp {
    pub(crate) size: u64,
    pub(crate) modified_ns: i64,
}

/// Entries of one container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub(super) struct Block {
    /// Of a shard.
    pub(super) stamp: Option<Stamp>,
    /// What is wrong with a shard as a whole.
    pub(super) trouble: Option<String>,
    pub(super) entries: Vec<Entry>,
}

/// A [`Block`] to write.
#[derive(Debug, Serialize)]
pub(super) struct BlockRef<'a> {
    pub(super) stamp: Option<Stamp>,
    pub(super) trouble: Option<&'a str>,
    pub(super) entries: Vec<&'a Entry>,
}

/// Tells contents apart: the first eight bytes of SHA-256.
pub(crate) fn content_hash(bytes: &[u8]) -> u64 {
    let digest = Sha256::digest(bytes);
    u64::from_le_bytes(std::array::from_fn(|i| digest[i]))
}

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
    settled: Option<Duration>,
}

impl IndexStore {
    /// The user's.
    pub(crate) fn of_user() -> Self {
        let dir = crate::cache::dir().map(|dir| dir.join("datasets"));
        Self { dir, worth: WORTH, few: FEW, reader: READER, trusts_folders: false, settled: Some(SETTLED) }
    }

    /// For a look that lists and stats no folder that is as it was when all its files were looked at (see `folders.rs`).
    pub(in crate::data) fn trusting_folders(self) -> Self {
        Self { trusts_folders: true, ..self }
    }

    pub(super) fn trusts_folders(&self) -> bool {
        self.trusts_folders
    }

    /// How long a folder must not have changed to be known; `None`: no time at all.
    pub(super) fn settled(&self) -> Option<Duration> {
        self.settled
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
            settled: None,
        }
    }

    /// Of another version of the program.
    #[cfg(test)]
    pub(super) fn of_reader(self, reader: u32) -> Self {
        Self { reader, ..self }
    }

    /// Folders must not have changed for so long.
    #[cfg(test)]
    pub(super) fn settling(self, settled: Duration) -> Self {
        Self { settled: Some(settled), ..self }
    }

    /// Of what is worth it only when so many pictures are unknown.
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

    /// Begins to make an index, when nobody else does any more; what is known then may be more than before.
    ///
    /// # Errors
    /// The cache directory cannot be written.
    pub(super) fn begin(&self, dataset: &Path) -> io::Result<Option<(Making, Facts)>> {
        let Some(dir) = &self.dir else { return Ok(None) };
        let named = |path: &Path, e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
        fs::create_dir_all(dir).map_err(|e| named(dir, e))?;
        let file = |extension| self.file(dataset, extension).unwrap_or_default();
        let lock_path = file("lock");
        let lock = File::options().create(true).truncate(false).write(true).open(&lock_path);
        let lock = lock.map_err(|e| named(&lock_path, e))?;
        // Where files cannot be locked, several may do the same work at the same time; each file appears whole.
        let _ = rustix::fs::flock(&lock, FlockOperation::LockExclusive);
        let mut facts = Facts::default();
        facts.add(&file("index"), dataset, self.reader);
        let part_path = file("part");
        let whole = facts.add(&part_path, dataset, self.reader);
        // Of one that was killed.
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
        let making = Making {
            dataset: dataset.to_owned(),
            reader: self.reader,
            index: file("index"),
            part_path,
            part,
            progress_path: file("progress"),
            told: None,
            _lock: lock,
        };
        Ok(Some((making, facts)))
    }

    /// How far the making of a dataset's index is; none when nobody makes one.
    pub(crate) fn progress(&self, dataset: &Path) -> Option<Progress> {
        let text = fs::read(self.file(dataset, "progress")?).ok()?;
        // Whoever makes one holds the lock; one that was killed leaves its progress.
        let lock = File::open(self.file(dataset, "lock")?).ok()?;
        if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockShared).is_ok() {
            return None;
        }
        serde_json::from_slice(&text).ok()
    }
}

fn path_key(dataset: &Path) -> String {
    let key = Sha256::digest(dataset.as_os_str().as_encoded_bytes());
    key.iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

/// Tells the folder of a dataset from another at the same path on another machine. None where the file system tells no
/// birth: such are of the network mostly, and the same on all machines.
fn folder_of(dataset: &Path) -> Option<String> {
    let fixed = crate::data::pattern::fixed_part(dataset).map(|(folder, _)| folder);
    let mut found = fs::metadata(fixed.as_deref().unwrap_or(dataset)).ok()?;
    if found.is_file() {
        found = fs::metadata(dataset.parent()?).ok()?;
    }
    let born = found.created().ok()?.duration_since(SystemTime::UNIX_EPOCH).ok()?.as_nanos();
    let mut key = Sha256::new();
    key.update(found.ino().to_le_bytes());
    key.update(born.to_le_bytes());
    Some(key.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect())
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

/// How many of a dataset's pictures were looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    pub done: u64,
    pub total: u64,
}

/// What is known of a dataset's pictures, by container.
#[derive(Debug, Default)]
pub(super) struct Facts {
    /// Files, and whether this version of the program has written them.
    buffers: Vec<(Vec<u8>, bool)>,
    blocks: HashMap<Vec<u8>, Vec<(usize, Range<usize>)>>,
}

impl Facts {
    /// Adds what a file says; how many of its bytes are whole blocks.
    fn add(&mut self, file: &Path, dataset: &Path, reader: u32) -> u64 {
        let Ok(bytes) = crate::files::read(file, MAX_BYTES) else { return 0 };
        let number = self.buffers.len();
        let (mut at, mut ours) = (MAGIC.len(), false);
        if !bytes.starts_with(MAGIC) {
            return 0;
        }
        while let Some((container, body)) = block_at(&bytes, at) {
            let first = at == MAGIC.len();
            if first && bytes[container.clone()] != *dataset.as_os_str().as_encoded_bytes() {
                return 0;
            }
            at = body.end;
            if first {
                ours = bytes[body] == reader.to_le_bytes();
            } else {
                self.blocks.entry(bytes[container].to_vec()).or_default().push((number, body));
            }
        }
        self.buffers.push((bytes, ours));
        if at == MAGIC.len() { 0 } else { at as u64 }
    }

    /// The blocks of a container, oldest first. One that cannot be read is not there.
    pub(super) fn of(&self, container: &[u8]) -> impl Iterator<Item = Block> {
        let all = self.blocks.get(container).into_iter().flatten();
        all.filter_map(|(buffer, body)| {
            let (bytes, ours) = &self.buffers[*buffer];
            let mut block: Block = rmp_serde::from_slice(&bytes[body.clone()]).ok()?;
            if !ours && block.stamp.is_some() {
                // A shard is read as a whole.
                let whole = block.trouble.is_none() && block.entries.iter().all(|e| e.broken.is_none());
                return whole.then_some(block);
            }
            block.entries.retain(|entry| *ours || entry.broken.is_none());
            Some(block)
        })
    }
}

/// Container and body of the block that begins at `at`, if it is whole.
fn block_at(bytes: &[u8], at: usize) -> Option<(Range<usize>, Range<usize>)> {
    let word = |at: usize| {
        let found = bytes.get(at..at.checked_add(4)?)?;
        Some(u32::from_le_bytes([found[0], found[1], found[2], found[3]]) as usize)
    };
    let (length, check) = (word(at)?, word(at + 4)?);
    let payload = at + 8..(at + 8).checked_add(length)?;
    if crc32fast::hash(bytes.get(payload.clone())?) as usize != check {
        return None;
    }
    let name = payload.start + 4..(payload.start + 4).checked_add(word(payload.start)?)?;
    (name.end <= payload.end).then(|| (name.clone(), name.end..payload.end))
}

fn write_block(to: &mut impl Write, container: &[u8], body: &[u8]) -> io::Result<()> {
    let short = |length: usize| u32::try_from(length).map_err(|_| io::Error::other("a block of 4 GiB"));
    let mut check = crc32fast::Hasher::new();
    let name_length = short(container.len())?.to_le_bytes();
    for part in [&name_length[..], container, body] {
        check.update(part);
    }
    to.write_all(&short(4 + container.len() + body.len())?.to_le_bytes())?;
    to.write_all(&check.finalize().to_le_bytes())?;
    to.write_all(&name_length)?;
    to.write_all(container)?;
    to.write_all(body)
}

fn write_head(to: &mut impl Write, dataset: &Path, reader: u32) -> io::Result<()> {
    to.write_all(MAGIC)?;
    write_block(to, dataset.as_os_str().as_encoded_bytes(), &reader.to_le_bytes())
}

/// An index in the making; nobody else makes one of this dataset meanwhile.
#[derive(Debug)]
pub(super) struct Making {
    dataset: PathBuf,
    reader: u32,
    index: PathBuf,
    part_path: PathBuf,
    part: File,
    progress_path: PathBuf,
    told: Option<Instant>,
    _lock: File,
}

impl Making {
    /// Keeps what was found, for a run that is interrupted.
    ///
    /// # Errors
    /// The disk does not take it.
    pub(super) fn append(&mut self, container: &[u8], block: BlockRef<'_>) -> io::Result<()> {
        let mut bytes = Vec::new();
        write_block(&mut bytes, container, &encoded(&block)?)?;
        self.part.write_all(&bytes)
    }

    /// Tells whoever asks, a few times a second.
    pub(super) fn tell(&mut self, progress: Progress) {
        if self.told.is_none_or(|told| told.elapsed() >= PROGRESS_EVERY) {
            self.told = Some(Instant::now());
            // Nobody depends on it.
            let text = serde_json::to_vec(&progress).unwrap_or_default();
            let _ = crate::host::write_whole(&self.progress_path, &text);
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

impl Drop for Making {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.progress_path);
        // Nothing but its head.
        let head = MAGIC.len() + 16 + self.dataset.as_os_str().len();
        if self.part.metadata().is_ok_and(|found| found.len() <= head as u64) {
            let _ = fs::remove_file(&self.part_path);
        }
    }
}

fn encoded(block: &BlockRef<'_>) -> io::Result<Vec<u8>> {
    rmp_serde::to_vec(block).map_err(io::Error::other)
}
