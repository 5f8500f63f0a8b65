//! `lockstep list`: lists jobs.

mod groups;

use super::{
    age::age,
    api::{ServerArgs, parse_elements, present_parameters},
    block_on, output,
};
use lockstep_protocol::{
    Job, JobState,
    metric::quantity,
    numbers::{loss, percent, rate, uncertainty, value},
};
use serde_json::Value;
use std::collections::BTreeSet;

/// List jobs, newest first
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only jobs in one of these states, such as running,failed
    #[arg(long, value_name = "STATE,...", value_delimiter = ',')]
    state: Vec<JobState>,
    /// Only jobs whose name contains this text
    #[arg(long)]
    name: Option<String>,
    /// Only jobs with this text in their name, tags or notes
    #[arg(long, value_name = "TEXT")]
    search: Option<String>,
    /// Only jobs whose settings or results match this condition, such as 'lr > 0.1' or 'best > 0.9', with = != < <= > or >= (may be
    /// repeated: all conditions must match); the table then shows the values. Accuracies are 0 to 1, or percentages such as 80%
    #[arg(long = "where", value_name = "CONDITION")]
    conditions: Vec<String>,
    /// Only jobs of this person, or of the token with this name
    #[arg(long)]
    owner: Option<String>,
    /// Only jobs of this project
    #[arg(long)]
    project: Option<String>,
    /// Only jobs with this tag (may be repeated: jobs must have all tags)
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<String>,
    /// Only jobs submitted at this time or later, such as 2026-01-31T12:00:00Z, or 2026-01-31 (UTC)
    #[arg(long, value_name = "TIME")]
    created_after: Option<String>,
    /// Only jobs submitted before this time
    #[arg(long, value_name = "TIME")]
    created_before: Option<String>,
    /// Sort by created, started, finished, name, state, project, owner, priority, step, epoch, attempt, ranks, speed, loss, best or the
    /// newest value of another metric that ranks report, tag:NAME, or a key such as spec.train.lr; a leading - sorts in descending order
    /// [default: -created]
    #[arg(long, allow_hyphen_values = true)]
    sort: Option<String>,
    /// List groups instead of jobs, by project, owner, tag, state, name or settings such as train.lr (up to 3), with mean and standard
    /// deviation; --sort then accepts group, jobs, newest, best, loss or speed [default: group]
    #[arg(long, value_name = "KEY,...")]
    group_by: Option<String>,
    /// Maximum number of lines to print
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,
    #[command(flatten)]
    server: ServerArgs,
}

/// Prints the jobs.
///
/// # Errors
/// The server is unreachable, or refuses a filter or a sort order.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let api = args.server.api()?;
    let states: Vec<_> = args.state.iter().map(ToString::to_string).collect();
    let query = present_parameters([
        ("state", Some(states.join(",")).filter(|states| !states.is_empty())),
        ("name", args.name),
        ("q", args.search),
        ("where", Some(args.conditions.join(",")).filter(|conditions| !conditions.is_empty())),
        ("owner", args.owner),
        ("project", args.project),
        ("tag", Some(args.tags.join(",")).filter(|tags| !tags.is_empty())),
        ("created_after", args.created_after),
        ("created_before", args.created_before),
        ("sort", args.sort),
    ]);
    if let Some(keys) = &args.group_by {
        return groups::run(&api, keys, query, args.limit, args.server.json);
    }
    let has_filter = !query.is_empty();
    let values = block_on(api.read_pages("/jobs", &query, args.limit))?;
    let jobs: Vec<Job> = parse_elements(&values, "jobs");
    if args.server.json {
        return output::json(&jobs);
    }
    let conditions = args.conditions.iter().flat_map(|conditions| conditions.split(','));
    let keys: BTreeSet<&str> = conditions.map(condition_key).collect();
    if jobs.is_empty() && has_filter {
        let has_accuracy = keys.iter().any(|key| *key == "best" || quantity(key) == "accuracy");
        let hint = if has_accuracy {
            "; give an accuracy as a number from 0 to 1, or as a percentage such as 80%"
        } else {
            ""
        };
        return output::line(format_args!("no job matches{hint}"));
    }
    if jobs.is_empty() {
        return output::line("no jobs; submit one with `lockstep submit JOB.toml`");
    }
    let mut header = vec!["JOB", "NAME", "STATE", "RANKS", "PROGRESS", "IMAGES/S", "LOSS", "BEST", "AGE"];
    let has_no_column = |key: &&str| !["name", "images_per_second", "speed", "loss", "best"].contains(key);
    let keys: Vec<&str> = keys.into_iter().filter(has_no_column).collect();
    header.extend(&keys);
    // `jobs` has the jobs of `values` in the same order, without the jobs that this version cannot read.
    let mut unparsed = values.iter();
    let rows = jobs.iter().map(|job| {
        let unparsed_job = unparsed.find(|value| value["id"] == job.id.as_str()).unwrap_or(&Value::Null);
        row(job)
            .into_iter()
            .chain(keys.iter().map(|key| condition_value(unparsed_job, key)))
            .collect::<Vec<String>>()
    });
    output::table_of_names(&header, &["NAME"], rows)
}

/// Returns the key in a condition that the server has accepted: `lr` in `lr > 0.1`.
fn condition_key(condition: &str) -> &str {
    let key = condition.split(['=', '!', '<', '>']).next().unwrap_or_default().trim();
    key.strip_prefix("spec.").unwrap_or(key)
}

/// Returns a job's value for the key of a condition: a setting, also without the name of its section, or else the newest value of a metric.
fn condition_value(job: &Value, key: &str) -> String {
    let name = key.rsplit('.').next().unwrap_or(key);
    let in_section = || job["spec"].as_object()?.values().find_map(|section| section.get(name));
    let setting = match key.split_once('.') {
        _ if !job["external"].is_null() => job["external"]["config"].get(name),
        Some((table, key)) => job["spec"][table].get(key),
        None => job["spec"].get(key).or_else(in_section),
    };
    match (setting.or_else(|| job.get(key)), job["last"][key].as_f64()) {
        (None, Some(newest)) if quantity(key) == "accuracy" => percent(newest),
        (None, Some(newest)) => value(newest),
        (None | Some(Value::Null), _) => String::new(),
        (Some(Value::String(text)), _) => text.clone(),
        (Some(setting), _) => setting.to_string(),
    }
}

fn row(job: &Job) -> [String; 9] {
    let progress = match (&job.queue, job.step, job.total_steps) {
        (Some(queue), ..) => format!("place {}", queue.place),
        (None, _, 0) => String::new(),
        (None, step, total) => format!("{} %", step * 100 / total),
    };
    [
        job.id.to_string(),
        job.name.clone(),
        job.state_in_words().to_owned(),
        if job.external.is_some() { "elsewhere".to_owned() } else { job.ranks.to_string() },
        progress,
        job.images_per_second.map(rate).unwrap_or_default(),
        job.last.loss.map(loss).unwrap_or_default(),
        job.best
            .map(|best| percent(best.value) + &uncertainty(best.value, job.last.val_pictures))
            .unwrap_or_default(),
        age(job.created_at),
    ]
}
