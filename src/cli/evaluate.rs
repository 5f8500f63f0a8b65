//! `lockstep evaluate`: evaluates a checkpoint on validation pictures.

use super::{
    api::{Api, ServerArgs, present_parameters, text, with_query},
    block_on,
    checkpoint_choice::{CheckpointArgs, Weights, find},
    job_file::{self, UnknownPath},
    output,
};
use indicatif::ProgressBar;
use lockstep_protocol::{
    JobId,
    inspect::{MAX_NEIGHBOURS, ModelEvaluation, NearestNeighbours},
    numbers::{percent, plural, standard_error},
};
use reqwest::StatusCode;
use serde::Serialize;
use serde_json::{Value, json};
use std::time::Duration;

/// Pause between two requests. The server itself waits before it responds, so the pause matters only if the server responds at once.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum number of confusions that are printed.
const MAX_CONFUSIONS: usize = 5;

/// Evaluate a job's checkpoint on validation pictures: accuracy, loss and each class
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    choice: CheckpointArgs,
    /// Another dataset, which must have the same classes unless --knn is given: its name, or its path, which is registered as by `submit`.
    /// If it has only one split, all of its pictures are evaluated [default: the job's own]
    #[arg(long, value_name = "NAME")]
    dataset: Option<String>,
    /// Classify by this number of nearest training embeddings (usually 20) instead of by the network's scores; the dataset may have other
    /// classes
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_NEIGHBOURS)))]
    knn: Option<u32>,
    #[command(flatten)]
    server: ServerArgs,
}

/// An evaluation, and the checkpoint that was evaluated.
#[derive(Serialize)]
struct Evaluated<'a> {
    job: &'a JobId,
    /// Epoch and step of the checkpoint.
    checkpoint: String,
    #[serde(flatten)]
    result: Value,
}

/// Polls until the server has the result. For a new evaluation, an agent computes it on CPU cores.
///
/// # Errors
/// Exit status 2 if the job, checkpoint or dataset does not exist, or the dataset does not fit the checkpoint.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let api = args.server.api()?;
    block_on(async {
        let (job, chosen) = find(&api, &args.choice.job, &args.choice.checkpoint).await?;
        let mut dataset = args.dataset;
        if let Some(path) = dataset.as_mut().filter(|dataset| dataset.contains(std::path::is_separator)) {
            let mut document = json!({ "private": job.spec.private, "data": { "dataset": path } });
            job_file::make_paths_absolute(&mut document);
            job_file::replace_dataset_paths(&api, &mut document, UnknownPath::Register).await?;
            *path = text(&document["data"], "dataset").to_owned();
        }
        let query = present_parameters([
            ("checkpoint", Some(chosen.id.clone())),
            ("weights", (args.choice.weights == Weights::Ema).then(|| "ema".to_owned())),
            ("dataset", dataset),
            ("k", args.knn.map(|k| k.to_string())),
        ]);
        let suffix = if args.knn.is_some() { "/neighbours" } else { "" };
        let path = with_query(&format!("/jobs/{}/evaluation{suffix}", job.id), &query)?;
        let result = wait_for_result(&api, &path).await?;
        let checkpoint = chosen.name();
        if args.server.json {
            return output::json(&Evaluated { job: &job.id, checkpoint, result });
        }
        match args.knn {
            Some(_) => print_neighbours(&checkpoint, &serde_json::from_value(result)?),
            None => print_evaluation(&checkpoint, &serde_json::from_value(result)?),
        }
    })
}

/// Polls the server for the result, and says that an agent computes the result. On a terminal, also shows what the server is waiting for.
async fn wait_for_result(api: &Api, path: &str) -> anyhow::Result<Value> {
    let bar = ProgressBar::new_spinner();
    bar.set_style(output::bar_style("{msg} {elapsed}"));
    let mut is_announced = false;
    loop {
        let response = api.get_response(path).await?;
        let is_ready = response.status() != StatusCode::ACCEPTED;
        let reply: Value = api.read(response).await?;
        if is_ready {
            bar.finish_and_clear();
            return Ok(reply);
        }
        if !std::mem::replace(&mut is_announced, true) {
            output::warn(
                "an agent evaluates the checkpoint on its CPU cores; Ctrl-C ends this command and not the evaluation, whose result the same \
                 command shows later",
            );
        }
        bar.set_message(reply.get("detail").and_then(Value::as_str).unwrap_or_default().to_owned());
        bar.tick();
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

fn print_neighbours(checkpoint: &str, result: &NearestNeighbours) -> anyhow::Result<()> {
    let accuracy = |share: f64| format!("{:.2} %{}", share * 100.0, standard_error(share, result.samples));
    output::line(format_args!(
        "checkpoint {checkpoint}: accuracy {} of {} by {} among {}; {} without weights",
        accuracy(result.weighted),
        plural(result.samples, "picture"),
        plural(result.k.into(), "nearest neighbour"),
        plural(result.gallery, "training picture"),
        accuracy(result.majority)
    ))?;
    match &result.note {
        Some(note) => output::line(format_args!("note: {note}")),
        None => Ok(()),
    }
}

fn print_evaluation(checkpoint: &str, result: &ModelEvaluation) -> anyhow::Result<()> {
    output::line(format_args!(
        "checkpoint {checkpoint}: accuracy {:.2} %{} of {}, loss {:.4}",
        result.accuracy * 100.0,
        standard_error(result.accuracy, result.samples),
        plural(result.samples, "picture"),
        result.loss
    ))?;
    if let Some(note) = &result.note {
        output::line(format_args!("note: {note}"))?;
    }
    let rows = result.classes.iter().map(|c| {
        // A class without pictures has no scores.
        let score = |share: f64| if c.samples == 0 { "–".to_owned() } else { percent(share) };
        [c.name.clone(), c.samples.to_string(), score(c.precision), score(c.recall), score(c.f1)]
    });
    output::table(["CLASS", "PICTURES", "PRECISION", "RECALL", "F1"], rows)?;
    let name = |class: usize| result.classes.get(class).map_or("?".into(), |c| output::one_line(&c.name));
    for (count, class, predicted) in most_frequent_confusions(result) {
        output::line(format_args!("{count} of {} taken for {}", name(class), name(predicted)))?;
    }
    Ok(())
}

/// Returns the most frequent confusions, each as the count of pictures, the index of their class and the index of the predicted class.
fn most_frequent_confusions(result: &ModelEvaluation) -> Vec<(u64, usize, usize)> {
    let mut confusions = Vec::new();
    for (class, counts) in result.confusion.iter().enumerate() {
        confusions.extend(counts.iter().enumerate().map(|(predicted, count)| (*count, class, predicted)));
    }
    confusions.retain(|(count, class, predicted)| *count > 0 && class != predicted);
    confusions.sort_by_key(|(count, class, predicted)| (std::cmp::Reverse(*count), *class, *predicted));
    confusions.truncate(MAX_CONFUSIONS);
    confusions
}
