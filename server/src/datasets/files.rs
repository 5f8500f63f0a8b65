//! Transfer of a dataset's files to agents: the list of files, and their bytes. Links never lead to files outside the dataset's folder.

use lockstep_protocol::{
    agent::{DatasetEntry, DatasetPart, PART_CHANGED, PART_FOLLOWS, PART_REFUSED},
    pattern::{self, has_brace},
};
use rustix::fs::{Mode, OFlags};
use sha2::{Digest, Sha256};
use std::{
    fs::{self, File, Metadata},
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::MetadataExt,
    path::{Component, Path, PathBuf},
    vec,
};

/// Maximum number of files and folders of a dataset.
pub(crate) const MAX_FILES: u64 = 100_000_000;
/// Maximum number of files that a pattern may name.
const MAX_NAMES: usize = 100_000;
/// Maximum depth of nested folders.
const MAX_DEPTH: usize = 32;
/// Size of a chunk of the list, in bytes.
const LIST_CHUNK_BYTES: usize = 128 << 10;
/// Minimum size of a chunk of the response with parts (ranges of files), in bytes. Parts are collected into a chunk until it has this size.
const PARTS_CHUNK_BYTES: usize = 1 << 20;

/// The location of a dataset's files.
#[derive(Debug, Clone)]
pub(crate) struct Tree {
    /// The dataset's folder, a path without symbolic links. Nothing outside the folder is read.
    root: PathBuf,
    kind: Kind,
    /// The file or the pattern, relative to `root`. Empty for a folder.
    relative_path: String,
}

/// The kind of path with which a dataset was registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Folder,
    File,
    Pattern,
}

/// Why a part is not sent: [`PART_CHANGED`] or [`PART_REFUSED`], and the message for the agent.
type Unsent = (u8, String);

impl Tree {
    /// Opens the dataset that was registered at `path`. `None` if it has no files. The files of a pattern are not looked for here:
    /// [`FileList::open`] returns `None` if none exists.
    ///
    /// # Errors
    /// The dataset cannot be read or copied.
    pub(crate) fn open(path: &Path) -> Result<Option<Self>, String> {
        match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => {
                refuse_links(path)?;
                let is_empty = fs::read_dir(path).map_err(unreadable(path))?.next().is_none();
                let root = path.to_owned();
                Ok((!is_empty).then_some(Self { root, kind: Kind::Folder, relative_path: String::new() }))
            }
            Ok(metadata) if metadata.is_file() => {
                refuse_links(path)?;
                let (Some(root), Some(name)) = (path.parent(), path.file_name()) else {
                    return Ok(None);
                };
                Ok(Some(Self { root: root.into(), kind: Kind::File, relative_path: to_unicode(name)? }))
            }
            Ok(_) => Err(format!("{} is neither a file nor a folder", path.display())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::open_pattern(path),
            Err(error) => Err(unreadable(path)(error)),
        }
    }

    fn open_pattern(path: &Path) -> Result<Option<Self>, String> {
        let root: PathBuf = path.iter().take_while(|part| !has_brace(part)).collect();
        let rest: PathBuf = path.iter().skip_while(|part| !has_brace(part)).collect();
        if rest.as_os_str().is_empty() || !root.exists() {
            return Ok(None);
        }
        refuse_links(&root)?;
        let relative_path = to_unicode(rest.as_os_str())?;
        Ok(Some(Self { root, kind: Kind::Pattern, relative_path }))
    }

    /// The paths, relative to the root, of the file or of the existing files of the pattern.
    fn existing_files(&self) -> Result<Vec<String>, String> {
        let path = &self.relative_path;
        if self.kind == Kind::File {
            return Ok(vec![path.clone()]);
        }
        let names = pattern::expand(path, MAX_NAMES).map_err(|e| format!("the pattern {path:?} {e}"))?;
        Ok(names.into_iter().filter(|name| self.root.join(name).exists()).collect())
    }

