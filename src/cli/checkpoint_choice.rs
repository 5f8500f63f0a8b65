//! Which checkpoint of which job a command uses.

use super::{
    api::{Api, list},
    wrong,
};
use lockstep_protocol::{Job, agent::CheckpointInfo};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Which of a checkpoint's weights a command uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Weights {
    /// The weights from which training continues
    Model,
    /// The moving average of the weights, for a job with train.ema_decay
    Ema,
}

impl Weights {
    /// The checkpoint's file with these weights.
    pub(crate) fn file(self) -> &'static str {
        match self {
            Weights::Model => "model.safetensors",
            Weights::Ema => "ema.safetensors",
        }
    }
}

/// A job's checkpoint.
#[derive(clap::Args)]
pub(crate) struct CheckpointArgs {
    /// The job's id, the start of its id, or its name
    job: String,
    /// best, latest, a step, or epoch and step (`2-54`)
    #[arg(long, default_value = "best")]
    checkpoint: String,
    /// Which of the checkpoint's weights to use
    #[arg(long, value_enum, default_value_t = Weights::Model)]
    pub(crate) weights: Weights,
}

impl CheckpointArgs {
    /// The job and the checkpoint, as the server has them.
    ///
    /// # Errors
    /// Exit status 2 when there is no such job or checkpoint.
    pub(crate) async fn find(&self, api: &Api) -> anyhow::Result<(Job, Listed)> {
        let job = api.find_job(&self.job).await?;
        let chosen = choose(api, &job, &self.checkpoint).await?;
        Ok((job, chosen))
    }
}

/// A checkpoint in the server's list.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Listed {
    pub(crate) id: String,
    #[serde(flatten)]
    pub(crate) info: CheckpointInfo,
}

impl Listed {
    /// Epoch and step, as every command prints them.
    pub(crate) fn name(&self) -> String {
        format!("{}-{}", self.info.epoch, self.info.step)
    }
}

/// Parses `54` or `2-54`: the step, and the epoch if it is given.
fn parse(name: &str) -> Option<(Option<u32>, u64)> {
    match name.split_once('-') {
        Some((epoch, step)) => Some((Some(epoch.parse().ok()?), step.parse().ok()?)),
        None => Some((None, name.parse().ok()?)),
    }
}

/// The checkpoint of `job` that `wanted` names: best, latest, a step, epoch and step in the printed form, or an id.
///
/// # Errors
/// Exit status 2 when there is no such checkpoint.
pub(crate) async fn choose(api: &Api, job: &Job, wanted: &str) -> anyhow::Result<Listed> {
    let all = api.all(&format!("/jobs/{}/checkpoints", job.id), "checkpoints", &[], None).await?;
    let all: Vec<Listed> = list(&Value::Array(all), "checkpoints")?;
    let newest = || all.iter().max_by_key(|c| c.info.step);
    let found = match wanted {
        "latest" => newest(),
        // A job without validation has no best checkpoint: take the newest.
        "best" => all.iter().filter(|c| c.info.best).max_by_key(|c| c.info.step).or_else(newest),
        id if all.iter().any(|c| c.id == id) => all.iter().find(|c| c.id == id),
        name => {
            let (epoch, step) = parse(name).ok_or_else(|| {
                wrong(format!(
                    "--checkpoint {name}: it is best, latest, the number of a step, or epoch and step such as 2-54"
                ))
            })?;
            all.iter().find(|c| c.info.step == step && epoch.is_none_or(|epoch| c.info.epoch == epoch))
        }
    };
    found.cloned().ok_or_else(|| match all.len() {
        0 => wrong(format!("{} has no checkpoint yet", job.id)),
        _ => {
            let names: Vec<_> = all.iter().map(Listed::name).collect();
            wrong(format!("{} has no checkpoint {wanted}; it has {}", job.id, names.join(", ")))
        }
    })
}
