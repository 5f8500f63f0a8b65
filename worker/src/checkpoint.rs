//! Checkpoints. Each is a folder `<epoch>-<step>` in the job's `checkpoints`, which appears atomically.
//! All files are written to `.tmp-<epoch>-<step>.<writer>` and synced (fsync). The last file is `MANIFEST.json` with
//! sizes and checksums. Then the folder is renamed to its final name, and the rename is synced. Equal jobs write
//! identical bytes to `model.safetensors`: its content does not depend on the time, a name or an id.

mod files;
mod folders;
mod header;
mod manifest;
mod own_disk;
mod parts;
mod read;
mod state;
mod tensors;
mod writer;

pub use files::{complete_parts, temporary_folder, write, write_part};
pub use folders::{
    folder_name, is_being_written, list, name_others, newest, parse_folder_name, remove, remove_leftovers,
    set_aside,
};
pub use manifest::{Files, Manifest, ManifestFile, validate};
pub(crate) use own_disk::{OWN_DISK_NOTE, OwnDiskNote};
pub(crate) use parts::read_selected;
pub use parts::{files_of, folder_metadata, model_files, read_files};
pub use read::{LoadedCheckpoint, infos, load, load_average, verified_info};
pub use state::{
    Best, DataPosition, OptimizerNote, RandomState, Snapshot, State, StopProgress, unverified_state,
};
pub use tensors::{join, metadata, read as read_tensors, shapes};
pub(crate) use tensors::{read_opened as read_opened_tensors, shapes_opened, write as write_tensors};
pub(crate) use writer::RETRY;
pub use writer::{CheckpointEvent, CheckpointWriter, Retention};

pub use lockstep_protocol::checkpoint_files::{AVERAGE, MANIFEST, MODEL, OPTIMIZER, STATE};
use std::{
    io,
    path::{Path, PathBuf},
};

/// The prefix of the names of incomplete folders. Rank 0 removes them when it starts.
pub(crate) const TEMPORARY: &str = ".tmp-";

/// Why a checkpoint cannot be written or read. The message names the file or the checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("{}: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
    /// The folder does not exist, for example after a backup was restored without the jobs' folders.
    #[error("checkpoint {name} is missing: {} does not exist", path.display())]
    Missing { name: String, path: PathBuf },
    /// The content differs from what was written.
    #[error("checkpoint {name} is damaged: {detail}")]
    Damaged { name: String, detail: String },
    /// Training has diverged: the values cannot be used to continue or to predict.
    #[error("checkpoint {name} is from training that has diverged: {detail}")]
    NotFinite { name: String, detail: String },
}

fn at(path: &Path) -> impl Fn(io::Error) -> CheckpointError + '_ {
    move |error| CheckpointError::Io { path: path.into(), error }
}

#[cfg(test)]
pub(crate) mod tests;