    /// The metadata of a file or folder in the list. If `path` is a link, the metadata of the link's target.
    fn stat(&self, path: &Path) -> Result<Metadata, String> {
        let mut metadata = fs::symlink_metadata(self.root.join(path)).map_err(unreadable(path))?;
        if metadata.is_symlink() {
            metadata = fs::metadata(self.root.join(self.resolve_links(path)?)).map_err(unreadable(path))?;
        }
        if metadata.is_dir() || metadata.is_file() {
            return Ok(metadata);
        }
        Err(format!("{} is neither a file nor a folder; remove it", path.display()))
    }

    /// The path with its links resolved, relative to the root.
    fn resolve_links(&self, path: &Path) -> Result<PathBuf, String> {
        let real = self.root.join(path).canonicalize().map_err(unreadable(path))?;
        real.strip_prefix(&self.root).map(Path::to_owned).map_err(|_| {
            let detail = format!("{} is a link that leads out of the dataset's folder", path.display());
            format!("{detail}; replace the link by its target")
        })
    }

    /// Whether `path` can be a file of the dataset, by its name.
    fn may_contain(&self, path: &str) -> bool {
        match self.kind {
            Kind::Folder => true,
            Kind::File => path == self.relative_path,
            Kind::Pattern => pattern::matches(&self.relative_path, path),
        }
    }

    /// Whether the file no longer exists. Links are not followed, so a path with a link counts as existing.
    fn is_gone(&self, path: &str) -> bool {
        let mut current = self.root.clone();
        for part in Path::new(path).components() {
            let Component::Normal(part) = part else { return false };
            current.push(part);
            match fs::symlink_metadata(&current) {
                Err(error) => return error.kind() == io::ErrorKind::NotFound,
                Ok(metadata) if metadata.is_symlink() => return false,
                Ok(_) => {}
            }
        }
        false
    }

    /// Opens a file by its path in the list. Links are resolved first. If a component of the path is replaced by a link afterwards, this
    /// fails.
    fn open_file(&self, path: &str) -> Result<File, String> {
        let may_be_listed = self.may_contain(path);
        let path = Path::new(path);
        let is_below = path.components().all(|part| matches!(part, Component::Normal(_)));
        if !may_be_listed || !is_below || path.as_os_str().is_empty() {
            return Err(format!("{} is not a file of the dataset", path.display()));
        }
        let real = self.resolve_links(path)?;
        let failed = |e: rustix::io::Errno| unreadable(path)(e.into());
        let Some(name) = real.file_name() else { return Err(format!("{} is a folder", path.display())) };
        // Opens every folder from `/` on, because a folder above the dataset's folder may be replaced by a link, too. `O_PATH` needs no
        // right to read.
        let folder_flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut folder = rustix::fs::open("/", folder_flags, Mode::empty()).map_err(failed)?;
        for part in self.root.iter().skip(1).chain(real.parent().into_iter().flatten()) {
            folder = rustix::fs::openat(&folder, part, folder_flags, Mode::empty()).map_err(failed)?;
        }
        // `NONBLOCK`: opening a named pipe does not wait. `NOCTTY`: a terminal does not become the controlling terminal.
        let file_flags =
            OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        Ok(File::from(rustix::fs::openat(&folder, name, file_flags, Mode::empty()).map_err(failed)?))
    }
}

/// The message for an error of reading `path`.
fn unreadable(path: &Path) -> impl Fn(io::Error) -> String {
    move |error| format!("{} cannot be read: {error}", path.display())
}

/// Checks that a registered path still has no links. A link that was made after the registration may lead to a folder that is not allowed.
fn refuse_links(path: &Path) -> Result<(), String> {
    let real = path.canonicalize().map_err(unreadable(path))?;
    if real == path {
        return Ok(());
    }
    let detail =
        "is not what was registered: the path, or a folder above it, is now a link on the server's machine";
    Err(format!("{} {detail}; register the dataset where its files are", path.display()))
}

