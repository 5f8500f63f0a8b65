//! The lock of an `--out` folder: two runs in one folder would overwrite each other's checkpoints.

use super::super::{output, wrong};
use rustix::{
    fs::{FlockOperation, flock},
    io::{Errno, FdFlags, fcntl_setfd},
};
use std::{
    fs::File,
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// The file in the folder that is locked.
const LOCK: &str = "train.lock";
/// For the threads of a run that was just killed: they may hold the lock a moment longer than `ps` shows it.
const PATIENCE: Duration = Duration::from_secs(1);
const AGAIN: Duration = Duration::from_millis(20);

/// A locked folder, until this is dropped and every process that inherited it has ended.
pub(super) struct OutLock {
    _file: File,
}

impl OutLock {
    /// Locks `out`. Processes that this one starts inherit the lock: ranks train on when this process is killed, and the
    /// folder stays locked until they have ended.
    ///
    /// # Errors
    /// Another run is using the folder, or it cannot be written.
    pub(super) fn take(out: &Path) -> anyhow::Result<Self> {
        let path = out.join(LOCK);
        let unusable = |e: &dyn std::fmt::Display| wrong(format!("--out: {}: {e}", path.display()));
        let file = File::options().create(true).append(true).open(&path).map_err(|e| unusable(&e))?;
        let until = Instant::now() + PATIENCE;
        let mut locked = flock(&file, FlockOperation::NonBlockingLockExclusive);
        while locked == Err(Errno::WOULDBLOCK) && Instant::now() < until {
            thread::sleep(AGAIN);
            locked = flock(&file, FlockOperation::NonBlockingLockExclusive);
        }
        match locked {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                return Err(wrong(format!(
                    "--out: another `lockstep train`, or ranks that one has left, are using {}: they hold {}. Wait \
                     until they end, or give another --out",
                    out.display(),
                    path.display()
                )));
            }
            // Some network file systems have no locks.
            Err(error) => output::warn(format_args!(
                "{} cannot be locked ({error}): see that no other run uses this folder",
                path.display()
            )),
        }
        fcntl_setfd(&file, FdFlags::empty()).map_err(|e| unusable(&e))?;
        Ok(Self { _file: file })
    }
}
