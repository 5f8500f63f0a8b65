//! Follows Kubernetes' Job and its pods, prints changes, and suspends the Job while Lockstep's job is paused.

use super::{
    super::{super::output, Launch, follow::read_job, uploads::UploadStatus},
    POLL_INTERVAL,
    cluster::{Cluster, Kind},
    objects::SUSPENDED_ANNOTATION,
    observe::{Observation, observe},
    words,
};
use kube::api::ListParams;
use lockstep_protocol::JobState;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use tokio::{sync::mpsc, time::Instant};

/// Maximum number of changes that wait to be handled.
const BACKLOG: usize = 64;
/// Maximum number of printed messages that are remembered. A remembered message is not printed again.
const MAX_REMEMBERED: usize = 4096;

/// Returns an error when Kubernetes' Job is over or deleted and Lockstep's job is not over.
pub(super) async fn wait_for_early_end(
    cluster: &Cluster,
    launch: &Launch,
    name: &str,
    queue: Option<&str>,
) -> anyhow::Error {
    let (sender, mut observations) = mpsc::channel(BACKLOG);
    let job_params = ListParams::default().fields(&format!("metadata.name={name}"));
    let pod_params = ListParams::default().labels(&format!("batch.kubernetes.io/job-name={name}"));
    let steering = async {
        let mut steering = Steering {
            cluster,
            launch,
            name,
            queue,
            job: None,
            end: None,
            last_line: String::new(),
            printed: BTreeSet::new(),
            is_upload_reported: false,
        };
        let mut poll = tokio::time::interval(POLL_INTERVAL);
        loop {
            tokio::select! {
                Some((kind, observation)) = observations.recv() => steering.handle(kind, observation),
                _ = poll.tick() => if let Err(error) = steering.poll().await {
                    return error;
                },
            }
        }
    };
    tokio::select! {
        error = observe(cluster, Kind::Job, job_params, &sender) => error,
        error = observe(cluster, Kind::Pod, pod_params, &sender) => error,
        error = steering => error,
    }
}

struct Steering<'a> {
    cluster: &'a Cluster,
    launch: &'a Launch,
    name: &'a str,
    queue: Option<&'a str>,
    /// The Job in the newest event. `None` before the first event, after the end, and from a change until the next event.
    job: Option<Value>,
    /// How the Job ended, and when this was detected. Printed once, even while the server is unreachable.
    end: Option<(String, Instant)>,
    /// The last printed line about the Job.
    last_line: String,
    /// Messages about pods that have been printed.
    printed: BTreeSet<String>,
    /// Whether the message about waiting for a checkpoint has been printed.
    is_upload_reported: bool,
}

impl Steering<'_> {
    fn handle(&mut self, kind: Kind, observation: Observation) {
        match (kind, observation) {
            (Kind::Job, Observation::Listed(jobs)) => match jobs.into_iter().next() {
                Some(job) => self.handle_job(job),
                None => self.handle_end("is gone".into()),
            },
            (Kind::Job, Observation::Changed(job)) => self.handle_job(job),
            (Kind::Job, Observation::Deleted(_)) => self.handle_end("was deleted".into()),
            (_, Observation::Listed(pods)) => pods.iter().for_each(|pod| self.handle_pod(pod)),
            (_, Observation::Changed(pod) | Observation::Deleted(pod)) => self.handle_pod(&pod),
        }
    }

    fn handle_job(&mut self, job: Value) {
        let line = words::describe_job(&job, self.queue);
        if line != self.last_line {
            output::warn(format_args!("Kubernetes' Job {}: {line}", self.name));
            self.last_line = line;
        }
        match words::describe_end(&job) {
            Some(end) => self.handle_end(format!("is over ({end})")),
            // The Job may have been created again.
            None => self.end = None,
        }
        self.job = Some(job);
    }

    fn handle_end(&mut self, how: String) {
        self.job = None;
        self.end.get_or_insert((how, Instant::now()));
    }

    fn handle_pod(&mut self, pod: &Value) {
        if let Some(words) = words::describe_pod(pod)
            && self.printed.len() < MAX_REMEMBERED
            && self.printed.insert(words.clone())
        {
            output::warn(words);
        }
    }

    /// Compares the Job with Lockstep's job, and suspends or resumes the Job.
    ///
    /// # Errors
    /// Kubernetes' Job is over or deleted and Lockstep's job is not over, or Kubernetes refuses a change.
    async fn poll(&mut self) -> anyhow::Result<()> {
        match &self.end {
            Some((how, since)) => self.check_early_end(how, *since).await,
            None => self.follow_lockstep_job().await,
        }
    }

    /// Returns an error if Kubernetes' Job has ended and Lockstep's job has not. If both have ended, the display of Lockstep's job reports
    /// the end. If the server does not respond, the next poll asks again.
    async fn check_early_end(&self, how: &str, since: Instant) -> anyhow::Result<()> {
        // Agents exit after the job, but their last report may not be stored yet.
        if since.elapsed() < 2 * POLL_INTERVAL {
            return Ok(());
        }
        match read_job(self.launch).await {
            Ok(job) if !job.state.is_final() => {
                let how = format!("Kubernetes' Job {} {how}", self.name);
                anyhow::bail!(self.launch.describe_early_end(&how, &job))
            }
            _ => Ok(()),
        }
    }

    /// Suspends the Job while Lockstep's job is paused. A Job that another user or program has suspended stays suspended.
    async fn follow_lockstep_job(&mut self) -> anyhow::Result<()> {
        let (None, Some(job)) = (self.queue, &self.job) else { return Ok(()) };
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
            self.cluster.change(self.name, suspend).await?;
            output::warn(format_args!(
                "the job is paused: Kubernetes' Job {} is suspended until it continues",
                self.name
            ));
            self.is_upload_reported = false;
            self.job = None;
        } else if !is_paused && is_suspended_by_launch {
            self.cluster.change(self.name, unsuspend).await?;
            self.job = None;
        }
        Ok(())
    }
}

/// Suspends a Job. Returns false if it is already suspended.
fn suspend(job: &mut Value) -> bool {
    if words::is_suspended(job) {
        return false;
    }
    job["spec"]["suspend"] = json!(true);
    job["metadata"]["annotations"][SUSPENDED_ANNOTATION] = json!("true");
    true
}

/// Starts a Job that a launch has suspended. Returns whether the Job was changed, like [`suspend`].
pub(super) fn unsuspend(job: &mut Value) -> bool {
    let was_suspended_by_launch = job["metadata"]["annotations"]
        .as_object_mut()
        .is_some_and(|map| map.remove(SUSPENDED_ANNOTATION).is_some());
    if was_suspended_by_launch {
        job["spec"]["suspend"] = json!(false);
    }
    was_suspended_by_launch
}