/// The later of a file's `mtime` and `ctime`, in nanoseconds since 1970.
pub(super) fn changed_ns(metadata: &Metadata) -> i64 {
    let ns = |secs: i64, rest: i64| secs.saturating_mul(1_000_000_000).saturating_add(rest);
    ns(metadata.mtime(), metadata.mtime_nsec()).max(ns(metadata.ctime(), metadata.ctime_nsec()))
}

fn to_unicode(name: &std::ffi::OsStr) -> Result<String, String> {
    let text = name.to_str().map(str::to_owned);
    text.ok_or_else(|| format!("the name {name:?} is not UTF-8; rename it"))
}

/// The list of a dataset's files. It is produced while it is sent, so each folder is read when the list reaches it.
pub(crate) struct FileList {
    tree: Tree,
    /// Maximum number of files and folders.
    max_entries: u64,
    /// The path and the remaining names of each folder that is not listed to its end.
    open_folders: Vec<(PathBuf, vec::IntoIter<String>)>,
    /// Number of files and folders listed so far.
    entry_count: u64,
    /// Number of files listed so far, and their total size in bytes.
    file_count: u64,
    bytes: u64,
    has_begun: bool,
    has_ended: bool,
}

impl FileList {
    /// Opens the list of a dataset with at most `max_entries` files and folders. `None` if a pattern has no files.
    ///
    /// # Errors
    /// The pattern is invalid.
    pub(crate) fn open(tree: Tree, max_entries: u64) -> Result<Option<Self>, String> {
        let mut open_folders = Vec::new();
        if tree.kind != Kind::Folder {
            let names = tree.existing_files()?;
            if names.is_empty() {
                return Ok(None);
            }
            open_folders.push((PathBuf::new(), names.into_iter()));
        }
        Ok(Some(Self {
            tree,
            max_entries,
            open_folders,
            entry_count: 0,
            file_count: 0,
            bytes: 0,
            has_begun: false,
            has_ended: false,
        }))
    }

    /// The next lines of the list, or `None` at its end.
    pub(crate) fn chunk(&mut self) -> io::Result<Option<Vec<u8>>> {
        let mut text = Vec::new();
        while !self.has_ended && text.len() < LIST_CHUNK_BYTES {
            let entry = self.next_entry().unwrap_or_else(DatasetEntry::Failed);
            self.has_ended = matches!(entry, DatasetEntry::End(..) | DatasetEntry::Failed(_));
            serde_json::to_writer(&mut text, &entry)?;
            text.push(b'\n');
        }
        Ok((!text.is_empty()).then_some(text))
    }

    fn next_entry(&mut self) -> Result<DatasetEntry, String> {
        if !self.has_begun {
            self.has_begun = true;
            if self.tree.kind == Kind::Folder {
                self.enter_folder(PathBuf::new())?;
            }
            return Ok(DatasetEntry::Begin(self.tree.relative_path.clone()));
        }
        loop {
            let Some((folder, names)) = self.open_folders.last_mut() else {
                return Ok(DatasetEntry::End(self.file_count, self.bytes));
            };
            let Some(name) = names.next() else {
                self.open_folders.pop();
                continue;
            };
            let path = folder.join(&name);
            let shown = to_unicode(path.as_os_str())?;
            let metadata = match self.tree.kind {
                Kind::Folder => self.tree.stat(&path)?,
                Kind::File | Kind::Pattern => self.tree.open_file(&shown).and_then(|file| {
                    let metadata = file.metadata().map_err(unreadable(&path))?;
                    if metadata.is_file() { Ok(metadata) } else { Err(format!("{shown} is not a file")) }
                })?,
            };
            self.entry_count += 1;
            self.check_count(0)?;
            if metadata.is_dir() {
                self.enter_folder(path)?;
                return Ok(DatasetEntry::Folder(shown));
            }
            self.file_count += 1;
            self.bytes += metadata.len();
            return Ok(DatasetEntry::File(shown, metadata.len(), changed_ns(&metadata)));
        }
    }

    /// Checks that the entries listed so far and `unlisted_count` further entries are not too many.
    fn check_count(&self, unlisted_count: usize) -> Result<(), String> {
        if self.entry_count + unlisted_count as u64 > self.max_entries {
            return Err(format!("the dataset has more than {} files and folders", self.max_entries));
        }
        Ok(())
    }

