//! Removes the points of a job from `events` some time after the job's end. The job's charts and CSV file are then read from chunks, which
//! contain every point. The job's stream begins after the removed events.

use super::{
    Metrics,
    compaction::{self, Rest},
    compaction_queue,
};
use crate::store::{Result, StoreError};
use lockstep_protocol::job::JobId;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// Maximum pause between two rounds. The pause is a quarter of the time for which points are kept, if that is shorter.
const POLL_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum pause between two transactions.
const MAX_PAUSE: Duration = Duration::from_millis(200);

/// Removes points. Runs until dropped.
pub(crate) async fn run(metrics: Arc<Metrics>) {
    let keep = metrics.keep_points;
    loop {
        tokio::time::sleep((keep / 4).clamp(Duration::from_millis(50), POLL_INTERVAL)).await;
        let Some(before) =
            jiff::SignedDuration::try_from(keep).ok().and_then(|k| crate::now().checked_sub(k).ok())
        else {
            continue;
        };
        // The next query continues after this job, so a job whose points cannot be removed is left for the next round.
        let mut previous_job: Option<JobId> = None;
        loop {
            let job = match metrics.store.oldest_job_with_points(before, previous_job.as_ref()).await {
                Ok(Some(job)) => job,
                Ok(None) => break,
                Err(error) => {
                    tracing::warn!(%error, "points of finished jobs could not be removed from events; trying again");
                    break;
                }
            };
            match remove_points_of(&metrics, &job).await {
                Ok(()) | Err(StoreError::NotFound(_)) => {}
                Err(error) => {
                    tracing::warn!(%error, %job, "a job's points could not be removed from events; trying again")
                }
            }
            previous_job = Some(job);
        }
    }
}

async fn remove_points_of(metrics: &Metrics, job: &JobId) -> Result<()> {
    let ranks = metrics.store.job(job).await?.map_or(1, |row| row.job.ranks);
    while compaction::compact(metrics.store.as_ref(), job, compaction_queue::batch_cost(ranks), Rest::Compact)
        .await?
    {}
    loop {
        let began = Instant::now();
        if !metrics.store.remove_points(job).await? {
            return Ok(());
        }
        // Uses at most half of the writer's time, because reports of running jobs come first.
        tokio::time::sleep(began.elapsed().min(MAX_PAUSE)).await;
    }
}
