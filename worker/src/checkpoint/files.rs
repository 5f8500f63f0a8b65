//! Writes the folder of a checkpoint.

use super::{
    AVERAGE, Best, CheckpointError, Files, MANIFEST, MODEL, Manifest, ManifestFile, OPTIMIZER, STATE,
    Snapshot, State, TEMPORARY, at, folders::folder_name, manifest::size_of, tensors, unverified_state,
    validate,
};
use lockstep_protocol::fault;
use serde::Serialize;
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};

/// The number of checkpoints that this process has begun to write.
static WRITTEN: AtomicU64 = AtomicU64::new(0);

/// Writes a checkpoint to `directory` (the job's `checkpoints`, created if needed). Returns the size of all its files
/// in bytes. `best` is the best checkpoint so far, including this one. A complete checkpoint of the same name is of the
/// same step of the same job and is kept, unless it lacks the evaluation that `snapshot` includes.
///
/// # Errors
/// The disk is full or not writable, or a checkpoint of this name cannot be read. Nothing incomplete is left under
/// the checkpoint's name.
pub fn write(directory: &Path, snapshot: &Snapshot, best: Option<&Best>) -> Result<u64, CheckpointError> {
    if let Some(size_bytes) = size_if_complete(directory, &snapshot.state)? {
        return Ok(size_bytes);
    }
    let name = folder_name(snapshot.state.epoch, snapshot.state.step);
    // After a rank is lost, another rank may write the same step while rank 0 still does. Each writer uses a separate
    // folder.
    let writer = (std::process::id(), WRITTEN.fetch_add(1, Ordering::Relaxed));
    let temporary = directory.join(format!("{TEMPORARY}{name}.{}.{}", writer.0, writer.1));
    fs::create_dir_all(directory).map_err(at(directory))?;
    if temporary.exists() {
        // A folder of an earlier process with the same process id.
        fs::remove_dir_all(&temporary).map_err(at(&temporary))?;
    }
    fault::point("checkpoint.begin").map_err(at(&temporary))?;
    let written = fs::create_dir(&temporary)
        .map_err(at(&temporary))
        .and_then(|()| write_tensors(&temporary, snapshot, str::to_owned))
        .and_then(|files| complete(directory, &temporary, &snapshot.state, best, files));
    // Remove an incomplete or replaced folder, because the disk may be full. If the removal fails, the next start
    // repeats it.
    let _ = fs::remove_dir_all(&temporary);
    written
}

/// The size of the complete checkpoint of the same step that is kept instead of a new one with this state. `None` if
/// there is no such checkpoint.
pub(super) fn size_if_complete(directory: &Path, state: &State) -> Result<Option<u64>, CheckpointError> {
    let place = directory.join(folder_name(state.epoch, state.step));
    if !place.exists() {
        return Ok(None);
    }
    match validate(&place) {
        Ok(manifest) => {
            let has_evaluation =
                || unverified_state(&place).is_some_and(|state| state.val_accuracy.is_some());
            let is_kept = state.val_accuracy.is_none() || has_evaluation();
            Ok(is_kept.then(|| size_of(&place, &manifest)))
        }
        Err(CheckpointError::Damaged { .. }) => {
            fs::remove_dir_all(&place).map_err(at(&place))?;
            Ok(None)
        }
        // The checkpoint cannot be read now, but may be intact. It is kept, and the caller may retry.
        Err(error) => Err(error),
    }
}

/// Exchanges two folders atomically.
fn exchange(one: &Path, other: &Path) -> rustix::io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE)
}

