//! The index of a dataset on disk: what is known of each picture, so that a job's start need not read them all.
//!
//! `datasets/<key>.index` in the cache directory, where `key` is of the dataset's path and, where the file system reports a
//! folder's birth, of the folder: machines that share the cache directory may have copies of their own at one path. Others
//! share the index; what is said of a file holds only while its size and time of change are the same.
//!
//! ```text
//! 8 bytes           "LSINDEX" and the format's version, 3
//! then blocks:      u32 length of the payload, u32 its CRC-32 (both little-endian), payload
//! payload:          u32 length of the container's name, the name, then MessagePack:
//!                   [stamp, trouble, [entry, ...]]
//! entry:            [name, size, modified_ns, offset, format, width, height, hash, label, broken]
//! ```
//!
//! A container is a class folder (`train/cat`) or a shard (`train-000.tar`), named relative to the dataset. The first
//! block's container is the dataset's own path, its body the number of the reader (`store.rs`, u32). Of several entries of one
//! name the last counts. `<key>.part` has the
//! same format: blocks are appended to it as they are made, and one that an interrupted run left is read before work
//! begins. `<key>.lock` is locked while an index is made, `<key>.folders` is described in `folders.rs`, `<key>.progress` has the
//! number of pictures that are done.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    collections::HashMap,
    io::{self, Write},
    ops::Range,
    path::Path,
};

pub(super) const MAGIC: &[u8; 8] = b"LSINDEX\x03";
/// Larger index files are taken for damage: that of fourteen million pictures has 800 MB.
const MAX_BYTES: u64 = 8 << 30;

/// What is known of one picture.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entry {
    /// File name, or the member's path in its shard.
    #[serde(with = "serde_bytes")]
    pub(crate) name: Vec<u8>,
    /// In bytes.
    pub(crate) size: u64,
    /// When the file was last changed, see [`lockstep_host::files::modified_ns`]; 0 in a shard, which has its own.
    pub(crate) modified_ns: i64,
    /// Where its bytes begin in the shard; 0 of a file.
    pub(crate) offset: u64,
    /// 1 JPEG, 2 PNG, 3 WebP, 4 GIF, 5 BMP, 6 TIFF; 0 none of these.
    pub(crate) format: u8,
    /// In pixels; 0 when it is broken.
    pub(crate) width: u32,
    /// In pixels; 0 when it is broken.
    pub(crate) height: u32,
    /// The hash of its bytes, see [`content_hash`]; 0 when it is broken.
    pub(crate) hash: u64,
    /// In a shard: the class, a number or a name.
    pub(crate) label: Option<String>,
    /// What is wrong with it, to stand after its name.
    pub(crate) broken: Option<String>,
    /// It could not be read, which may succeed next time: this is not stored.
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
    /// The stamp of a shard.
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

/// What is known of a dataset's pictures, by container.
#[derive(Debug, Default)]
pub(super) struct Facts {
    /// Files, and whether this version of the program has written them.
    buffers: Vec<(Vec<u8>, bool)>,
    blocks: HashMap<Vec<u8>, Vec<(usize, Range<usize>)>>,
}

impl Facts {
    /// Adds what a file says; how many of its bytes are whole blocks.
    pub(super) fn add(&mut self, file: &Path, dataset: &Path, reader: u32) -> u64 {
        let Ok(bytes) = lockstep_host::files::read(file, MAX_BYTES) else { return 0 };
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

pub(super) fn write_block(to: &mut impl Write, container: &[u8], body: &[u8]) -> io::Result<()> {
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

pub(super) fn write_head(to: &mut impl Write, dataset: &Path, reader: u32) -> io::Result<()> {
    to.write_all(MAGIC)?;
    write_block(to, dataset.as_os_str().as_encoded_bytes(), &reader.to_le_bytes())
}

pub(super) fn encoded(block: &BlockRef<'_>) -> io::Result<Vec<u8>> {
    rmp_serde::to_vec(block).map_err(io::Error::other)
}
