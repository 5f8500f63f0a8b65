//! `lockstep compare`: the settings in which jobs differ, and their results, side by side.

use super::{api::ServerArgs, block_on, output};
use lockstep_protocol::{
    Job,
    numbers::{percent, rate, standard_error, value},
};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Compare jobs: the settings in which they differ, and their results
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A job's id, the start of its id, or its name
    job: String,
    /// The other jobs
    #[arg(value_name = "JOB", required = true)]
    others: Vec<String>,
    #[command(flatten)]
    server: ServerArgs,
}

/// Jobs and their differences.
#[derive(Serialize)]
struct Comparison<'a> {
    jobs: &'a [Job],
    /// The settings in which the jobs differ, by key, each with a value for each job; `null` if a job does not have the setting.
    settings: BTreeMap<String, Vec<Value>>,
}

/// A row of the table: its name, and its text for a job.
type Row = (&'static str, fn(&Job) -> Option<String>);

const RESULTS: [Row; 8] = [
    ("state", |job| Some(job.state.to_string())),
    ("step", |job| Some(job.step.to_string())),
    ("loss", |job| job.last.loss.map(value)),
    ("validation loss", |job| job.last.val_loss.map(value)),
    ("validation accuracy", |job| job.last.accuracy_in_words()),
    ("best accuracy", |job| {
        let best = job.best?;
        let error = standard_error(best.value, job.last.val_pictures.unwrap_or(0));
        Some(format!("{}{error} after epoch {}", percent(best.value), best.epoch))
    }),
    ("images a second", |job| job.images_per_second.map(rate)),
    ("ran", |job| job.ran_secs.map(|secs| format!("{secs:.0} s"))),
];

/// Prints a column for each job: its name, the settings that differ, and its results.
///
/// # Errors
/// Exit status 2 if a job does not exist.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let api = args.server.api()?;
    let jobs: Vec<Job> = block_on(async {
        let mut jobs = Vec::new();
        for named in [&args.job].into_iter().chain(&args.others) {
            jobs.push(api.find_job(named).await?);
        }
        Ok(jobs)
    })?;
    let settings = differing_settings(&jobs)?;
    if args.server.json {
        return output::json(&Comparison { jobs: &jobs, settings });
    }
    let header: Vec<&str> = ["JOB"].into_iter().chain(jobs.iter().map(|job| job.id.as_str())).collect();
    let row = |name: &str, of: &dyn Fn(&Job) -> Option<String>| -> Vec<String> {
        let cells = jobs.iter().map(|job| of(job).unwrap_or_default());
        [name.to_owned()].into_iter().chain(cells).collect()
    };
    let mut rows = vec![row("name", &|job| Some(job.name.clone()))];
    rows.extend(settings.iter().map(|(key, values)| {
        [key.clone()].into_iter().chain(values.iter().map(format_value)).collect::<Vec<_>>()
    }));
    rows.extend(RESULTS.iter().map(|(name, of)| row(name, of)));
    // Runs from elsewhere have metrics with other names.
    let elsewhere = jobs.iter().filter(|job| job.external.is_some());
    let metrics: BTreeSet<&String> = elsewhere.flat_map(|job| job.last.others.keys()).collect();
    rows.extend(
        metrics.into_iter().map(|name| row(name, &|job| job.last.others.get(name).map(|v| value(*v)))),
    );
    rows.retain(|row| row.iter().skip(1).any(|cell| !cell.is_empty()));
    output::table_of_columns(&header, &rows)
}

/// Returns the settings in which the jobs differ. Names of jobs do not count.
fn differing_settings(jobs: &[Job]) -> anyhow::Result<BTreeMap<String, Vec<Value>>> {
    let all = jobs.iter().map(flat_settings).collect::<anyhow::Result<Vec<_>>>()?;
    let keys: BTreeSet<&String> = all.iter().flat_map(BTreeMap::keys).filter(|key| *key != "name").collect();
    let values = |key: &String| -> Vec<Value> {
        all.iter().map(|settings| settings.get(key).cloned().unwrap_or_default()).collect()
    };
    let each = keys.into_iter().map(|key| (key.clone(), values(key)));
    Ok(each.filter(|(_, values)| values.windows(2).any(|pair| pair[0] != pair[1])).collect())
}

/// Returns a job's settings by keys such as `train.lr`.
fn flat_settings(job: &Job) -> anyhow::Result<BTreeMap<String, Value>> {
    // Through text, so that 0.1 in single precision stays 0.1.
    let spec = match &job.external {
        Some(run) => json!({ "project": job.project, "config": run.config }),
        None => serde_json::from_str(&serde_json::to_string(&job.spec)?)?,
    };
    let mut settings = BTreeMap::new();
    flatten(String::new(), spec, &mut settings);
    Ok(settings)
}

/// Adds the values in `value` under keys such as `train.lr`. `key`: the key of `value` itself, or an empty text.
pub(crate) fn flatten(key: String, value: Value, settings: &mut BTreeMap<String, Value>) {
    match value {
        Value::Object(table) => {
            for (name, value) in table {
                let key = if key.is_empty() { name } else { format!("{key}.{name}") };
                flatten(key, value, settings);
            }
        }
        Value::Null => {}
        value => {
            settings.insert(key, value);
        }
    }
}

fn format_value(value: &Value) -> String {
    match value {
        Value::Null => "–".into(),
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}
