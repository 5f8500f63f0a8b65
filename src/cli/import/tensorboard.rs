//! TensorBoard's event files: each folder with event files is a run.

use super::{Failure, Parts, Run, check_folder, derive_id, file_name, sorted_entries};
use crate::cli::{
    event_files::{self, Event, Hparam, HparamsData, SummaryValue},
    usage_error,
};
use anyhow::Context;
use prost::Message;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Returns the runs of a log directory, in the order of their paths.
pub(super) fn parts(root: &Path) -> anyhow::Result<Parts> {
    check_folder(root)?;
    let mut found = Vec::new();
    collect_folders(root, &mut found)?;
    if found.is_empty() {
        let detail = format!("{} has no event files: no file is called *tfevents*", root.display());
        return Err(usage_error(detail));
    }
    let root = root.to_owned();
    Ok(Box::new(found.into_iter().map(move |(folder, files)| {
        let name = folder.strip_prefix(&root).map(|path| path.to_string_lossy().into_owned());
        let name = name.ok().filter(|name| !name.is_empty()).unwrap_or_else(|| file_name(&folder));
        (folder.display().to_string(), read_run(name, &file_name(&folder), &files).map(|run| vec![run]))
    })))
}

/// Adds the folders that have event files, each with the paths of these files.
fn collect_folders(folder: &Path, found: &mut Vec<(PathBuf, Vec<PathBuf>)>) -> anyhow::Result<()> {
    let (folders, mut files): (Vec<_>, Vec<_>) =
        sorted_entries(folder)?.into_iter().partition(|path| path.is_dir() && !path.is_symlink());
    files.retain(|file| file.file_name().is_some_and(|name| name.to_string_lossy().contains("tfevents")));
    if !files.is_empty() {
        found.push((folder.to_owned(), files));
    }
    folders.iter().try_for_each(|inner| collect_folders(inner, found))
}

/// Reads a run. `folder` is the name of the run's folder, which distinguishes runs that began at the same time.
fn read_run(name: String, folder: &str, files: &[PathBuf]) -> anyhow::Result<Run> {
    let mut run = Run { name, ..Run::default() };
    for file in files {
        let unreadable_part = event_files::read(file, |event| add_event(&mut run, folder, file, &event))
            .with_context(|| file.display().to_string())?;
        if let Some(unreadable_part) = unreadable_part {
            run.leave_out(unreadable_part, 1);
        }
    }
    anyhow::ensure!(!run.id.is_empty(), "the event files have no event");
    Ok(run)
}

fn add_event(run: &mut Run, folder: &str, file: &Path, event: &Event) {
    let at = (event.wall_time * 1000.0) as i64;
    if run.id.is_empty() {
        let name = file_name(file);
        run.id =
            derive_id("tensorboard", &[folder.as_bytes(), name.as_bytes(), &event.wall_time.to_le_bytes()]);
        run.started_at = Some(at);
    }
    run.ended_at = run.ended_at.max(Some(at));
    for value in event.summary.iter().flat_map(|summary| &summary.value) {
        if value.tag.starts_with("_hparams_/") {
            add_settings(run, value);
        } else if let Some(number) = value.scalar() {
            run.add_point(event.step, Some(at), &value.tag, number);
        } else {
            run.leave_out("values that are not scalars", 1);
        }
    }
}

/// Reads a run's settings, and its outcome.
fn add_settings(run: &mut Run, value: &SummaryValue) {
    let plugin = value.metadata.as_ref().and_then(|metadata| metadata.plugin_data.as_ref());
    let Some(Ok(data)) = plugin.map(|plugin| HparamsData::decode(&plugin.content[..])) else { return };
    if let Some(start) = data.session_start_info {
        let setting = |hparam: Hparam| match hparam {
            Hparam { number: Some(number), .. } => Value::from(number),
            Hparam { flag: Some(flag), .. } => flag.into(),
            Hparam { text, .. } => text.into(),
        };
        run.config.extend(start.hparams.into_iter().map(|(name, hparam)| (name, setting(hparam))));
    }
    if data.session_end_info.is_some_and(|end| end.status == 2) {
        run.failure = Some(Failure::Failed);
    }
}
