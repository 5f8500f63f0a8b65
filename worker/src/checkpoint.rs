//! Checkpoints: a folder `<epoch>-<step>` each, under the job's `checkpoints`, that appears complete
//! or not at all.
//!
//! Everything is written into `.tmp-<epoch>-<step>` and made to last (fsync), `MANIFEST.json` with
//! sizes and checksums last of all; then the folder gets its name by a rename, and the rename is made
//! to last too. Equal jobs give equal `model.safetensors`, byte for byte: nothing in it comes from a
//! clock, a name or an id.

mod header;
mod keeper;
mod tensors;

pub use keeper::{Keeper, Kept};
pub use tensors::{metadata, read as read_tensors, shapes};

use crate::{
    engine::{LossScaling, NamedTensors, first_not_finite, slot_name},
    precision::SkippedSteps,
};
use lockstep_protocol::{
    agent::CheckpointInfo,
    fault,
    spec::{OptimizerKind, Precision},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
};

/// Weights, biases and running statistics.
pub const MODEL: &str = "model.safetensors";
/// What the optimizer keeps: `<parameter>.<slot>`, such as `conv1.weight.momentum` or `conv1.weight.exp_avg`. In files of
/// older versions, whose [`State`] has no `optimizer`, momentum under the parameters' bare names.
pub const OPTIMIZER: &str = "optimizer.safetensors";
/// The running average of what [`MODEL`] has, under the same names; in the checkpoints of jobs with `train.ema_decay`.
pub const AVERAGE: &str = "ema.safetensors";
/// A [`State`].
pub const STATE: &str = "state.json";
/// A [`Manifest`].
pub const MANIFEST: &str = "MANIFEST.json";
const TEMPORARY: &str = ".tmp-";

/// What training needs besides tensors to go on as if it had never stopped.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// The epoch that the last step was in, from 1.
    pub epoch: u32,
    /// Optimizer steps done.
    pub step: u64,
    pub data_position: DataPosition,
    pub random_state: RandomState,
    pub world_size: u32,
    /// Pictures of a step, over all ranks.
    pub global_batch_size: u64,
    pub steps_per_epoch: u64,
    /// Validation right after this step, if there was one.
    pub val_accuracy: Option<f64>,
    /// Validation right after this step, if there was one.
    pub val_loss: Option<f64>,
    /// The best checkpoint so far, this one included.
    pub best: Option<Best>,
    /// Of the programs that wrote it.
    pub versions: BTreeMap<String, String>,
    /// What convolutions were computed in.
    #[serde(default)]
    pub precision: Option<Precision>,
    /// Of float16.
    #[serde(default)]
    pub loss_scaling: Option<LossScaling>,
    #[serde(default)]
    pub skipped_steps: SkippedSteps,
    /// Absent in files of older versions.
    #[serde(default)]
    pub optimizer: Option<OptimizerNote>,
}

/// Of the optimizer that a checkpoint has the state of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OptimizerNote {
    pub kind: OptimizerKind,
    /// As [`crate::engine::OptimizerState::updates`].
    pub updates: u64,
}

/// The next picture.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DataPosition {
    /// From 0.
    pub epoch: u32,
    /// Steps of that epoch that are done.
    pub step_in_epoch: u64,
    /// Pictures of that epoch, in its order, that are done (over all ranks).
    pub samples_in_epoch: u64,
}

/// Where randomness comes from: order and augmentation follow from the seed and the position.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RandomState {
    pub seed: u64,
}

/// The best value of `keep_best`'s metric.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Best {
    pub metric: String,
    pub value: f64,
    pub epoch: u32,
    pub step: u64,
}

/// A checkpoint in memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    pub state: State,
    pub parameters: NamedTensors,
    /// As [`crate::engine::OptimizerState::slots`].
    pub optimizer: NamedTensors,
    /// The running average of the parameters, if there is one.
    pub average: Option<NamedTensors>,
    /// Batches that batch norm has seen.
    pub batches: u64,
    /// For `model.safetensors`: `classes`, `mean`, `std`, `spec`, `arch`, `image_size`, ...
    pub metadata: BTreeMap<String, String>,
}

