//! `lockstep export`: files for other programs.

mod onnx;
mod parquet;
mod tensorboard;

use super::{checkpoint_choice::Weights, file, output, usage_error, weight_files};
use lockstep_worker::checkpoint::ManifestFile;
use std::path::PathBuf;

/// Write files for other programs: ONNX, TensorBoard, Parquet, or a checkpoint's weights as one file (safetensors)
///
/// Without a format, the command joins the weights in a checkpoint's folder, sharded or not, in one file with torchvision's names. No
/// server is needed.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Args {
    /// The checkpoint's folder, such as lockstep-run/checkpoints/2-54
    #[arg(value_name = "FOLDER", required = true)]
    checkpoint: Option<PathBuf>,
    /// The weights of the checkpoint to use
    #[arg(long, value_enum, default_value_t = Weights::Model)]
    weights: Weights,
    /// File for the weights
    #[arg(short, long, value_name = "FILE", required = true)]
    output: Option<PathBuf>,
    #[command(subcommand)]
    format: Option<Format>,
}

#[derive(clap::Subcommand)]
enum Format {
    Onnx(onnx::Args),
    Tensorboard(tensorboard::Args),
    Parquet(parquet::Args),
}

/// Writes files for other programs.
///
/// # Errors
/// Exit status 2 if the checkpoint or the job does not exist, or the checkpoint is damaged.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match args {
        Args { format: Some(Format::Onnx(args)), .. } => onnx::run(args),
        Args { format: Some(Format::Tensorboard(args)), .. } => tensorboard::run(args),
        Args { format: Some(Format::Parquet(args)), .. } => parquet::run(args),
        Args { checkpoint: Some(folder), output: Some(place), .. } => {
            file::check_output(place)?;
            let ManifestFile { size_bytes, sha256 } = weight_files::join(folder, args.weights, place)?;
            output::line(format_args!("{}: {size_bytes} bytes, sha256 {sha256}", place.display()))
        }
        // Both are required without a subcommand.
        Args { .. } => Err(usage_error("give the checkpoint's folder, and a file with -o")),
    }
}
