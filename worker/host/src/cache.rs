//! A cache on disk of compiled kernels, of the choice of convolution plans and of a machine's measured figures, for faster
//! starts. A package may have installed some of its files. Recreating a file takes seconds, so errors are only logged.
//!
//! A file consists of the SHA-256 of the content, and the content. The driver crashes on truncated or damaged machine code, so only
//! verified content is used. Because of the checksum, files need not be synced. Other modules have files of their own in [`dir`].

use crate::{lock_within, open_lock, write_atomically};
use lockstep_protocol::spec::KNOWN_WEIGHTS;
use sha2::{Digest, Sha256};
use std::{
    fmt::Display,
    fs::{self, File},
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

/// `$LOCKSTEP_CACHE`, or `lockstep` in the user's cache directory. `None` if no environment variable gives one of the two.
pub fn dir() -> Option<PathBuf> {
    let from = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    from("LOCKSTEP_CACHE")
        .or_else(|| from("XDG_CACHE_HOME").map(|d| d.join("lockstep")))
        .or_else(|| from("HOME").map(|d| d.join(".cache").join("lockstep")))
}

/// The file of the weights that `lockstep weights get NAME` downloads. `None` for unknown names, and without a cache directory.
pub fn weights(name: &str) -> Option<PathBuf> {
    Some(dir().filter(|_| KNOWN_WEIGHTS.contains(&name))?.join("weights").join(format!("{name}.safetensors")))
}

/// The path to which `model.pretrained` refers on this machine. The value is a path or the name of downloaded weights.
///
/// # Errors
/// The weights with this name have not been downloaded. The error is a sentence.
pub fn find_weights(given: &str) -> Result<PathBuf, String> {
    if !KNOWN_WEIGHTS.contains(&given) {
        return Ok(given.into());
    }
    let file = weights(given);
    let place = file.as_ref().map(|file| format!(" ({} does not exist)", file.display())).unwrap_or_default();
    file.filter(|file| file.is_file()).ok_or_else(|| {
        format!(
            "the weights of {given} have not been downloaded{place}; run `lockstep weights get {given}` on the machine that trains"
        )
    })
}

/// The folder `../share/lockstep/cache` beside the program's folder, where packages put compiled kernels. `None` if it
/// does not exist, as for a program that was built from source.
pub fn installed() -> Option<PathBuf> {
    let program = crate::own_program().ok()?;
    Some(program.parent()?.parent()?.join("share/lockstep/cache")).filter(|dir| dir.is_dir())
}

/// The content of `name`, if it exists and is undamaged. A damaged file is removed.
pub fn read(name: &str) -> Option<Vec<u8>> {
    read_file(&dir()?.join(name))
}

/// When `name` was written, if it exists.
pub fn modified(name: &str) -> Option<SystemTime> {
    fs::metadata(dir()?.join(name)).ok()?.modified().ok()
}

/// The content of `name` that was installed with the program, if it exists and is undamaged.
pub fn read_installed(name: &str) -> Option<Vec<u8>> {
    let path = installed()?.join(name);
    let content = content(fs::read(&path).ok()?);
    if content.is_none() {
        tracing::warn!("{}: it is damaged; install Lockstep again", path.display());
    }
    content
}

/// Writes `name` atomically. Several processes may write the same name at the same time.
pub fn write(name: &str, content: &[u8]) {
    let Some(dir) = dir() else { return };
    if let Err(error) = write_file(&dir, name, content) {
        tracing::warn!("{}: {error}; the next start has to create this file again", dir.join(name).display());
    }
}

/// Removes `name`, which is unusable for the reason `why`.
pub fn remove(name: &str, why: impl Display) {
    if let Some(dir) = dir() {
        remove_file(&dir.join(name), why);
    }
}

/// Locks `name` in `dir`, so that only one process at a time creates its content. `None` if there is no directory, or if
/// another process still holds the lock after `max_wait`.
pub fn lock(dir: Option<PathBuf>, name: &str, max_wait: Duration) -> Option<File> {
    let dir = dir?;
    fs::create_dir_all(&dir).ok()?;
    let file = open_lock(&dir.join(format!("{name}.lock"))).ok()?;
    lock_within(&file, max_wait).ok()?.then_some(file)
}

fn read_file(path: &Path) -> Option<Vec<u8>> {
    let file = match fs::read(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return None,
        Err(error) => {
            remove_file(path, error);
            return None;
        }
    };
    let content = content(file);
    if content.is_none() {
        remove_file(path, "it is damaged or of another version");
    }
    content
}

/// The content of a file without its checksum. `None` if the checksum is wrong.
fn content(mut file: Vec<u8>) -> Option<Vec<u8>> {
    let (sum, content) = file.split_at_checked(Sha256::output_size())?;
    if Sha256::digest(content).as_slice() != sum {
        return None;
    }
    file.drain(..Sha256::output_size());
    Some(file)
}

/// Writes `name` into `dir` as [`write`] does.
///
/// # Errors
/// The folder or the file cannot be written.
pub fn write_file(dir: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    write_atomically(&dir.join(name), &[Sha256::digest(content).as_slice(), content].concat())
}

fn remove_file(path: &Path, why: impl Display) {
    let removed = fs::remove_file(path).err().map(|error| format!(" (removing it failed: {error})"));
    tracing::info!("{}: {why}; it is created again{}", path.display(), removed.unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::mpsc, thread};

    #[test]
    fn one_process_creates_a_file_while_another_waits_and_reads_it() {
        let folder = tempfile::tempdir().unwrap();
        let (dir, path) = (folder.path(), folder.path().join("kernels"));
        let get = |create: &mut dyn FnMut() -> io::Result<Vec<u8>>| {
            let _one_at_a_time = lock(Some(dir.into()), "kernels", Duration::from_secs(60));
            read_file(&path).map_or_else(create, Ok).unwrap()
        };
        let (started, has_started) = mpsc::channel();
        let (also_created, is_also_created) = mpsc::channel();
        let get = &get;
        thread::scope(|scope| {
            let first = scope.spawn(move || {
                get(&mut || {
                    started.send(()).unwrap();
                    // A process that did not wait would create the file now.
                    assert!(
                        is_also_created.recv_timeout(Duration::from_millis(200)).is_err(),
                        "created twice"
                    );
                    write_file(dir, "kernels", b"machine code")?;
                    Ok(b"machine code".to_vec())
                })
            });
            has_started.recv().unwrap();
            let found = get(&mut || {
                also_created.send(()).unwrap();
                Ok(Vec::new())
            });
            assert_eq!((found, first.join().unwrap()), (b"machine code".to_vec(), b"machine code".to_vec()));
        });
    }

    #[test]
    fn a_damaged_file_is_removed_and_can_be_written_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kernels");
        let content = b"machine code".as_slice();
        write_file(dir.path(), "kernels", content).unwrap();
        assert_eq!(read_file(&path).as_deref(), Some(content));
        let whole = fs::read(&path).unwrap();
        let flipped = |at: usize| {
            let mut file = whole.clone();
            file[at] ^= 1;
            file
        };
        for (case, damaged) in [
            ("emptied", Vec::new()),
            ("truncated in its checksum", whole[..20].to_vec()),
            ("truncated after its checksum", whole[..32].to_vec()),
            ("truncated in the middle", whole[..whole.len() / 2].to_vec()),
            ("without its last byte", whole[..whole.len() - 1].to_vec()),
            ("longer", [&whole[..], &[0]].concat()),
            ("a flipped bit in its checksum", flipped(3)),
            ("a flipped bit in its first byte", flipped(32)),
            ("a flipped bit in its last byte", flipped(whole.len() - 1)),
            ("zeros, as after a power failure", vec![0; whole.len()]),
            ("without a checksum", content.to_vec()),
        ] {
            fs::write(&path, damaged).unwrap();
            assert_eq!(read_file(&path), None, "{case}");
            assert!(!path.exists(), "{case}: the file remains");
            assert_eq!(read_file(&path), None, "{case}: the file was removed");
            write_file(dir.path(), "kernels", content).unwrap();
            assert_eq!(read_file(&path).as_deref(), Some(content), "{case}");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "temporary files are left");
    }
}
