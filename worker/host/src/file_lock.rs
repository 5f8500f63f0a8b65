//! File locks between processes (`flock(2)`). The kernel releases a lock when the last handle of the opened file is
//! closed, at the latest when its processes end.

use std::{
    fs::{File, TryLockError},
    io,
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// Interval between two attempts. `flock` can wait for a lock, but not for a limited time.
const TRY_EVERY: Duration = Duration::from_millis(20);

/// Opens `path` without writing to it, and creates it if it does not exist.
///
/// # Errors
/// The errors of the file system.
pub fn open_lock(path: &Path) -> io::Result<File> {
    File::options().create(true).append(true).open(path)
}

/// Locks `file`. Returns false if another process still holds the lock after `max_wait`.
///
/// # Errors
/// The errors of `flock(2)`. Some network file systems do not support locks.
pub fn lock_within(file: &File, max_wait: Duration) -> io::Result<bool> {
    let until = Instant::now() + max_wait;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(true),
            Err(TryLockError::WouldBlock) if Instant::now() < until => thread::sleep(TRY_EVERY),
            Err(TryLockError::WouldBlock) => return Ok(false),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_exclusive_until_its_file_is_closed_and_waiters_then_get_it() {
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
