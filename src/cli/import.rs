//! `lockstep import`: stores runs of other programs as runs from elsewhere.

mod mlflow;
mod table;
mod tensorboard;
mod wandb;

use super::{
    api::{Api, ServerArgs, text},
    block_on, describe_error, history, output, usage_error,
};
use anyhow::Context;
use lockstep_protocol::{
    labels::{project_mistake, to_project_name},
    limits::{MAX_RUN_METRICS, MAX_RUN_VALUES, MAX_TAGS, NOTES_BYTES, TAG_CHARS},
    metric::name_mistake,
    numbers::plural,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
    path::{Path, PathBuf},
};

/// Maximum length of a run's name.
const NAME_CHARS: usize = 200;
/// Maximum size of a request's records in bytes. The server accepts requests of up to 1 MiB.
const REQUEST_BYTES: usize = 900 << 10;

#[derive(clap::Subcommand)]
pub(crate) enum Format {
    /// Import runs from TensorBoard's event files: a run for each folder with event files
    Tensorboard(Source),
    /// Import runs from a folder to which MLflow has logged, such as mlruns, or from the URL of an MLflow server
    ///
    /// For a database, start `mlflow server` with the database and give the server's URL. Credentials come from MLFLOW_TRACKING_TOKEN, or
    /// MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.
    Mlflow(Source),
    /// Import runs from a folder to which W&B has logged, such as wandb, online or offline
    Wandb(Source),
    /// Import runs from a CSV file
    ///
    /// A row has either the metrics of a step, each in a column, or one value, with the columns step, value and metric or name. A
    /// column run, run_id or job distinguishes several runs. The file's path identifies the runs.
    Csv(TableSource),
    /// Import runs from a Parquet file, with columns as for CSV
    Parquet(TableSource),
}

#[derive(clap::Args)]
pub(crate) struct Source {
    /// The folder, file or URL
    #[arg(value_name = "PATH")]
    path: PathBuf,
    /// Project of the runs [default: the source's project, else `default`]
    #[arg(long)]
    project: Option<String>,
    #[command(flatten)]
    server: ServerArgs,
}

#[derive(clap::Args)]
pub(crate) struct TableSource {
    #[command(flatten)]
    source: Source,
    /// Identify the file's runs by this text, also after the file is renamed [default: the file's absolute path]
    #[arg(long)]
    id: Option<String>,
}

/// Parts of a source: folders, files or experiments with runs. Each is read when the iterator reaches it, and has a name for errors.
type Parts = Box<dyn Iterator<Item = (String, anyhow::Result<Vec<Run>>)>>;

/// Imports every run of a source.
///
/// # Errors
/// Exit status 2 if the source has no runs, 1 if a run cannot be read or the server refuses it.
pub(crate) fn run(format: &Format) -> anyhow::Result<()> {
    let (source, parts) = match format {
        Format::Tensorboard(source) => (source, tensorboard::parts(&source.path)),
        Format::Mlflow(source) => (source, mlflow::parts(&source.path)),
        Format::Wandb(source) => (source, wandb::parts(&source.path)),
        Format::Csv(TableSource { source, id }) => {
            (source, table::parts(&source.path, id.as_deref(), table::read_csv))
        }
        Format::Parquet(TableSource { source, id }) => {
            (source, table::parts(&source.path, id.as_deref(), table::read_parquet))
        }
    };
    if let Some(mistake) = source.project.as_deref().and_then(project_mistake) {
        return Err(usage_error(format!("--project {mistake}")));
    }
    let api = source.server.api()?;
    let (mut reports, mut failure_count) = (Vec::new(), 0);
    for (name, runs) in parts? {
        let mut report_failure = |error: &anyhow::Error| {
            output::warn(format_args!("{name}: {}", describe_error(error)));
            failure_count += 1;
        };
        let runs = runs.unwrap_or_else(|error| {
            report_failure(&error);
            Vec::new()
        });
        for run in runs {
            match block_on(upload(&api, run, source.project.as_deref())) {
                Ok(report) if source.server.json => reports.push(report),
                Ok(report) => output::line(report.describe())?,
                Err(error) => report_failure(&error),
            }
        }
    }
    if source.server.json {
        output::json(&reports)?;
    }
    anyhow::ensure!(failure_count == 0, "{} could not be imported", plural(failure_count, "run"));
    Ok(())
}

