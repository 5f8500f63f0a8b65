//! Encoded pictures in files or shards, as described by the index. A million pictures take about 70 MB of memory.

use super::{
    DataError, Picture,
    index::{Entry, Stamp, content_hash},
    parquet::ParquetFile,
    picture,
};
use lockstep_host::files::{self, FileKind};
use lockstep_protocol::dataset::BrokenFile;
use std::{
    ffi::OsStr,
    fs::{self, File},
    os::unix::{ffi::OsStrExt, fs::FileExt},
    path::{Path, PathBuf},
    sync::Arc,
};

/// The pictures of one split, read on demand.
#[derive(Debug, Clone, Default)]
pub(crate) struct Listing {
    root: PathBuf,
    containers: Vec<Container>,
    /// The names of all pictures, concatenated.
    names: Vec<u8>,
    records: Vec<PictureRecord>,
    /// The path of the folder cache. [`Listing::read`] removes this file if a picture differs from the index, so that the next start
    /// examines all files.
    pub(super) folder_cache: Option<PathBuf>,
}

/// A folder or a shard, which contains pictures.
#[derive(Debug, Clone)]
struct Container {
    /// The path relative to the root.
    path: PathBuf,
    kind: ContainerKind,
}

#[derive(Debug, Clone)]
pub(super) enum ContainerKind {
    /// Each picture is a file.
    Folder,
    /// Each picture has an offset.
    Tar(Stamp),
    /// Each picture is in a row.
    Parquet(Stamp, Arc<ParquetFile>),
}

/// A picture as the index describes it.
#[derive(Debug, Clone, Copy)]
struct PictureRecord {
    container: u32,
    /// The end of the picture's name in `names`. The name begins where the previous name ends.
    name_end: u64,
    /// Byte offset in a tar shard, or row number in a Parquet file.
    offset: u64,
    size: u64,
    modified_ns: i64,
    hash: u64,
    width: u32,
    height: u32,
    is_jpeg: bool,
}

impl Listing {
    pub(super) fn new(root: &Path) -> Self {
        Self { root: root.to_owned(), ..Self::default() }
    }

    /// Adds a container. Pictures that are pushed next belong to this container.
    pub(super) fn add_container(&mut self, path: &Path, kind: ContainerKind) {
        self.containers.push(Container { path: path.to_owned(), kind });
    }

    /// Adds a picture in the newest container.
    pub(super) fn push(&mut self, entry: &Entry) {
        self.names.extend_from_slice(&entry.name);
        let Entry { offset, size, modified_ns, hash, width, height, is_jpeg, .. } = *entry;
        self.records.push(PictureRecord {
            container: (self.containers.len() - 1) as u32,
            name_end: self.names.len() as u64,
            offset,
            size,
            modified_ns,
            hash,
            width,
            height,
            is_jpeg,
        });
    }

    pub(crate) fn len(&self) -> usize {
        self.records.len()
    }

    /// Width and height in pixels, according to the index.
    pub(crate) fn dimensions(&self, index: usize) -> (u32, u32) {
        (self.records[index].width, self.records[index].height)
    }

    /// Whether a picture is a JPEG file, according to the index.
    pub(crate) fn is_jpeg(&self, index: usize) -> bool {
        self.records[index].is_jpeg
    }

    /// The path of the file. For a member of a shard: the path of the shard, then the path in the shard.
    pub(crate) fn name(&self, index: usize) -> String {
        self.path(index).display().to_string()
    }

    /// Adds the identity of a picture to `hash`: name, size and content. The identity is equal on other machines.
    pub(super) fn add_to(&self, hash: &mut crc32fast::Hasher, index: usize) {
        let (name, size, content) = self.identity(index);
        hash.update(name.as_os_str().as_encoded_bytes());
        hash.update(&size.to_le_bytes());
        hash.update(&content.to_le_bytes());
    }

    /// A picture's name (as in [`Listing::name`], but relative to the dataset), its size in bytes, and the hash of its content.
    pub(super) fn identity(&self, index: usize) -> (PathBuf, u64, u64) {
        let record = &self.records[index];
        (self.container(index).path.join(self.name_in_container(index)), record.size, record.hash)
    }

    /// The hash of the picture's bytes.
    pub(super) fn hash(&self, index: usize) -> u64 {
        self.records[index].hash
    }

    /// The name of the picture's file. `None` if the picture is part of a shard.
    pub(super) fn file_name(&self, index: usize) -> Option<&OsStr> {
        let is_file = matches!(self.container(index).kind, ContainerKind::Folder);
        is_file.then(|| self.name_in_container(index))
    }

    /// The picture's bytes, still encoded.
    ///
    /// # Errors
    /// [`DataError::File`]: the picture cannot be read, or differs from the index.
    pub(crate) fn read(&self, index: usize) -> Result<Vec<u8>, DataError> {
        let (record, Container { path, kind }) = (&self.records[index], self.container(index));
        let found = match kind {
            ContainerKind::Folder => read_file(&self.path(index), record),
            ContainerKind::Tar(stamp) => read_member(record, &self.root.join(path), *stamp),
            ContainerKind::Parquet(stamp, file) => read_row(record, &self.root.join(path), *stamp, file),
        };
        found.map_err(|detail| {
            if let Some(cache) = &self.folder_cache {
                let _ = fs::remove_file(cache);
            }
            self.broken(index, detail)
        })
    }

    /// Whether pictures are rows of Parquet files, which are read fastest in the order of the file.
    pub(super) fn has_parquet_rows(&self) -> bool {
        self.containers.iter().any(|container| matches!(container.kind, ContainerKind::Parquet(..)))
    }

