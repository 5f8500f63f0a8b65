//! `lockstep export onnx`: a checkpoint's network and weights as an ONNX file.

use crate::cli::{
    api::ServerArgs,
    block_on,
    checkpoint_choice::{ListedCheckpoint, Weights, find},
    file, output, usage_error, weight_files,
};
use lockstep_host::write_atomically;
use lockstep_protocol::models::SCHEME;
use lockstep_worker::inspect;
use serde_json::json;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Write a checkpoint's network as an ONNX file: opset 17, input `input` (normalised pictures, N x C x H x W), output `output` (logits)
#[derive(clap::Args)]
pub(super) struct Args {
    /// A job (its id, the start of its id, or its name), a version of a model (`models:/shoes@champion`), or a path, which needs no server:
    /// a checkpoint's folder, the folder of a run of `lockstep train` (its best checkpoint), or a model.safetensors that Lockstep wrote
    #[arg(value_name = "JOB|PATH")]
    source: PathBuf,
    /// The job's checkpoint: best, latest, a step, or epoch and step (`2-54`)
    #[arg(long, default_value = "best")]
    checkpoint: String,
    /// Which weights of the checkpoint to use
    #[arg(long, value_enum, default_value_t = Weights::Model)]
    weights: Weights,
    /// File for the network; an existing file is replaced
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Leave out the last layer: the output is the embedding, which is the input of that layer
    #[arg(long)]
    embed: bool,
    /// Fold each batch norm that follows a convolution into the convolution
    #[arg(long)]
    fold_batch_norm: bool,
    #[command(flatten)]
    server: ServerArgs,
}

/// Converts a checkpoint of this machine, or a checkpoint that is downloaded from a server, to an ONNX file.
///
/// # Errors
/// Exit status 2 if the checkpoint does not exist or cannot be used.
pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let Args { source, output, .. } = args;
    file::check_output(output)?;
    let downloaded = if is_path(source) { None } else { Some(fetch(args)?) };
    let (folder, description) = match &downloaded {
        Some((folder, checkpoint)) => {
            (folder.path().to_owned(), format!("{}, ", checkpoint.describe(args.weights)))
        }
        None => (weight_files::resolve_run_folder(source)?, String::new()),
    };
    let path = weight_files::weights_path(&folder, args.weights);
    let model = inspect::to_onnx(&path, args.embed, args.fold_batch_norm).map_err(usage_error)?;
    write_atomically(output, &model)?;
    let (size_bytes, sha256) = (model.len(), hex::encode(Sha256::digest(&model)));
    let file = output.display().to_string();
    let value = json!({"file": file, "size_bytes": size_bytes, "sha256": sha256});
    let text = format!("{file}: {description}{size_bytes} bytes, sha256 {sha256}");
    output::print(args.server.json, &value, text)
}

/// Whether the source is a path: a file, a folder whose path contains a slash, or a folder that contains a checkpoint or a run. The name of
/// any other folder may be the name of a job.
fn is_path(source: &Path) -> bool {
    let has_slash = source.components().count() > 1 || source.is_absolute();
    let has_model = || weight_files::has_weights(source) || source.join("checkpoints").exists();
    source.is_file() || (source.is_dir() && (has_slash || has_model()))
}

/// Downloads the weights of a job's checkpoint into a folder next to the output. Also returns the checkpoint.
fn fetch(args: &Args) -> anyhow::Result<(TempDir, ListedCheckpoint)> {
    let source = args.source.to_string_lossy();
    // A mistyped path is reported without a server.
    if source.contains('/') && !source.starts_with(SCHEME) {
        let detail = "there is no such file or folder; if the job's name contains a /, give the job's id";
        return Err(usage_error(format!("{source}: {detail}")));
    }
    let api = args.server.api()?;
    block_on(async {
        let (_, checkpoint) = find(&api, &source, &args.checkpoint).await?;
        let files = weight_files::list_files(&api, &checkpoint, args.weights).await?;
        let folder = weight_files::fetch_beside(&args.output, &api, &checkpoint, &files).await?;
        Ok((folder, checkpoint))
    })
}
