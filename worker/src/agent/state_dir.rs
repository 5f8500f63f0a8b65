//! The agent's own folder: the agent's identity, and its attempts.
//!
//! ```text
//! <dir>/agent_id                       created once
//! <dir>/agent.lock                     locked while an agent uses the folder
//! <dir>/server                         the path of the server's lock file, if the server is on this machine
//! <dir>/attempts/<job>-<attempt>.json  an attempt whose end the server has not acknowledged
//! <dir>/jobs/<job>/                    job folders, if the server's disk is not shared (place.rs)
//! ```

use lockstep_host::{write_atomically, write_private};
use lockstep_protocol::agent::{AttemptRef, StartAttempt};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File, TryLockError},
    io::{self, Seek, Write},
    path::{Path, PathBuf},
};

/// Size of a probe file: more than an attempt and its ranks write at the start.
const PROBE_BYTES: usize = 64 << 10;

/// The agent's folder, locked for this process.
#[derive(Debug)]
pub struct StateDir {
    dir: PathBuf,
    agent_id: String,
    _lock: File,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StoredAttempt {
    pub start: StartAttempt,
    pub job_dir: PathBuf,
}

impl StoredAttempt {
    pub fn attempt_dir(&self) -> PathBuf {
        self.job_dir.join("attempts").join(self.start.attempt.folder_name())
    }

    pub fn checkpoints_dir(&self) -> PathBuf {
        self.job_dir.join("checkpoints")
    }
}

impl StateDir {
    /// Creates or opens the folder, and locks it until this process ends.
    ///
    /// # Errors
    /// The folder cannot be created, read or written, or another agent uses it.
    pub fn open(dir: &Path) -> Result<Self, String> {
        fn failed(path: &Path) -> impl Fn(io::Error) -> String + '_ {
            move |error| format!("the agent's folder {}: {error}", path.display())
        }
        fs::create_dir_all(dir.join("attempts")).map_err(failed(dir))?;
        let dir = dir.canonicalize().map_err(failed(dir))?;
        let lock_path = dir.join("agent.lock");
        let mut lock = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&lock_path)
            .map_err(failed(&lock_path))?;
        match lock.try_lock() {
            Ok(()) => {
                // Even if the disk is full, an agent can take over the ranks of the previous agent.
                let noted = lock.set_len(0).and_then(|()| lock.rewind());
                if let Err(error) = noted.and_then(|()| write!(lock, "{}", std::process::id())) {
                    tracing::warn!(%error, path = %lock_path.display(), "the process id cannot be written to the lock file");
                }
            }
            Err(TryLockError::WouldBlock) => {
                let process = pid_in(&lock).map(|pid| format!(" (process {pid})")).unwrap_or_default();
                return Err(format!(
                    "the agent's folder {} is in use by another agent{process}; stop that agent, or choose another folder with \
                     --data-dir",
                    dir.display()
                ));
            }
            Err(TryLockError::Error(error)) => return Err(failed(&lock_path)(error)),
        }
        let agent_id = agent_id(&dir).map_err(failed(&dir.join("agent_id")))?;
        Ok(Self { dir, agent_id, _lock: lock })
    }

    /// The id shared by all agents that use this folder, one after the other. Created once.
    pub fn agent_id(&self) -> &str {
        &self.agent_id
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The folder of a job for which the server did not name a folder.
    pub fn job_dir(&self, attempt: &AttemptRef) -> PathBuf {
        self.dir.join("jobs").join(attempt.job.as_str())
    }

    /// Checks that attempts can be stored, and their folders created. Otherwise the agent could only decline jobs.
    ///
    /// # Errors
    /// The file system's error.
    pub fn probe(&self) -> io::Result<()> {
        for folder in ["attempts", "jobs"] {
            let folder = self.dir.join(folder);
            fs::create_dir_all(&folder)?;
            let probe = folder.join("probe");
            write_private(&probe, &[0; PROBE_BYTES]).and_then(|()| fs::remove_file(&probe))?;
        }
        Ok(())
    }

    /// Stores an attempt, before any of its ranks is started.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn store(&self, stored: &StoredAttempt) -> io::Result<()> {
        write_private(&attempt_path(&self.dir, &stored.start.attempt), &serde_json::to_vec_pretty(stored)?)
    }

    /// Deletes a stored attempt after the server has all of its records or refuses them.
    pub fn forget(&self, attempt: &AttemptRef) {
        let path = attempt_path(&self.dir, attempt);
        if let Err(error) = fs::remove_file(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, path = %path.display(), "the file of an ended attempt cannot be removed");
        }
    }

    pub fn stored_attempts(&self) -> Vec<StoredAttempt> {
        let stored = attempt_files(&self.dir).filter_map(|(path, read)| {
            read.inspect_err(|error| {
                tracing::warn!(%error, path = %path.display(), "the file of an attempt cannot be read, or is not of this version; it is skipped");
            })
            .ok()
        });
        let mut all: Vec<_> = stored.collect();
        all.sort_by_key(|stored| stored.start.attempt.fencing_token);
        all
    }

    /// Records which file the server keeps locked, if the file is locked on this machine. Otherwise the server is on
    /// another machine, and the record is removed.
    pub fn record_server(&self, lock: Option<&Path>) {
        let note = self.dir.join("server");
        let local_lock = lock.filter(|lock| is_locked(lock) == Some(true));
        let noted = match local_lock {
            Some(lock) if fs::read(&note).is_ok_and(|old| old == lock.as_os_str().as_encoded_bytes()) => {
                Ok(())
            }
            Some(lock) => write_atomically(&note, lock.as_os_str().as_encoded_bytes()),
            None => fs::remove_file(&note).or_else(|e| match e.kind() {
                io::ErrorKind::NotFound => Ok(()),
                _ => Err(e),
            }),
        };
        if let Err(error) = noted {
            tracing::warn!(%error, "the path of the server's lock file cannot be stored");
        }
    }

    /// Whether the server of the last connection, which ran on this machine, holds its lock. If it does not, it has
    /// certainly ended. A refused connection proves less, because the connection may go through a tunnel. `None` if the
    /// server is on another machine.
    pub fn server_holds_lock(&self) -> Option<bool> {
        is_locked(Path::new(&fs::read_to_string(self.dir.join("server")).ok()?))
    }
}

