//! `lockstep predict`: classifies pictures.

use super::{
    api::{Api, ServerArgs},
    block_on,
    checkpoint_choice::{Listed, Weights, choose},
    file, output, wrong,
};
use lockstep_protocol::{
    Job, JobId,
    inspect::{Prediction, Probability},
};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Most bytes of the pictures in a request, as on the server.
const MOST_BYTES: u64 = 24 << 20;

/// Classify pictures (JPEG, PNG, WebP, GIF, BMP or TIFF) with a job's checkpoint, or with a model file
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The pictures
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<PathBuf>,
    /// The job's id, the start of its id, or its name; the newest job with a checkpoint when absent
    #[arg(long)]
    job: Option<String>,
    /// best, latest, or a step
    #[arg(long, default_value = "best", conflicts_with = "model")]
    checkpoint: String,
    /// Which of the checkpoint's weights
    #[arg(long, value_enum, default_value_t = Weights::Model, conflicts_with = "model")]
    weights: Weights,
    /// A model.safetensors or ema.safetensors that Lockstep wrote, or its folder; needs no server
    #[arg(long, value_name = "FILE", conflicts_with = "job")]
    model: Option<PathBuf>,
    /// Most probable classes to print
    #[arg(long, default_value_t = 5, value_name = "N")]
    top: usize,
    #[command(flatten)]
    server: ServerArgs,
}

/// A picture's file.
fn read(path: &Path) -> Result<Vec<u8>, String> {
    let larger =
        format!("is larger than {} MiB, which is the most that a picture may have", MOST_BYTES >> 20);
    file::read(path, MOST_BYTES, &larger)
}

/// Prints each picture's most probable classes.
///
/// # Errors
/// Exit status 2 for a file that is missing or no picture, and when there is no such job or checkpoint.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let mut pictures = Vec::new();
    for image in &args.images {
        let bytes = read(image).map_err(|e| wrong(format!("{}: {e}", image.display())))?;
        if bytes.is_empty() {
            return Err(wrong(format!(
                "{}: is empty; give a picture: JPEG, PNG, WebP, GIF, BMP or TIFF",
                image.display()
            )));
        }
        pictures.push((image.display().to_string(), bytes));
    }
    let (answering, mut predictions) = match &args.model {
        Some(model) => (None, lockstep_worker::inspect::predict(model, pictures).map_err(wrong)?),
        None => {
            let (answering, predictions) = block_on(ask(&args, pictures))?;
            (Some(answering), predictions)
        }
    };
    predictions.iter_mut().for_each(|prediction| prediction.classes.truncate(args.top));
    match &answering {
        Some(by) if args.server.json => {
            let each = predictions.iter().map(|prediction| PredictionLine { prediction, by });
            output::json(&each.collect::<Vec<_>>())?;
        }
        None if args.server.json => output::json(&predictions)?,
        _ => {
            if let Some(by) = &answering {
                let best = if by.best { ", the best" } else { "" };
                output::warn(format_args!("{} ({}), checkpoint {}{best}", by.job, by.job_id, by.checkpoint));
            }
            for prediction in predictions.iter().filter(|prediction| prediction.error.is_none()) {
                output::line(line(prediction))?;
            }
        }
    }
    let unread: Vec<String> =
        predictions.iter().filter_map(|p| p.error.as_ref().map(|e| format!("{} {e}", p.name))).collect();
    if unread.is_empty() { Ok(()) } else { Err(wrong(unread.join("\n"))) }
}

/// A prediction as one line. Class names are whatever the model's file holds; no character of theirs moves the cursor or
/// begins another line, whether a terminal or a program reads it.
fn line(prediction: &Prediction) -> String {
    let words = |c: &Probability| {
        format!(
            "{} {}",
            output::one_line(&c.class),
            lockstep_protocol::numbers::percent(f64::from(c.probability))
        )
    };
    let top: Vec<String> = prediction.classes.iter().map(words).collect();
    format!("{}: {}", output::one_line(&prediction.name), top.join(", "))
}

/// The model that was used.
#[derive(Serialize)]
struct ModelUsed {
    /// The job's name.
    job: String,
    job_id: JobId,
    /// Epoch and step.
    checkpoint: String,
    /// It is the job's best.
    best: bool,
}

/// A prediction, and whose it is.
#[derive(Serialize)]
struct PredictionLine<'a> {
    #[serde(flatten)]
    prediction: &'a Prediction,
    #[serde(flatten)]
    by: &'a ModelUsed,
}

/// The newest job with a checkpoint, and which of its checkpoints is wanted.
async fn newest(api: &Api, wanted: &str) -> anyhow::Result<(Job, Listed)> {
    for job in api.jobs().await? {
        // None of a job that has not taken a step.
        if job.step == 0 && job.best.is_none() {
            continue;
        }
        let answer: serde_json::Value = api.get(&format!("/jobs/{}/checkpoints", job.id)).await?;
        if !super::api::list::<Listed>(&answer, "checkpoints")?.is_empty() {
            let checkpoint = choose(api, &job, wanted).await?;
            return Ok((job, checkpoint));
        }
    }
    Err(wrong("no job has a checkpoint yet; `lockstep list` shows how far they are"))
}

async fn ask(args: &Args, pictures: Vec<(String, Vec<u8>)>) -> anyhow::Result<(ModelUsed, Vec<Prediction>)> {
    let api = args.server.api()?;
    let (job, checkpoint) = match &args.job {
        Some(id) => {
            let job = api.find_job(id).await?;
            let checkpoint = choose(&api, &job, &args.checkpoint).await?;
            (job, checkpoint)
        }
        None => newest(&api, &args.checkpoint).await?,
    };
    let by = if args.weights == Weights::Ema { "?weights=ema" } else { "" };
    let path = format!("/checkpoints/{}/predict{by}", checkpoint.id);
    let mut predictions = Vec::new();
    for (name, bytes) in pictures {
        let answer: serde_json::Value = api.send_bytes(&path, bytes).await?;
        let mut found: Vec<Prediction> = super::api::list(&answer, "predictions")?;
        found.iter_mut().for_each(|p| p.name.clone_from(&name));
        predictions.extend(found);
    }
    let best = checkpoint.info.best;
    let checkpoint = format!("{}-{}", checkpoint.info.epoch, checkpoint.info.step);
    Ok((ModelUsed { job: job.name, job_id: job.id, checkpoint, best }, predictions))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_name_cannot_command_a_terminal() {
        let class = "\u{1b}]0;title\u{7}cat\nfake.png: dog 99.0 %".to_owned();
        let prediction = Prediction {
            name: "a.png".into(),
            classes: vec![Probability { class, probability: 0.5 }],
            error: None,
        };
        let shown = line(&prediction);
        assert_eq!(shown, "a.png: \\u001b]0;title\\u0007cat fake.png: dog 99.0 % 50.0 %");
    }
}
