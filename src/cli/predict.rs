//! `lockstep predict`: classifies or embeds pictures.

use super::{
    api::{ServerArgs, parse_list},
    block_on,
    checkpoint_choice::{Weights, find},
    file, output, usage_error, weight_files,
};
use lockstep_data::has_picture_extension;
use lockstep_protocol::{
    JobId,
    inspect::{Prediction, Probability},
    numbers::{percent, plural},
};
use lockstep_worker::inspect;
use serde::Serialize;
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Maximum total size of pictures in a request, as on the server.
const MAX_REQUEST_BYTES: u64 = 24 << 20;
/// Maximum number of pictures that are classified together with a model file. All pictures of a batch are in memory.
const BATCH_SIZE: usize = 256;

/// Classify or embed pictures (JPEG, PNG, WebP, GIF, BMP or TIFF) with a job's checkpoint, or with a model file
#[derive(clap::Args)]
#[command(override_usage = "lockstep predict [OPTIONS] <JOB> <IMAGE>...")]
pub(crate) struct Args {
    /// The job's id, the start of its id, or its name, or a version of a model (`models:/shoes@champion`). Omitted with --model
    #[arg(required_unless_present = "model")]
    job: Option<PathBuf>,
    /// Picture files; a folder stands for the pictures directly in it
    #[arg(value_name = "IMAGE")]
    images: Vec<PathBuf>,
    /// best, latest, a step, or epoch and step (`2-54`)
    #[arg(long, default_value = "best", conflicts_with = "model")]
    checkpoint: String,
    /// The weights of the checkpoint to use
    #[arg(long, value_enum, default_value_t = Weights::Model, conflicts_with = "model")]
    weights: Weights,
    /// A model.safetensors or ema.safetensors that Lockstep wrote, the folder that contains it, or the folder of a run of `lockstep train`,
    /// whose best checkpoint is used; needs no server
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// Number of classes to print for each picture, the most probable first
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    top: u32,
    /// Print each picture's embedding (the input of the network's last layer) as a line of JSON instead of its classes
    #[arg(long, conflicts_with = "top")]
    embed: bool,
    /// Write the embeddings to this safetensors file: the tensor `embeddings` (float32, one row per picture), and the pictures' names in
    /// the metadata; an existing file is replaced
    #[arg(short, long, value_name = "FILE", requires = "embed")]
    output: Option<PathBuf>,
    #[command(flatten)]
    server: ServerArgs,
}

/// Replaces a folder by the picture files in it, sorted by name.
///
/// # Errors
/// Exit status 2: the folder cannot be read, or has no pictures, or `path` is `-` or a URL.
fn expand_folder(path: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let failed = |detail: String| usage_error(format!("{}: {detail}", path.display()));
    if path == Path::new("-") {
        return Err(usage_error("to read a picture from standard input, give /dev/stdin"));
    }
    if ["http:", "https:"].iter().any(|scheme| path.starts_with(scheme)) {
        return Err(failed("pictures must be files: download the picture first".into()));
    }
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let entries: io::Result<Vec<_>> =
        fs::read_dir(path).and_then(|all| all.map(|entry| entry.map(|entry| entry.path())).collect());
    let mut pictures = entries.map_err(|e| failed(e.to_string()))?;
    let has_subfolders = pictures.iter().any(|path| path.is_dir());
    pictures.retain(|path| has_picture_extension(path) && !path.is_dir());
    pictures.sort();
    if pictures.is_empty() {
        return Err(failed(if has_subfolders {
            format!(
                "has no pictures directly in it; `{}/*/*` names the files of its subfolders",
                path.display()
            )
        } else {
            "has no pictures; give the folder, or the files, of JPEG, PNG, WebP, GIF, BMP or TIFF pictures"
                .into()
        }));
    }
    Ok(pictures)
}

/// Reads a picture file.
fn read_picture(path: &Path) -> Result<Vec<u8>, String> {
    let too_large = format!("is larger than {} MiB, the limit for a picture", MAX_REQUEST_BYTES >> 20);
    let bytes = file::read(path, MAX_REQUEST_BYTES, &too_large)?;
    if bytes.is_empty() {
        return Err("is empty; give a JPEG, PNG, WebP, GIF, BMP or TIFF file".into());
    }
    Ok(bytes)
}