/// The file of a stored attempt in an agent's folder.
pub(super) fn attempt_path(dir: &Path, attempt: &AttemptRef) -> PathBuf {
    dir.join("attempts").join(format!("{}-{}.json", attempt.job, attempt.folder_name()))
}

/// The files of attempts in an agent's folder, with the result of reading each.
fn attempt_files(dir: &Path) -> impl Iterator<Item = (PathBuf, io::Result<StoredAttempt>)> {
    let entries = fs::read_dir(dir.join("attempts")).into_iter().flatten().flatten();
    let paths =
        entries.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "json"));
    paths.map(|path| {
        let read = fs::read(&path).and_then(|json| Ok(serde_json::from_slice(&json)?));
        (path, read)
    })
}

/// The attempts in the folder of a running agent. Any of them may disappear at any moment.
pub(super) fn current_attempts(dir: &Path) -> impl Iterator<Item = StoredAttempt> {
    attempt_files(dir).filter_map(|(_, read)| read.ok())
}

/// The id of the agents that use a folder. It is created if there is none.
///
/// # Errors
/// The folder cannot be created, or the file cannot be read or written.
pub fn agent_id(dir: &Path) -> io::Result<String> {
    fs::create_dir_all(dir)?;
    let path = dir.join("agent_id");
    match fs::read_to_string(&path) {
        Ok(id) if !id.trim().is_empty() => return Ok(id.trim().to_owned()),
        Ok(_) => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(e),
    }
    let id = uuid::Uuid::new_v4().simple().to_string();
    write_atomically(&path, id.as_bytes())?;
    Ok(id)
}

/// Whether a process has locked a file. `None` if there is no such file.
fn is_locked(path: &Path) -> Option<bool> {
    match File::open(path).ok()?.try_lock_shared() {
        Ok(()) => Some(false),
        Err(TryLockError::WouldBlock) => Some(true),
        Err(TryLockError::Error(_)) => None,
    }
}

/// The process id of the agent that uses `dir` now.
pub fn running_agent(dir: &Path) -> Option<i32> {
    let lock = File::open(dir.join("agent.lock")).ok()?;
    match lock.try_lock_shared() {
        Err(TryLockError::WouldBlock) => pid_in(&lock),
        _ => None,
    }
}

fn pid_in(lock: &File) -> Option<i32> {
    io::read_to_string(lock).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::wait_until;

    /// The server's database was restored, and the server uses the attempt's number again.
    #[test]
    fn two_attempts_with_one_number_have_separate_folders() {
        let dir = tempfile::tempdir().unwrap();
        let state_dir = StateDir::open(dir.path()).unwrap();
        let job = lockstep_protocol::JobId::generate();
        let stored = [7u128, 8].map(|secret| {
            let fencing_token = lockstep_protocol::agent::FencingToken { number: 2, secret: secret << 96 };
            let start: StartAttempt = serde_json::from_value(serde_json::json!({
                "attempt": AttemptRef { job: job.clone(), attempt: 2, fencing_token },
                "spec": lockstep_protocol::JobSpec::default(), "dataset_path": "/none", "world_size": 1, "ranks": [[0, 0]],
                "master_addr": "127.0.0.1", "master_port": 1, "secret": "", "job_dir": null, "resume": null, "files": {},
            }))
            .unwrap();
            let stored = StoredAttempt { start, job_dir: "/none".into() };
            state_dir.store(&stored).unwrap();
            stored
        });
        assert_ne!(stored[0].attempt_dir(), stored[1].attempt_dir());
        state_dir.forget(&stored[0].start.attempt);
        assert_eq!(state_dir.stored_attempts(), stored[1..]);
    }

    #[test]
    fn a_folder_keeps_its_agent_id_and_admits_one_agent() {
        let dir = tempfile::tempdir().unwrap();
        let state_dir = StateDir::open(dir.path()).unwrap();
        let id = state_dir.agent_id().to_owned();
        assert_eq!(running_agent(dir.path()), Some(std::process::id().cast_signed()));
        let error = StateDir::open(dir.path()).unwrap_err();
        assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
        // A server on this machine, then a server on another machine.
        let lock = dir.path().join("server.lock");
        let server = File::create(&lock).unwrap();
        server.lock().unwrap();
        assert_eq!(state_dir.server_holds_lock(), None, "no server is known");
        state_dir.record_server(Some(&lock));
        assert_eq!(state_dir.server_holds_lock(), Some(true));
        server.unlock().unwrap();
        assert_eq!(state_dir.server_holds_lock(), Some(false));
        state_dir.record_server(Some(&lock));
        // The file was not locked when the server was noted, so another machine may have a lock of this name.
        assert_eq!(state_dir.server_holds_lock(), None);
        state_dir.record_server(Some(Path::new("/nowhere/server.lock")));
        assert_eq!(state_dir.server_holds_lock(), None);
        drop(state_dir);
        // A process forked by another test may still hold the lock, until it executes another program.
        wait_until("the folder is still locked", || running_agent(dir.path()).is_none());
        assert_eq!(StateDir::open(dir.path()).unwrap().agent_id(), id);
    }
}
