//! Files in PEM format: certificates, keys and revocation lists.

use rustls::pki_types::{CertificateDer, pem::PemObject};
use std::{fs::File, io::Read, os::unix::fs::MetadataExt, path::Path};

/// Maximum size of a file. A chain has a few kilobytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Who may read a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Readers {
    Anybody,
    /// Only the file's owner, so its mode is `0600`. A group may also read a file of root (`0640`), as with Debian's group `ssl-cert`.
    Owner,
}

/// Reads a file or a pipe.
///
/// # Errors
/// The file cannot be read, is too long, or can be read by more users than `readers`.
pub(crate) fn read(path: &Path, readers: Readers) -> Result<Vec<u8>, String> {
    let shown = path.display();
    let failed = |error: std::io::Error| format!("{shown}: {error}");
    let file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    let forbidden_mode = if metadata.uid() == 0 { 0o037 } else { 0o077 };
    if readers == Readers::Owner && metadata.mode() & forbidden_mode != 0 {
        return Err(format!(
            "the key {shown} can be read by others (mode {:04o}); run `chmod 600 {shown}`",
            metadata.mode() & 0o7777
        ));
    }
    let mut content = Vec::new();
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut content).map_err(failed)?;
    if content.len() as u64 > MAX_FILE_BYTES {
        return Err(format!("{shown} has more than {} KiB", MAX_FILE_BYTES >> 10));
    }
    Ok(content)
}

/// Parses the content of a file. Returns the objects of type `T`, at least one; `what` describes them in an error.
pub(crate) fn parse_objects<T: PemObject>(path: &Path, content: &[u8], what: &str) -> Result<Vec<T>, String> {
    let objects: Result<Vec<T>, _> = T::pem_slice_iter(content).collect();
    match objects {
        Ok(objects) if !objects.is_empty() => Ok(objects),
        Ok(_) => Err(format!("{} has no {what}", path.display())),
        Err(error) => Err(format!("{} cannot be read as PEM: {error}", path.display())),
    }
}

/// Reads the certificates of a file, at least one.
pub(crate) fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    parse_objects(path, &read(path, Readers::Anybody)?, "certificate (PEM, \"BEGIN CERTIFICATE\")")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{io::Write as _, os::fd::AsRawFd as _};

    #[test]
    fn a_key_is_read_from_a_pipe() {
        let (reader, mut writer) = std::io::pipe().unwrap();
        writer.write_all(b"key").unwrap();
        drop(writer);
        let path = format!("/proc/self/fd/{}", reader.as_raw_fd());
        assert_eq!(read(Path::new(&path), Readers::Owner).unwrap(), b"key");
    }

    #[test]
    fn files_of_more_than_one_mebibyte_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("chain.pem");
        std::fs::write(&path, vec![b'#'; MAX_FILE_BYTES as usize]).unwrap();
        assert_eq!(read(&path, Readers::Anybody).unwrap().len() as u64, MAX_FILE_BYTES);
        std::fs::write(&path, vec![b'#'; MAX_FILE_BYTES as usize + 1]).unwrap();
        let why = read(&path, Readers::Anybody).unwrap_err();
        assert!(why.contains("chain.pem has more than 1024 KiB"), "{why}");
    }
}
