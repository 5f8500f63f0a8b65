//! Files that contain a checkpoint's weights, on a server or in a folder of this machine.

use super::{
    api::Api,
    checkpoint_choice::{ListedCheckpoint, Weights},
    file, output, usage_error,
};
use anyhow::{Context, bail};
use futures_util::StreamExt;
use lockstep_protocol::checkpoint_files::{self, AVERAGE, MANIFEST, MODEL, index_name};
use lockstep_worker::checkpoint::{self, ManifestFile};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
};
use tempfile::TempDir;

/// A file in a checkpoint's manifest.
pub(super) struct WeightFile {
    name: String,
    pub(super) sha256: String,
}

/// Returns the files that contain a checkpoint's weights. A sharded checkpoint has several files, one of which is an index.
///
/// # Errors
/// Exit status 2 if the checkpoint does not have these weights.
pub(super) async fn list_files(
    api: &Api,
    checkpoint: &ListedCheckpoint,
    weights: Weights,
) -> anyhow::Result<Vec<WeightFile>> {
    let manifest: Value = api.get(&format!("/checkpoints/{}/MANIFEST.json", checkpoint.id)).await?;
    let files = manifest.get("files").and_then(Value::as_object).into_iter().flatten();
    let of_kind = files.filter(|(name, _)| checkpoint_files::kind_of(name) == Some(weights.file_name()));
    let weight_file = |(name, entry): (&String, &Value)| {
        Some(WeightFile { name: name.clone(), sha256: entry.get("sha256")?.as_str()?.to_owned() })
    };
    let files: Vec<WeightFile> = of_kind.filter_map(weight_file).collect();
    match weights {
        _ if !files.is_empty() => Ok(files),
        Weights::Ema => {
            let id = &checkpoint.id;
            Err(usage_error(format!("checkpoint {id} has no averaged weights: leave --weights out")))
        }
        Weights::Model => bail!("checkpoint {} has no checksum of {}", checkpoint.id, weights.file_name()),
    }
}

/// Downloads a file to `target`. First writes to a path next to `target`, so that a broken download leaves no file at `target`. Returns the
/// size in bytes.
///
/// # Errors
/// The download is damaged, or the file cannot be written.
pub(super) async fn fetch(
    api: &Api,
    checkpoint: &ListedCheckpoint,
    weight_file: &WeightFile,
    target: &Path,
) -> anyhow::Result<u64> {
    let path = format!("/checkpoints/{}/{}", checkpoint.id, weight_file.name);
    let partial = file::partial_path(target);
    let mut file = File::create(&partial).map_err(|e| usage_error(format!("{}: {e}", partial.display())))?;
    let result = async {
        let mut body = api.get_response(&path).await?.bytes_stream();
        let mut hash = Sha256::new();
        let mut size_bytes = 0;
        while let Some(chunk) = body.next().await {
            let chunk = chunk.context("the connection broke during the download")?;
            hash.update(&chunk);
            size_bytes += chunk.len() as u64;
            file.write_all(&chunk).with_context(|| partial.display().to_string())?;
        }
        let (actual, expected) = (hex::encode(hash.finalize()), &weight_file.sha256);
        if !actual.eq_ignore_ascii_case(expected) {
            bail!("the download is damaged: its sha256 is {actual}, but the checkpoint's is {expected}; try again");
        }
        file.sync_all()?;
        fs::rename(&partial, target).with_context(|| target.display().to_string())?;
        Ok(size_bytes)
    }
    .await;
    if result.is_err() {
        // The first error is reported, not a failure to remove the partial file.
        let _ = fs::remove_file(&partial);
    }
    result
}

/// Downloads `files` into a temporary folder next to `target`.
///
/// # Errors
/// See [`fetch`].
pub(super) async fn fetch_beside(
    target: &Path,
    api: &Api,
    checkpoint: &ListedCheckpoint,
    files: &[WeightFile],
) -> anyhow::Result<TempDir> {
    let folder = tempfile::tempdir_in(file::folder_of(target))?;
    for file in files {
        fetch(api, checkpoint, file, &folder.path().join(&file.name)).await?;
    }
    Ok(folder)
}

/// Whether `folder` has the weights of a checkpoint.
pub(super) fn has_weights(folder: &Path) -> bool {
    has_trained_weights(folder)
        || [AVERAGE, &index_name(AVERAGE)].iter().any(|file| folder.join(file).exists())
}

