//! What a checkpoint's `MANIFEST.json` says of its files, and whether they are those.

use rustix::io::Errno;
use sha2::{Digest, Sha256};
use std::{
    fs,
    io::{self, Read as _},
    path::Path,
};

pub(crate) use lockstep_protocol::checkpoint_files::{MANIFEST, Manifest, ManifestFile};

/// The hexadecimal SHA-256 of `bytes`.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// Whether a disk cannot return what was written, and will not be able to later either: a bad sector, or metadata that is corrupt. Other errors
/// may pass, or are of something else.
pub(crate) fn is_media_error(error: &io::Error) -> bool {
    const LASTING: [Errno; 4] = [Errno::IO, Errno::NODATA, Errno::BADMSG, Errno::UCLEAN];
    error.raw_os_error().is_some_and(|number| LASTING.iter().any(|of| of.raw_os_error() == number))
}

/// Whether the files of a checkpoint are those that its manifest names.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] says which one is not, or can never be read again.
pub(crate) fn check_whole(folder: &Path) -> io::Result<()> {
    let damaged = |detail: String| io::Error::new(io::ErrorKind::InvalidData, detail);
    let text = fs::read(folder.join(MANIFEST))
        .map_err(|e| damaged(format!("its MANIFEST.json cannot be read ({e})")))?;
    let manifest: Manifest = serde_json::from_slice(&text)
        .map_err(|e| damaged(format!("its MANIFEST.json cannot be read ({e})")))?;
    for (name, wanted) in &manifest.files {
        let mut file = match fs::File::open(folder.join(name)) {
            Ok(file) if Path::new(name).file_name() == Some(name.as_ref()) => file,
            _ => return Err(damaged(format!("its {name} is missing"))),
        };
        let (mut hash, mut size, mut block) = (Sha256::new(), 0, vec![0; 1 << 18]);
        loop {
            let n = file.read(&mut block).map_err(|error| match is_media_error(&error) {
                true => damaged(format!("its {name} cannot be read ({error})")),
                false => error,
            })?;
            if n == 0 {
                break;
            }
            hash.update(&block[..n]);
            size += n as u64;
        }
        if size != wanted.size_bytes {
            return Err(damaged(format!(
                "its {name} has {size} bytes and was written with {}",
                wanted.size_bytes
            )));
        }
        if hex::encode(hash.finalize()) != wanted.sha256 {
            return Err(damaged(format!("the bytes of its {name} are not those that were written")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_disk_has_lost_is_damage_and_what_may_pass_is_not() {
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
