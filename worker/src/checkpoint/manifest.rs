//! The manifest of a checkpoint: sizes and checksums that reveal damage.

use super::{CheckpointError, MANIFEST, STATE, files::on_threads, folders::name_of};
pub use lockstep_protocol::checkpoint_files::{Files, Manifest, ManifestFile};
use lockstep_protocol::{checkpoint_files, limits::STATE_FILE_BYTES};
use sha2::{Digest, Sha256};
use std::{
    fs::{self, File},
    io::{self, Read},
    path::Path,
};

/// The size of all files of a checkpoint in bytes, including the manifest.
pub(super) fn size_of(folder: &Path, manifest: &Manifest) -> u64 {
    let manifest_size = fs::metadata(folder.join(MANIFEST)).map_or(0, |m| m.len());
    manifest.files.values().map(|f| f.size_bytes).sum::<u64>() + manifest_size
}

/// Checks every file of a checkpoint against the manifest.
///
/// # Errors
/// [`CheckpointError::Missing`]: the folder does not exist. [`CheckpointError::Damaged`]: a file is missing or differs.
/// [`CheckpointError::Io`]: a file cannot be read now, and the checkpoint may be intact.
pub fn validate(folder: &Path) -> Result<Manifest, CheckpointError> {
    let (name, manifest) = read_manifest(folder)?;
    let check = |(file, expected): (&String, &ManifestFile)| {
        if Path::new(file).file_name() != Some(file.as_ref()) {
            let detail = format!("{MANIFEST} names {file:?}, which is not a plain file name");
            return Err(CheckpointError::Damaged { name: name.clone(), detail });
        }
        check_file(folder, &name, file, expected)
    };
    on_threads(manifest.files.iter(), check).into_iter().collect::<Result<(), _>>()?;
    Ok(manifest)
}

/// Reads the name and the manifest of a checkpoint. Fails unless the manifest names every required file.
pub(super) fn read_manifest(folder: &Path) -> Result<(String, Manifest), CheckpointError> {
    let name = name_of(folder);
    let damaged = |detail: String| CheckpointError::Damaged { name: name.clone(), detail };
    let json = fs::read(folder.join(MANIFEST)).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound if !folder.exists() => {
            CheckpointError::Missing { name: name.clone(), path: folder.into() }
        }
        _ => read_error(folder, &name, MANIFEST, e),
    })?;
    let manifest: Manifest =
        serde_json::from_slice(&json).map_err(|e| damaged(format!("{MANIFEST}: {e}")))?;
    if manifest.version != 1 {
        return Err(damaged(format!(
            "{MANIFEST} has version {}, and this program reads version 1",
            manifest.version
        )));
    }
    if let Some(missing) = checkpoint_files::first_missing(|name| manifest.files.contains_key(name)) {
        return Err(damaged(format!("{MANIFEST} does not name {missing}")));
    }
    // The state file is read into memory, and may come from another machine.
    let state_bytes = manifest.files.get(STATE).map_or(0, |file| file.size_bytes);
    if state_bytes > STATE_FILE_BYTES {
        let detail = format!("{STATE} has {state_bytes} bytes; at most {STATE_FILE_BYTES} are allowed");
        return Err(damaged(detail));
    }
    Ok((name, manifest))
}

/// Compares a file with its entry in the manifest.
pub(super) fn check_file(
    folder: &Path,
    name: &str,
    file: &str,
    expected: &ManifestFile,
) -> Result<(), CheckpointError> {
    let damaged = |detail: String| Err(CheckpointError::Damaged { name: name.into(), detail });
    let found = checksum(&folder.join(file)).map_err(|e| read_error(folder, name, file, e))?;
    if found.size_bytes != expected.size_bytes {
        return damaged(format!(
            "{file} has {} bytes, but {} were written",
            found.size_bytes, expected.size_bytes
        ));
    }
    if found.sha256 != expected.sha256 {
        return damaged(format!("{file}: its checksum does not match"));
    }
    Ok(())
}

/// The error for a file that cannot be read. A missing file, or an entry that is not a file, is damage. Any other I/O error (a
/// network file system that does not respond, too many open files) may be temporary and says nothing about the stored content,
/// so the checkpoint must be kept.
fn read_error(folder: &Path, name: &str, file: &str, error: io::Error) -> CheckpointError {
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::IsADirectory | io::ErrorKind::NotADirectory => {
            CheckpointError::Damaged { name: name.into(), detail: format!("{file}: {error}") }
        }
        _ => CheckpointError::Io { path: folder.join(file), error },
    }
}

/// The size and SHA-256 of a file.
pub(super) fn checksum(path: &Path) -> io::Result<ManifestFile> {
    let mut file = File::open(path)?;
    let mut hash = Sha256::new();
    let mut size_bytes = 0;
    let mut block = vec![0; 1 << 18];
    loop {
        match file.read(&mut block)? {
            0 => break,
            n => {
                hash.update(&block[..n]);
                size_bytes += n as u64;
            }
        }
    }
    Ok(ManifestFile { size_bytes, sha256: hex::encode(hash.finalize()) })
}
