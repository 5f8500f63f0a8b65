//! The end of a launch after its job is over: the agents upload the job's checkpoints, then exit. Agents that do not exit are ended only
//! after the uploads.

use super::{
    super::{WrongRequest, output},
    Launch,
};
use anyhow::Context as _;
use lockstep_protocol::Job;
use serde_json::Value;
use std::time::{Duration, Instant};

/// Maximum wait for the last checkpoint of a job that is over.
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(3600);
/// Time for agents to exit after the uploads: a heartbeat tells an agent that the job has ended.
const EXIT_TIMEOUT: Duration = Duration::from_secs(90);
const POLL_INTERVAL: Duration = Duration::from_secs(2);
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
        tokio::time::timeout(RESPONSE_TIMEOUT, self.read_upload_status())
            .await
            .context("the server does not answer")?
    }

    async fn read_upload_status(&self) -> anyhow::Result<UploadStatus> {
        let path = format!("/jobs/{}", self.job.id);
        let find_job = async || self.api.find::<Job>(&path).await;
        let checkpoints = match self.api.read_all(&format!("{path}/checkpoints")).await {
            Ok(checkpoints) => checkpoints,
            Err(error) => {
                return if find_job().await?.is_none() { Ok(UploadStatus::Deleted) } else { Err(error) };
            }
        };
        if awaits_upload(&checkpoints) {
            return Ok(UploadStatus::Uploading);
        }
        Ok(find_job().await?.map_or(UploadStatus::Deleted, |job| UploadStatus::Complete(Box::new(job))))
    }

    /// Waits for the agents of a job that is over. `agents` returns their current state.
    ///
    /// # Errors
    /// The state of the agents is unknown.
    pub(super) async fn wait_for_agents(
        &self,
        mut agents: impl AsyncFnMut() -> anyhow::Result<Agents>,
    ) -> anyhow::Result<AgentsEnd> {
        let mut wait = EndWait::new();
        loop {
            if let Some(end) = wait.poll(self, agents().await?).await {
                return Ok(end);
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Prints once that the launch waits for an upload.
    pub(super) fn report_upload_once(&self, is_reported: &mut bool) {
        if !std::mem::replace(is_reported, true) {
            output::warn(format_args!(
                "the last checkpoint of job {} is still being uploaded to the server",
                self.job.id
            ));
        }
    }
}

/// The agents of a launch.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Agents {
    /// No agent is left.
    Ended,
    /// The agents may be ended as soon as the checkpoints are on the server: they have not started, or will not exit by themselves.
    Idle,
    /// The agents exit by themselves.
    Running,
}

/// The end of a wait for the agents of a job that is over.
pub(super) enum AgentsEnd {
    /// No agent is left.
    Ended,
    /// The checkpoints are on the server, and the remaining agents may be ended.
    Unneeded,
    /// The job was queued again, and needs its agents.
    QueuedAgain,
    /// The last checkpoint has not reached the server within the time limit.
    NotUploaded,
}

/// A wait for the agents of a job that is over.
pub(super) struct EndWait {
    began: Instant,
    /// The time since which the checkpoints are known to be on the server.
    uploaded_since: Option<Instant>,
    is_upload_reported: bool,
}

impl EndWait {
    pub(super) fn new() -> Self {
        Self { began: Instant::now(), uploaded_since: None, is_upload_reported: false }
    }

    /// Returns the end of the wait, or `None` while the wait continues, even while the server does not respond.
    pub(super) async fn poll(&mut self, launch: &Launch, agents: Agents) -> Option<AgentsEnd> {
        if agents == Agents::Ended {
            return Some(AgentsEnd::Ended);
        }
        match launch.upload_status().await {
            Ok(UploadStatus::Complete(job)) if !job.state.is_final() => return Some(AgentsEnd::QueuedAgain),
            Ok(UploadStatus::Complete(_) | UploadStatus::Deleted) => {
                let uploaded_since = *self.uploaded_since.get_or_insert_with(Instant::now);
                if agents == Agents::Idle || uploaded_since.elapsed() > EXIT_TIMEOUT {
                    return Some(AgentsEnd::Unneeded);
                }
            }
            Ok(UploadStatus::Uploading) => launch.report_upload_once(&mut self.is_upload_reported),
            Err(error) if error.is::<WrongRequest>() => return Some(AgentsEnd::NotUploaded),
            // The state of the uploads is unknown.
            Err(_) => {}
        }
        (self.began.elapsed() > UPLOAD_TIMEOUT).then_some(AgentsEnd::NotUploaded)
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
