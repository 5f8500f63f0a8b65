//! Reads a checkpoint.

use super::{
    AVERAGE, CheckpointError, MODEL, OPTIMIZER, STATE, State, at,
    files::on_threads,
    folders::{folder_name, list, name_of},
    manifest::{check_file, read_manifest, size_of, validate},
    parts::{files_of, read_files},
};
use lockstep_engine::first_invalid;
use lockstep_host::tensors::NamedTensors;
use lockstep_protocol::{agent::CheckpointInfo, checkpoint_files};
use std::{fs, path::Path};

/// A checkpoint in memory, without the moving average.
#[derive(Debug)]
pub struct LoadedCheckpoint {
    pub state: State,
    pub parameters: NamedTensors,
    /// The optimizer's state, by tensor.
    pub optimizer: NamedTensors,
}

/// Verifies and reads a checkpoint.
///
/// # Errors
/// The checkpoint cannot be read, is damaged, or contains values that are not finite.
pub fn load(folder: &Path) -> Result<LoadedCheckpoint, CheckpointError> {
    validate(folder)?;
    let name = name_of(folder);
    let tensors = on_threads([MODEL, OPTIMIZER].into_iter(), |kind| read_tensors(folder, &name, kind));
    let [parameters, optimizer] =
        tensors.try_into().unwrap_or_else(|_| unreachable!("one result for each kind"));
    Ok(LoadedCheckpoint { state: read_state(folder, &name)?, parameters: parameters?, optimizer: optimizer? })
}

/// Reads the tensors of `kind` of the checkpoint `name` in `folder`.
fn read_tensors(folder: &Path, name: &str, kind: &str) -> Result<NamedTensors, CheckpointError> {
    let tensors = files_of(folder, kind)
        .and_then(|files| read_files(&files))
        .map_err(|detail| CheckpointError::Damaged { name: name.into(), detail })?;
    match first_invalid(&tensors) {
        Some(found) => {
            Err(CheckpointError::NotFinite { name: name.into(), detail: format!("{kind}: {found}") })
        }
        None => Ok(tensors),
    }
}

/// The moving average of the weights (`train.ema_decay`) in a checkpoint, if it has one. The checkpoint's checksums must have
/// been verified before.
///
/// # Errors
/// The average cannot be read, or has values that are not finite.
pub fn load_average(folder: &Path) -> Result<Option<NamedTensors>, CheckpointError> {
    let (name, manifest) = read_manifest(folder)?;
    if !manifest.files.keys().any(|file| checkpoint_files::kind_of(file) == Some(AVERAGE)) {
        return Ok(None);
    }
    read_tensors(folder, &name, AVERAGE).map(Some)
}

/// Verifies a checkpoint, and returns the facts that are reported about it.
///
/// # Errors
/// The checkpoint is damaged or cannot be read.
pub fn verified_info(folder: &Path) -> Result<CheckpointInfo, CheckpointError> {
    let manifest = validate(folder)?;
    let state = read_state(folder, &folder_name(manifest.epoch, manifest.step))?;
    Ok(state.info(state.best.as_ref(), size_of(folder, &manifest)))
}

/// The facts that were reported about the checkpoints in a directory, by ascending step. Only the manifest and the state of each
/// checkpoint are verified. Checkpoints whose manifest or state is damaged are left out.
///
/// # Errors
/// The directory exists and cannot be read.
pub fn infos(directory: &Path) -> Result<Vec<CheckpointInfo>, CheckpointError> {
    let info = |(epoch, step): (u32, u64)| {
        let folder = directory.join(folder_name(epoch, step));
        let (name, manifest) = read_manifest(&folder).ok()?;
        check_file(&folder, &name, STATE, manifest.files.get(STATE)?).ok()?;
        let state = read_state(&folder, &name).ok()?;
        Some(state.info(state.best.as_ref(), size_of(&folder, &manifest)))
    };
    Ok(list(directory)?.into_iter().filter_map(info).collect())
}

/// Reads the state of the checkpoint `name` in `folder`, after [`read_manifest`] has compared its size with the limit.
fn read_state(folder: &Path, name: &str) -> Result<State, CheckpointError> {
    let path = folder.join(STATE);
    let json = fs::read(&path).map_err(at(&path))?;
    serde_json::from_slice(&json)
        .map_err(|e| CheckpointError::Damaged { name: name.into(), detail: format!("{STATE}: {e}") })
}
