//! Checkpoints that the database does not name. On the server's disk: the ranks continued and ended while the server or their agent was
//! unreachable. In the object store: they were stored after the backup from which the database was restored.

use super::{
    disk_checks::has_expected_sizes,
    manifest::{self, MANIFEST, Manifest},
};
use lockstep_protocol::{
    agent::{AttemptEvent, CheckpointInfo, Evaluation},
    checkpoint_files::{STATE, folder_name, parse_folder_name},
    dataset::ValidationSet,
    job::Job,
    limits::STATE_FILE_BYTES,
    metric::MetricColumn,
};
use serde::Deserialize;
use std::{
    fs::{self, File},
    io::{self, Read as _},
    path::{Path, PathBuf},
};

/// Maximum number of checkpoints that are tried, the newest first. Some may be incomplete, because their ranks died.
const MAX_TRIED: usize = 5;

/// The results of the evaluation in a checkpoint's `state.json`.
#[derive(Deserialize)]
struct State {
    val_accuracy: Option<f64>,
    val_loss: Option<f64>,
    validation: Option<ValidationSet>,
    best: Option<Best>,
}

/// The best checkpoint at the time of writing.
#[derive(Deserialize)]
pub(crate) struct Best {
    epoch: u32,
    step: u64,
}

/// Finds the newest checkpoint in `checkpoints` that has all of its files. If another checkpoint is the best, the best comes first in the
/// list. Rank 0 verifies checksums later, and uses the previous checkpoint if they are wrong.
pub(crate) async fn find_unreported(checkpoints: PathBuf) -> Vec<CheckpointInfo> {
    let work = move || {
        let mut found: Vec<(u64, u32)> = fs::read_dir(&checkpoints)
            .into_iter()
            .flatten()
            .filter_map(|entry| parse_folder_name(&entry.ok()?.file_name().to_string_lossy()))
            .map(|(epoch, step)| (step, epoch))
            .collect();
        found.sort_unstable_by(|a, b| b.cmp(a));
        let newest = found.into_iter().take(MAX_TRIED).find_map(|(step, epoch)| {
            let folder = checkpoints.join(folder_name(epoch, step));
            let failed = |error: &io::Error| {
                tracing::warn!(folder = %folder.display(), %error, "no checkpoint to continue from");
            };
            read_checkpoint(&checkpoints, epoch, step).inspect_err(failed).ok()
        });
        let Some((newest, best)) = newest else { return Vec::new() };
        let other = best.filter(|best| best.step != newest.step);
        let other = other.and_then(|best| Some(read_checkpoint(&checkpoints, best.epoch, best.step).ok()?.0));
        let best = other.map(|other| CheckpointInfo { best: true, ..other });
        best.into_iter().chain([newest]).collect()
    };
    tokio::task::spawn_blocking(work).await.unwrap_or_default()
}

/// The records that a rank would have sent about an unreported checkpoint. Leaves out the validation if it was reported: the job has later
/// steps, or its last accuracy and loss are the same.
pub(crate) fn report(job: &Job, checkpoint: CheckpointInfo) -> Vec<AttemptEvent> {
    let mut events = Vec::new();
    let is_reported = job.step > checkpoint.step
        || (job.last.val_accuracy, job.last.val_loss) == (checkpoint.val_accuracy, checkpoint.val_loss);
    if let (Some(accuracy), Some(loss), Some(validation)) =
        (checkpoint.val_accuracy, checkpoint.val_loss, &checkpoint.validation)
        && !is_reported
    {
        let CheckpointInfo { epoch, step, .. } = checkpoint;
        let columns = [("val_loss", loss), ("val_accuracy", accuracy)].map(|(name, value)| MetricColumn {
            name: name.into(),
            steps: vec![step],
            values: vec![value as f32],
        });
        events.push(AttemptEvent::Metrics { rank: 0, columns: columns.into() });
        let samples = validation.pictures;
        // The duration is unknown.
        events.push(AttemptEvent::Evaluation(Evaluation { epoch, step, samples, accuracy, loss, secs: 0.0 }));
    }
    events.push(AttemptEvent::Checkpoint(checkpoint));
    events
}

fn read_checkpoint(checkpoints: &Path, epoch: u32, step: u64) -> io::Result<(CheckpointInfo, Option<Best>)> {
    let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what);
    let name = folder_name(epoch, step);
    let folder = checkpoints.join(&name);
    if !has_expected_sizes(&folder) {
        return Err(invalid("a file is missing, or has another size than was written"));
    }
    let manifest_bytes = fs::read(folder.join(MANIFEST))?;
    let manifest = manifest::parse(&manifest_bytes, &name)
        .map_err(|detail| invalid(&format!("its {MANIFEST} {detail}")))?;
    let mut state = Vec::new();
    File::open(folder.join(STATE))?.take(STATE_FILE_BYTES).read_to_end(&mut state)?;
    Ok(describe(&manifest, manifest_bytes.len(), &state)?)
}

/// Describes a checkpoint by its manifest and its [`STATE`]. Also returns the best checkpoint at the time of writing.
pub(crate) fn describe(
    manifest: &Manifest,
    manifest_len: usize,
    state: &[u8],
) -> serde_json::Result<(CheckpointInfo, Option<Best>)> {
    let State { val_accuracy, val_loss, validation, best } = serde_json::from_slice(state)?;
    let Manifest { epoch, step, .. } = *manifest;
    let files: u64 = manifest.files.values().map(|file| file.size_bytes).sum();
    let is_best = best.as_ref().is_some_and(|best| best.step == step);
    let size_bytes = files + manifest_len as u64;
    let info = CheckpointInfo { epoch, step, val_accuracy, val_loss, validation, best: is_best, size_bytes };
    Ok((info, best))
}
