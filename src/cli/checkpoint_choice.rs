//! Options that choose a job's checkpoint.

use super::{api::Api, usage_error};
use lockstep_protocol::{
    Job,
    agent::CheckpointInfo,
    models::{SCHEME, VersionName},
};
use serde::{Deserialize, Serialize};

/// The weights of a checkpoint that a command uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Weights {
    /// The weights from which training continues
    Model,
    /// The moving average of the weights, for jobs with train.ema_decay
    Ema,
}

impl Weights {
    /// Returns the name of the checkpoint's file with these weights.
    pub(crate) fn file_name(self) -> &'static str {
        match self {
            Weights::Model => "model.safetensors",
            Weights::Ema => "ema.safetensors",
        }
    }
}

/// The default of `--checkpoint`.
const BEST: &str = "best";

/// Options that choose a checkpoint.
#[derive(clap::Args)]
pub(crate) struct CheckpointArgs {
    /// The job's id, the start of its id, or its name; or a version of a model (`models:/shoes@champion`, `models:/shoes/3`)
    pub(crate) job: String,
    /// best, latest, a step, or epoch and step (`2-54`)
    #[arg(long, default_value = BEST)]
    pub(crate) checkpoint: String,
    /// The weights of the checkpoint to use
    #[arg(long, value_enum, default_value_t = Weights::Model)]
    pub(crate) weights: Weights,
}

/// Returns the job `source` and its checkpoint `checkpoint`, as in [`choose`]. If `source` is a version of a model, returns that version's
/// job and checkpoint.
///
/// # Errors
/// Exit status 2 if the job, checkpoint or version does not exist.
pub(crate) async fn find(
    api: &Api,
    source: &str,
    checkpoint: &str,
) -> anyhow::Result<(Job, ListedCheckpoint)> {
    if !source.starts_with(SCHEME) {
        let job = api.find_trained_job(source).await?;
        let chosen = choose(api, &job, checkpoint).await?;
        return Ok((job, chosen));
    }
    let name = match source.parse::<VersionName>() {
        Ok(name) => name,
        Err(error) => return Err(usage_error(api.describe_namesake(source).await.unwrap_or(error))),
    };
    if checkpoint != BEST {
        return Err(usage_error(format!("{source} names a checkpoint already: leave --checkpoint out")));
    }
    let version = api.find_model_version(&name).await?;
    let job = api.get(&format!("/jobs/{}", version.job)).await?;
    Ok((job, api.get(&format!("/checkpoints/{}", version.checkpoint)).await?))
}

/// A checkpoint in the server's list.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ListedCheckpoint {
    pub(crate) id: String,
    pub(crate) attempt: u32,
    #[serde(flatten)]
    pub(crate) info: CheckpointInfo,
    /// Whether the files no longer exist.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) missing: bool,
}

impl ListedCheckpoint {
    /// Formats epoch and step, in the form that all commands print.
    pub(crate) fn name(&self) -> String {
        format!("{}-{}", self.info.epoch, self.info.step)
    }

    /// Describes the checkpoint whose `weights` a command has written: epoch, step and validation accuracy.
    pub(crate) fn describe(&self, weights: Weights) -> String {
        // The accuracy was measured with the model's weights, not with the averaged weights.
        let accuracy = self.info.accuracy_in_words().filter(|_| weights == Weights::Model);
        let accuracy = accuracy.map(|accuracy| format!(", validation accuracy {accuracy}"));
        format!("epoch {}, step {}{}", self.info.epoch, self.info.step, accuracy.unwrap_or_default())
    }
}

/// Parses `54` or `2-54`: the step, and the epoch if it is given.
fn parse(name: &str) -> Option<(Option<u32>, u64)> {
    match name.split_once('-') {
        Some((epoch, step)) => Some((Some(epoch.parse().ok()?), step.parse().ok()?)),
        None => Some((None, name.parse().ok()?)),
    }
}

/// Chooses the checkpoint of `job` that `name` names: best, latest, a step, epoch and step in the printed form, or an id.
///
/// # Errors
/// Exit status 2 if the checkpoint does not exist.
pub(crate) async fn choose(api: &Api, job: &Job, name: &str) -> anyhow::Result<ListedCheckpoint> {
    let checkpoints: Vec<ListedCheckpoint> = api.list(&format!("/jobs/{}/checkpoints", job.id)).await?;
    if checkpoints.is_empty() && job.external.is_some() {
        return Err(usage_error(format!(
            "{} is a run from elsewhere and has no checkpoints; download its files from its page, or with job.download_file in Python",
            job.id
        )));
    }
    let newest = || checkpoints.iter().max_by_key(|c| c.info.step);
    let chosen = match name {
        "latest" => newest(),
        // A job without validation has no best checkpoint: use the newest.
        "best" => checkpoints.iter().filter(|c| c.info.best).max_by_key(|c| c.info.step).or_else(newest),
        id if checkpoints.iter().any(|c| c.id == id) => checkpoints.iter().find(|c| c.id == id),
        _ => {
            let (epoch, step) = parse(name).ok_or_else(|| {
                usage_error(format!(
                    "--checkpoint {name}: give best, latest, a step such as 54, or epoch and step such as 2-54"
                ))
            })?;
            checkpoints
                .iter()
                .find(|c| c.info.step == step && epoch.is_none_or(|epoch| c.info.epoch == epoch))
        }
    };
    chosen.cloned().ok_or_else(|| match checkpoints.len() {
        0 if job.state.is_final() => {
            let reason = job.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
            usage_error(format!("{} has no checkpoint: the job {}{reason}", job.id, job.state.predicate()))
        }
        0 => {
            usage_error(format!("{0} has no checkpoint yet; `lockstep watch {0}` shows its progress", job.id))
        }
        _ => {
            let names: Vec<_> = checkpoints.iter().map(ListedCheckpoint::name).collect();
            usage_error(format!("{} has no checkpoint {name}; it has {}", job.id, names.join(", ")))
        }
    })
}
