//! Uploads of checkpoints by agents that have their own disk. The pieces are collected in `uploads/<epoch>-<step>` of the job's folder,
//! which is renamed into `checkpoints/` after every checksum was verified. So a checkpoint exists completely or not at all, like the
//! checkpoints of ranks. Pieces survive a restart of the agent or the server, because the agent asks how many bytes have arrived, and
//! continues.

use crate::{
    checkpoints::manifest::{self, MANIFEST, Manifest, sha256, verify_checkpoint},
    util::if_exists,
};
use lockstep_protocol::{
    agent::UploadState,
    checkpoint_files::{self, STATE},
    limits::STATE_FILE_BYTES,
};
use std::{
    fs::{self, File},
    io::{self, Seek as _, SeekFrom, Write as _},
    path::{Path, PathBuf},
};

/// Maximum size of a piece of a file in a request, in bytes.
pub(crate) const PIECE_BYTES: usize = 8 << 20;
/// Maximum total size of the files of a checkpoint, in bytes.
const MAX_CHECKPOINT_BYTES: u64 = 1 << 40;

/// Why a piece or a checkpoint is refused.
#[derive(Debug)]
pub(crate) enum UploadError {
    /// The request is invalid.
    Wrong(String),
    /// The piece does not continue the file, which has this many bytes.
    Offset(u64),
    /// A checksum is wrong. The upload was removed and must be sent again.
    Damaged(String),
    /// Another request is changing this upload.
    Busy,
    /// The server has this checkpoint with other weights, and the attempt that would replace the checkpoint has ended.
    OtherWeightsStored,
    /// An I/O error.
    Io(io::Error),
}

impl From<io::Error> for UploadError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

type Result<T> = std::result::Result<T, UploadError>;

/// The folders of a checkpoint below a job's folder.
pub(crate) struct Upload {
    /// `<epoch>-<step>`.
    name: String,
    /// The folder in which the pieces are collected.
    partial: PathBuf,
    /// The folder of the complete checkpoint.
    complete: PathBuf,
}

impl Upload {
    /// The upload of the checkpoint with the name `<epoch>-<step>`.
    pub(crate) fn of(job_dir: &Path, name: &str) -> Self {
        Self {
            name: name.to_owned(),
            partial: job_dir.join("uploads").join(name),
            complete: job_dir.join("checkpoints").join(name),
        }
    }

    /// The number of bytes of each file that have arrived.
    pub(crate) fn state(&self) -> Result<UploadState> {
        let hash = |folder: &Path| if_exists(fs::read(folder.join(MANIFEST)).map(|bytes| sha256(&bytes)));
        let mut state = UploadState {
            stored: hash(&self.complete)?,
            manifest: hash(&self.partial)?,
            ..UploadState::default()
        };
        for name in self.received_files()? {
            if let Ok(metadata) = self.partial.join(&name).metadata() {
                state.received.insert(name, metadata.len());
            }
        }
        Ok(state)
    }

    /// The names of the files of which pieces have arrived, without the manifest.
    fn received_files(&self) -> io::Result<Vec<String>> {
        let entries = if_exists(fs::read_dir(&self.partial))?.into_iter().flatten();
        let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        let names: Vec<String> = names.collect::<io::Result<_>>()?;
        Ok(names.into_iter().filter(|name| is_checkpoint_file(name)).collect())
    }

    /// Begins an upload with its manifest. An earlier upload with another manifest is dropped. `is_live`: whether the attempt may still
    /// write.
    ///
    /// # Errors
    /// The bytes are not a manifest of this checkpoint, or it names files that are too large.
    pub(crate) fn begin(&self, bytes: &[u8], is_live: bool) -> Result<()> {
        let manifest = self.parse_manifest(bytes)?;
        self.check_replaceable(&manifest, is_live)?;
        let _lock = self.lock()?;
        let path = self.partial.join(MANIFEST);
        if fs::read(&path).is_ok_and(|before| before == bytes) {
            return Ok(());
        }
        for name in self.received_files()? {
            fs::remove_file(self.partial.join(name))?;
        }
        let temporary = self.partial.join("MANIFEST.new");
        fs::write(&temporary, bytes)?;
        Ok(fs::rename(temporary, path)?)
    }

    /// Appends a piece to a file, and returns the file's new size. `offset` is the position of the piece in the file.
    ///
    /// # Errors
    /// The upload was not begun, `offset` is not the file's size, or the file would be larger than in the manifest.
    pub(crate) fn append(&self, name: &str, offset: u64, piece: &[u8]) -> Result<u64> {
        let _lock = self.lock()?;
        let manifest = self.read_manifest()?;
        let Some(expected) = manifest.files.get(name) else {
            return Err(UploadError::Wrong(format!(
                "the manifest of checkpoint {} names no {name}",
                self.name
            )));
        };
        let path = self.partial.join(name);
        let mut file = File::options().write(true).create(true).truncate(false).open(&path)?;
        let size = file.metadata()?.len();
        if size != offset {
            return Err(UploadError::Offset(size));
        }
        let end = offset.saturating_add(piece.len() as u64);
        if end > expected.size_bytes {
            return Err(UploadError::Wrong(format!(
                "{name} has {} bytes, and more were sent",
                expected.size_bytes
            )));
        }
        file.seek(SeekFrom::Start(offset))?;
        if let Err(error) = file.write_all(piece) {
            // With a partial piece, the agent could not send the piece again.
            let _ = file.set_len(offset);
            return Err(error.into());
        }
        Ok(end)
    }