/// Returns the result for a picture that cannot be read.
fn unreadable_picture(name: String, detail: String) -> Prediction {
    Prediction { name, classes: Vec::new(), embedding: None, error: Some(detail) }
}

/// Prints each picture's most probable classes, or its embedding.
///
/// # Errors
/// Exit status 1 if a picture cannot be read; the results of the other pictures are printed. Exit status 2 if the job, the checkpoint or
/// the model file does not exist.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    if let Some(path) = &args.output {
        file::check_output(path)?;
    }
    if let Some(model) = args.model.as_deref().filter(|m| m.extension().is_some_and(|e| e == "onnx")) {
        return Err(usage_error(format!(
            "{}: Lockstep writes ONNX files and does not read them; onnxruntime reads them. Give --model a model.safetensors or a \
             checkpoint's folder, or name a job, or a version of a model such as `models:/shoes@champion`, in place of --model",
            model.display()
        )));
    }
    // With a model file there is no job, so the first argument is a picture.
    let paths = args.job.iter().filter(|_| args.model.is_some()).chain(&args.images);
    let images = paths.map(|path| expand_folder(path)).collect::<anyhow::Result<Vec<_>>>();
    let images = images.map(|images| images.concat());
    // The picture and the job are in the wrong order, or there is no job.
    if images.as_deref().unwrap_or_default().is_empty()
        && let Some(picture) = args.job.as_deref().filter(|path| args.model.is_none() && path.is_file())
    {
        return Err(usage_error(format!(
            "no job is given: the job comes first, as in `lockstep predict JOB {}`; `lockstep list` shows all jobs",
            picture.display()
        )));
    }
    let images = images?;
    if images.is_empty() {
        return Err(usage_error(
            "no picture is given: name its file after the job, as in `lockstep predict JOB shoe.png`",
        ));
    }
    let results: Vec<ModelPrediction> = match &args.model {
        Some(model) => {
            let model = weight_files::resolve_run_folder(model)?;
            if model.is_dir() && !weight_files::has_weights(&model) {
                return Err(usage_error(format!(
                    "{} has no model: the folder of a checkpoint has model.safetensors or ema.safetensors, and the folder of a run of \
                     `lockstep train` has the folder checkpoints; give one of these",
                    model.display()
                )));
            }
            let predictions = predict_here(&model, args.embed, &images).map_err(usage_error)?;
            let reported = predictions.into_iter().map(|prediction| args.report(prediction, None));
            reported.collect::<anyhow::Result<_>>()?
        }
        None => block_on(predict_on_server(&args, &images))?,
    };
    let failed = |result: &ModelPrediction| {
        let Prediction { name, error, .. } = &result.prediction;
        error.as_ref().map(|error| format!("{name}: {error}"))
    };
    let errors: Vec<String> = results.iter().filter_map(failed).collect();
    match &args.output {
        // No picture could be read, so there is no embedding to write.
        Some(_) if errors.len() == results.len() => {}
        Some(path) => {
            write_embeddings(path, &results.into_iter().map(|result| result.prediction).collect::<Vec<_>>())?
        }
        None if args.server.json => output::json(&results)?,
        None => {}
    }
    anyhow::ensure!(errors.is_empty(), errors.join("\n"));
    Ok(())
}

impl Args {
    /// Whether each result is printed as soon as it is known.
    fn prints_lines(&self) -> bool {
        self.output.is_none() && !self.server.json
    }

    /// Keeps the most probable classes of a prediction, and prints the prediction.
    fn report(
        &self,
        mut prediction: Prediction,
        model: Option<&ModelUsed>,
    ) -> anyhow::Result<ModelPrediction> {
        prediction.classes.truncate(self.top as usize);
        if self.prints_lines() && prediction.error.is_none() {
            if self.embed {
                output::line(serde_json::to_string(&prediction)?)?
            } else {
                output::line(format_prediction(&prediction))?
            }
        }
        Ok(ModelPrediction { prediction, model: model.cloned() })
    }
}

