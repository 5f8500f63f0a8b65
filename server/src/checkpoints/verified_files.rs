//! Remembers which files of checkpoints were verified by checksum. A comparison of sizes would not find wrong bytes that a disk returns.

use crate::{
    checkpoints::manifest::{ManifestFile, verify},
    util::{blocking, lock, regular_files, remember},
};
use std::{collections::HashSet, fs::Metadata, io, os::unix::fs::MetadataExt, path::PathBuf, sync::Mutex};

/// The identity of a file when it was read. Writing into a file changes its times, and replacing a file changes the inode. Times are in
/// seconds and nanoseconds.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct FileIdentity {
    /// Device and inode.
    file: (u64, u64),
    size_bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
    sha256: String,
}

impl FileIdentity {
    fn of(metadata: &Metadata, sha256: &str) -> Self {
        Self {
            file: (metadata.dev(), metadata.ino()),
            size_bytes: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
            sha256: sha256.to_owned(),
        }
    }
}

/// The verified files, so that a file is not read again for each requested part.
#[derive(Debug, Default)]
pub(crate) struct VerifiedFiles(Mutex<HashSet<FileIdentity>>);

impl VerifiedFiles {
    /// Checks that a file has the size and checksum of its manifest.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if the file is damaged; the text says how. Other errors if the file cannot be read now.
    pub(crate) async fn check(&self, path: PathBuf, expected: &ManifestFile) -> io::Result<()> {
        let metadata = tokio::fs::metadata(&path).await?;
        if lock(&self.0).contains(&FileIdentity::of(&metadata, &expected.sha256)) {
            return Ok(());
        }
        let expected = expected.clone();
        let verify = move || {
            let file = regular_files::open(&path)?;
            // Taken before reading, so that a file which changes while it is read is verified again.
            let identity = FileIdentity::of(&file.metadata()?, &expected.sha256);
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            verify(file, &name, &expected).map(|()| identity)
        };
        remember(&self.0, blocking(verify).await?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoints::manifest::sha256;
    use std::fs;

    #[tokio::test]
    async fn changed_files_are_always_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        fs::write(&path, b"weights").unwrap();
        let written = ManifestFile { size_bytes: 7, sha256: sha256(b"weights") };
        let files = VerifiedFiles::default();
        let is_undamaged = async || match files.check(path.clone(), &written).await {
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
                false
            }
            Ok(()) => true,
        };
        assert!(is_undamaged().await && is_undamaged().await);
        // The content changes but not the modification time.
        let before = fs::metadata(&path).unwrap().modified().unwrap();
        fs::write(&path, b"wEights").unwrap();
        fs::File::options().write(true).open(&path).unwrap().set_modified(before).unwrap();
        assert!(!is_undamaged().await && !is_undamaged().await, "damaged files are checked again");
        fs::write(&path, b"weights").unwrap();
        assert!(is_undamaged().await);
        fs::write(&path, b"weight").unwrap();
        assert!(!is_undamaged().await);
        fs::remove_file(&path).unwrap();
        assert_eq!(files.check(path, &written).await.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
