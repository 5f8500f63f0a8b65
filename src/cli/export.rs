//! `lockstep export`: writes a checkpoint's weights into one file.

use super::{checkpoint_choice::Weights, file, output, wrong};
use anyhow::Context;
use lockstep_worker::checkpoint::{self, ManifestFile};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Write the weights of a checkpoint's folder, sharded or not, into one file with torchvision's names (safetensors); needs no server
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The checkpoint's folder, such as lockstep-run/checkpoints/2-54
    #[arg(value_name = "FOLDER")]
    checkpoint: PathBuf,
    /// Which of the checkpoint's weights to use
    #[arg(long, value_enum, default_value_t = Weights::Model)]
    weights: Weights,
    /// File for the weights
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
}

/// Checks the checkpoint's files and joins them.
///
/// # Errors
/// Exit status 2 when there is no such checkpoint or the checkpoint is damaged.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    file::check_output(&args.output)?;
    let ManifestFile { size_bytes, sha256 } = join(&args.checkpoint, args.weights, &args.output)?;
    output::line(format_args!("{}: {size_bytes} bytes, sha256 {sha256}", args.output.display()))
}

/// Joins the weights of the checkpoint in `folder`. The result is written next to `place` first, so a broken copy leaves nothing under that name.
///
/// # Errors
/// As [`run`].
pub(super) fn join(folder: &Path, weights: Weights, place: &Path) -> anyhow::Result<ManifestFile> {
    if !folder.is_dir() {
        return Err(wrong(format!("{}: is not the folder of a checkpoint", folder.display())));
    }
    let from = match weights {
        Weights::Model => folder.to_owned(),
        Weights::Ema => folder.join(weights.file()),
    };
    let files = checkpoint::model_files(&from).map_err(|e| wrong(e.to_string()))?;
    if weights == Weights::Ema && !files.iter().all(|file| file.exists()) {
        let detail = "this checkpoint has no averaged weights: leave --weights out";
        return Err(wrong(format!("{}: {detail}", folder.display())));
    }
    let mut partial = place.as_os_str().to_owned();
    partial.push(".part");
    let partial = PathBuf::from(partial);
    // An earlier run may have left its partial file.
    let _ = fs::remove_file(&partial);
    let written = checkpoint::join(&files, &partial).map_err(wrong).and_then(|written| {
        fs::rename(&partial, place).with_context(|| place.display().to_string())?;
        Ok(written)
    });
    if written.is_err() {
        let _ = fs::remove_file(&partial);
    }
    written
}
