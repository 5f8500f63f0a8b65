//! Sharded checkpoints in the format of Hugging Face: each rank writes some of the tensors to a separate file, and an
//! index maps tensors to files. A tensor is never divided between files. This module also finds the files with a
//! checkpoint's tensors, sharded or not.

use super::{
    AVERAGE, CheckpointError, Files, MANIFEST, MODEL, OPTIMIZER, at,
    folders::name_of,
    header::HEADER_BYTES,
    manifest::{check_file, read_manifest},
    tensors,
};
use lockstep_host::{files, tensors::NamedTensors};
use lockstep_protocol::checkpoint_files;
use serde::Deserialize;
use serde_json::json;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io,
    path::{Path, PathBuf},
};

/// The part of an index that is read.
#[derive(Deserialize)]
struct Index {
    /// The file of each tensor.
    weight_map: BTreeMap<String, String>,
}

/// Writes the index of each kind of tensors whose parts are in `folder`.
pub(super) fn write_indexes(folder: &Path, files: &mut Files) -> Result<(), CheckpointError> {
    for kind in [MODEL, OPTIMIZER, AVERAGE] {
        let is_part = |name: &&String| *name != kind && checkpoint_files::kind_of(name) == Some(kind);
        let (mut weight_map, mut total_size) = (BTreeMap::new(), 0);
        for part in files.keys().filter(is_part) {
            let path = folder.join(part);
            let sizes = tensors::sizes(&path).map_err(|detail| at(&path)(io::Error::other(detail)))?;
            total_size += sizes.values().sum::<u64>();
            weight_map.extend(sizes.into_keys().map(|name| (name, part.clone())));
        }
        if !weight_map.is_empty() {
            let name = checkpoint_files::index_name(kind);
            let path = folder.join(&name);
            let index = json!({"metadata": {"total_size": total_size}, "weight_map": weight_map});
            files.insert(name, tensors::write_json(&path, &index).map_err(at(&path))?);
        }
    }
    Ok(())
}

/// The files with the tensors of `kind` ([`MODEL`], [`OPTIMIZER`] or [`AVERAGE`]) in a folder: the file of that name,
/// or the parts in its index.
///
/// # Errors
/// The index cannot be read, or names something other than a file of the folder.
pub fn files_of(folder: &Path, kind: &str) -> Result<Vec<PathBuf>, String> {
    let (single, index) = (folder.join(kind), folder.join(checkpoint_files::index_name(kind)));
    if single.exists() || !index.exists() {
        return Ok(vec![single]);
    }
    let invalid_index = |detail: String| format!("{}: {detail}", index.display());
    let json = files::read(&index, HEADER_BYTES).map_err(|detail| format!("{} {detail}", index.display()))?;
    let found: Index = serde_json::from_slice(&json).map_err(|e| invalid_index(e.to_string()))?;
    let names = BTreeSet::from_iter(found.weight_map.into_values());
    match names.iter().find(|name| Path::new(name).file_name() != Some(name.as_ref())) {
        Some(name) => Err(invalid_index(format!("it names {name:?}, which is not a plain file name"))),
        None if names.is_empty() => Err(invalid_index("it names no file".into())),
        None => Ok(names.into_iter().map(|name| folder.join(name)).collect()),
    }
}

/// The files with the weights, if `path` is a checkpoint's folder, or with the average, if `path` is `ema.safetensors` in
/// such a folder. If the folder has a manifest, the files are checked against the manifest. Any other `path` is returned
/// itself.
///
/// # Errors
/// As [`validate`](super::validate).
pub fn model_files(path: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let (folder, kind) = match path.parent() {
        _ if path.is_dir() => (path, MODEL),
        Some(folder) if path.file_name().is_some_and(|name| name == AVERAGE) => (folder, AVERAGE),
        _ => return Ok(vec![path.into()]),
    };
    let name = name_of(folder);
    if folder.join(MANIFEST).exists() {
        let (_, manifest) = read_manifest(folder)?;
        for (file, expected) in
            manifest.files.iter().filter(|(file, _)| checkpoint_files::kind_of(file) == Some(kind))
        {
            check_file(folder, &name, file, expected)?;
        }
    }
    files_of(folder, kind).map_err(|detail| CheckpointError::Damaged { name, detail })
}

/// Reads the tensors of several files.
///
/// # Errors
/// As [`read_tensors`](super::read_tensors).
pub fn read_files(files: &[PathBuf]) -> Result<NamedTensors, String> {
    let every_tensor = |_: &str| true;
    read_selected(files, &every_tensor)
}

/// Reads from several files the tensors whose names `select` accepts.
pub(crate) fn read_selected(
    files: &[PathBuf],
    select: &dyn Fn(&str) -> bool,
) -> Result<NamedTensors, String> {
    let mut all = NamedTensors::new();
    for file in files {
        all.extend(tensors::read_opened(file, tensors::open(file)?, select)?);
    }
    Ok(all)
}

/// The metadata of the weights in a checkpoint's folder, such as the classes on which they were trained.
///
/// # Errors
/// As [`metadata`](super::metadata).
pub fn folder_metadata(folder: &Path) -> Result<HashMap<String, String>, String> {
    files_of(folder, MODEL)?.first().map_or_else(|| Ok(HashMap::new()), |file| tensors::metadata(file))
}
