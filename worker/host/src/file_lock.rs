//! Locks of files between processes (`flock(2)`): the kernel gives one back when the last process that has the file open ends.

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};
use std::{
    fs::File,
    io,
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// How often a lock is tried. `flock` can wait by itself, but not for a limited time.
const TRY_EVERY: Duration = Duration::from_millis(20);

/// Opens `path`, which is made if it is not there. Nothing is written to it.
///
/// # Errors
/// Those of the file system.
pub fn open_lock(path: &Path) -> io::Result<File> {
    File::options().create(true).append(true).open(path)
}

/// Locks `file` for whoever has it open, and waits at most `within` for another process that has it locked. False: that one still has it.
///
/// # Errors
/// Those of `flock(2)`. Some network file systems have no locks.
pub fn lock_within(file: &File, within: Duration) -> io::Result<bool> {
    let until = Instant::now() + within;
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(true),
            Err(Errno::WOULDBLOCK) if Instant::now() < until => thread::sleep(TRY_EVERY),
            Err(Errno::WOULDBLOCK) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_one_s_own_until_its_file_is_closed_and_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let first = open_lock(&path).unwrap();
        assert!(lock_within(&first, Duration::ZERO).unwrap());
        let second = open_lock(&path).unwrap();
        assert!(!lock_within(&second, Duration::ZERO).unwrap());
        let began = Instant::now();
        assert!(!lock_within(&second, 2 * TRY_EVERY).unwrap());
        assert!(began.elapsed() >= 2 * TRY_EVERY);
        let waiting = thread::spawn(move || lock_within(&second, Duration::from_secs(60)).unwrap());
        drop(first);
        assert!(waiting.join().unwrap());
    }
}