impl Snapshot {
    /// The first value in it that no model can go on from, in words.
    pub fn first_not_finite(&self) -> Option<String> {
        first_not_finite(&self.parameters)
            .or_else(|| {
                self.average
                    .as_ref()
                    .and_then(first_not_finite)
                    .map(|found| format!("of the average {found}"))
            })
            .or_else(|| {
                first_not_finite(&self.optimizer).map(|found| format!("of the optimizer's state {found}"))
            })
    }
}

/// Sizes and checksums of a checkpoint's other files.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// 1.
    pub version: u32,
    pub epoch: u32,
    pub step: u64,
    pub files: BTreeMap<String, ManifestFile>,
}

/// A file as the manifest knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManifestFile {
    pub size_bytes: u64,
    /// Hexadecimal.
    pub sha256: String,
}

/// Why a checkpoint could not be written or read; the sentence names the file.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("{}: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
    /// Not what was written.
    #[error("checkpoint {name} is damaged: {detail}")]
    Damaged { name: String, detail: String },
    /// Training had diverged: nothing can go on from it or be answered from it.
    #[error("checkpoint {name} is of a training that has diverged: {detail}")]
    NotFinite { name: String, detail: String },
}

fn at(path: &Path) -> impl Fn(io::Error) -> CheckpointError + '_ {
    move |error| CheckpointError::Io { path: path.into(), error }
}

/// The folder's name: `<epoch>-<step>`.
pub fn folder_name(epoch: u32, step: u64) -> String {
    format!("{epoch}-{step}")
}

/// Epoch and step of a checkpoint's folder.
pub fn parse_folder_name(name: &str) -> Option<(u32, u64)> {
    let (epoch, step) = name.split_once('-')?;
    let parsed = (epoch.parse().ok()?, step.parse().ok()?);
    // Only as this module writes it: no signs, no leading zeros.
    (folder_name(parsed.0, parsed.1) == name).then_some(parsed)
}

/// Writes a checkpoint under `directory` (the job's `checkpoints`, made if need be); gives the size
/// of all its files; `best` is the best one so far, this one included. A whole one of the same name stays as it is: it
/// is of the same step of the same job. Only where it was written before the evaluation and the new one after it the new
/// one takes its place.
///
/// # Errors
/// The disk is full or not writable; nothing half done is left under the checkpoint's name.
pub fn write(directory: &Path, snapshot: &Snapshot, best: Option<&Best>) -> Result<u64, CheckpointError> {
    let (epoch, step) = (snapshot.state.epoch, snapshot.state.step);
    let name = folder_name(epoch, step);
    let place = directory.join(&name);
    if place.exists() {
        match validate(&place) {
            Ok(manifest) if snapshot.state.val_accuracy.is_none() || is_measured(&place) => {
                return Ok(size_of(&place, &manifest));
            }
            Ok(_) => {}
            Err(_) => fs::remove_dir_all(&place).map_err(at(&place))?,
        }
    }
    let temporary = directory.join(format!("{TEMPORARY}{name}"));
    fs::create_dir_all(directory).map_err(at(directory))?;
    if temporary.exists() {
        fs::remove_dir_all(&temporary).map_err(at(&temporary))?;
    }
    let reached = |point: &str, path: &Path| fault::point(point).map_err(at(path));
    reached("checkpoint.begin", &temporary)?;
    let written = write_files(&temporary, snapshot, best).and_then(|size| {
        reached("checkpoint.synced", &temporary)?;
        let stands = put(&temporary, &place).map_err(at(&place))?;
        reached("checkpoint.renamed", &place)?;
        sync_directory(directory)?;
        reached("checkpoint.written", &place)?;
        if stands { Ok(size) } else { validate(&place).map(|manifest| size_of(&place, &manifest)) }
    });
    // What could not be written, or was replaced: the room it takes may be what others lack. Should it stay, the next start
    // removes it.
    let _ = fs::remove_dir_all(&temporary);
    written
}

