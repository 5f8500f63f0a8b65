//! `lockstep download`: downloads a checkpoint's weights.

use super::{
    api::ServerArgs,
    block_on,
    checkpoint_choice::{CheckpointArgs, find},
    file, output, weight_files,
};
use std::path::PathBuf;

/// Download a checkpoint's weights (safetensors)
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    choice: CheckpointArgs,
    /// File for the weights; an existing file is replaced
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    server: ServerArgs,
}

/// Downloads the weights, compares the checksum, and only then gives the file its name.
///
/// # Errors
/// Exit status 2 if the job or the checkpoint does not exist, 1 if the download is damaged.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    file::check_output(&args.output)?;
    let api = args.server.api()?;
    block_on(async {
        let (_, chosen) = find(&api, &args.choice.job, &args.choice.checkpoint).await?;
        let files = weight_files::list_files(&api, &chosen, args.choice.weights).await?;
        let (size_bytes, sha256) = match &files[..] {
            [file] => (weight_files::fetch(&api, &chosen, file, &args.output).await?, file.sha256.clone()),
            // The parts of a sharded checkpoint are joined in one file.
            parts => {
                let folder = weight_files::fetch_beside(&args.output, &api, &chosen, parts).await?;
                let joined = weight_files::join(folder.path(), args.choice.weights, &args.output)?;
                (joined.size_bytes, joined.sha256)
            }
        };
        let file = args.output.display().to_string();
        let value = serde_json::json!({
            "file": file, "size_bytes": size_bytes, "sha256": sha256, "checkpoint": chosen,
        });
        let text =
            format!("{file}: {}, {size_bytes} bytes, sha256 {sha256}", chosen.describe(args.choice.weights));
        output::print(args.server.json, &value, text)
    })
}
