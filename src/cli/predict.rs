//! `lockstep predict`: classifies or embeds pictures.

use super::{
    api::ServerArgs,
    block_on,
    checkpoint_choice::{Weights, find},
    file, output, usage_error,
};
use anyhow::Context;
use lockstep_protocol::{
    JobId,
    inspect::{Prediction, Probability},
    numbers::plural,
};
use lockstep_worker::inspect;
use serde::Serialize;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Maximum total size of pictures in a request, as on the server.
const MAX_REQUEST_BYTES: u64 = 24 << 20;

/// Classify or embed pictures (JPEG, PNG, WebP, GIF, BMP or TIFF) with a job's checkpoint, or with a model file
#[derive(clap::Args)]
#[command(override_usage = "lockstep predict [OPTIONS] <JOB> <IMAGE>...")]
pub(crate) struct Args {
    /// The job's id, the start of its id, or its name, or a version of a model (`models:/shoes@champion`). Omitted with --model
    #[arg(required_unless_present = "model")]
    job: Option<PathBuf>,
    /// Picture files
    #[arg(value_name = "IMAGE")]
    images: Vec<PathBuf>,
    /// best, latest, a step, or epoch and step (`2-54`)
    #[arg(long, default_value = "best", conflicts_with = "model")]
    checkpoint: String,
    /// The weights of the checkpoint to use
    #[arg(long, value_enum, default_value_t = Weights::Model, conflicts_with = "model")]
    weights: Weights,
    /// A model.safetensors or ema.safetensors that Lockstep wrote, or the folder that contains it; needs no server
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// Number of classes to print for each picture, the most probable first
    #[arg(long, default_value_t = 5, value_name = "N")]
    top: usize,
    /// Print each picture's embedding (the input of the network's last layer) as a line of JSON instead of its classes
    #[arg(long, conflicts_with = "top")]
    embed: bool,
    /// Write the embeddings to this safetensors file: the tensor `embeddings` (float32, one row per picture), and the pictures' names in
    /// the metadata
    #[arg(short, long, value_name = "FILE", requires = "embed")]
    output: Option<PathBuf>,
    #[command(flatten)]
    server: ServerArgs,
}

/// Reads a picture file.
fn read(path: &Path) -> Result<Vec<u8>, String> {
    let larger = format!("is larger than {} MiB, the limit for a picture", MAX_REQUEST_BYTES >> 20);
    file::read(path, MAX_REQUEST_BYTES, &larger)
}

/// Prints each picture's most probable classes, or its embedding.
///
/// # Errors
/// Exit status 2 if a file is missing or is not a picture, or if the job or the checkpoint does not exist.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    if let Some(place) = &args.output {
        file::check_output(place)?;
    }
    // With a model file there is no job, so the first argument is a picture.
    let images = args.job.iter().filter(|_| args.model.is_some()).chain(&args.images);
    let mut pictures = Vec::new();
    for image in images {
        let bytes = read(image).map_err(|e| usage_error(format!("{}: {e}", image.display())))?;
        if bytes.is_empty() {
            return Err(usage_error(format!(
                "{}: is empty; give a JPEG, PNG, WebP, GIF, BMP or TIFF file",
                image.display()
            )));
        }
        pictures.push((image.display().to_string(), bytes));
    }
    if pictures.is_empty() {
        return Err(usage_error(match args.job.as_deref().filter(|given| given.is_file()) {
            Some(picture) => format!(
                "no job is given: the job comes first, as in `lockstep predict JOB {}`; `lockstep list` shows all jobs",
                picture.display()
            ),
            None => "no picture is given: name its file after the job, as in `lockstep predict JOB shoe.png`"
                .into(),
        }));
    }
    let (answering, mut predictions) = match &args.model {
        Some(model) => {
            let infer = if args.embed { inspect::embed } else { inspect::predict };
            (None, infer(model, pictures).map_err(usage_error)?)
        }
        None => {
            let (answering, predictions) = block_on(ask(&args, pictures))?;
            (Some(answering), predictions)
        }
    };
    predictions.iter_mut().for_each(|prediction| prediction.classes.truncate(args.top));
    match (&answering, &args.output) {
        (_, Some(place)) => write(place, &predictions)?,
        (Some(by), _) if args.server.json => {
            let each = predictions.iter().map(|prediction| PredictionLine { prediction, by });
            output::json(&each.collect::<Vec<_>>())?;
        }
        (None, _) if args.server.json => output::json(&predictions)?,
        _ => {
            if let Some(by) = &answering {
                let best = if by.best { ", the best" } else { "" };
                output::warn(format_args!("{} ({}), checkpoint {}{best}", by.job, by.job_id, by.checkpoint));
            }
            for prediction in predictions.iter().filter(|prediction| prediction.error.is_none()) {
                match args.embed {
                    true => output::line(serde_json::to_string(prediction)?)?,
                    false => output::line(line(prediction))?,
                }
            }
        }
    }
    let unread: Vec<String> =
        predictions.iter().filter_map(|p| p.error.as_ref().map(|e| format!("{} {e}", p.name))).collect();
    if unread.is_empty() { Ok(()) } else { Err(usage_error(unread.join("\n"))) }
}