/// Whether a whole checkpoint says how its step was evaluated.
fn is_measured(folder: &Path) -> bool {
    let state =
        fs::read(folder.join(STATE)).ok().and_then(|text| serde_json::from_slice::<State>(&text).ok());
    state.is_some_and(|state| state.val_accuracy.is_some())
}

/// Gives a whole folder its name. Where one has that name, the two change places at once, so that a crash finds one or the
/// other; false where the file system cannot do that (NFS), and the one that was there stays: all it lacks is how its step
/// was evaluated.
fn put(temporary: &Path, place: &Path) -> io::Result<bool> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    if !place.exists() {
        return fs::rename(temporary, place).map(|()| true);
    }
    match renameat_with(CWD, temporary, CWD, place, RenameFlags::EXCHANGE) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS | rustix::io::Errno::OPNOTSUPP) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn write_files(folder: &Path, snapshot: &Snapshot, best: Option<&Best>) -> Result<u64, CheckpointError> {
    fs::create_dir(folder).map_err(at(folder))?;
    let mut manifest = Manifest {
        version: 1,
        epoch: snapshot.state.epoch,
        step: snapshot.state.step,
        files: BTreeMap::new(),
    };
    let mut total = 0;
    let mut note = |name: &str, written: io::Result<tensors::Written>| {
        let point = format!("checkpoint.{}", name.split('.').next().unwrap_or_default());
        let written = written.and_then(|w| fault::point(&point).map(|()| w));
        let written = written.map_err(at(&folder.join(name)))?;
        total += written.size_bytes;
        let file = ManifestFile { size_bytes: written.size_bytes, sha256: written.sha256 };
        manifest.files.insert(name.into(), file);
        Ok(())
    };
    let (model, optimizer) = (folder.join(MODEL), folder.join(OPTIMIZER));
    note(MODEL, tensors::write(&model, &snapshot.parameters, Some(snapshot.batches), &snapshot.metadata))?;
    if let Some(average) = &snapshot.average {
        let path = folder.join(AVERAGE);
        note(AVERAGE, tensors::write(&path, average, Some(snapshot.batches), &snapshot.metadata))?;
    }
    note(OPTIMIZER, tensors::write(&optimizer, &snapshot.optimizer, None, &BTreeMap::new()))?;
    let state = State { best: best.cloned(), ..snapshot.state.clone() };
    note(STATE, write_json(&folder.join(STATE), &state))?;
    let path = folder.join(MANIFEST);
    total += write_json(&path, &manifest).map_err(at(&path))?.size_bytes;
    fault::point("checkpoint.manifest").map_err(at(&path))?;
    sync_directory(folder)?;
    Ok(total)
}

fn write_json(path: &Path, value: &impl Serialize) -> io::Result<tensors::Written> {
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    tensors::write_bytes(path, &text)
}

fn sync_directory(path: &Path) -> Result<(), CheckpointError> {
    File::open(path).and_then(|directory| directory.sync_all()).map_err(at(path))
}

fn size_of(folder: &Path, manifest: &Manifest) -> u64 {
    let manifest_size = fs::metadata(folder.join(MANIFEST)).map_or(0, |m| m.len());
    manifest.files.values().map(|f| f.size_bytes).sum::<u64>() + manifest_size
}

/// Checks every file of a checkpoint against its manifest.
///
/// # Errors
/// What is missing or differs.
pub fn validate(folder: &Path) -> Result<Manifest, CheckpointError> {
    let (name, manifest) = manifest(folder)?;
    for (file, wanted) in &manifest.files {
        if Path::new(file).file_name() != Some(file.as_ref()) {
            let detail = format!("{MANIFEST} names {file:?}, which is no plain file name");
            return Err(CheckpointError::Damaged { name, detail });
        }
        same(folder, file, wanted)
            .map_err(|detail| CheckpointError::Damaged { name: name.clone(), detail })?;
    }
    Ok(manifest)
}

