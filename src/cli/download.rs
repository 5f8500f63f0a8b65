//! `lockstep download`: a checkpoint's weights.

use super::{
    api::{Api, ServerArgs},
    block_on,
    checkpoint_choice::{CheckpointArgs, Listed, Weights},
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
use tempfile::TempDir;

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
        let files = weight_files(&api, &chosen, args.which.weights).await?;
        let (size_bytes, sha256) = match &files[..] {
            [file] => (fetch(&api, &chosen, file, &args.output).await?, file.sha256.clone()),
            // The parts of a sharded checkpoint become one file.
            parts => {
                let folder = fetch_beside(&args.output, &api, &chosen, parts).await?;
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

/// A file of a checkpoint, as its manifest has it.
pub(super) struct WeightFile {
    name: String,
    sha256: String,
}

/// The files with a checkpoint's weights: several, of which one is their index, if it is sharded.
///
/// # Errors
/// Exit status 2 when the checkpoint has no such weights.
pub(super) async fn weight_files(
    api: &Api,
    checkpoint: &Listed,
    weights: Weights,
) -> anyhow::Result<Vec<WeightFile>> {
    let manifest: Value = api.get(&format!("/checkpoints/{}/MANIFEST.json", checkpoint.id)).await?;
    let files = manifest.get("files").and_then(Value::as_object).into_iter().flatten();
    let of_kind = files.filter(|(name, _)| checkpoint_files::kind(name) == Some(weights.file()));
    let with_checksum = |(name, about): (&String, &Value)| {
        Some(WeightFile { name: name.clone(), sha256: about.get("sha256")?.as_str()?.to_owned() })
    };
    let files: Vec<WeightFile> = of_kind.filter_map(with_checksum).collect();
    match weights {
        _ if !files.is_empty() => Ok(files),
        Weights::Ema => {
            let id = &checkpoint.id;
            Err(wrong(format!("checkpoint {id} has no averaged weights: leave --weights out")))
        }
        Weights::Model => bail!("checkpoint {} has no checksum of {}", checkpoint.id, weights.file()),
    }
}

/// Downloads `files` into a temporary folder next to `place`.
///
/// # Errors
/// The download is damaged, or a file cannot be written.
pub(super) async fn fetch_beside(
    place: &Path,
    api: &Api,
    checkpoint: &Listed,
    files: &[WeightFile],
) -> anyhow::Result<TempDir> {
    let beside = place.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = tempfile::tempdir_in(beside.unwrap_or(Path::new(".")))?;
    for file in files {
        fetch(api, checkpoint, file, &folder.path().join(&file.name)).await?;
    }
    Ok(folder)
}

/// Writes a temporary file next to `place` first, so a broken download leaves nothing under that name.
async fn fetch(api: &Api, checkpoint: &Listed, file: &WeightFile, place: &Path) -> anyhow::Result<u64> {
    let (path, expected) = (format!("/checkpoints/{}/{}", checkpoint.id, file.name), &file.sha256);
    let mut partial = place.as_os_str().to_owned();
    partial.push(".part");
    let partial = PathBuf::from(partial);
    let mut file = File::create(&partial).map_err(|e| wrong(format!("{}: {e}", partial.display())))?;
    let result = async {
        let answer = api.request(Method::GET, &path, None::<&()>).await?;
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
