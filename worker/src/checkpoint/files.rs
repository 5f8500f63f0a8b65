//! Writes the folder of a checkpoint.

use super::{
    AVERAGE, Best, CheckpointError, Files, MANIFEST, MODEL, Manifest, ManifestFile, OPTIMIZER, STATE,
    Snapshot, State, TEMPORARY, at, folders::folder_name, manifest::size_of, parts::write_indexes, tensors,
    unverified_state, validate,
};
use lockstep_protocol::{checkpoint_files, fault};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io, iter,
    panic::resume_unwind,
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

/// The number of checkpoints that this process has begun to write.
static BEGUN: AtomicU64 = AtomicU64::new(0);

/// Writes a checkpoint to `directory` (the job's `checkpoints`, created if needed). Returns the size of all its files
/// in bytes. `best` is the best checkpoint so far, including this checkpoint. If the job already has a complete checkpoint of
/// this step, that checkpoint is kept, unless it lacks the evaluation that `snapshot` includes.
///
/// # Errors
/// The disk is full or not writable, or a checkpoint of this name cannot be read. Nothing incomplete is left under
/// the checkpoint's name.
pub fn write(directory: &Path, snapshot: &Snapshot, best: Option<&Best>) -> Result<u64, CheckpointError> {
    if let Some(size_bytes) = size_if_kept(directory, &snapshot.state)? {
        return Ok(size_bytes);
    }
    // After a rank is lost, another rank may write the same step while rank 0 is still writing it. Each writer uses a
    // separate folder.
    let writer = format!("{}.{}", std::process::id(), BEGUN.fetch_add(1, Ordering::Relaxed));
    let temporary = temporary_folder(directory, &snapshot.state, &writer);
    if temporary.exists() {
        // A folder of an earlier process with the same process id.
        fs::remove_dir_all(&temporary).map_err(at(&temporary))?;
    }
    let (part, divides_average) = (None, false);
    let written = write_part(&temporary, snapshot, part, divides_average)
        .and_then(|files| complete(directory, &temporary, &snapshot.state, best, files));
    // If the folder still exists, it has an incomplete or a replaced checkpoint, and is removed to free its disk space.
    // If the removal fails, the next start of the job removes it.
    let _ = fs::remove_dir_all(&temporary);
    written
}

/// The folder in which a checkpoint is written. `writer` is used only once. If several ranks write the checkpoint, all of them have
/// the same `writer`.
pub fn temporary_folder(directory: &Path, state: &State, writer: &str) -> PathBuf {
    directory.join(format!("{TEMPORARY}{}.{writer}", folder_name(state.epoch, state.step)))
}

/// Writes the tensors of a snapshot to the temporary `folder`, which is created if needed. If several ranks write the
/// checkpoint, `part` is the number of this rank's part (from 1) and the number of parts. The average is then written as
/// a whole unless `divides_average`.
///
/// # Errors
/// The disk is full or not writable.
pub fn write_part(
    folder: &Path,
    snapshot: &Snapshot,
    part: Option<(usize, usize)>,
    divides_average: bool,
) -> Result<Files, CheckpointError> {
    fault::point("checkpoint.begin").map_err(at(folder))?;
    fs::create_dir_all(folder).map_err(at(folder))?;
    let batches = Some(snapshot.batches);
    let model = Some((MODEL, &snapshot.parameters, batches, &snapshot.metadata));
    let average = snapshot.average.as_ref().map(|average| (AVERAGE, average, batches, &snapshot.metadata));
    let optimizer = Some((OPTIMIZER, &snapshot.optimizer, None, &BTreeMap::new()));
    let write_file = |(kind, tensors, batches, metadata)| {
        let name = match part {
            Some((number, count)) if kind != AVERAGE || divides_average => {
                checkpoint_files::part_name(kind, number, count)
            }
            _ => kind.to_owned(),
        };
        let path = folder.join(&name);
        let written = tensors::write(&path, tensors, batches, metadata);
        (kind, name, path, written)
    };
    let files: Vec<_> = [model, average, optimizer].into_iter().flatten().collect();
    let written = on_threads(files.into_iter(), write_file);
    // Tests count on one fault per checkpoint, so the fault points come after the concurrent writes.
    let check =
        |(kind, name, path, written): (_, _, PathBuf, _)| Ok((name, with_fault_point(kind, &path, written)?));
    written.into_iter().map(check).collect()
}

/// Maximum number of files of a checkpoint that are read or written at the same time.
const MAX_THREADS: usize = 8;

/// Runs `work` for each item, on at most [`MAX_THREADS`] new threads, and returns the results in order. A disk that hangs must not occupy
/// rayon's threads, which the engine uses.
pub(super) fn on_threads<T: Send, R: Send>(
    items: impl ExactSizeIterator<Item = T> + Send,
    work: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    let count = items.len().min(MAX_THREADS);
    let items = Mutex::new(items.enumerate());
    let take = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
    let run = || iter::from_fn(take).map(|(index, item)| (index, work(item))).collect::<Vec<_>>();
    let mut results = thread::scope(|scope| {
        let threads: Vec<_> = (0..count).map(|_| scope.spawn(run)).collect();
        let join =
            |thread: thread::ScopedJoinHandle<'_, _>| thread.join().unwrap_or_else(|e| resume_unwind(e));
        threads.into_iter().flat_map(join).collect::<Vec<(usize, R)>>()
    });
    results.sort_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}

