//! What a job has left to continue from.

use super::unreported;
use crate::{
    app::App,
    artifacts, job_log, lifecycle,
    store::{CheckpointRow, JobRow, Result},
};
use lockstep_protocol::{
    agent::{AttemptEvent, CheckpointInfo},
    job::Job,
};
use std::collections::BTreeSet;

/// As ranks say it that find only damaged ones.
pub(super) const NONE_LEFT: &str = "no whole checkpoint is left to continue from: neither the server's disk nor the object store has one; submit the job \
                         anew to begin from the start";

/// What a job may continue from.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Left {
    /// A checkpoint, or the start where it never had one.
    Some,
    /// It had checkpoints that an object store was to keep, and all of them are gone. Its training is not to begin from the start without a word.
    None,
}

/// Removes the rows of checkpoints that the next attempt cannot have, before one of them is chosen to continue from: those whose folder is
/// gone (a user removed it, or a rank died before it reported removing it), and those that were never uploaded from another machine
/// than `agent`. Where the newest one is not left, a newer one on this disk that nobody has told of is taken.
pub(super) async fn forget_missing(app: &App, job: &Job, agent: &str) -> Result<Left> {
    // No folder at all: this disk is not where they are. What an object store does not have either is nowhere.
    let checkpoints = app.job_dir(&job.id).join("checkpoints");
    let is_stored = |row: &CheckpointRow| app.artifact_store.as_ref().is_some_and(|store| store.has(&row.id));
    let is_here =
        app.artifact_store.is_some() || matches!(tokio::fs::try_exists(&checkpoints).await, Ok(true));
    let mut missing = Vec::new();
    let rows = app.store.checkpoints(&job.id).await?;
    let (all, mut lost, mut elsewhere) = (rows.len(), 0, BTreeSet::new());
    let newest = rows.iter().map(|row| row.info.step).max();
    let mut left = BTreeSet::new();
    for row in rows {
        let holders = artifacts::on_its_way(app, &row);
        let is_missing = match holders.is_empty() {
            false => holders.iter().all(|holder| holder.agent_id != agent),
            true => {
                is_here
                    && !is_stored(&row)
                    && matches!(tokio::fs::try_exists(app.checkpoint_dir(&row)).await, Ok(false))
            }
        };
        if is_missing {
            missing.push((row.info.epoch, row.info.step));
            lost += usize::from(holders.is_empty());
            elsewhere.extend(holders.into_iter().map(|holder| holder.agent));
        } else {
            left.insert((row.info.step, row.info.epoch));
        }
    }
    let newest_left = left.last().map(|(step, _)| *step);
    if newest_left.is_some() && newest_left == newest {
        return forget(app, job, missing, Vec::new(), None).await;
    }
    let mut found = unreported::find(checkpoints).await;
    found.retain(|one| !left.contains(&(one.step, one.epoch)));
    if let Some(newest) = found.last().filter(|newest| Some(newest.step) > newest_left) {
        let mut text = format!(
            "checkpoint {}-{} was written and never reported: training continues from there",
            newest.epoch, newest.step
        );
        if newest.step > job.step {
            text += &format!("; there are no points of steps {} to {}", job.step + 1, newest.step);
        }
        return forget(app, job, missing, found, Some(text)).await;
    }
    if missing.len() < all || missing.is_empty() {
        return forget(app, job, missing, Vec::new(), None).await;
    }
    // Their rows stay: what comes back, as a disk does that was not mounted, can be continued from.
    if app.artifact_store.is_some() && lost == all {
        return Ok(Left::None);
    }
    let text = if elsewhere.is_empty() {
        "the checkpoints that are known are not on the server's disk any more: training begins from the start"
            .to_owned()
    } else {
        let names: Vec<_> = elsewhere.into_iter().collect();
        format!("{} did not upload a checkpoint: training begins from the start", names.join(", "))
    };
    forget(app, job, missing, Vec::new(), Some(text)).await
}

/// Removes rows of checkpoints and adds others, and says so in the job's log.
async fn forget(
    app: &App,
    job: &Job,
    missing: Vec<(u32, u64)>,
    found: Vec<CheckpointInfo>,
    text: Option<String>,
) -> Result<Left> {
    if missing.is_empty() && found.is_empty() {
        return Ok(Left::Some);
    }
    let change = move |row: &mut JobRow| {
        let removed = missing
            .iter()
            .map(|(epoch, step)| AttemptEvent::CheckpointRemoved { epoch: *epoch, step: *step });
        let added = found.iter().cloned().map(AttemptEvent::Checkpoint);
        let mut events = Vec::new();
        for event in removed.chain(added) {
            events.extend(lifecycle::report(row, event, None, crate::now())?);
        }
        Ok(events)
    };
    let changed = app.store.change_job(&job.id, Box::new(change)).await?;
    app.announce(&changed);
    if let Some(text) = text {
        job_log::log(app, &job.id, text).await;
    }
    Ok(Left::Some)
}
