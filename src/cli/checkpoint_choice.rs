//! Which checkpoint of which job a command is about.

use super::{
    api::{Api, list},
    wrong,
};
use lockstep_protocol::{Job, agent::CheckpointInfo};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Which weights of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Weights {
    /// Those that training continues from
    Model,
    /// Their running average, of a job with train.ema_decay
    Ema,
}

impl Weights {
    /// The file of a checkpoint that programs load.
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
    /// best, latest, or a step
    #[arg(long, default_value = "best")]
    checkpoint: String,
    /// Which of the checkpoint's weights
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

/// The checkpoint of `job` that is called `wanted`: best, latest, or a step.
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
        step => {
            let step: u64 = step.parse().map_err(|_| {
                wrong(format!("--checkpoint {step}: it is best, latest, or the number of a step"))
            })?;
            all.iter().find(|c| c.info.step == step)
        }
    };
    found.cloned().ok_or_else(|| match all.len() {
        0 => wrong(format!("{} has no checkpoint yet", job.id)),
        _ => {
            let steps: Vec<_> = all.iter().map(|c| c.info.step.to_string()).collect();
            wrong(format!(
                "{} has no checkpoint {wanted}; there are those of steps {}",
                job.id,
                steps.join(", ")
            ))
        }
    })
}
