//! Runs in MLflow's file store, `EXPERIMENT/RUN/{meta.yaml,metrics,params,tags,artifacts}` (`mlflow/store/tracking/file_store.py`), or on
//! an MLflow server with any store.

mod server;

use super::{Failure, Parts, Run, check_folder, derive_id, file_name, sorted_entries};
use crate::cli::usage_error;
use anyhow::Context;
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// File that every run and every experiment has.
const META_FILE: &str = "meta.yaml";

/// Returns an iterator that reads the runs of a store, each with its label, in the order of their folders. Deleted runs are left out.
pub(super) fn parts(root: &Path) -> anyhow::Result<Parts> {
    if let Some(url) =
        root.to_str().filter(|path| path.starts_with("http://") || path.starts_with("https://"))
    {
        return server::parts(url);
    }
    check_folder(root)?;
    let mut runs = Vec::new();
    // The store itself, or the folder that contains `mlruns`.
    for root in [root.to_owned(), root.join("mlruns")] {
        if !root.is_dir() {
            continue;
        }
        for experiment in sorted_entries(&root)?.into_iter().filter(|path| path.join(META_FILE).is_file()) {
            let entries = sorted_entries(&experiment)?.into_iter();
            let folders = entries.filter(|path| path.join(META_FILE).is_file());
            runs.extend(folders.map(|run| (experiment.clone(), run)));
        }
    }
    if runs.is_empty() {
        return Err(usage_error(format!(
            "{} has no runs of MLflow: no folder EXPERIMENT/RUN in it has a {META_FILE}. If MLflow keeps the runs in a database, start \
             `mlflow server` with the database and give the server's URL",
            root.display()
        )));
    }
    let read = |(experiment, run): (PathBuf, PathBuf)| {
        (run.display().to_string(), read_run(&experiment, &run).map(Vec::from_iter))
    };
    Ok(Box::new(runs.into_iter().map(read)))
}

fn read_meta(folder: &Path) -> anyhow::Result<Value> {
    let path = folder.join(META_FILE);
    let bytes = fs::read(&path).with_context(|| path.display().to_string())?;
    serde_saphyr::from_slice(&bytes).map_err(|e| anyhow::anyhow!("{}: {e}", path.display()))
}

/// Reads a run. `None` if the run was deleted.
fn read_run(experiment: &Path, folder: &Path) -> anyhow::Result<Option<Run>> {
    let meta = read_meta(folder)?;
    if text(&meta, "lifecycle_stage") == "deleted" {
        return Ok(None);
    }
    let mut run = new_run(&file_name(folder), &text(&read_meta(experiment)?, "name"), &meta);
    let (params, tags) = (read_texts(&folder.join("params"))?, read_texts(&folder.join("tags"))?);
    add_settings(&mut run, params, tags);
    let mut points = Vec::new();
    for (name, lines) in read_texts(&folder.join("metrics"))? {
        for line in lines.lines() {
            match parse_point(line) {
                Some((at, value, step)) => points.push((at, name.clone(), step, value)),
                None => run.leave_out("lines that are not points", 1),
            }
        }
    }
    add_points(&mut run, points);
    let mut artifacts = Vec::new();
    collect_files(&folder.join("artifacts"), &mut artifacts)?;
    run.leave_out("artifacts", artifacts.len() as u64);
    Ok(Some(run))
}

/// Returns a field as text. YAML reads a text that looks like a number as a number.
fn text(object: &Value, key: &str) -> String {
    match object.get(key) {
        Some(Value::String(text)) => text.clone(),
        Some(value @ Value::Number(_)) => value.to_string(),
        _ => String::new(),
    }
}

/// Makes a run without settings and points. `info` is MLflow's `RunInfo`. Its status is a name, or a number if it comes from a file.
fn new_run(id: &str, experiment: &str, info: &Value) -> Run {
    let time = |key: &str| text(info, key).parse().ok();
    let name = text(info, "run_name");
    Run {
        // A run has the same id whether it is imported from files or from a server.
        id: derive_id("mlflow", &[id.as_bytes()]),
        name: if name.is_empty() { id.to_owned() } else { name },
        project: Some(if experiment == "Default" { "default" } else { experiment }.to_owned()),
        started_at: time("start_time"),
        ended_at: time("end_time"),
        failure: match text(info, "status").as_str() {
            "FINISHED" | "3" => None,
            "FAILED" | "4" => Some(Failure::Failed),
            "KILLED" | "5" => Some(Failure::Cancelled),
            _ => Some(Failure::Unfinished),
        },
        ..Run::default()
    }
}

