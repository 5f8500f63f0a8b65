//! `lockstep predict`: what a model says of pictures.

use super::{
    api::{Api, ServerArgs},
    block_on,
    download::{Weights, choose},
    output, wrong,
};
use lockstep_protocol::look::Prediction;
use serde::Serialize;
use std::path::PathBuf;

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

/// Prints each picture's most probable classes.
///
/// # Errors
/// Exit status 2 for a file that is missing or no picture, and when there is no such job or checkpoint.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let mut pictures = Vec::new();
    for image in &args.images {
        let bytes = std::fs::read(image).map_err(|e| wrong(format!("{}: {e}", image.display())))?;
        if bytes.is_empty() {
            return Err(wrong(format!(
                "{}: is empty; give a picture: JPEG, PNG, WebP, GIF, BMP or TIFF",
                image.display()
            )));
        }
        pictures.push((image.display().to_string(), bytes));
    }
    let predictions = match &args.model {
        Some(model) => lockstep_worker::look::predict(model, pictures).map_err(wrong)?,
        None => {
            let (answering, predictions) = block_on(ask(&args, pictures))?;
            if args.server.json {
                let each = predictions.iter().map(|prediction| Answered { prediction, by: &answering });
                return output::json(&each.collect::<Vec<_>>());
            }
            // Whoever named no job reads which one was taken.
            if args.job.is_none() {
                output::warn(format_args!("{}, checkpoint {}", answering.job, answering.checkpoint));
            }
            predictions
        }
    };
    if args.server.json {
        return output::json(&predictions);
    }
    for prediction in &predictions {
        if prediction.error.is_some() {
            continue;
        }
        let top: Vec<String> = prediction
            .classes
            .iter()
            .take(args.top)
            .map(|c| format!("{} {:.1} %", c.class, c.probability * 100.0))
            .collect();
        output::line(format_args!("{}: {}", prediction.name, top.join(", ")))?;
    }
    let unread: Vec<String> =
        predictions.iter().filter_map(|p| p.error.as_ref().map(|e| format!("{} {e}", p.name))).collect();
    if unread.is_empty() { Ok(()) } else { Err(wrong(unread.join("\n"))) }
}

/// Whose model it was.
#[derive(Serialize)]
struct Answering {
    /// The job's name.
    job: String,
    /// Epoch and step.
    checkpoint: String,
}

/// A prediction, and whose it is.
#[derive(Serialize)]
struct Answered<'a> {
    #[serde(flatten)]
    prediction: &'a Prediction,
    #[serde(flatten)]
    by: &'a Answering,
}

async fn ask(args: &Args, pictures: Vec<(String, Vec<u8>)>) -> anyhow::Result<(Answering, Vec<Prediction>)> {
    let api = Api::new(&args.server.server)?;
    let job = match &args.job {
        Some(id) => api.find_job(id).await?,
        None => {
            let trained = api.jobs().await?.into_iter().find(|job| job.best.is_some());
            trained.ok_or_else(|| wrong("no job has been evaluated yet; name one with --job"))?
        }
    };
    let checkpoint = choose(&api, &job, &args.checkpoint).await?;
    let by = if args.weights == Weights::Ema { "?weights=ema" } else { "" };
    let path = format!("/checkpoints/{}/predict{by}", checkpoint.id);
    let mut predictions = Vec::new();
    for (name, bytes) in pictures {
        let answer: serde_json::Value = api.send_bytes(&path, bytes).await?;
        let mut found: Vec<Prediction> = super::api::list(&answer, "predictions")?;
        found.iter_mut().for_each(|p| p.name.clone_from(&name));
        predictions.extend(found);
    }
    let checkpoint = format!("{}-{}", checkpoint.info.epoch, checkpoint.info.step);
    Ok((Answering { job: job.name, checkpoint }, predictions))
}
