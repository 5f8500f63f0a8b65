//! What a job has left to continue from.

use crate::{
    app::App,
    artifacts, lifecycle,
    store::{CheckpointRow, JobRow, Result},
};
use lockstep_protocol::{agent::AttemptEvent, job::Job};

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
/// than `agent`.
pub(super) async fn forget_missing(app: &App, job: &Job, agent: &str) -> Result<Left> {
    // No folder at all: this disk is not where they are. What an object store does not have either is nowhere.
    let is_stored = |row: &CheckpointRow| app.artifact_store.as_ref().is_some_and(|store| store.has(&row.id));
    let is_here = app.artifact_store.is_some()
        || matches!(tokio::fs::try_exists(app.job_dir(&job.id).join("checkpoints")).await, Ok(true));
    let mut missing = Vec::new();
    let rows = app.store.checkpoints(&job.id).await?;
    let (all, mut lost) = (rows.len(), 0);
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
        }
    }
    if missing.is_empty() {
        return Ok(Left::Some);
    }
    // Their rows stay: what comes back, as a disk does that was not mounted, can be continued from.
    if app.artifact_store.is_some() && lost == all {
        return Ok(Left::None);
    }
    let change = move |row: &mut JobRow| {
        let removed = |(epoch, step): &(u32, u64)| {
            let event = AttemptEvent::CheckpointRemoved { epoch: *epoch, step: *step };
            lifecycle::report(row, event, None, crate::now())
        };
        Ok(missing.iter().map(removed).collect::<std::result::Result<Vec<_>, _>>()?.concat())
    };
    let changed = app.store.change_job(&job.id, Box::new(change)).await?;
    app.announce(&changed);
    Ok(Left::Some)
}
