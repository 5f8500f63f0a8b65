//! The index file of a dataset: facts about each picture, so that the start of a job need not read all pictures.
//! The file is `datasets/<key>.index` in the cache directory. `key` is computed from the dataset's path and, if the
//! file system reports birth times, from the birth time of the folder, because machines that share the cache directory
//! may have different copies at the same path. Without birth times, such machines share the index. An entry is valid
//! only while the file's size and modification time are unchanged.
//!
//! ```text
//! 8 bytes           "LSINDEX" and the format's version, 4
//! then blocks:      u32 length of the payload, u32 CRC-32 of the payload (both little-endian), payload
//! payload:          u32 length of the container's name, the name, then MessagePack:
//!                   [stamp, shard_error, [entry, ...]]
//! entry:            [name, size, modified_ns, offset, is_jpeg, width, height, hash, label, broken]
//! ```
//!
//! A container is a class folder (`train/cat`) or a shard (`train-000.tar`), named relative to the dataset. The first
//! block has the dataset's own path as its container and no body. If several entries have the same name, the last is
//! valid.
//!
//! `<key>.part` has the same format: blocks are appended to it as they are made, and the blocks of an interrupted run
//! are read before work begins. `<key>.lock` is locked while an index is built, `<key>.folders` is described in
//! `folders.rs`, and `<key>.progress` contains the number of examined pictures.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    collections::HashMap,
    io::{self, Write},
    ops::Range,
    path::Path,
};

/// Increase the version also when the reader supports more pictures, because older indexes list these pictures as broken.
const MAGIC: &[u8; 8] = b"LSINDEX\x04";
/// Larger index files are considered damaged. The index of fourteen million pictures has 800 MB.
const MAX_BYTES: u64 = 8 << 30;

/// The facts about one picture.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entry {
    /// The file name, or the member's path in its shard.
    #[serde(with = "serde_bytes")]
    pub(crate) name: Vec<u8>,
    /// Size in bytes.
    pub(crate) size: u64,
    /// The file's modification time, see [`lockstep_host::files::modified_ns`]. 0 for a member of a shard, because the
    /// shard has a stamp.
    pub(crate) modified_ns: i64,
    /// The offset of the picture in the shard. 0 for a file.
    pub(crate) offset: u64,
    pub(crate) is_jpeg: bool,
    /// In pixels. Width, height and hash are 0 if the picture is broken.
    pub(crate) width: u32,
    pub(crate) height: u32,
    /// The hash of the picture's bytes, see [`content_hash`].
    pub(crate) hash: u64,
    /// The number or name of the class, if the picture is in a shard.
    pub(crate) label: Option<String>,
    /// The reason why the picture cannot be used, as a phrase to follow its name.
    pub(crate) broken: Option<String>,
    /// Whether the picture could not be read. The next attempt may succeed, so the entry is not stored.
    #[serde(skip)]
    pub(crate) is_transient: bool,
}

/// Size and modification time of a shard.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stamp {
    pub(crate) size: u64,
    pub(crate) modified_ns: i64,
}

/// Entries of one container.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Block {
    /// The stamp, if the container is a shard.
    pub(super) stamp: Option<Stamp>,
    /// The reason why the shard as a whole cannot be used.
    pub(super) shard_error: Option<String>,
    pub(super) entries: Vec<Entry>,
}

impl Block {
    /// A block of the entries that are stored.
    pub(super) fn of<'a>(
        stamp: Option<Stamp>,
        shard_error: Option<String>,
        entries: impl IntoIterator<Item = &'a Entry>,
    ) -> Self {
        let stored = entries.into_iter().filter(|entry| !entry.is_transient);
        Self { stamp, shard_error, entries: stored.cloned().collect() }
    }
}

/// A hash of content: the first eight bytes of its SHA-256.
pub(crate) fn content_hash(bytes: &[u8]) -> u64 {
    let digest = Sha256::digest(bytes);
    u64::from_le_bytes(std::array::from_fn(|i| digest[i]))
}

/// The facts about a dataset's pictures, by container.
#[derive(Debug, Default)]
pub(super) struct Facts {
    /// The files' contents.
    buffers: Vec<Vec<u8>>,
    /// The blocks of each container: index in `buffers`, and position of the block's body.
    blocks: HashMap<Vec<u8>, Vec<(usize, Range<usize>)>>,
}

impl Facts {
    /// Adds the facts in `file`. Returns the number of bytes in complete blocks.
    pub(super) fn add(&mut self, file: &Path, dataset: &Path) -> u64 {
        let Ok(bytes) = lockstep_host::files::read(file, MAX_BYTES) else { return 0 };
        let buffer = self.buffers.len();
        let mut at = MAGIC.len();
        if !bytes.starts_with(MAGIC) {
            return 0;
        }
        while let Some((container, body)) = block_at(&bytes, at) {
            let is_first = at == MAGIC.len();
            if is_first && bytes[container.clone()] != *dataset.as_os_str().as_encoded_bytes() {
                return 0;
            }
            at = body.end;
            if !is_first {
                self.blocks.entry(bytes[container].to_vec()).or_default().push((buffer, body));
            }
        }
        self.buffers.push(bytes);
        if at == MAGIC.len() { 0 } else { at as u64 }
    }

    /// The blocks of a container, oldest first. Unreadable blocks are skipped.
    pub(super) fn of(&self, container: &[u8]) -> impl Iterator<Item = Block> {
        let all = self.blocks.get(container).into_iter().flatten();
        all.filter_map(|(buffer, body)| rmp_serde::from_slice(&self.buffers[*buffer][body.clone()]).ok())
    }
}

/// The positions of the container's name and of the body of the block at offset `at`, if the block is complete.
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

fn write_container(to: &mut impl Write, container: &[u8], body: &[u8]) -> io::Result<()> {
    let in_32_bits = |length: usize| {
        u32::try_from(length).map_err(|_| io::Error::other("a block of a dataset's index has 4 GiB or more"))
    };
    let mut checksum = crc32fast::Hasher::new();
    let name_length = in_32_bits(container.len())?.to_le_bytes();
    for part in [&name_length[..], container, body] {
        checksum.update(part);
    }
    to.write_all(&in_32_bits(4 + container.len() + body.len())?.to_le_bytes())?;
    to.write_all(&checksum.finalize().to_le_bytes())?;
    to.write_all(&name_length)?;
    to.write_all(container)?;
    to.write_all(body)
}

pub(super) fn write_head(to: &mut impl Write, dataset: &Path) -> io::Result<()> {
    to.write_all(MAGIC)?;
    write_container(to, dataset.as_os_str().as_encoded_bytes(), &[])
}

pub(super) fn write_block(to: &mut impl Write, container: &[u8], block: &Block) -> io::Result<()> {
    write_container(to, container, &rmp_serde::to_vec(block).map_err(io::Error::other)?)
}