/// A run as read from its source.
#[derive(Debug, Default)]
struct Run {
    /// Identifies the run: equal in all imports of the run, on any machine.
    id: String,
    name: String,
    project: Option<String>,
    config: Map<String, Value>,
    summary: Map<String, Value>,
    tags: Vec<String>,
    notes: String,
    /// How the run ended without success. `None` if it succeeded.
    failure: Option<Failure>,
    /// Milliseconds since 1970.
    started_at: Option<i64>,
    /// Milliseconds since 1970.
    ended_at: Option<i64>,
    records: Vec<Record>,
    metric_names: BTreeSet<String>,
    point_count: u64,
    /// The kinds of data that are not imported, each with a count.
    left_out: BTreeMap<&'static str, u64>,
    /// Whether the source may have other points than an earlier import with the same id.
    may_differ: bool,
    /// Whether the next point begins a record even if its step and time are those of the last record.
    begins_record: bool,
}

/// The outcome of a run that did not succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failure {
    Failed,
    Cancelled,
    /// The source does not record the run's end: the program was killed, or still runs.
    Unfinished,
}

/// The values of one step, in the server's format.
#[derive(Debug, Serialize)]
struct Record {
    step: u64,
    /// Milliseconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    at: Option<i64>,
    values: BTreeMap<String, Value>,
}

/// Derives a run's id from its source.
fn derive_id(kind: &str, parts: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    format!("{kind}-{}", hex::encode(&hash.finalize()[..16]))
}

impl Run {
    fn leave_out(&mut self, what: &'static str, count: u64) {
        if count > 0 {
            *self.left_out.entry(what).or_default() += count;
        }
    }

    /// Appends a point to the run. `at` is in milliseconds since 1970.
    fn add_point(&mut self, step: i64, at: Option<i64>, name: &str, value: f64) {
        let Some(step) = u64::try_from(step).ok().filter(|step| *step < 1 << 53) else {
            return self.leave_out("points at steps below 0, or 2^53 and above", 1);
        };
        if name_mistake(name).is_some() {
            return self
                .leave_out("points of metrics with names that are too long or have control characters", 1);
        }
        if !self.metric_names.contains(name) {
            if self.metric_names.len() >= MAX_RUN_METRICS {
                return self.leave_out("points of metrics beyond the first 1000", 1);
            }
            self.metric_names.insert(name.to_owned());
        }
        let value = match value {
            value if value.is_nan() => "NaN".into(),
            f64::INFINITY => "Infinity".into(),
            f64::NEG_INFINITY => "-Infinity".into(),
            value => Value::from(value),
        };
        self.point_count += 1;
        let begins_record = std::mem::take(&mut self.begins_record);
        match self.records.last_mut() {
            Some(last)
                if !begins_record
                    && last.step == step
                    && last.at == at
                    && !last.values.contains_key(name) =>
            {
                last.values.insert(name.to_owned(), value);
            }
            _ => {
                let values = BTreeMap::from([(name.to_owned(), value)]);
                self.records.push(Record { step, at, values });
            }
        }
    }

    /// Leaves out the newest records of a run without a recorded end: its program may still add points to these records, and the server
    /// does not accept changes of a record.
    fn drop_newest_records(&mut self) {
        let Some(newest) = self.records.last().map(|record| record.at) else { return };
        // Leaves out all records of the newest time, or the last record if records have no times.
        let remaining_count = match newest {
            Some(_) => self.records.iter().rposition(|record| record.at != newest).map_or(0, |last| last + 1),
            None => self.records.len() - 1,
        };
        let points: u64 =
            self.records.drain(remaining_count..).map(|record| record.values.len() as u64).sum();
        self.point_count -= points;
        self.leave_out("newest points of a run without an end", points);
    }
}

/// The result of a run's import.
#[derive(Debug, Serialize)]
struct Report {
    /// The job's id.
    job: String,
    name: String,
    metrics: usize,
    points: u64,
    /// Number of points that the server did not have before.
    new_points: u64,
    left_out: BTreeMap<&'static str, u64>,
}