    fn enter_folder(&mut self, path: PathBuf) -> Result<(), String> {
        if self.open_folders.len() > MAX_DEPTH {
            let detail = format!("{} is nested deeper than {MAX_DEPTH} folders", path.display());
            return Err(format!("{detail}; does a link lead back to a folder that contains it?"));
        }
        let mut names = Vec::new();
        for entry in fs::read_dir(self.tree.root.join(&path)).map_err(unreadable(&path))? {
            names.push(to_unicode(&entry.map_err(unreadable(&path))?.file_name())?);
            // All names of a folder are in memory at the same time, so they count before they are listed.
            self.check_count(names.len())?;
        }
        names.sort_unstable();
        self.open_folders.push((path, names.into_iter()));
        Ok(())
    }
}

/// Parts of a dataset's files, read while they are sent.
pub(crate) struct Parts {
    tree: Tree,
    parts: vec::IntoIter<DatasetPart>,
    has_ended: bool,
}

impl Parts {
    pub(crate) fn of(tree: Tree, parts: Vec<DatasetPart>) -> Self {
        Self { tree, parts: parts.into_iter(), has_ended: false }
    }

    /// The next whole parts, or `None` at the end.
    pub(crate) fn chunk(&mut self) -> io::Result<Option<Vec<u8>>> {
        let mut out = Vec::new();
        while !self.has_ended && out.len() < PARTS_CHUNK_BYTES {
            let Some(part) = self.parts.next() else { break };
            // A part is read whole before it is sent, so that a read error is reported to the agent. If the response were truncated
            // instead, the agent would repeat its request again and again.
            let begin = out.len();
            out.push(PART_FOLLOWS);
            if let Err((code, message)) = self.append_part(&part, &mut out) {
                self.has_ended = true;
                out.truncate(begin);
                out.push(code);
                out.extend_from_slice(&u32::try_from(message.len()).unwrap_or(0).to_be_bytes());
                out.extend_from_slice(message.as_bytes());
            }
        }
        Ok((!out.is_empty()).then_some(out))
    }

    /// Appends a part's bytes and their SHA-256 to `out`.
    fn append_part(&self, part: &DatasetPart, out: &mut Vec<u8>) -> Result<(), Unsent> {
        let changed = || (PART_CHANGED, format!("{} has changed since it was listed", part.path));
        let failed = |e: io::Error| match e.kind() {
            io::ErrorKind::UnexpectedEof => changed(),
            _ => (PART_REFUSED, format!("{} cannot be read: {e}", part.path)),
        };
        let mut file = match self.tree.open_file(&part.path) {
            Ok(file) => file,
            // The file was removed after it was listed. The agent then requests a new list.
            Err(_) if self.tree.may_contain(&part.path) && self.tree.is_gone(&part.path) => {
                return Err(changed());
            }
            Err(message) => return Err((PART_REFUSED, message)),
        };
        let metadata = file.metadata().map_err(failed)?;
        if !metadata.is_file()
            || !is_as_listed(&metadata, part)
            || part.offset.saturating_add(part.length) > metadata.len()
        {
            return Err(changed());
        }
        file.seek(SeekFrom::Start(part.offset)).map_err(failed)?;
        let begin = out.len();
        // The request was checked, so a part has at most `DATASET_PART_BYTES` (4 MiB).
        out.resize(begin + part.length as usize, 0);
        file.read_exact(&mut out[begin..]).map_err(failed)?;
        if !is_as_listed(&file.metadata().map_err(failed)?, part) {
            return Err(changed());
        }
        let sum = Sha256::digest(&out[begin..]);
        out.extend_from_slice(&sum);
        Ok(())
    }
}

fn is_as_listed(metadata: &Metadata, part: &DatasetPart) -> bool {
    metadata.len() == part.size_bytes && changed_ns(metadata) == part.changed_ns
}

#[cfg(test)]
mod tests;