    /// Verifies all checksums, syncs all files and renames the folder to its final name.
    ///
    /// # Errors
    /// [`UploadError::Damaged`] if the files do not match the manifest. The files are removed.
    pub(crate) fn commit(&self, is_live: bool) -> Result<()> {
        let _lock = self.lock()?;
        let manifest = match self.read_manifest() {
            Ok(manifest) => manifest,
            // The upload was committed before, and only the response was lost.
            Err(UploadError::Wrong(_)) if self.complete.join(MANIFEST).exists() => return Ok(()),
            Err(error) => return Err(error),
        };
        self.check_replaceable(&manifest, is_live)?;
        if let Err(error) = verify_checkpoint(&self.partial) {
            if error.kind() != io::ErrorKind::InvalidData {
                return Err(error.into());
            }
            fs::remove_dir_all(&self.partial)?;
            return Err(UploadError::Damaged(error.to_string()));
        }
        for name in manifest.files.keys().map(String::as_str).chain([MANIFEST]) {
            File::open(self.partial.join(name))?.sync_all()?;
        }
        File::open(&self.partial)?.sync_all()?;
        let Some(parent) = self.complete.parent() else { return Err(UploadError::Wrong("no folder".into())) };
        fs::create_dir_all(parent)?;
        self.rename_to_complete()?;
        Ok(File::open(parent)?.sync_all()?)
    }

    /// Renames the folder to its final name. It may replace a checkpoint of the same step that was written before the step's evaluation or
    /// by an earlier attempt.
    fn rename_to_complete(&self) -> io::Result<()> {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        if !self.complete.exists() {
            return fs::rename(&self.partial, &self.complete);
        }
        if renameat_with(CWD, &self.partial, CWD, &self.complete, RenameFlags::EXCHANGE).is_err() {
            // The file system cannot exchange two folders, so for a moment there is no checkpoint.
            let old = self.partial.with_extension("old");
            fs::rename(&self.complete, &old)?;
            fs::rename(&self.partial, &self.complete)?;
            return fs::remove_dir_all(&old);
        }
        fs::remove_dir_all(&self.partial)
    }

    /// Checks that an upload may replace a stored checkpoint. Only the live attempt may do so. An attempt that has ended may still add the
    /// result of its last evaluation to the same weights.
    fn check_replaceable(&self, manifest: &Manifest, is_live: bool) -> Result<()> {
        if is_live {
            return Ok(());
        }
        let Some(stored) = if_exists(fs::read(self.complete.join(MANIFEST)))? else { return Ok(()) };
        let stored = self.parse_manifest(&stored)?;
        let weights = |manifest: &Manifest| -> Vec<_> {
            let files = manifest.files.iter().filter(|(name, _)| name.as_str() != STATE);
            files.map(|(name, file)| (name.clone(), file.sha256.clone())).collect()
        };
        (weights(manifest) == weights(&stored)).then_some(()).ok_or(UploadError::OtherWeightsStored)
    }

    /// Takes the lock that is held while files change, because a repeated request of an agent may overlap with the first request.
    ///
    /// Does not wait for the lock, because waiting would block a thread.
    fn lock(&self) -> Result<File> {
        fs::create_dir_all(&self.partial)?;
        let folder = File::open(&self.partial)?;
        match folder.try_lock() {
            Ok(()) => Ok(folder),
            Err(fs::TryLockError::WouldBlock) => Err(UploadError::Busy),
            Err(fs::TryLockError::Error(error)) => Err(error.into()),
        }
    }

    fn read_manifest(&self) -> Result<Manifest> {
        let bytes = if_exists(fs::read(self.partial.join(MANIFEST)))?;
        let missing = || UploadError::Wrong(format!("send {MANIFEST} of checkpoint {} first", self.name));
        self.parse_manifest(&bytes.ok_or_else(missing)?)
    }

    fn parse_manifest(&self, bytes: &[u8]) -> Result<Manifest> {
        let wrong =
            |detail: String| UploadError::Wrong(format!("{MANIFEST} of checkpoint {} {detail}", self.name));
        let manifest = manifest::parse(bytes, &self.name).map_err(wrong)?;
        if let Some(other) = manifest.files.keys().find(|name| !is_checkpoint_file(name)) {
            return Err(wrong(format!("names {other:?}, which is not a file of a checkpoint")));
        }
        if let Some(missing) = checkpoint_files::first_missing(|name| manifest.files.contains_key(name)) {
            return Err(wrong(format!("names no {missing}")));
        }
        let state = manifest.files.get(STATE).map_or(0, |file| file.size_bytes);
        if state > STATE_FILE_BYTES {
            return Err(wrong(format!(
                "names a {STATE} of {state} bytes; at most {STATE_FILE_BYTES} are allowed"
            )));
        }
        let size = manifest.files.values().fold(0_u64, |sum, file| sum.saturating_add(file.size_bytes));
        if size > MAX_CHECKPOINT_BYTES {
            return Err(wrong(format!(
                "names files of {size} bytes in all; at most {MAX_CHECKPOINT_BYTES} are allowed"
            )));
        }
        Ok(manifest)
    }
}

/// Whether a manifest may name this file.
fn is_checkpoint_file(name: &str) -> bool {
    name == STATE || checkpoint_files::kind_of(name).is_some()
}

#[cfg(test)]
mod tests;
