//! `lockstep download`: a checkpoint's weights.

use super::{
    api::{Api, ServerArgs},
    block_on,
    checkpoint_choice::{CheckpointArgs, Weights},
    export, file, output, wrong,
};
use anyhow::{Context, bail};
use futures_util::StreamExt;
use lockstep_protocol::checkpoint_files;
use reqwest::Method;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
};

/// Download a checkpoint's weights (safetensors)
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    which: CheckpointArgs,
    /// File for the weights
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    server: ServerArgs,
}

/// Downloads, compares the checksum, and only then gives the file its name.
///
/// # Errors
/// Exit status 2 when there is no such job or checkpoint, 1 when the download is damaged.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    file::check_output(&args.output)?;
    let api = args.server.api()?;
    block_on(async {
        let (_, chosen) = args.which.find(&api).await?;
        let file = args.which.weights.file();
        let from = format!("/checkpoints/{}", chosen.id);
        let manifest: Value = api.get(&format!("{from}/MANIFEST.json")).await?;
        let files = manifest.get("files").and_then(Value::as_object).into_iter().flatten();
        let of_kind = files.filter(|(name, _)| checkpoint_files::kind(name) == Some(file));
        let files: Vec<(&String, &str)> =
            of_kind.filter_map(|(name, about)| Some((name, about.get("sha256")?.as_str()?))).collect();
        let (size_bytes, sha256) = match &files[..] {
            [] if args.which.weights == Weights::Ema => {
                return Err(wrong(format!(
                    "checkpoint {} has no averaged weights: leave --weights out",
                    chosen.id
                )));
            }
            [] => bail!("checkpoint {} has no checksum of {file}", chosen.id),
            [(name, expected)] => {
                let size_bytes = fetch(&api, &format!("{from}/{name}"), expected, &args.output).await?;
                (size_bytes, (*expected).to_owned())
            }
            // The parts of a sharded checkpoint become one file.
            parts => {
                let beside = args.output.parent().filter(|folder| !folder.as_os_str().is_empty());
                let folder = tempfile::tempdir_in(beside.unwrap_or(Path::new(".")))?;
                for (name, expected) in parts {
                    fetch(&api, &format!("{from}/{name}"), expected, &folder.path().join(name)).await?;
                }
                let joined = export::join(folder.path(), args.which.weights, &args.output)?;
                (joined.size_bytes, joined.sha256)
            }
        };
        if args.server.json {
            let file = args.output.display().to_string();
            return output::json(&serde_json::json!({
                "file": file, "size_bytes": size_bytes, "sha256": sha256, "checkpoint": chosen,
            }));
        }
        let accuracy = chosen
            .info
            .accuracy_in_words()
            // The accuracy was measured with the model's own weights.
            .filter(|_| args.which.weights == Weights::Model)
            .map(|accuracy| format!(", validation accuracy {accuracy}"))
            .unwrap_or_default();
        output::line(format_args!(
            "{}: epoch {}, step {}{accuracy}, {size_bytes} bytes, sha256 {sha256}",
            args.output.display(),
            chosen.info.epoch,
            chosen.info.step
        ))
    })
}

/// Writes a temporary file next to `place` first, so a broken download leaves nothing under that name.
async fn fetch(api: &Api, path: &str, expected: &str, place: &Path) -> anyhow::Result<u64> {
    let mut partial = place.as_os_str().to_owned();
    partial.push(".part");
    let partial = PathBuf::from(partial);
    let mut file = File::create(&partial).map_err(|e| wrong(format!("{}: {e}", partial.display())))?;
    let result = async {
        let answer = api.request(Method::GET, path, None::<&()>).await?;
        let mut body = answer.bytes_stream();
        let mut hash = Sha256::new();
        let mut size_bytes = 0;
        while let Some(chunk) = body.next().await {
            let chunk = chunk.context("the download broke off")?;
            hash.update(&chunk);
            size_bytes += chunk.len() as u64;
            file.write_all(&chunk).with_context(|| partial.display().to_string())?;
        }
        let found = hex::encode(hash.finalize());
        if !found.eq_ignore_ascii_case(expected) {
            bail!("the download is damaged: its sha256 is {found}, but the checkpoint's is {expected}; try again");
        }
        file.sync_all()?;
        fs::rename(&partial, place).with_context(|| place.display().to_string())?;
        Ok(size_bytes)
    }
    .await;
    if result.is_err() {
        // The first error is the one to report, not a failure to remove the partial file.
        let _ = fs::remove_file(&partial);
    }
    result
}
