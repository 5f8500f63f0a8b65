//! The checkpoint from which a job's next attempt continues.

use crate::{checkpoints::unreported, scheduler::Scheduler, store::Result};
use lockstep_protocol::job::Job;
use std::collections::BTreeSet;

/// Why a job fails if all its checkpoints are lost. Ranks that find only damaged checkpoints report a reason that begins with the same words.
pub(super) const ALL_LOST: &str = "no valid checkpoint is left to continue from: neither the server's disk nor the object store has one; \
    submit the job again to begin from the start";

/// Whether a job can continue.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ResumePoint {
    /// The job has a checkpoint, or may begin from the start.
    Available,
    /// An object store should have the job's checkpoints, and all of them are lost. Training must not silently begin from the start.
    AllLost,
}

/// Removes the rows of checkpoints that the next attempt on an agent cannot read, before the attempt's checkpoint is chosen. Either their
/// folder is missing (a user removed it, or a rank died before it reported the removal), or only another machine has them and never
/// uploaded them. Unreported checkpoints on the server's disk that are newer than the remaining checkpoints get rows.
pub(super) async fn remove_missing_checkpoints(
    scheduler: &Scheduler,
    job: &Job,
    agent_id: &str,
) -> Result<ResumePoint> {
    // If the folder does not exist, the checkpoints are on another disk, unless there is an object store, which should have all of them.
    let checkpoints = scheduler.config.job_dir(&job.id).join("checkpoints");
    let are_expected = scheduler.checkpoints.object_store.is_some()
        || matches!(tokio::fs::try_exists(&checkpoints).await, Ok(true));
    let mut missing = Vec::new();
    let rows = scheduler.store.checkpoints(&job.id).await?;
    let count = rows.len();
    // The number of checkpoints that no machine has any more, and the agents that have the other missing checkpoints.
    let (mut lost_count, mut holder_names) = (0, BTreeSet::new());
    let mut remaining = BTreeSet::new();
    let copies = scheduler.checkpoints.copies(&job.id).await?;
    for row in rows {
        let copies = copies.of(&row.id);
        let holders = scheduler.checkpoints.holders_unless_on_server(&row, copies);
        let is_missing = if holders.is_empty() {
            are_expected
                && !copies.may_be_fetched()
                && matches!(tokio::fs::try_exists(scheduler.checkpoints.folder(&row)).await, Ok(false))
        } else {
            holders.iter().all(|holder| holder.agent_id != agent_id)
        };
        if is_missing {
            missing.push((row.info.epoch, row.info.step));
            lost_count += usize::from(holders.is_empty());
            holder_names.extend(holders.into_iter().map(|holder| holder.agent));
        } else {
            remaining.insert((row.info.step, row.info.epoch));
        }
    }
    let newest_remaining = remaining.last().map(|(step, _)| *step);
    let mut found = unreported::find_unreported(checkpoints).await;
    found.retain(|checkpoint| !remaining.contains(&(checkpoint.step, checkpoint.epoch)));
    if found.last().is_none_or(|newest| Some(newest.step) <= newest_remaining) {
        found.clear();
    }
    let text = if let Some(newest) = found.last() {
        let mut text = format!(
            "checkpoint {}-{} was written and never reported: training continues from there",
            newest.epoch, newest.step
        );
        if newest.step > job.step {
            text += &format!("; there are no training metrics of steps {} to {}", job.step + 1, newest.step);
        }
        Some(text)
    } else if missing.len() < count || missing.is_empty() {
        None
    } else if scheduler.checkpoints.object_store.is_some() && lost_count == count {
        // The rows stay, because a disk that is not mounted may return.
        return Ok(ResumePoint::AllLost);
    } else if holder_names.is_empty() {
        Some(
            "the known checkpoints are no longer on the server's disk: training begins from the start".into(),
        )
    } else {
        let names: Vec<_> = holder_names.into_iter().collect();
        Some(format!("{} did not upload a checkpoint: training begins from the start", names.join(", ")))
    };
    let added = found.into_iter().flat_map(|checkpoint| unreported::report(job, checkpoint)).collect();
    scheduler.checkpoints.change_rows(&job.id, missing, added).await?;
    if let Some(text) = text {
        scheduler.events.log(&job.id, text).await;
    }
    Ok(ResumePoint::Available)
}