/// The file with the weights of a checkpoint's folder (or the file of averaged weights in it, if `path` names that), which
/// is checked against its manifest where there is one, or of somebody's own.
///
/// # Errors
/// It is damaged.
pub fn model_file(path: &Path) -> Result<PathBuf, CheckpointError> {
    let (folder, file) = match path.parent() {
        _ if path.is_dir() => (path, MODEL),
        Some(folder) if path.file_name().is_some_and(|name| name == AVERAGE) => (folder, AVERAGE),
        _ => return Ok(path.into()),
    };
    if folder.join(MANIFEST).exists() {
        let (name, manifest) = manifest(folder)?;
        if let Some(wanted) = manifest.files.get(file) {
            same(folder, file, wanted).map_err(|detail| CheckpointError::Damaged { name, detail })?;
        }
    }
    Ok(folder.join(file))
}

/// A checkpoint's name and manifest, which names all that a checkpoint has.
fn manifest(folder: &Path) -> Result<(String, Manifest), CheckpointError> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let damaged = |detail: String| CheckpointError::Damaged { name: name.clone(), detail };
    let text = fs::read(folder.join(MANIFEST)).map_err(|e| damaged(format!("{MANIFEST}: {e}")))?;
    let manifest: Manifest =
        serde_json::from_slice(&text).map_err(|e| damaged(format!("{MANIFEST}: {e}")))?;
    if manifest.version != 1 {
        return Err(damaged(format!("{MANIFEST} is of version {}; this program reads 1", manifest.version)));
    }
    for required in [MODEL, OPTIMIZER, STATE] {
        if !manifest.files.contains_key(required) {
            return Err(damaged(format!("{MANIFEST} does not name {required}")));
        }
    }
    Ok((name, manifest))
}

/// How a file differs from what was written.
fn same(folder: &Path, file: &str, wanted: &ManifestFile) -> Result<(), String> {
    let found = checksum(&folder.join(file)).map_err(|e| format!("{file}: {e}"))?;
    if found.size_bytes != wanted.size_bytes {
        return Err(format!("{file} has {} bytes, {} were written", found.size_bytes, wanted.size_bytes));
    }
    if found.sha256 != wanted.sha256 {
        return Err(format!("{file}: its checksum does not match"));
    }
    Ok(())
}

fn checksum(path: &Path) -> io::Result<ManifestFile> {
    let mut file = File::open(path)?;
    let mut hash = Sha256::new();
    let mut size_bytes = 0;
    let mut block = vec![0; 1 << 18];
    loop {
        match file.read(&mut block)? {
            0 => break,
            n => {
                hash.update(&block[..n]);
                size_bytes += n as u64;
            }
        }
    }
    Ok(ManifestFile { size_bytes, sha256: tensors::hexadecimal(&hash.finalize()) })
}

/// The folders that bear a checkpoint's name, oldest step first, unchecked.
///
/// # Errors
/// The directory is there and cannot be read.
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

/// The newest checkpoint that is whole, and what is wrong with each newer one.
///
/// # Errors
/// The directory cannot be read.
pub fn newest(directory: &Path) -> Result<(Option<PathBuf>, Vec<CheckpointError>), CheckpointError> {
    let mut torn = Vec::new();
    for (epoch, step) in list(directory)?.into_iter().rev() {
        let folder = directory.join(folder_name(epoch, step));
        match validate(&folder) {
            Ok(_) => return Ok((Some(folder), torn)),
            Err(error) => torn.push(error),
        }
    }
    Ok((None, torn))
}

/// Takes a damaged checkpoint out of the way: it no longer counts as one, and can still be looked at.
///
/// # Errors
/// It cannot be renamed.
pub fn set_aside(folder: &Path) -> Result<(), CheckpointError> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let aside = folder.with_file_name(format!("damaged-{name}"));
    if aside.exists() {
        fs::remove_dir_all(&aside).map_err(at(&aside))?;
    }
    fs::rename(folder, &aside).map_err(at(folder))
}