/// Renames a complete folder to its final name. If a folder with that name exists, the two are exchanged atomically. On
/// a file system without atomic exchange (NFS), a crash between two renames loses this checkpoint, but not the previous
/// one. Returns false if another writer has written the same step meanwhile. The other writer's folder is kept; it
/// lacks at most the evaluation of its step.
pub(super) fn put(
    temporary: &Path,
    place: &Path,
    exchange: impl FnOnce(&Path, &Path) -> rustix::io::Result<()>,
) -> io::Result<bool> {
    if !place.exists() {
        return match fs::rename(temporary, place) {
            Err(error) if place.exists() => {
                tracing::debug!(%error, "another writer has already written this checkpoint");
                Ok(false)
            }
            renamed => renamed.map(|()| true),
        };
    }
    match exchange(temporary, place) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS | rustix::io::Errno::OPNOTSUPP) => {
            let mut replaced = temporary.as_os_str().to_owned();
            replaced.push(".replaced");
            let replaced = Path::new(&replaced);
            fs::rename(place, replaced)?;
            if let Err(error) = fs::rename(temporary, place) {
                fs::rename(replaced, place)?;
                return Err(error);
            }
            // If this cannot be removed now, the next start removes it.
            let _ = fs::remove_dir_all(replaced);
            Ok(true)
        }
        Err(error) => Err(error.into()),
    }
}

/// Writes the tensors of a snapshot to `folder`. `name` maps each kind to a file name.
pub(super) fn write_tensors(
    folder: &Path,
    snapshot: &Snapshot,
    name: impl Fn(&str) -> String,
) -> Result<Files, CheckpointError> {
    let batches = Some(snapshot.batches);
    let model = Some((MODEL, &snapshot.parameters, batches, &snapshot.metadata));
    let average = snapshot.average.as_ref().map(|average| (AVERAGE, average, batches, &snapshot.metadata));
    let optimizer = Some((OPTIMIZER, &snapshot.optimizer, None, &BTreeMap::new()));
    let mut files = Files::new();
    for (kind, tensors, batches, metadata) in [model, average, optimizer].into_iter().flatten() {
        let name = name(kind);
        let path = folder.join(&name);
        let file = with_fault_point(kind, &path, tensors::write(&path, tensors, batches, metadata))?;
        files.insert(name, file);
    }
    Ok(files)
}

/// Adds the path to an error, and triggers the fault point of `kind`.
fn with_fault_point(
    kind: &str,
    path: &Path,
    written: io::Result<ManifestFile>,
) -> Result<ManifestFile, CheckpointError> {
    let point = format!("checkpoint.{}", kind.split('.').next().unwrap_or_default());
    written.and_then(|file| fault::point(&point).map(|()| file)).map_err(at(path))
}

/// Adds the state and the manifest to the folder `temporary` with `files`, and renames it to the checkpoint's name.
/// Returns the size of all files.
pub(super) fn complete(
    directory: &Path,
    temporary: &Path,
    state: &State,
    best: Option<&Best>,
    mut files: Files,
) -> Result<u64, CheckpointError> {
    let (epoch, step) = (state.epoch, state.step);
    let place = directory.join(folder_name(epoch, step));
    let reached = |point: &str, path: &Path| fault::point(point).map_err(at(path));
    let state = State { best: best.cloned(), ..state.clone() };
    let path = temporary.join(STATE);
    files.insert(STATE.into(), with_fault_point(STATE, &path, write_json(&path, &state))?);
    let manifest = Manifest { version: 1, epoch, step, files };
    let path = temporary.join(MANIFEST);
    write_json(&path, &manifest).map_err(at(&path))?;
    reached("checkpoint.manifest", &path)?;
    sync_directory(temporary)?;
    let size_bytes = size_of(temporary, &manifest);
    reached("checkpoint.synced", temporary)?;
    let is_placed = put(temporary, &place, exchange).map_err(at(&place))?;
    reached("checkpoint.renamed", &place)?;
    sync_directory(directory)?;
    reached("checkpoint.written", &place)?;
    if is_placed { Ok(size_bytes) } else { validate(&place).map(|manifest| size_of(&place, &manifest)) }
}

pub(super) fn write_json(path: &Path, value: &impl Serialize) -> io::Result<ManifestFile> {
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    tensors::write_bytes(path, &text)
}

fn sync_directory(path: &Path) -> Result<(), CheckpointError> {
    File::open(path).and_then(|directory| directory.sync_all()).map_err(at(path))
}
