//! Compares the files of a checkpoint with its `MANIFEST.json`.

use crate::util::regular_files;
use lockstep_protocol::{checkpoint_files::folder_name, limits::MANIFEST_BYTES};
use rustix::io::Errno;
use sha2::{Digest, Sha256};
use std::{
    fs,
    io::{self, Read as _},
    path::Path,
};

pub(crate) use lockstep_protocol::checkpoint_files::{MANIFEST, Manifest, ManifestFile};

/// Parses the manifest of the checkpoint `name` (`<epoch>-<step>`).
///
/// # Errors
/// What is wrong with the manifest, as the predicate of a sentence.
pub(crate) fn parse(bytes: &[u8], name: &str) -> Result<Manifest, String> {
    if bytes.len() > MANIFEST_BYTES {
        return Err(format!("has more than {MANIFEST_BYTES} bytes"));
    }
    let manifest: Manifest =
        serde_json::from_slice(bytes).map_err(|error| format!("cannot be read ({error})"))?;
    let found = folder_name(manifest.epoch, manifest.step);
    if found == name { Ok(manifest) } else { Err(format!("belongs to checkpoint {found}")) }
}

/// The hexadecimal SHA-256 of `bytes`.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// Whether an error means that the data on a disk is permanently lost: a bad sector or corrupt metadata. Other errors may be temporary, or
/// may not concern the data.
pub(crate) fn is_media_error(error: &io::Error) -> bool {
    const LASTING: [Errno; 4] = [Errno::IO, Errno::NODATA, Errno::BADMSG, Errno::UCLEAN];
    error.raw_os_error().is_some_and(|number| LASTING.iter().any(|lasting| lasting.raw_os_error() == number))
}

/// Compares the bytes of a file with the manifest while the file is read or copied.
#[derive(Debug, Default)]
pub(crate) struct Verifier {
    hash: Sha256,
    pub(crate) size_bytes: u64,
}

impl Verifier {
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.hash.update(bytes);
        self.size_bytes += bytes.len() as u64;
    }

    /// Compares the size and checksum of the bytes with those of the manifest.
    ///
    /// # Errors
    /// The bytes differ. The text describes the difference.
    pub(crate) fn finish(self, name: &str, expected: &ManifestFile) -> Result<(), String> {
        if self.size_bytes != expected.size_bytes {
            return Err(format!(
                "its {name} has {} bytes and was written with {}",
                self.size_bytes, expected.size_bytes
            ));
        }
        if hex::encode(self.hash.finalize()) != expected.sha256 {
            return Err(format!("the bytes of its {name} are not those that were written"));
        }
        Ok(())
    }
}

fn damage_error(detail: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, detail)
}

/// Checks that a file has the size and checksum of its manifest.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] if the file is damaged or permanently unreadable.
pub(crate) fn verify(mut file: fs::File, name: &str, expected: &ManifestFile) -> io::Result<()> {
    let (mut verifier, mut block) = (Verifier::default(), vec![0; 1 << 18]);
    loop {
        let bytes = match file.read(&mut block) {
            Err(error) if is_media_error(&error) => {
                return Err(damage_error(format!("its {name} cannot be read ({error})")));
            }
            bytes => bytes?,
        };
        if bytes == 0 {
            return verifier.finish(name, expected).map_err(damage_error);
        }
        verifier.add(&block[..bytes]);
    }
}

/// Checks that all files of a checkpoint match its manifest.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] if a file is missing, damaged or permanently unreadable. The text names the file.
pub(crate) fn verify_checkpoint(folder: &Path) -> io::Result<()> {
    let manifest = regular_files::read_blocking(&folder.join(MANIFEST))
        .and_then(|bytes| Ok(serde_json::from_slice::<Manifest>(&bytes)?))
        .map_err(|error| damage_error(format!("its {MANIFEST} cannot be read ({error})")))?;
    for (name, expected) in &manifest.files {
        match regular_files::open(&folder.join(name)) {
            Ok(file) if Path::new(name).file_name() == Some(name.as_ref()) => verify(file, name, expected)?,
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                return Err(damage_error(format!("its {name} {error}")));
            }
            _ => return Err(damage_error(format!("its {name} is missing"))),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_errors_of_the_disk_are_media_errors() {
        for (number, is_lost) in [
            // EIO, ENODATA, EBADMSG, EUCLEAN.
            (5, true),
            (61, true),
            (74, true),
            (117, true),
            // EINTR, EACCES, EMFILE, ENOSPC, ETIMEDOUT, ESTALE.
            (4, false),
            (13, false),
            (24, false),
            (28, false),
            (110, false),
            (116, false),
        ] {
            assert_eq!(is_media_error(&io::Error::from_raw_os_error(number)), is_lost, "{number}");
        }
        assert!(!is_media_error(&io::ErrorKind::NotFound.into()));
    }
}
