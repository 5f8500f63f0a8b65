//! The folders of a job's checkpoints: names, listing and removal.

use super::{CheckpointError, TEMPORARY, at, manifest::validate};
pub use lockstep_protocol::checkpoint_files::{folder_name, parse_folder_name};
use lockstep_protocol::fault;
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// The epoch and step of each folder that has the name of a checkpoint, by ascending step. The content is not checked.
///
/// # Errors
/// The directory exists and cannot be read.
pub fn list(directory: &Path) -> Result<Vec<(u32, u64)>, CheckpointError> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(at(directory)(e)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let name = entry.map_err(at(directory))?.file_name();
        found.extend(name.to_str().and_then(parse_folder_name));
    }
    found.sort_by_key(|(epoch, step)| (*step, *epoch));
    Ok(found)
}

/// Names the other checkpoints beside `folder`, for an error about this checkpoint: `; its folder has the checkpoints 1-2, 1-4`.
pub fn name_others(folder: &Path) -> String {
    let found = folder.parent().and_then(|directory| list(directory).ok()).unwrap_or_default();
    let names = found.into_iter().map(|(epoch, step)| folder_name(epoch, step));
    let names: Vec<_> = names.filter(|name| *name != name_of(folder)).collect();
    if names.is_empty() {
        String::new()
    } else {
        format!("; its folder has the checkpoints {}", names.join(", "))
    }
}

/// The newest complete checkpoint, and the errors of newer, damaged checkpoints.
///
/// # Errors
/// The directory or a file of a checkpoint cannot be read.
pub fn newest(directory: &Path) -> Result<(Option<PathBuf>, Vec<CheckpointError>), CheckpointError> {
    let mut damaged = Vec::new();
    for (epoch, step) in list(directory)?.into_iter().rev() {
        let folder = directory.join(folder_name(epoch, step));
        match validate(&folder) {
            Ok(_) => return Ok((Some(folder), damaged)),
            // The checkpoint may be intact. Skipping it would use an older checkpoint without need.
            Err(error @ CheckpointError::Io { .. }) => return Err(error),
            Err(error) => damaged.push(error),
        }
    }
    Ok((None, damaged))
}

/// The name of the checkpoint in `folder`.
pub(super) fn name_of(folder: &Path) -> String {
    folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Renames a damaged checkpoint, so that it no longer counts as a checkpoint, but can still be examined.
///
/// # Errors
/// The folder cannot be renamed.
pub fn set_aside(folder: &Path) -> Result<(), CheckpointError> {
    let aside = folder.with_file_name(format!("damaged-{}", name_of(folder)));
    if aside.exists() {
        fs::remove_dir_all(&aside).map_err(at(&aside))?;
    }
    fs::rename(folder, &aside).map_err(at(folder))
}

/// The folders of incomplete checkpoints, which are being written, or whose writers were killed.
fn incomplete(directory: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(TEMPORARY))
        .map(|entry| entry.path())
}

/// Whether an incomplete checkpoint exists, because it is being written or its writer was killed.
pub fn is_being_written(directory: &Path) -> bool {
    incomplete(directory).next().is_some()
}

/// Removes incomplete checkpoints of writers that were killed.
///
/// # Errors
/// A folder cannot be removed.
pub fn remove_leftovers(directory: &Path) -> Result<(), CheckpointError> {
    incomplete(directory).try_for_each(|folder| fs::remove_dir_all(&folder).map_err(at(&folder)))
}

/// Removes a checkpoint. The folder is renamed first, so that a partly removed checkpoint is never visible.
///
/// # Errors
/// The folder cannot be removed.
pub fn remove(directory: &Path, epoch: u32, step: u64) -> Result<(), CheckpointError> {
    let name = folder_name(epoch, step);
    let path = directory.join(&name);
    let hidden = directory.join(format!("{TEMPORARY}gone-{name}"));
    match fs::rename(&path, &hidden) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(at(&path))?,
    }
    fault::point("checkpoint.remove").map_err(at(&hidden))?;
    fs::remove_dir_all(&hidden).map_err(at(&hidden))
}
