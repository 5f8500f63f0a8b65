//! Follows Kubernetes' Job and its pods, prints changes, and suspends the Job while Lockstep's job is paused.

use super::{
    super::{super::output, Launch, follow::read_job, uploads::UploadStatus},
    POLL_INTERVAL,
    cluster::{Cluster, Kind, is_retryable, to_json},
    objects::SUSPENDED_ANNOTATION,
    words,
};
use kube::{Error, api::ListParams};
use lockstep_protocol::JobState;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use tokio::time::sleep;

/// Maximum number of printed messages that are remembered. A remembered message is not printed again.
const MAX_REMEMBERED: usize = 4096;

/// Returns an error when Kubernetes' Job is over or deleted and Lockstep's job is not over.
pub(super) async fn wait_for_early_end(
    cluster: &Cluster,
    launch: &Launch,
    name: &str,
    queue: Option<&str>,
) -> anyhow::Error {
    let mut steering = Steering {
        cluster,
        launch,
        name,
        queue,
        last_line: String::new(),
        printed: BTreeSet::new(),
        is_upload_reported: false,
    };
    loop {
        if let Err(error) = steering.poll().await {
            return error;
        }
        sleep(POLL_INTERVAL).await;
    }
}

struct Steering<'a> {
    cluster: &'a Cluster,
    launch: &'a Launch,
    name: &'a str,
    queue: Option<&'a str>,
    /// The last printed line about the Job.
    last_line: String,
    /// Messages about pods that have been printed.
    printed: BTreeSet<String>,
    /// Whether the message about waiting for a checkpoint has been printed.
    is_upload_reported: bool,
}

impl Steering<'_> {
    /// Prints changes of the Job and its pods, and suspends or resumes the Job. While the API server is unreachable, does nothing.
    ///
    /// # Errors
    /// Kubernetes' Job is over or deleted and Lockstep's job is not over, or Kubernetes refuses a request.
    async fn poll(&mut self) -> anyhow::Result<()> {
        let (job, pods) = match self.read().await {
            Ok(found) => found,
            Err(error) if is_retryable(&error) => {
                self.cluster.report_lost(&error);
                return Ok(());
            }
            Err(error) => return Err(self.cluster.explain(&format!("reading Job {}", self.name), &error)),
        };
        self.cluster.report_restored();
        pods.iter().for_each(|pod| self.report_pod(pod));
        let Some(job) = job else { return self.check_early_end("was deleted").await };
        self.report_job(&job);
        match words::describe_end(&job) {
            Some(end) => self.check_early_end(&format!("is over ({end})")).await,
            None => self.follow_lockstep_job(&job).await,
        }
    }

    /// Reads the Job, which is `None` if it does not exist, and its pods.
    async fn read(&self) -> Result<(Option<Value>, Vec<Value>), Error> {
        let job = self.cluster.api(Kind::Job);
        let job = self.cluster.with_time_limit(job.get_opt(self.name)).await?;
        let params = ListParams::default().labels(&format!("batch.kubernetes.io/job-name={}", self.name));
        let pods = self.cluster.with_time_limit(self.cluster.api(Kind::Pod).list(&params)).await?;
        Ok((job.map(to_json), pods.items.into_iter().map(to_json).collect()))
    }

    fn report_job(&mut self, job: &Value) {
        let line = words::describe_job(job, self.queue);
        if line != self.last_line {
            output::warn(format_args!("Kubernetes' Job {}: {line}", self.name));
            self.last_line = line;
        }
    }

    fn report_pod(&mut self, pod: &Value) {
        if let Some(words) = words::describe_pod(pod)
            && self.printed.len() < MAX_REMEMBERED
            && self.printed.insert(words.clone())
        {
            output::warn(words);
        }
    }

    /// Returns an error if Lockstep's job has not ended, although Kubernetes' Job has. If both have ended, the display of Lockstep's job
    /// reports the end. If the server does not respond, the next poll asks again.
    async fn check_early_end(&self, how: &str) -> anyhow::Result<()> {
        // Agents exit after the job, but their last report may not be stored yet.
        sleep(2 * POLL_INTERVAL).await;
        match read_job(self.launch).await {
            Ok(job) if !job.state.is_final() => {
                let how = format!("Kubernetes' Job {} {how}", self.name);
                anyhow::bail!(self.launch.describe_early_end(&how, &job))
            }
            _ => Ok(()),
        }
    }

    /// Suspends the Job while Lockstep's job is paused. A Job that another user or program has suspended stays suspended.
    async fn follow_lockstep_job(&mut self, job: &Value) -> anyhow::Result<()> {
        if self.queue.is_some() {
            return Ok(());
        }
        let is_suspended_by_launch = job["metadata"]["annotations"][SUSPENDED_ANNOTATION].is_string();
        let Ok(lockstep_job) = read_job(self.launch).await else { return Ok(()) };
        let is_paused = lockstep_job.state == JobState::Paused;
        if is_paused && !is_suspended_by_launch && !words::is_suspended(job) {
            // The last checkpoint may be only on the pods' disks, which are deleted with the pods. So the pods stay until the checkpoint is
            // known to be on the server. Then the job is read again: it must still be paused.
            match self.launch.upload_status().await {
                Ok(UploadStatus::Complete(lockstep_job)) if lockstep_job.state == JobState::Paused => {}
                Ok(UploadStatus::Uploading) => {
                    self.launch.report_upload_once(&mut self.is_upload_reported);
                    return Ok(());
                }
                _ => return Ok(()),
            }
            self.cluster.patch_job(self.name, &suspend_patch(true)).await?;
            output::warn(format_args!(
                "the job is paused: Kubernetes' Job {} is suspended until it continues",
                self.name
            ));
            self.is_upload_reported = false;
        } else if !is_paused && is_suspended_by_launch {
            self.cluster.patch_job(self.name, &suspend_patch(false)).await?;
        }
        Ok(())
    }
}

/// Returns the patch that suspends a Job, or starts a suspended Job. The annotation marks a Job that a launch has suspended.
pub(super) fn suspend_patch(is_suspended: bool) -> Value {
    let mark = is_suspended.then_some("true");
    json!({"spec": {"suspend": is_suspended}, "metadata": {"annotations": {SUSPENDED_ANNOTATION: mark}}})
}
