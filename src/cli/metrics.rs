//! `lockstep metrics`: prints the values of a job's metrics.

use super::{
    api::{ServerArgs, with_query},
    block_on, output, usage_error,
};
use futures_util::StreamExt;
use lockstep_protocol::{numbers, spec::nearest};
use serde_json::Value;
use std::{collections::BTreeSet, io::Write};

/// Maximum number of points of a series that the server returns.
const MAX_POINTS: u32 = 10_000;

/// Print a job's metrics
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The job's id, the start of its id, or its name
    job: String,
    /// A metric, such as loss, lr, val_accuracy or images_per_second [default: all metrics]
    #[arg(value_name = "METRIC")]
    name: Option<String>,
    /// Print every point as CSV: attempt, rank, name, step, value
    #[arg(long, conflicts_with = "json")]
    csv: bool,
    #[command(flatten)]
    server: ServerArgs,
}

/// Prints points as CSV or JSON, otherwise newest value, minimum and maximum of each series.
///
/// # Errors
/// Exit status 2 if the job or the metric does not exist.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let api = args.server.api()?;
    block_on(async {
        let job = api.find_job(&args.job).await?;
        let path = |file: &str, points: u32| {
            let name = args.name.iter().map(|name| ("name", name.clone()));
            let query: Vec<_> = name.chain([("points", points.to_string())]).collect();
            with_query(&format!("/jobs/{}/{file}", job.id), &query)
        };
        // A run from elsewhere may have metrics of any name, so the server refuses no name.
        if let Some(name) = args.name.as_ref().filter(|_| job.external.is_some()) {
            let requested: Value = api.get(&path("metrics", 1)?).await?;
            if requested["series"].as_array().is_none_or(Vec::is_empty) {
                let all: Value = api.get(&format!("/jobs/{}/metrics?points=1", job.id)).await?;
                let series = all["series"].as_array().into_iter().flatten();
                let names: BTreeSet<_> = series.filter_map(|series| series["name"].as_str()).collect();
                let near = nearest(name, names.iter().copied());
                let near = near.map(|near| format!("did you mean {near:?}? ")).unwrap_or_default();
                let names = Vec::from_iter(names).join(", ");
                let names = if names.is_empty() { "none yet" } else { &names };
                return Err(usage_error(format!(
                    "{} has no metric {name:?}; {near}its metrics: {names}",
                    job.id
                )));
            }
        }
        if args.csv {
            let mut body = api.get_response(&path("metrics.csv", 1)?).await?.bytes_stream();
            let mut out = std::io::stdout().lock();
            while let Some(part) = body.next().await {
                out.write_all(&part?)?;
            }
            return Ok(out.flush()?);
        }
        let response: Value = api.get(&path("metrics", MAX_POINTS)?).await?;
        if args.server.json {
            return output::json(&response);
        }
        let header = ["METRIC", "ATTEMPT", "RANK", "STEPS", "LAST", "MIN", "MAX"];
        output::table(header, response["series"].as_array().into_iter().flatten().map(row))
    })
}

/// Formats a value with at least four significant digits, which small learning rates need.
fn format_value(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        1e-3..1e-2 => format!("{value:.6}"),
        1e-2..0.1 => format!("{value:.5}"),
        _ => numbers::value(value),
    }
}

fn row(series: &Value) -> [String; 7] {
    let values = |key: &str| -> Vec<f64> {
        series[key].as_array().map(|v| v.iter().filter_map(Value::as_f64).collect()).unwrap_or_default()
    };
    let format_optional = |value: Option<f64>| value.map(format_value).unwrap_or_default();
    let steps = values("steps");
    let range = match (steps.first(), steps.last()) {
        (Some(first), Some(last)) => format!("{first} to {last}"),
        _ => String::new(),
    };
    [
        series["name"].as_str().unwrap_or_default().to_owned(),
        series["attempt"].to_string(),
        series["rank"].to_string(),
        range,
        format_optional(values("mean").last().copied()),
        format_optional(values("min").into_iter().reduce(f64::min)),
        format_optional(values("max").into_iter().reduce(f64::max)),
    ]
}
