//! Files of checkpoints that were compared with their manifest: a disk may return other bytes than were written, as many as there were.

use crate::{checkpoints::manifest::ManifestFile, util::regular};
use sha2::{Digest, Sha256};
use std::{
    collections::HashSet,
    fs::Metadata,
    io::{self, Read as _},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Files of which it is remembered that they were whole. Beyond, one may be read a second time.
const REMEMBERED: usize = 4096;
/// Bytes that are read at a time.
const BLOCK: usize = 1 << 18;

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
    /// It cannot be read.
    pub(crate) async fn is_whole(&self, path: PathBuf, written: &ManifestFile) -> io::Result<bool> {
        let about = tokio::fs::metadata(&path).await?;
        if self.lock().contains(&Seen::of(&about, &written.sha256)) {
            return Ok(true);
        }
        let (seen, sha256) =
            tokio::task::spawn_blocking(move || read(&path)).await.map_err(io::Error::other)??;
        let seen = Seen::of(&seen, &written.sha256);
        if seen.size_bytes != written.size_bytes || sha256 != written.sha256 {
            return Ok(false);
        }
        let mut known = self.lock();
        if known.len() >= REMEMBERED {
            known.clear();
        }
        known.insert(seen);
        Ok(true)
    }
}

/// The checksum of a file, and what it was before it was read: what changes meanwhile is read again.
fn read(path: &Path) -> io::Result<(Metadata, String)> {
    let mut file = regular::open(path)?;
    let about = file.metadata()?;
    let (mut hash, mut block) = (Sha256::new(), vec![0; BLOCK]);
    loop {
        let n = file.read(&mut block)?;
        if n == 0 {
            return Ok((about, hex::encode(hash.finalize())));
        }
        hash.update(&block[..n]);
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
        let is_whole = async || files.is_whole(path.clone(), &written).await.unwrap();
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
        assert!(files.is_whole(path, &written).await.is_err());
    }
}
