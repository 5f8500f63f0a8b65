//! A note in a job's folder that marks a disk that the server does not share.

use lockstep_protocol::agent::AttemptRef;
use serde::{Deserialize, Serialize};
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// The file name of the note. The file exists on machines with their own disk, which upload checkpoints to the server.
pub(crate) const OWN_DISK_NOTE: &str = "here.json";

/// The last attempt on this machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct OwnDiskNote {
    pub(crate) attempt: AttemptRef,
    /// Whether rank 0 ran on this machine, so that this machine has the checkpoints.
    pub(crate) has_rank_0: bool,
}

impl OwnDiskNote {
    fn path(job_dir: &Path) -> PathBuf {
        job_dir.join(OWN_DISK_NOTE)
    }

    pub(crate) fn read(job_dir: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(Self::path(job_dir)).ok()?).ok()
    }

    pub(crate) fn write(&self, job_dir: &Path) -> io::Result<()> {
        lockstep_host::write_private(&Self::path(job_dir), &serde_json::to_vec(self)?)
    }
}
