//! `lockstep export`: writes a checkpoint into one file, for other programs.

use super::{
    api::ServerArgs,
    block_on,
    checkpoint_choice::{Weights, choose},
    download, file, output, wrong,
};
use anyhow::Context;
use lockstep_worker::{
    checkpoint::{self, ManifestFile},
    inspect,
};
use sha2::{Digest, Sha256};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Write a checkpoint into one file: its weights with torchvision's names (safetensors), or its network with them (ONNX)
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The checkpoint's folder, such as lockstep-run/checkpoints/2-54, for which no server is needed; or a job: its id, the
    /// start of its id, or its name
    #[arg(value_name = "FOLDER|JOB")]
    source: PathBuf,
    /// Of a job: best, latest, a step, or epoch and step (`2-54`)
    #[arg(long, default_value = "best")]
    checkpoint: String,
    /// Which of the checkpoint's weights to use
    #[arg(long, value_enum, default_value_t = Weights::Model)]
    weights: Weights,
    /// File for the weights
    #[arg(short, long, value_name = "FILE", required_unless_present = "onnx")]
    output: Option<PathBuf>,
    /// File for the network as ONNX: opset 17, input `input` (normalised pictures, N x C x H x W), output `output` (logits)
    #[arg(long, value_name = "FILE", conflicts_with = "output")]
    onnx: Option<PathBuf>,
    /// Make each batch norm a part of the convolution before it
    #[arg(long, conflicts_with = "output")]
    fold_batch_norm: bool,
    #[command(flatten)]
    server: ServerArgs,
}

/// Checks the checkpoint's files, and joins or converts them.
///
/// # Errors
/// Exit status 2 when there is no such checkpoint or the checkpoint is damaged.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let Some(place) = args.onnx.as_ref().or(args.output.as_ref()) else {
        return Err(wrong("name a file: -o FILE for the weights, or --onnx FILE for the network"));
    };
    file::check_output(place)?;
    let downloaded = if args.source.is_dir() { None } else { Some(fetch(args, place)?) };
    let folder = downloaded.as_ref().map_or(&*args.source, |folder| folder.path());
    let ManifestFile { size_bytes, sha256 } = match &args.onnx {
        Some(place) => convert(folder, args.weights, args.fold_batch_norm, place)?,
        None => join(folder, args.weights, place)?,
    };
    if args.server.json {
        let file = place.display().to_string();
        return output::json(&serde_json::json!({"file": file, "size_bytes": size_bytes, "sha256": sha256}));
    }
    output::line(format_args!("{}: {size_bytes} bytes, sha256 {sha256}", place.display()))
}

/// Downloads the weights of a job's checkpoint into a folder next to `place`.
fn fetch(args: &Args, place: &Path) -> anyhow::Result<tempfile::TempDir> {
    let source = args.source.to_string_lossy();
    // A mistyped folder must not need a server to be told.
    if source.contains('/') {
        let detail = "is not the folder of a checkpoint; name a job that has a / in its name by its id";
        return Err(wrong(format!("{source}: {detail}")));
    }
    let api = args.server.api()?;
    block_on(async {
        let job = api.find_job(&source).await?;
        let checkpoint = choose(&api, &job, &args.checkpoint).await?;
        let files = download::weight_files(&api, &checkpoint, args.weights).await?;
        download::fetch_beside(place, &api, &checkpoint, &files).await
    })
}

/// Writes the network of the checkpoint in `folder` as an ONNX file.
fn convert(folder: &Path, weights: Weights, fold: bool, place: &Path) -> anyhow::Result<ManifestFile> {
    model_files(folder, weights)?;
    let model = inspect::onnx(&path_of(folder, weights), fold).map_err(wrong)?;
    replace(place, |partial| {
        fs::write(partial, &model).with_context(|| partial.display().to_string())?;
        Ok(ManifestFile { size_bytes: model.len() as u64, sha256: hex::encode(Sha256::digest(&model)) })
    })
}

/// Joins the weights of the checkpoint in `folder`.
///
/// # Errors
/// As [`run`].
pub(super) fn join(folder: &Path, weights: Weights, place: &Path) -> anyhow::Result<ManifestFile> {
    let files = model_files(folder, weights)?;
    replace(place, |partial| checkpoint::join(&files, partial).map_err(wrong))
}

/// What [`checkpoint::model_files`] takes.
fn path_of(folder: &Path, weights: Weights) -> PathBuf {
    match weights {
        Weights::Model => folder.to_owned(),
        Weights::Ema => folder.join(weights.file()),
    }
}

/// The files with these weights of the checkpoint in `folder`.
fn model_files(folder: &Path, weights: Weights) -> anyhow::Result<Vec<PathBuf>> {
    let files = checkpoint::model_files(&path_of(folder, weights)).map_err(|e| wrong(e.to_string()))?;
    if weights == Weights::Ema && !files.iter().all(|file| file.exists()) {
        let detail = "this checkpoint has no averaged weights: leave --weights out";
        return Err(wrong(format!("{}: {detail}", folder.display())));
    }
    Ok(files)
}

/// Lets `write` make a file next to `place` and renames it, so a broken write leaves nothing under that name.
fn replace(
    place: &Path,
    write: impl FnOnce(&Path) -> anyhow::Result<ManifestFile>,
) -> anyhow::Result<ManifestFile> {
    let mut partial = place.as_os_str().to_owned();
    partial.push(".part");
    let partial = PathBuf::from(partial);
    // An earlier run may have left its partial file.
    let _ = fs::remove_file(&partial);
    let written = write(&partial).and_then(|written| {
        fs::rename(&partial, place).with_context(|| place.display().to_string())?;
        Ok(written)
    });
    if written.is_err() {
        let _ = fs::remove_file(&partial);
    }
    written
}