/// Whether `folder` has weights that are not averaged, or a manifest, which lists such weights.
fn has_trained_weights(folder: &Path) -> bool {
    [MODEL, &index_name(MODEL), MANIFEST].iter().any(|file| folder.join(file).exists())
}

/// If `path` is the folder of a run of `lockstep train`, returns the folder of the run's best checkpoint, and prints a note that names the
/// checkpoint. Returns any other path unchanged. Without validation, the newest checkpoint counts as the best.
///
/// # Errors
/// Exit status 2 if the run has no checkpoint, or `path` is a folder that contains runs.
pub(super) fn resolve_run_folder(path: &Path) -> anyhow::Result<PathBuf> {
    // A run's folder `checkpoints` itself means the run.
    let is_checkpoints =
        path.ends_with("checkpoints") && checkpoint::list(path).is_ok_and(|found| !found.is_empty());
    let checkpoints = if is_checkpoints { path.to_owned() } else { path.join("checkpoints") };
    // In a sharded checkpoint, `model.safetensors` does not exist: an index and parts are in its place.
    let is_in_checkpoint = path.parent().is_some_and(has_weights);
    if !is_in_checkpoint && path.try_exists().is_ok_and(|exists| !exists) {
        return Err(usage_error(format!("{} does not exist", path.display())));
    }
    if has_trained_weights(path) || (has_weights(path) && !checkpoints.is_dir()) {
        return Ok(path.to_owned());
    }
    if !checkpoints.is_dir() {
        let folders = fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
        let runs = folders.filter(|folder| folder.join("checkpoints").is_dir());
        let mut runs: Vec<_> = runs.map(|run| run.display().to_string()).collect();
        if runs.is_empty() {
            return Ok(path.to_owned());
        }
        runs.sort();
        let (path, runs) = (path.display(), runs.join(", "));
        return Err(usage_error(format!("{path} is not the folder of a run; it contains the runs {runs}")));
    }
    let infos = checkpoint::infos(&checkpoints)?;
    let best = infos.iter().rfind(|info| info.best);
    let Some(chosen) = best.or(infos.last()) else {
        return Err(usage_error(format!("{}: this run has no complete checkpoint yet", path.display())));
    };
    let name = checkpoint::folder_name(chosen.epoch, chosen.step);
    let which = if best.is_some() { "best" } else { "newest" };
    let accuracy = chosen.accuracy_in_words().map(|words| format!(": validation accuracy {words}"));
    let (path, accuracy) = (path.display(), accuracy.unwrap_or_default());
    output::warn(format_args!("{path}: checkpoint {name}, the {which}{accuracy}"));
    Ok(checkpoints.join(name))
}

/// Joins the weights of the checkpoint in `folder` in one file.
///
/// # Errors
/// Exit status 2 if the checkpoint does not exist or is damaged.
pub(super) fn join(folder: &Path, weights: Weights, target: &Path) -> anyhow::Result<ManifestFile> {
    if !folder.is_dir() {
        return Err(usage_error(format!("{} is not the folder of a checkpoint", folder.display())));
    }
    let files = checkpoint::model_files(&weights_path(folder, weights))
        .map_err(|e| usage_error(format!("{e}{}", checkpoint::name_others(folder))))?;
    if weights == Weights::Ema && !files.iter().all(|file| file.exists()) {
        let detail = "this checkpoint has no averaged weights: leave --weights out";
        return Err(usage_error(format!("{}: {detail}", folder.display())));
    }
    file::replace(target, |partial| checkpoint::join(&files, partial).map_err(usage_error))
}

/// Returns the path to pass to [`checkpoint::model_files`] for these weights of the checkpoint in `folder`. If the folder has only averaged
/// weights, prints a note and returns their path.
pub(super) fn weights_path(folder: &Path, weights: Weights) -> PathBuf {
    match weights {
        Weights::Model if has_weights(folder) && !has_trained_weights(folder) => {
            output::warn(format_args!("{} has only averaged weights, which are used", folder.display()));
            folder.join(AVERAGE)
        }
        Weights::Model => folder.to_owned(),
        Weights::Ema => folder.join(weights.file_name()),
    }
}
