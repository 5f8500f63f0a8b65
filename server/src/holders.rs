//! Which agent has the checkpoints of an attempt on a disk of its own: a note in the attempt's folder on the server's disk. It outlives the
//! attempt, because the last checkpoint is uploaded after its end, and it is what an upload is checked against.

use lockstep_protocol::agent::FencingToken;
use serde::{Deserialize, Serialize};
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// The agent of rank 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Holder {
    pub(crate) agent_id: String,
    /// Its name then.
    pub(crate) agent: String,
    pub(crate) fencing_token: FencingToken,
}

fn path(job_dir: &Path, attempt: u32) -> PathBuf {
    job_dir.join("attempts").join(attempt.to_string()).join("holder.json")
}

impl Holder {
    /// The holder of an attempt's checkpoints; none where its ranks write to the server's disk.
    pub(crate) fn of(job_dir: &Path, attempt: u32) -> Option<Self> {
        serde_json::from_slice(&fs::read(path(job_dir, attempt)).ok()?).ok()
    }

    /// Notes it.
    ///
    /// # Errors
    /// The disk.
    pub(crate) fn note(&self, job_dir: &Path, attempt: u32) -> io::Result<()> {
        let path = path(job_dir, attempt);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let temporary = path.with_extension("new");
        fs::write(&temporary, serde_json::to_vec(self)?)?;
        fs::rename(temporary, path)
    }
}
