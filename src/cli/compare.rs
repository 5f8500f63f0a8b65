//! `lockstep compare`: the settings in which jobs differ, and their results, side by side.

use super::{api::ServerArgs, block_on, output, usage_error};
use lockstep_protocol::{
    Job,
    numbers::{percent, rate, standard_error, value},
    spec::{Validation, ValidationDivision},
};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Compare jobs: the settings in which they differ, and their results
#[derive(clap::Args)]
pub(crate) struct Args {
    /// At least two jobs: their ids, the starts of their ids, or their names
    #[arg(value_name = "JOB", required = true)]
    jobs: Vec<String>,
    #[command(flatten)]
    server: ServerArgs,
}

/// Jobs and their differences.
#[derive(Serialize)]
struct Comparison<'a> {
    jobs: &'a [Job],
    /// The settings in which the jobs differ, by key, each with one value per job; `null` if a job does not have the setting.
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
        Some(format!("{}{error} at {}", percent(best.value), best.epoch_or_step()))
    }),
    ("images a second", |job| job.images_per_second.map(rate)),
    ("ran", |job| job.ran_secs.map(|secs| format!("{secs:.0} s"))),
];

/// Prints a column for each job: its name, the settings that differ, and its results.
///
/// # Errors
/// Exit status 2 if a job does not exist or is named twice, or if only one job is named.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    if args.jobs.len() < 2 {
        return Err(usage_error("name at least two jobs, as in `lockstep compare JOB JOB`"));
    }
    let api = args.server.api()?;
    let jobs: Vec<Job> = block_on(async {
        let mut jobs = Vec::new();
        for named in &args.jobs {
            jobs.push(api.find_job(named).await?);
        }
        let distinct = jobs.iter().map(|job| job.id.as_str()).collect::<BTreeSet<_>>().len();
        if distinct < jobs.len() {
            return Err(usage_error(
                "a job is named twice; name different jobs, by their ids if they have the same name (`lockstep list` shows ids)",
            ));
        }
        Ok(jobs)
    })?;
    let settings = differing_settings(&jobs)?;
    if args.server.json {
        return output::json(&Comparison { jobs: &jobs, settings });
    }
    let header: Vec<&str> = ["JOB"].into_iter().chain(jobs.iter().map(|job| job.id.as_str())).collect();
    let row = |name: &str, cell: &dyn Fn(&Job) -> Option<String>| -> Vec<String> {
        let cells = jobs.iter().map(|job| cell(job).unwrap_or_default());
        [name.to_owned()].into_iter().chain(cells).collect()
    };
    let mut rows = vec![row("name", &|job| Some(job.name.clone()))];
    rows.extend(settings.iter().map(|(key, values)| {
        [key.clone()].into_iter().chain(values.iter().map(format_value)).collect::<Vec<_>>()
    }));
    rows.extend(RESULTS.iter().map(|(name, cell)| row(name, cell)));
    // Runs from elsewhere have metrics with other names.
    let elsewhere = jobs.iter().filter(|job| job.external.is_some());
    let metrics: BTreeSet<&String> = elsewhere.flat_map(|job| job.last.others.keys()).collect();
    rows.extend(
        metrics.into_iter().map(|name| row(name, &|job| job.last.others.get(name).map(|v| value(*v)))),
    );
    let summaries = jobs.iter().map(flat_summary).collect::<anyhow::Result<Vec<_>>>()?;
    let results: BTreeSet<&String> = summaries.iter().flat_map(BTreeMap::keys).collect();
    rows.extend(results.into_iter().map(|name| {
        let cells = summaries.iter().map(|summary| summary.get(name).map(format_value).unwrap_or_default());
        [name.clone()].into_iter().chain(cells).collect::<Vec<_>>()
    }));
    rows.retain(|row| row.iter().skip(1).any(|cell| !cell.is_empty()));
    output::table_of_names(&header, &[], &rows)?;
    caution(&jobs).into_iter().try_for_each(output::line)
}

/// The best validation accuracy of a job, or of a trial.
pub(crate) struct BestAccuracy {
    pub(crate) title: String,
    pub(crate) accuracy: f64,
    /// Number of validation pictures.
    pub(crate) pictures: u64,
}

/// Explains why the jobs' order by best validation accuracy may mean nothing. The same as `caution` in `static/compare/caution.js`.
fn caution(jobs: &[Job]) -> Vec<String> {
    // The name; the random end of the id distinguishes jobs with the same name.
    let title = |job: &Job| {
        let id = job.id.as_str();
        match jobs.iter().filter(|other| other.name == job.name).count() {
            1 => job.name.clone(),
            _ => format!("{} · {}", job.name, id.get(id.len().saturating_sub(5)..).unwrap_or(id)),
        }
    };
    let (mut measured, mut uncertain) = (Vec::new(), Vec::new());
    for job in jobs {
        let Some(best) = job.best else { continue };
        let Some(pictures) = job.last.val_pictures.filter(|pictures| *pictures > 0) else {
            uncertain.push(title(job));
            continue;
        };
        let mut division = ValidationDivision::of(&job.spec.data);
        // Settings without effect must not make two divisions differ: the seed if no pictures are held out, `data.validation` with folds.
        if !division.holds_out() {
            division.validation_seed = 0;
        } else if division.fold.is_some() {
            division.validation = Validation::Split("none".into());
        }
        measured.push((BestAccuracy { title: title(job), accuracy: best.value, pictures }, division));
    }
    let mut sentences = Vec::new();
    if !uncertain.is_empty() {
        sentences.push(format!(
            "The number of validation pictures of these jobs is unknown, so their differences to other jobs may be chance: {}.",
            uncertain.join(", ")
        ));
    }
    measured.sort_by(|(a, _), (b, _)| b.accuracy.total_cmp(&a.accuracy));
    let [(first, division), (second, _), ..] = measured.as_slice() else { return sentences };
    if measured.iter().any(|(other, _)| other.pictures != first.pictures) {
        sentences.push("These accuracies were not measured on the same validation pictures.".to_owned());
        return sentences;
    }
    if measured.iter().any(|(_, other)| other != division) {
        sentences
            .push("These accuracies may not have been measured on the same validation pictures.".to_owned());
    }
    sentences.extend(explain_insignificance(first, second));
    sentences
}

