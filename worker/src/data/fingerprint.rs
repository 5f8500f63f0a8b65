//! Whether a dataset is still the one that it was: its files' names, sizes and content.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

/// Up to this much is read whole; of more, the beginning and the end of every file.
const WHOLE: u64 = 1 << 30;
const EDGE: u64 = 64 << 10;

/// Of a file, or of all files in a folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint {
    pub files: u64,
    pub bytes: u64,
    /// Hexadecimal.
    pub sha256: String,
}

impl Fingerprint {
    /// Looks at every file below `path`.
    ///
    /// # Errors
    /// Something cannot be read, or there is no file at all; the sentence names it.
    pub fn of(path: &Path) -> io::Result<Self> {
        let mut files = Vec::new();
        collect(path, &mut files)?;
        files.sort();
        let bytes = files.iter().map(|(_, size)| size).sum();
        if files.is_empty() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "there is no file in it"));
        }
        let mut hash = Sha256::new();
        for (file, size) in &files {
            let name = file.strip_prefix(path).unwrap_or(file);
            hash.update(name.as_os_str().as_encoded_bytes());
            hash.update([0]);
            hash.update(size.to_le_bytes());
            content(file, *size, bytes <= WHOLE, &mut hash).map_err(|e| named(file, &e))?;
        }
        let sha256 = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Self { files: files.len() as u64, bytes, sha256 })
    }
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

fn collect(path: &Path, files: &mut Vec<(PathBuf, u64)>) -> io::Result<()> {
    let found = fs::metadata(path).map_err(|e| named(path, &e))?;
    if !found.is_dir() {
        files.push((path.into(), found.len()));
        return Ok(());
    }
    for entry in fs::read_dir(path).map_err(|e| named(path, &e))? {
        collect(&entry?.path(), files)?;
    }
    Ok(())
}

fn content(path: &Path, size: u64, whole: bool, hash: &mut Sha256) -> io::Result<()> {
    let mut file = File::open(path)?;
    if whole || size <= 2 * EDGE {
        let mut block = vec![0; 1 << 18];
        loop {
            match file.read(&mut block)? {
                0 => return Ok(()),
                n => hash.update(&block[..n]),
            }
        }
    }
    let mut edge = vec![0; EDGE as usize];
    file.read_exact(&mut edge)?;
    hash.update(&edge);
    file.seek(SeekFrom::End(-(EDGE as i64)))?;
    file.read_exact(&mut edge)?;
    hash.update(&edge);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_sizes_and_content_count_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Fingerprint::of(dir.path()).is_err(), "an empty folder");
        assert!(Fingerprint::of(&dir.path().join("gone")).unwrap_err().to_string().contains("gone"));
        fs::create_dir(dir.path().join("a")).unwrap();
        fs::write(dir.path().join("a/x"), "one").unwrap();
        fs::write(dir.path().join("y"), "two").unwrap();
        let first = Fingerprint::of(dir.path()).unwrap();
        assert_eq!((first.files, first.bytes), (2, 6));
        // Written again, at another time, elsewhere.
        let other = tempfile::tempdir().unwrap();
        fs::write(other.path().join("y"), "two").unwrap();
        fs::create_dir(other.path().join("a")).unwrap();
        fs::write(other.path().join("a/x"), "one").unwrap();
        assert_eq!(Fingerprint::of(other.path()).unwrap(), first);
        fs::write(other.path().join("a/x"), "onE").unwrap();
        assert_ne!(Fingerprint::of(other.path()).unwrap(), first);
        fs::rename(dir.path().join("y"), dir.path().join("z")).unwrap();
        assert_ne!(Fingerprint::of(dir.path()).unwrap(), first);
    }
}
