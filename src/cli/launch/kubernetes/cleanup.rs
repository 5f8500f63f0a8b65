//! Ends Kubernetes' Job after Lockstep's job is over.

use super::{
    super::{
        Launch,
        uploads::{UPLOAD_TIMEOUT, UploadStatus, report_upload_once},
    },
    POLL_INTERVAL,
    cluster::{Cluster, Kind},
    words,
};
use lockstep_protocol::JobState;
use std::time::Duration;
use tokio::time::Instant;

/// Time for the pods to end after the job is over: a heartbeat tells an agent that the job has ended.
const PODS_END_TIMEOUT: Duration = Duration::from_secs(90);

pub(super) enum Cleanup {
    /// No pod is left, or the last pods are terminating.
    Ended,
    /// The job was retried, and needs its pods.
    QueuedAgain,
}

/// Waits for the pods to end after the job is over. Deletes pods of a cancelled job, pods that do not end, and pods that still wait for a
/// node, but only after the server has their checkpoints.
///
/// # Errors
/// Kubernetes refuses a request, or the server does not receive the checkpoints within the time limit.
pub(super) async fn clean_up(cluster: &Cluster, launch: &Launch, name: &str) -> anyhow::Result<Cleanup> {
    let began = Instant::now();
    let (mut complete_since, mut is_announced) = (None, false);
    loop {
        let Some(job) = cluster.get(Kind::Job, name).await? else { return Ok(Cleanup::Ended) };
        let (is_over, has_pods) = (words::describe_end(&job).is_some(), words::has_pods(&job));
        if is_over && !has_pods {
            return Ok(Cleanup::Ended);
        }
        let may_end = match launch.upload_status().await {
            Ok(UploadStatus::Complete(lockstep_job)) if !lockstep_job.state.is_final() && !is_over => {
                return Ok(Cleanup::QueuedAgain);
            }
            // No pod exists that could upload a checkpoint.
            Ok(_) if words::is_suspended(&job) && !has_pods => true,
            Ok(UploadStatus::Deleted) => true,
            Ok(UploadStatus::Complete(lockstep_job)) => {
                let since = complete_since.get_or_insert_with(Instant::now);
                is_over || lockstep_job.state == JobState::Cancelled || since.elapsed() > PODS_END_TIMEOUT
            }
            Ok(UploadStatus::Uploading) => {
                report_upload_once(&mut is_announced);
                false
            }
            // After an error, the state of the uploads is unknown.
            Err(_) => false,
        };
        if may_end {
            // A finished Job stays for a while, so that its pods' logs can be read.
            if !is_over {
                cluster.delete(Kind::Job, &job).await?;
            }
            return Ok(Cleanup::Ended);
        }
        if began.elapsed() > UPLOAD_TIMEOUT {
            anyhow::bail!(
                "the job's last checkpoint is not known to be on the server; `kubectl -n {} delete job {name}` ends the pods",
                cluster.namespace
            );
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
