//! Checks whether a job's checkpoints are on the server. The launch's agents upload the checkpoints, so the agents are ended only after the
//! uploads.

use super::{
    super::{WrongRequest, output},
    Launch,
};
use anyhow::Context as _;
use lockstep_protocol::Job;
use serde_json::Value;
use std::time::{Duration, Instant};

/// Maximum wait for the last checkpoint of a job that is over.
pub(super) const UPLOAD_TIMEOUT: Duration = Duration::from_secs(3600);
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Time limit for a response of the server.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);

/// Whether all checkpoints of a job have been uploaded, so that its agents may be ended.
pub(super) enum UploadStatus {
    /// The server no longer has the job.
    Deleted,
    /// A checkpoint is still being uploaded.
    Uploading,
    /// All checkpoints are uploaded. Contains the job as read after that check, because the job may have been resumed.
    Complete(Box<Job>),
}

impl Launch {
    /// Reads the list of checkpoints, then the job.
    ///
    /// # Errors
    /// The server does not respond, or refuses a request. The state of the uploads is then unknown.
    pub(super) async fn upload_status(&self) -> anyhow::Result<UploadStatus> {
        tokio::time::timeout(RESPONSE_TIMEOUT, self.inspect()).await.context("the server does not answer")?
    }

    async fn inspect(&self) -> anyhow::Result<UploadStatus> {
        let path = format!("/jobs/{}", self.job.id);
        let job = async || self.api.find::<Job>(&path).await;
        let read = self.api.read_pages(&format!("{path}/checkpoints"), "checkpoints", &[], None).await;
        let checkpoints = match read {
            Ok(checkpoints) => checkpoints,
            Err(error) => return if job().await?.is_none() { Ok(UploadStatus::Deleted) } else { Err(error) },
        };
        if awaits_upload(&checkpoints) {
            return Ok(UploadStatus::Uploading);
        }
        Ok(job().await?.map_or(UploadStatus::Deleted, |job| UploadStatus::Complete(Box::new(job))))
    }

    /// Waits until the checkpoints of a finished job are on the server, even while the server does not respond. Returns true if the
    /// checkpoints are there and the job has not been queued again, or if the job is deleted.
    pub(super) async fn wait_for_uploads(&self) -> bool {
        let mut is_announced = false;
        let began = Instant::now();
        while began.elapsed() < UPLOAD_TIMEOUT {
            match self.upload_status().await {
                Ok(UploadStatus::Deleted) => return true,
                Ok(UploadStatus::Complete(job)) => return job.state.is_final(),
                Ok(UploadStatus::Uploading) => report_upload_once(&mut is_announced),
                Err(error) if error.is::<WrongRequest>() => return false,
                Err(_) => {}
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        false
    }
}

/// Whether a checkpoint in the list is still to be uploaded. Ignores attempts before the newest attempt with uploaded checkpoints: their
/// agents may have exited, and no attempt continues from their checkpoints.
fn awaits_upload(checkpoints: &[Value]) -> bool {
    let attempt = |checkpoint: &Value| checkpoint.get("attempt").and_then(Value::as_u64).unwrap_or(0);
    let is_uploading = |checkpoint: &Value| checkpoint.get("uploading_from").is_some_and(Value::is_string);
    let uploaded = checkpoints.iter().filter(|checkpoint| !is_uploading(checkpoint));
    let newest = uploaded.map(attempt).max().unwrap_or(0);
    checkpoints.iter().any(|checkpoint| is_uploading(checkpoint) && attempt(checkpoint) >= newest)
}

/// Prints once that the command waits for an upload.
pub(super) fn report_upload_once(is_announced: &mut bool) {
    if !std::mem::replace(is_announced, true) {
        output::warn("the job's last checkpoint is still being uploaded to the server");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn replaced_checkpoints_are_not_awaited() {
        let uploaded = |attempt: u64| json!({"attempt": attempt});
        let uploading = |attempt: u64| json!({"attempt": attempt, "uploading_from": "node1"});
        assert!(!awaits_upload(&[]));
        assert!(!awaits_upload(&[uploaded(1), uploaded(2)]));
        assert!(awaits_upload(&[uploading(1)]));
        assert!(awaits_upload(&[uploading(2), uploaded(2)]), "the last checkpoint of an attempt");
        assert!(awaits_upload(&[uploading(2), uploaded(1)]));
        assert!(!awaits_upload(&[uploaded(2), uploading(1)]), "the machine of attempt 1 may be lost");
    }
}