/// Writes embeddings to the safetensors file `path`.
fn write_embeddings(path: &Path, predictions: &[Prediction]) -> anyhow::Result<()> {
    let write = |partial: &Path| inspect::write_embeddings(partial, predictions).map_err(usage_error);
    let [rows, width] = file::replace(path, write)?;
    output::line(format_args!("{}: {} of {width} values", path.display(), plural(rows as u64, "embedding")))
}

/// Formats a prediction as one line. Control characters are escaped in names of classes, which come from the model's file.
fn format_prediction(prediction: &Prediction) -> String {
    let words =
        |c: &Probability| format!("{} {}", output::one_line(&c.class), percent(f64::from(c.probability)));
    let top: Vec<String> = prediction.classes.iter().map(words).collect();
    format!("{}: {}", output::one_line(&prediction.name), top.join(", "))
}

/// The model that made a prediction.
#[derive(Clone, Serialize)]
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
struct ModelPrediction {
    #[serde(flatten)]
    prediction: Prediction,
    /// `None` if the prediction was made with a model file.
    #[serde(flatten)]
    model: Option<ModelUsed>,
}

/// Computes the predictions on this machine, with a model file.
fn predict_here(model: &Path, embed: bool, images: &[PathBuf]) -> Result<Vec<Prediction>, String> {
    let infer = if embed { inspect::embed } else { inspect::predict };
    let mut predictions = Vec::new();
    for batch in images.chunks(BATCH_SIZE) {
        let (mut pictures, mut unreadable) = (Vec::new(), Vec::new());
        for (index, image) in batch.iter().enumerate() {
            let name = image.display().to_string();
            match read_picture(image) {
                Ok(bytes) => pictures.push((name, bytes)),
                Err(detail) => unreadable.push((index, unreadable_picture(name, detail))),
            }
        }
        let mut results = infer(model, pictures)?;
        for (index, prediction) in unreadable {
            results.insert(index, prediction);
        }
        predictions.extend(results);
    }
    Ok(predictions)
}

/// Asks the server for the predictions, one picture at a time.
async fn predict_on_server(args: &Args, images: &[PathBuf]) -> anyhow::Result<Vec<ModelPrediction>> {
    let api = args.server.api()?;
    let source = args.job.as_deref().unwrap_or(Path::new("")).to_string_lossy();
    let (job, chosen) = find(&api, &source, &args.checkpoint).await?;
    let weights = if args.weights == Weights::Ema { "ema" } else { "model" };
    let path = format!("/checkpoints/{}/predict?weights={weights}&embed={}", chosen.id, args.embed);
    let model =
        ModelUsed { job: job.name, job_id: job.id, checkpoint: chosen.name(), best: chosen.info.best };
    if args.prints_lines() {
        let ModelUsed { job, job_id, checkpoint, best } = &model;
        let best = if *best { ", the best" } else { "" };
        let accuracy = chosen.info.accuracy_in_words().map(|words| format!(": validation accuracy {words}"));
        let accuracy = accuracy.unwrap_or_default();
        output::warn(format_args!("{job} ({job_id}), checkpoint {checkpoint}{best}{accuracy}"));
    }
    let mut results = Vec::new();
    for image in images {
        let name = image.display().to_string();
        let bytes = match read_picture(image) {
            Ok(bytes) => bytes,
            Err(detail) => {
                results.push(args.report(unreadable_picture(name, detail), Some(&model))?);
                continue;
            }
        };
        let response: serde_json::Value = api.send_bytes(&path, bytes).await?;
        for mut prediction in parse_list::<Prediction>(&response, "predictions")? {
            prediction.name.clone_from(&name);
            results.push(args.report(prediction, Some(&model))?);
        }
    }
    Ok(results)
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
        let shown = format_prediction(&prediction);
        assert_eq!(shown, "a.png: \\u001b]0;title\\u0007cat fake.png: dog 99.0 % 50.0 %");
    }
}