/// Writes embeddings next to `place` and renames the file, so that `place` is never incomplete.
fn write(place: &Path, predictions: &[Prediction]) -> anyhow::Result<()> {
    let mut partial = place.as_os_str().to_owned();
    partial.push(".part");
    let partial = PathBuf::from(partial);
    // An earlier run may have left its partial file.
    let _ = fs::remove_file(&partial);
    let [rows, width] = inspect::write_embeddings(&partial, predictions).map_err(usage_error)?;
    fs::rename(&partial, place).with_context(|| place.display().to_string())?;
    output::line(format_args!("{}: {} of {width} values", place.display(), plural(rows as u64, "embedding")))
}

/// Formats a prediction as one line. Control characters are escaped in names of classes, which come from the model's file.
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

/// The model that made the predictions.
#[derive(Serialize)]
struct ModelUsed {
    /// The job's name.
    job: String,
    job_id: JobId,
    /// Epoch and step of the checkpoint.
    checkpoint: String,
    /// Whether the checkpoint is the job's best.
    best: bool,
}

/// A prediction, with the model that made it.
#[derive(Serialize)]
struct PredictionLine<'a> {
    #[serde(flatten)]
    prediction: &'a Prediction,
    #[serde(flatten)]
    by: &'a ModelUsed,
}

async fn ask(args: &Args, pictures: Vec<(String, Vec<u8>)>) -> anyhow::Result<(ModelUsed, Vec<Prediction>)> {
    let api = args.server.api()?;
    let named = args.job.as_deref().unwrap_or(Path::new("")).to_string_lossy();
    let (job, checkpoint) = find(&api, &named, &args.checkpoint).await?;
    let weights = if args.weights == Weights::Ema { "ema" } else { "model" };
    let path = format!("/checkpoints/{}/predict?weights={weights}&embed={}", checkpoint.id, args.embed);
    let mut predictions = Vec::new();
    for (name, bytes) in pictures {
        let response: serde_json::Value = api.send_bytes(&path, bytes).await?;
        let mut found: Vec<Prediction> = super::api::list(&response, "predictions")?;
        found.iter_mut().for_each(|p| p.name.clone_from(&name));
        predictions.extend(found);
    }
    let best = checkpoint.info.best;
    let checkpoint = checkpoint.name();
    Ok((ModelUsed { job: job.name, job_id: job.id, checkpoint, best }, predictions))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn class_names_are_escaped() {
        let class = "\u{1b}]0;title\u{7}cat\nfake.png: dog 99.0 %".to_owned();
        let prediction = Prediction {
            name: "a.png".into(),
            classes: vec![Probability { class, probability: 0.5 }],
            embedding: None,
            error: None,
        };
        let shown = line(&prediction);
        assert_eq!(shown, "a.png: \\u001b]0;title\\u0007cat fake.png: dog 99.0 % 50.0 %");
    }
}
