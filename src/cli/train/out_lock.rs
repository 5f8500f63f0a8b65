//! The lock of an `--out` folder: two runs in one folder would overwrite each other's checkpoints.

use super::super::{output, usage_error};
use lockstep_host::{lock_within, open_lock};
use lockstep_protocol::numbers::nouns;
use rustix::io::{FdFlags, fcntl_setfd};
use std::{
    fs::{self, File},
    path::Path,
    time::Duration,
};

/// Name of the locked file in the folder.
const LOCK: &str = "train.lock";
/// Time for the threads of a killed run to exit: they may hold the lock after the process has disappeared from `ps`.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// A locked folder. The lock is held until this value is dropped and every process that inherited the lock has exited.
pub(super) struct OutLock {
    _file: File,
}

impl OutLock {
    /// Locks `out`. Child processes inherit the lock: if this process is killed, its ranks train on, and the folder stays locked until they
    /// have exited.
    ///
    /// # Errors
    /// Another run uses the folder, or the folder cannot be written.
    pub(super) fn take(out: &Path) -> anyhow::Result<Self> {
        let path = out.join(LOCK);
        let unusable = |e: &dyn std::fmt::Display| usage_error(format!("--out: {}: {e}", path.display()));
        let file = open_lock(&path).map_err(|e| unusable(&e))?;
        match lock_within(&file, LOCK_TIMEOUT) {
            Ok(true) => {}
            Ok(false) => {
                let holders = match &find_holders(&path, std::process::id())[..] {
                    [] => "another process".to_owned(),
                    pids => format!("{} {}", nouns(pids.len() as u64, "process"), pids.join(", ")),
                };
                return Err(usage_error(format!(
                    "--out: {} is in use: {} is held by {holders}. Another `lockstep train`, or the ranks of a killed \
                     `lockstep train`, use the folder. Wait until they end, end them with `kill`, or give another --out",
                    out.display(),
                    path.display()
                )));
            }
            // Some network file systems do not support locks.
            Err(error) => output::warn(format_args!(
                "{} cannot be locked ({error}): make sure that no other run uses this folder",
                path.display()
            )),
        }
        fcntl_setfd(&file, FdFlags::empty()).map_err(|e| unusable(&e))?;
        Ok(Self { _file: file })
    }
}

/// Returns the ids of this account's processes on this machine that have `path` open, except `own_pid`. The lock's record in /proc/locks
/// names only the process that took the lock, which may have ended.
fn find_holders(path: &Path, own_pid: u32) -> Vec<String> {
    let is_open = |pid: &u32| {
        let mut files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        files.any(|file| fs::read_link(file.path()).is_ok_and(|target| target == path))
    };
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|process| process.file_name().into_string().ok()?.parse::<u32>().ok());
    pids.filter(|pid| *pid != own_pid).filter(is_open).map(|pid| pid.to_string()).collect()
}
