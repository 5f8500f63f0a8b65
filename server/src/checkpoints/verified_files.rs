//! Files of checkpoints that were compared with their manifest: a disk may return other bytes than were written, as many as there were.

use crate::{
    checkpoints::manifest::{ManifestFile, verify},
    util::regular,
};
use std::{
    collections::HashSet,
    fs::Metadata,
    io,
    os::unix::fs::MetadataExt,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Files of which it is remembered that they were whole. Beyond, one may be read a second time.
const REMEMBERED: usize = 4096;

/// A file as it was when it was read: whoever writes into it changes its times, and whoever replaces it makes another one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Seen {
    file: (u64, u64),
    size_bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
    sha256: String,
}

impl Seen {
    fn of(about: &Metadata, sha256: &str) -> Self {
        Self {
            file: (about.dev(), about.ino()),
            size_bytes: about.size(),
            modified: (about.mtime(), about.mtime_nsec()),
            changed: (about.ctime(), about.ctime_nsec()),
            sha256: sha256.to_owned(),
        }
    }
}

/// What is remembered, so that a file is not read twice for each part of it that somebody asks for.
#[derive(Debug, Default)]
pub(crate) struct VerifiedFiles(Mutex<HashSet<Seen>>);

impl VerifiedFiles {
    fn lock(&self) -> MutexGuard<'_, HashSet<Seen>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a file has the bytes that its manifest says.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] says how it is damaged; it cannot be read for now.
    pub(crate) async fn check(&self, path: PathBuf, written: &ManifestFile) -> io::Result<()> {
        let about = tokio::fs::metadata(&path).await?;
        if self.lock().contains(&Seen::of(&about, &written.sha256)) {
            return Ok(());
        }
        let wanted = written.clone();
        let seen = move || {
            let file = regular::open(&path)?;
            // What changes while it is read is read again.
            let seen = Seen::of(&file.metadata()?, &wanted.sha256);
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            verify(file, &name, &wanted).map(|()| seen)
        };
        let seen = tokio::task::spawn_blocking(seen).await.map_err(io::Error::other)??;
        let mut known = self.lock();
        if known.len() >= REMEMBERED {
            known.clear();
        }
        known.insert(seen);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoints::manifest::sha256;
    use std::fs;

    #[tokio::test]
    async fn a_file_of_other_bytes_is_found_at_any_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        fs::write(&path, b"weights").unwrap();
        let written = ManifestFile { size_bytes: 7, sha256: sha256(b"weights") };
        let files = VerifiedFiles::default();
        let is_whole = async || match files.check(path.clone(), &written).await {
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
                false
            }
            Ok(()) => true,
        };
        assert!(is_whole().await && is_whole().await);
        // In place, by a program that sets the time back.
        let before = fs::metadata(&path).unwrap().modified().unwrap();
        fs::write(&path, b"wEights").unwrap();
        fs::File::options().write(true).open(&path).unwrap().set_modified(before).unwrap();
        assert!(!is_whole().await && !is_whole().await, "what is damaged is not remembered as whole");
        fs::write(&path, b"weights").unwrap();
        assert!(is_whole().await);
        fs::write(&path, b"weight").unwrap();
        assert!(!is_whole().await);
        fs::remove_file(&path).unwrap();
        assert_eq!(files.check(path, &written).await.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