impl Report {
    fn describe(&self) -> String {
        let Self { job, name, metrics, points, new_points, left_out } = self;
        let (points, metrics) = (plural(*points, "point"), plural(*metrics as u64, "metric"));
        let left_out: Vec<_> = left_out.iter().map(|(what, count)| format!("{what} ({count})")).collect();
        let left_out =
            if left_out.is_empty() { String::new() } else { format!("; left out: {}", left_out.join(", ")) };
        format!("{job} {}: {points} of {metrics}, {new_points} of them new{left_out}", output::one_line(name))
    }
}

/// Creates the run if the server does not have it, and sends the records that the server lacks.
async fn upload(api: &Api, mut run: Run, project: Option<&str>) -> anyhow::Result<Report> {
    #[derive(Deserialize)]
    struct Stored {
        /// Number of the run's records that the server has.
        acknowledged: u64,
    }
    #[derive(Serialize)]
    struct Batch<'a> {
        /// Number of the first record. A run's records are numbered from 1.
        first: u64,
        records: &'a [Record],
    }
    if run.failure == Some(Failure::Unfinished) {
        run.drop_newest_records();
    }
    let path = format!("/runs/{}", run.id);
    let is_known = api.find::<Value>(&format!("{path}/files")).await?.is_some();
    if !is_known {
        let tags =
            run.tags.iter().map(|tag| tag.replace(',', " ").chars().take(TAG_CHARS).collect::<String>());
        let name = output::one_line(&run.name);
        let name = if name.trim().is_empty() { run.id.as_str() } else { name.trim() };
        let mut notes = run.notes.clone();
        notes.truncate(notes.floor_char_boundary(NOTES_BYTES));
        let new = json!({
            "id": run.id, "name": name.chars().take(NAME_CHARS).collect::<String>(), "config": run.config, "notes": notes,
            "project": project.map(str::to_owned).or(run.project.as_deref().map(to_project_name)),
            "tags": tags.take(MAX_TAGS).collect::<Vec<_>>(), "started_at": run.started_at, "imported": true,
        });
        api.post::<Value>("/runs", &new).await?;
    }

    let records_path = format!("{path}/records");
    let Stored { mut acknowledged } = api.post(&records_path, &Batch { first: 1, records: &[] }).await?;
    if run.may_differ && acknowledged > 0 {
        check_stored(api, &path, &run, acknowledged).await?;
    }
    let mut new_points = 0;
    while let Some(rest) = usize::try_from(acknowledged).ok().and_then(|count| run.records.get(count..)) {
        let (mut count, mut value_count, mut size_bytes) = (0, 0, 0);
        for record in rest {
            value_count += record.values.len();
            size_bytes += serde_json::to_vec(record)?.len() + 1;
            if count > 0 && (value_count > MAX_RUN_VALUES || size_bytes > REQUEST_BYTES) {
                break;
            }
            count += 1;
        }
        let batch = &rest[..count];
        if batch.is_empty() {
            break;
        }
        let stored: Stored =
            api.post(&records_path, &Batch { first: acknowledged + 1, records: batch }).await?;
        anyhow::ensure!(stored.acknowledged > acknowledged, "the server does not accept the run's records");
        new_points += batch.iter().map(|record| record.values.len() as u64).sum::<u64>();
        acknowledged = stored.acknowledged;
    }

    let (state, reason) = match run.failure {
        None => ("succeeded", None),
        Some(Failure::Failed) => ("failed", None),
        Some(Failure::Cancelled) => ("cancelled", None),
        Some(Failure::Unfinished) => (
            "failed",
            Some("the imported run has no recorded end: its program was killed or was still running"),
        ),
    };
    let update = json!({
        "config": run.config, "summary": run.summary, "state": state, "reason": reason, "ended_at": run.ended_at,
    });
    let job: Value = api.patch(&path, &update).await?;
    Ok(Report {
        job: text(&job, "id").into(),
        name: text(&job, "name").into(),
        metrics: run.metric_names.len(),
        points: run.point_count,
        new_points,
        left_out: run.left_out,
    })
}