/// Adds parameters as settings, and tags as results. Of MLflow's own tags, two set the run's name and notes; the others are left out.
fn add_settings(run: &mut Run, params: Vec<(String, String)>, tags: Vec<(String, String)>) {
    run.config.extend(params.into_iter().map(|(name, value)| (name, value.into())));
    for (key, value) in tags {
        match key.as_str() {
            "mlflow.runName" => run.name = value,
            "mlflow.note.content" => run.notes = value,
            key if key.starts_with("mlflow.") => {}
            _ => _ = run.summary.insert(key, value.into()),
        }
    }
}

/// Adds points (time, metric, step and value) sorted by time, so that a later import of the same run only appends records. Points of the
/// same time are in the order of steps and names.
fn add_points(run: &mut Run, mut points: Vec<(i64, String, i64, f64)>) {
    points.sort_by(|(at, name, step, _), (other_at, other_name, other_step, _)| {
        (at, step, name).cmp(&(other_at, other_step, other_name))
    });
    for (at, name, step, value) in points {
        run.add_point(step, Some(at), &name, value);
    }
}

/// Parses a line of a metric: time, value and step.
fn parse_point(line: &str) -> Option<(i64, f64, i64)> {
    let mut parts = line.split_whitespace();
    let (at, value) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    // Early versions had no steps.
    let step = parts.next().map_or(Some(0), |step| step.parse().ok())?;
    Some((at, value, step))
}

/// Reads all files in a folder. Returns the contents of the files, each with the file's path in the folder: a name of a
/// metric, parameter or tag may have slashes.
fn read_texts(folder: &Path) -> anyhow::Result<Vec<(String, String)>> {
    let mut paths = Vec::new();
    collect_files(folder, &mut paths)?;
    let text = |path: PathBuf| -> anyhow::Result<(String, String)> {
        let bytes = fs::read(&path).with_context(|| path.display().to_string())?;
        let name = path.strip_prefix(folder).unwrap_or(&path).to_string_lossy().into_owned();
        Ok((name, String::from_utf8_lossy(&bytes).into_owned()))
    };
    paths.into_iter().map(text).collect()
}

/// Adds the paths of all files in a folder and its subfolders.
fn collect_files(folder: &Path, found: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    if !folder.is_dir() {
        return Ok(());
    }
    for path in sorted_entries(folder)? {
        if path.is_dir() { collect_files(&path, found)? } else { found.push(path) }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_points_follow_imported_points() {
        let point = |at: i64, name: &str, step: i64| (at, name.to_owned(), step, 0.5);
        let before = vec![point(1, "loss", 0), point(2, "loss", 1)];
        let later = vec![point(2, "acc", 1), point(3, "acc", 2), point(1, "loss", 0), point(2, "loss", 1)];
        let records = |points| {
            let mut run = Run::default();
            add_points(&mut run, points);
            // Points of the newest time may still be logged.
            run.drop_newest_records();
            serde_json::to_value(&run.records).unwrap()
        };
        let first = serde_json::json!({"step": 0, "at": 1, "values": {"loss": 0.5}});
        let second = serde_json::json!({"step": 1, "at": 2, "values": {"acc": 0.5, "loss": 0.5}});
        assert_eq!(records(before), serde_json::json!([first]));
        assert_eq!(records(later), serde_json::json!([first, second]));
    }

    #[test]
    fn a_line_has_time_value_and_step() {
        assert_eq!(parse_point("1700000000123 0.5 7"), Some((1_700_000_000_123, 0.5, 7)));
        assert_eq!(parse_point("1 -inf 0 dataset digest"), Some((1, f64::NEG_INFINITY, 0)));
        assert!(parse_point("1 nan 3").is_some_and(|(_, value, _)| value.is_nan()));
        assert_eq!(parse_point("1 2"), Some((1, 2.0, 0)));
        for line in ["", "1", "x 2 3", "1 x 3", "1 2 x"] {
            assert_eq!(parse_point(line), None, "{line}");
        }
    }
}