/// Explains why the order of `first` and `second` may be chance. `None` if `first` is clearly better. Both have the same pictures.
pub(crate) fn explain_insignificance(first: &BestAccuracy, second: &BestAccuracy) -> Option<String> {
    // The variance of a proportion.
    let variance = |job: &BestAccuracy| job.accuracy * (1.0 - job.accuracy) / job.pictures as f64;
    let difference = first.accuracy - second.accuracy;
    let two_errors = 2.0 * (variance(first) + variance(second)).sqrt();
    if difference <= 0.0 {
        return Some(format!(
            "The best accuracies of {} and {} are equal ({}), so these results do not show which is better.",
            first.title,
            second.title,
            percent(first.accuracy)
        ));
    }
    (difference < two_errors).then(|| {
        format!(
            "{} ({}) and {} ({}) differ by {:.1} points, which is less than two standard errors of the difference \
             ({:.1} points), so these results do not show which is better.",
            first.title,
            percent(first.accuracy),
            second.title,
            percent(second.accuracy),
            100.0 * difference,
            100.0 * two_errors
        )
    })
}

/// Returns the settings in which the jobs differ, except their names. A key that no run from elsewhere has is compared only among the jobs
/// that Lockstep trains. A run's `config.lr` counts as `train.lr` if no other setting of these jobs is called `lr`. Like `settings` in
/// `static/compare/names.js`.
fn differing_settings(jobs: &[Job]) -> anyhow::Result<BTreeMap<String, Vec<Value>>> {
    let mut settings_of_jobs = jobs.iter().map(flat_settings).collect::<anyhow::Result<Vec<_>>>()?;
    let trained = jobs.iter().zip(&settings_of_jobs).filter(|(job, _)| job.external.is_none());
    let keys_of_trained: BTreeSet<String> =
        trained.flat_map(|(_, settings)| settings.keys().cloned()).collect();
    let setting_of_run = |key: String| -> String {
        let Some(name) = key.strip_prefix("config.") else { return key };
        let is_called = |setting: &&String| setting.rsplit_once('.').is_some_and(|(_, last)| last == name);
        let mut settings = keys_of_trained.iter().filter(is_called);
        match (settings.next(), settings.next()) {
            (Some(only), None) => only.clone(),
            _ => key,
        }
    };
    for (_, settings) in jobs.iter().zip(&mut settings_of_jobs).filter(|(job, _)| job.external.is_some()) {
        *settings = std::mem::take(settings).into_iter().map(|(key, v)| (setting_of_run(key), v)).collect();
    }
    let keys: BTreeSet<&String> =
        settings_of_jobs.iter().flat_map(BTreeMap::keys).filter(|key| *key != "name").collect();
    let values = |key: &String| -> Vec<Value> {
        settings_of_jobs.iter().map(|settings| settings.get(key).cloned().unwrap_or_default()).collect()
    };
    let differs = |key: &String| {
        let each_job = || {
            jobs.iter()
                .zip(&settings_of_jobs)
                .map(|(job, settings)| (job.external.is_some(), settings.get(key)))
        };
        let any_run_has_key = each_job().any(|(is_external, value)| is_external && value.is_some());
        let mut compared =
            each_job().filter(|(is_external, _)| any_run_has_key || !is_external).map(|(_, value)| value);
        let first = compared.next().flatten();
        compared.any(|value| value != first)
    };
    Ok(keys.into_iter().filter(|key| differs(key)).map(|key| (key.clone(), values(key))).collect())
}

/// Returns a job's settings by keys such as `train.lr`, and its project.
fn flat_settings(job: &Job) -> anyhow::Result<BTreeMap<String, Value>> {
    let mut settings = match &job.external {
        Some(run) => flat(&json!({ "config": run.config }))?,
        None => flat(&job.spec)?,
    };
    settings.insert("project".into(), job.project.as_str().into());
    Ok(settings)
}

/// Returns the results in the summary of a run from elsewhere, by keys such as `summary.best`. Leaves out the same entries as `withSummary`
/// in `static/compare/names.js`.
fn flat_summary(job: &Job) -> anyhow::Result<BTreeMap<String, Value>> {
    let Some(run) = &job.external else { return Ok(BTreeMap::new()) };
    let mut summary = run.summary.clone();
    summary.retain(|name, _| name != "alerts" && !name.starts_with('_'));
    flat(&json!({ "summary": summary }))
}

fn flat(value: &impl Serialize) -> anyhow::Result<BTreeMap<String, Value>> {
    let mut settings = BTreeMap::new();
    // Through text, so that 0.1 in single precision stays 0.1.
    flatten(String::new(), serde_json::from_str(&serde_json::to_string(value)?)?, &mut settings);
    Ok(settings)
}

/// Adds the values in `value` to `settings`, under keys such as `train.lr`. `key` is the key of `value` itself, or empty.
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