/// Compares the stored points of a run with its first `acknowledged` records. If a metric has several values at a step, only the last value
/// is compared, because the server soon removes the other values.
///
/// # Errors
/// The points differ.
async fn check_stored(api: &Api, path: &str, run: &Run, acknowledged: u64) -> anyhow::Result<()> {
    // The response to an update without a change is the job.
    let job: Value = api.patch(path, &json!({})).await?;
    let id = text(&job, "id");
    let mut stored = HashMap::new();
    for (name, series) in history::read_points(api, id, 0).await? {
        stored.extend(series.iter().map(|point| ((name.clone(), point.step), finite_bits(point.value))));
    }
    let mut points = HashMap::new();
    for record in run.records.iter().take(usize::try_from(acknowledged)?) {
        for (name, value) in &record.values {
            let number = value.as_f64().or_else(|| value.as_str()?.parse().ok()).unwrap_or_default();
            points.insert((name.clone(), record.step), finite_bits(number as f32));
        }
    }
    anyhow::ensure!(
        points == stored,
        "the file does not begin with the rows that were imported from it as job {id}, so nothing was added: import the file as another \
         run with --id and a new id, or delete the job first"
    );
    Ok(())
}

/// Returns the bits of a value for comparisons. `None` if the value is not finite: the server's CSV does not distinguish infinity from NaN.
fn finite_bits(value: f32) -> Option<u32> {
    value.is_finite().then(|| value.to_bits())
}

/// Returns the paths in a folder, sorted.
fn sorted_entries(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

/// Returns the last part of a path as text.
fn file_name(path: &Path) -> String {
    let absolute = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    absolute.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

/// Checks that a folder exists.
///
/// # Errors
/// The path is not a folder.
fn check_folder(path: &Path) -> anyhow::Result<()> {
    if path.is_dir() {
        Ok(())
    } else {
        Err(usage_error(format!("{}: there is no such folder", path.display())))
    }
}

/// Adds each number in a value to `numbers`, with its name. The names of nested values are joined by dots. Returns the count of values that
/// are not numbers.
fn collect_numbers(name: &str, value: &Value, numbers: &mut Vec<(String, f64)>) -> u64 {
    match value {
        Value::Number(number) => numbers.extend(number.as_f64().map(|value| (name.to_owned(), value))),
        Value::Bool(flag) => numbers.push((name.to_owned(), f64::from(u8::from(*flag)))),
        Value::String(text) if text == "NaN" => numbers.push((name.to_owned(), f64::NAN)),
        Value::String(text) if text == "Infinity" => numbers.push((name.to_owned(), f64::INFINITY)),
        Value::String(text) if text == "-Infinity" => numbers.push((name.to_owned(), f64::NEG_INFINITY)),
        // An object with `_type` is an image, a table or a histogram of W&B.
        Value::Object(fields) if !fields.contains_key("_type") => {
            return fields
                .iter()
                .map(|(key, value)| collect_numbers(&format!("{name}.{key}"), value, numbers))
                .sum();
        }
        _ => return 1,
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_of_a_step_are_one_record_and_invalid_points_are_left_out() {
        let mut run = Run::default();
        for (step, name, value) in [
            (0, "loss", 1.0),
            (0, "acc", f64::NAN),
            (0, "loss", 2.0),
            (-1, "loss", 1.0),
            (1, "a\nb", 1.0),
            (1, "loss", f64::NEG_INFINITY),
        ] {
            run.add_point(step, None, name, value);
        }
        let expected = json!([
            {"step": 0, "values": {"loss": 1.0, "acc": "NaN"}},
            {"step": 0, "values": {"loss": 2.0}},
            {"step": 1, "values": {"loss": "-Infinity"}},
        ]);
        assert_eq!(serde_json::to_value(&run.records).unwrap(), expected);
        assert_eq!((run.point_count, run.left_out.values().sum::<u64>()), (4, 2));
    }

    #[test]
    fn nested_values_are_named_by_their_path_and_media_are_left_out() {
        let mut numbers = Vec::new();
        let value = json!({"b": 1, "c": {"d": 2.5, "e": "text"}, "f": {"_type": "image-file", "size": 3}});
        assert_eq!(collect_numbers("a", &value, &mut numbers), 2);
        assert_eq!(numbers, [("a.b".to_owned(), 1.0), ("a.c.d".to_owned(), 2.5)]);
    }
}