/// Reads a checkpoint after checking it: its state, parameters, and the optimizer's slots as they are named today.
///
/// # Errors
/// It is damaged, or holds values that are not finite.
pub fn load(folder: &Path) -> Result<(State, NamedTensors, NamedTensors), CheckpointError> {
    validate(folder)?;
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let damaged = |detail: String| CheckpointError::Damaged { name: name.clone(), detail };
    let path = folder.join(STATE);
    let text = fs::read(&path).map_err(at(&path))?;
    let state: State = serde_json::from_slice(&text).map_err(|e| damaged(format!("{STATE}: {e}")))?;
    let parameters = read_tensors(&folder.join(MODEL)).map_err(damaged)?;
    let mut optimizer = read_tensors(&folder.join(OPTIMIZER)).map_err(damaged)?;
    if state.optimizer.is_none() {
        optimizer =
            optimizer.into_iter().map(|(name, tensor)| (slot_name(&name, "momentum"), tensor)).collect();
    }
    for (file, tensors) in [(MODEL, &parameters), (OPTIMIZER, &optimizer)] {
        if let Some(found) = first_not_finite(tensors) {
            return Err(CheckpointError::NotFinite { name, detail: format!("{file}: {found}") });
        }
    }
    Ok((state, parameters, optimizer))
}

/// The running average of a checkpoint that was checked, if it has one.
///
/// # Errors
/// It cannot be read, or holds values that are not finite.
pub fn load_average(folder: &Path) -> Result<Option<NamedTensors>, CheckpointError> {
    let (name, manifest) = manifest(folder)?;
    if !manifest.files.contains_key(AVERAGE) {
        return Ok(None);
    }
    let average = match read_tensors(&folder.join(AVERAGE)) {
        Ok(average) => average,
        Err(detail) => return Err(CheckpointError::Damaged { name, detail }),
    };
    match first_not_finite(&average) {
        Some(found) => Err(CheckpointError::NotFinite { name, detail: format!("{AVERAGE}: {found}") }),
        None => Ok(Some(average)),
    }
}

/// What there is to tell of a checkpoint, after checking it.
///
/// # Errors
/// It is damaged.
pub fn info(folder: &Path) -> Result<CheckpointInfo, CheckpointError> {
    let manifest = validate(folder)?;
    let path = folder.join(STATE);
    let text = fs::read(&path).map_err(at(&path))?;
    let state: State = serde_json::from_slice(&text).map_err(|e| CheckpointError::Damaged {
        name: folder_name(manifest.epoch, manifest.step),
        detail: format!("{STATE}: {e}"),
    })?;
    Ok(CheckpointInfo {
        epoch: state.epoch,
        step: state.step,
        val_accuracy: state.val_accuracy,
        val_loss: state.val_loss,
        best: state.best.is_some_and(|best| best.step == state.step),
        size_bytes: size_of(folder, &manifest),
    })
}

/// What convolutions were computed in when the checkpoint in `folder` was written, unchecked.
pub fn precision(folder: &Path) -> Option<Precision> {
    let text = fs::read(folder.join(STATE)).ok()?;
    serde_json::from_slice::<State>(&text).ok()?.precision
}

/// Whether there is one that is not whole yet: being written, or left by a writer that was killed.
pub fn is_being_written(directory: &Path) -> bool {
    let unfinished = |entry: fs::DirEntry| entry.file_name().to_string_lossy().starts_with(TEMPORARY);
    fs::read_dir(directory).is_ok_and(|entries| entries.flatten().any(unfinished))
}

/// Removes what writers that were killed have left.
///
/// # Errors
/// It cannot be removed.
pub fn remove_leftovers(directory: &Path) -> Result<(), CheckpointError> {
    let Ok(entries) = fs::read_dir(directory) else { return Ok(()) };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with(TEMPORARY) {
            fs::remove_dir_all(entry.path()).map_err(at(&entry.path()))?;
        }
    }
    Ok(())
}

/// Removes a checkpoint: first its name, so that no half of it is ever seen.
///
/// # Errors
/// It cannot be removed.
pub fn remove(directory: &Path, epoch: u32, step: u64) -> Result<(), CheckpointError> {
    let name = folder_name(epoch, step);
    let place = directory.join(&name);
    let hidden = directory.join(format!("{TEMPORARY}gone-{name}"));
    match fs::rename(&place, &hidden) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(at(&place))?,
    }
    fault::point("checkpoint.remove").map_err(at(&hidden))?;
    fs::remove_dir_all(&hidden).map_err(at(&hidden))
}

#[cfg(test)]
pub(crate) mod tests;
