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
/// server is needed. For the folder of a run of `lockstep train`, the command uses the run's best checkpoint. `lockstep download` writes
/// the weights of a job that a server has.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(
    override_usage = "lockstep export <FORMAT> [OPTIONS] <JOB> -o <FILE>\n       lockstep export [OPTIONS] <FOLDER> -o <FILE>"
)]
pub(crate) struct Args {
    /// Folder of a checkpoint, such as runs/JOB/checkpoints/2-54, or of a run of `lockstep train`
    // Several values are accepted so that the error for an unknown format can name the formats.
    #[arg(value_name = "FOLDER")]
    folders: Vec<PathBuf>,
    /// The weights of the checkpoint to use
    #[arg(long, value_enum, default_value_t = Weights::Model)]
    weights: Weights,
    /// File for the weights; an existing file is replaced
    #[arg(short, long, value_name = "FILE")]
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
    match &args.format {
        Some(Format::Onnx(args)) => onnx::run(args),
        Some(Format::Tensorboard(args)) => tensorboard::run(args),
        Some(Format::Parquet(args)) => parquet::run(args),
        None => write_weights(args),
    }
}

/// Joins the weights of a checkpoint's folder in one file.
fn write_weights(args: &Args) -> anyhow::Result<()> {
    match (&args.folders[..], &args.output) {
        ([folder], Some(output)) if folder.is_dir() => {
            file::check_output(output)?;
            let folder = weight_files::resolve_run_folder(folder)?;
            if !weight_files::has_weights(&folder) {
                let (folder, output) = (folder.display(), output.display());
                return Err(usage_error(format!(
                    "{folder} is neither the folder of a checkpoint nor of a run; if you mean the job {folder}, write its weights with \
                     `lockstep download {folder} -o {output}`"
                )));
            }
            let ManifestFile { size_bytes, sha256 } = weight_files::join(&folder, args.weights, output)?;
            output::line(format_args!("{}: {size_bytes} bytes, sha256 {sha256}", output.display()))
        }
        (folders, _) => {
            let unknown = folders.first().filter(|path| !path.is_dir());
            let problem =
                unknown.map(|path| format!("{} is neither a format nor a folder; ", path.display()));
            Err(usage_error(format!(
                "{}write `lockstep export FORMAT JOB -o FILE`, with the format onnx, tensorboard or parquet. `lockstep download JOB -o FILE` \
                 writes a job's weights (safetensors), and `lockstep export FOLDER -o FILE` the weights in the FOLDER of a checkpoint",
                problem.unwrap_or_default()
            )))
        }
    }
}