    /// As [`Listing::read`], for `count` consecutive pictures. Rows of one file are read together.
    pub(super) fn read_run(&self, first: usize, count: usize) -> Vec<Result<Vec<u8>, DataError>> {
        let records = &self.records[first..first + count];
        let run = || -> Option<Vec<Vec<u8>>> {
            let (first_record, last_record) = (records.first()?, records.last()?);
            let Container { path, kind: ContainerKind::Parquet(stamp, indexed_file) } = self.container(first)
            else {
                return None;
            };
            // The rows may include rows that are not in this listing. They are read together only if at least half of them are.
            let length = last_record.offset.checked_sub(first_record.offset)?.checked_add(1)?;
            if first_record.container != last_record.container || length > 2 * count as u64 {
                return None;
            }
            let (file, current) = open(&self.root.join(path)).ok()?;
            let read = indexed_file.read_run(file, current.size, first_record.offset, length).ok()?;
            let unchanged_bytes = |record: &PictureRecord| {
                let bytes = read.get((record.offset - first_record.offset) as usize)?.clone()?;
                (bytes.len() as u64 == record.size && content_hash(&bytes) == record.hash).then_some(bytes)
            };
            (current == *stamp).then(|| records.iter().map(unchanged_bytes).collect())?
        };
        match run() {
            Some(read) => read.into_iter().map(Ok).collect(),
            // Read one by one, to find out which pictures cannot be read, and why.
            None => (first..first + count).map(|index| self.read(index)).collect(),
        }
    }

    /// The whole picture, decoded as RGB. Fails as [`Listing::read`], or if the picture cannot be decoded.
    pub(crate) fn picture(&self, index: usize) -> Result<Picture, DataError> {
        Picture::decode(&self.read(index)?).map_err(|detail| self.broken(index, detail))
    }

    /// Removes the pictures for which `keep` is false, with their `labels`.
    pub(super) fn retain<L>(&mut self, labels: &mut Vec<L>, keep: &[bool]) {
        if keep.iter().all(|keep| *keep) {
            return;
        }
        let mut kept = keep.iter();
        labels.retain(|_| kept.next() == Some(&true));
        let (mut names, mut records) = (Vec::new(), Vec::new());
        for index in (0..self.len()).filter(|index| keep.get(*index) == Some(&true)) {
            names.extend_from_slice(self.name_in_container(index).as_bytes());
            records.push(PictureRecord { name_end: names.len() as u64, ..self.records[index] });
        }
        (self.names, self.records) = (names, records);
    }

    /// An error about a picture.
    pub(crate) fn broken(&self, index: usize, detail: String) -> DataError {
        DataError::File(BrokenFile { file: self.name(index), detail })
    }

    fn name_in_container(&self, index: usize) -> &OsStr {
        let begin = index.checked_sub(1).map_or(0, |before| self.records[before].name_end);
        OsStr::from_bytes(&self.names[begin as usize..self.records[index].name_end as usize])
    }

    fn container(&self, index: usize) -> &Container {
        &self.containers[self.records[index].container as usize]
    }

    fn path(&self, index: usize) -> PathBuf {
        self.root.join(&self.container(index).path).join(self.name_in_container(index))
    }
}

fn read_member(record: &PictureRecord, shard: &Path, stamp: Stamp) -> Result<Vec<u8>, String> {
    let (file, current) = open(shard)?;
    if record.offset.saturating_add(record.size) > current.size {
        return Err(format!("no longer exists: its shard now has {} bytes", current.size));
    }
    let mut bytes = vec![0; record.size as usize];
    file.read_exact_at(&mut bytes, record.offset).map_err(files::cannot_be_read)?;
    if current != stamp && content_hash(&bytes) != record.hash {
        return Err("has changed since it was first inspected: its shard was written again".into());
    }
    Ok(bytes)
}

fn read_row(
    record: &PictureRecord,
    path: &Path,
    stamp: Stamp,
    indexed_file: &ParquetFile,
) -> Result<Vec<u8>, String> {
    let (file, current) = open(path)?;
    let bytes = if current == stamp {
        indexed_file.read(file, current.size, record.offset)?
    } else {
        // The file has changed, so its pages may be at other offsets.
        let reopened = ParquetFile::open(path);
        let reopened = reopened.map_err(|error| format!("cannot be read, as its file {}", error.detail))?;
        reopened.read(file, current.size, record.offset)?
    };
    // The hash is checked even if the file is unchanged: a file with a wrong page index would return another row's picture.
    if bytes.len() as u64 != record.size || content_hash(&bytes) != record.hash {
        return Err("has changed since it was first inspected: its file was written again".into());
    }
    Ok(bytes)
}

fn open(shard: &Path) -> Result<(File, Stamp), String> {
    let (file, size) = files::open(shard)?;
    let modified_ns = files::modified_ns(&file.metadata().map_err(files::cannot_be_read)?);
    Ok((file, Stamp { size, modified_ns }))
}

fn read_file(path: &Path, record: &PictureRecord) -> Result<Vec<u8>, String> {
    let bytes = files::read(path, picture::MAX_BYTES)?;
    if bytes.len() as u64 != record.size {
        return Err(format!(
            "has changed since it was first inspected: it had {} bytes then, and has {} now",
            record.size,
            bytes.len()
        ));
    }
    // A file with a new modification time but the same content has not changed. A symbolic link has the time of its target.
    let has_same_time = matches!(files::stat(path), Ok(FileKind::File { modified_ns, .. }) if modified_ns == record.modified_ns);
    if !has_same_time && content_hash(&bytes) != record.hash {
        return Err("has changed since it was first inspected".into());
    }
    Ok(bytes)
}