/// Completes the checkpoint whose parts are in `temporary`. `files` lists the files of all ranks. The result and `best` are as in
/// [`write`].
///
/// # Errors
/// As [`write`], or a part is missing.
pub fn complete_parts(
    directory: &Path,
    temporary: &Path,
    state: &State,
    best: Option<&Best>,
    mut files: Files,
) -> Result<u64, CheckpointError> {
    if let Some(size_bytes) = size_if_kept(directory, state)? {
        return Ok(size_bytes);
    }
    write_indexes(temporary, &mut files)?;
    complete(directory, temporary, state, best, files)
}

/// The size of the existing checkpoint of the step of `state`, if it is complete and is kept. `None` if a checkpoint
/// with this state must be written. A damaged checkpoint is removed.
fn size_if_kept(directory: &Path, state: &State) -> Result<Option<u64>, CheckpointError> {
    let final_path = directory.join(folder_name(state.epoch, state.step));
    if !final_path.exists() {
        return Ok(None);
    }
    match validate(&final_path) {
        Ok(manifest) => {
            let has_evaluation =
                || unverified_state(&final_path).is_some_and(|state| state.val_accuracy.is_some());
            let is_kept = state.val_accuracy.is_none() || has_evaluation();
            Ok(is_kept.then(|| size_of(&final_path, &manifest)))
        }
        Err(CheckpointError::Damaged { .. }) => {
            fs::remove_dir_all(&final_path).map_err(at(&final_path))?;
            Ok(None)
        }
        // The checkpoint cannot be read now, but may be intact. It is kept, and the caller may retry.
        Err(error) => Err(error),
    }
}

fn exchange(one: &Path, other: &Path) -> rustix::io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE)
}

/// Renames a complete folder to its final name. If a folder with that name exists, the two are exchanged atomically. On
/// a file system without atomic exchange (NFS), a crash between two renames loses the checkpoint of this step, but no
/// earlier checkpoint. Returns false if another writer has written the same step meanwhile. The other writer's folder is
/// then kept, and lacks at most the evaluation of the step.
pub(super) fn rename_to_final(
    temporary: &Path,
    final_path: &Path,
    exchange: impl FnOnce(&Path, &Path) -> rustix::io::Result<()>,
) -> io::Result<bool> {
    if !final_path.exists() {
        return match fs::rename(temporary, final_path) {
            Err(error) if final_path.exists() => {
                tracing::debug!(%error, "another writer has already written this checkpoint");
                Ok(false)
            }
            renamed => renamed.map(|()| true),
        };
    }
    match exchange(temporary, final_path) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS | rustix::io::Errno::OPNOTSUPP) => {
            let mut replaced = temporary.as_os_str().to_owned();
            replaced.push(".replaced");
            let replaced = Path::new(&replaced);
            fs::rename(final_path, replaced)?;
            if let Err(error) = fs::rename(temporary, final_path) {
                fs::rename(replaced, final_path)?;
                return Err(error);
            }
            // If the folder cannot be removed now, the next start removes it.
            let _ = fs::remove_dir_all(replaced);
            Ok(true)
        }
        Err(error) => Err(error.into()),
    }
}

/// Adds the path to an error, and triggers the fault point of `kind`, at which tests inject errors.
fn with_fault_point(
    kind: &str,
    path: &Path,
    written: io::Result<ManifestFile>,
) -> Result<ManifestFile, CheckpointError> {
    let point = format!("checkpoint.{}", kind.split('.').next().unwrap_or_default());
    written.and_then(|file| fault::point(&point).map(|()| file)).map_err(at(path))
}

/// Adds the state and the manifest to the folder `temporary`, which contains `files`, and renames the folder to the
/// checkpoint's name. Returns the size of all files in bytes.
fn complete(
    directory: &Path,
    temporary: &Path,
    state: &State,
    best: Option<&Best>,
    mut files: Files,
) -> Result<u64, CheckpointError> {
    let (epoch, step) = (state.epoch, state.step);
    let final_path = directory.join(folder_name(epoch, step));
    let fault_point = |point: &str, path: &Path| fault::point(point).map_err(at(path));
    let state = State { best: best.cloned(), ..state.clone() };
    let path = temporary.join(STATE);
    files.insert(STATE.into(), with_fault_point(STATE, &path, tensors::write_json(&path, &state))?);
    let manifest = Manifest { version: 1, epoch, step, files };
    let path = temporary.join(MANIFEST);
    tensors::write_json(&path, &manifest).map_err(at(&path))?;
    fault_point("checkpoint.manifest", &path)?;
    sync_directory(temporary)?;
    let size_bytes = size_of(temporary, &manifest);
    fault_point("checkpoint.synced", temporary)?;
    let is_renamed = rename_to_final(temporary, &final_path, exchange).map_err(at(&final_path))?;
    fault_point("checkpoint.renamed", &final_path)?;
    sync_directory(directory)?;
    fault_point("checkpoint.written", &final_path)?;
    if is_renamed {
        Ok(size_bytes)
    } else {
        validate(&final_path).map(|manifest| size_of(&final_path, &manifest))
    }
}

fn sync_directory(path: &Path) -> Result<(), CheckpointError> {
    File::open(path).and_then(|directory| directory.sync_all()).map_err(at(path))
}
