//! `lockstep pause`, `resume`, `cancel` and `retry`, for one or several jobs.

use super::{api::ServerArgs, block_on, output, watch};
use lockstep_protocol::{Job, JobState};

/// The jobs to which a command applies.
#[derive(clap::Args)]
pub(crate) struct JobSelector {
    /// A job's id, the start of its id, or its name (may be repeated)
    #[arg(required = true, value_name = "JOB")]
    jobs: Vec<String>,
    #[command(flatten)]
    server: ServerArgs,
}

/// Pause a job: its ranks write a checkpoint and free their slots
#[derive(clap::Args)]
pub(crate) struct PauseArgs {
    #[command(flatten)]
    selector: JobSelector,
}

/// Resume a paused job; its final weights are the same as without a pause
#[derive(clap::Args)]
pub(crate) struct ResumeArgs {
    #[command(flatten)]
    selector: JobSelector,
}

/// Cancel a job: its ranks end, but its checkpoints stay
#[derive(clap::Args)]
pub(crate) struct CancelArgs {
    #[command(flatten)]
    selector: JobSelector,
}

/// Retry a failed or cancelled job from its newest checkpoint
#[derive(clap::Args)]
pub(crate) struct RetryArgs {
    #[command(flatten)]
    selector: JobSelector,
}

/// Pauses jobs, and waits until they are paused.
///
/// # Errors
/// Exit status 2 if a job does not exist, or neither waits nor runs.
pub(crate) fn pause(args: PauseArgs) -> anyhow::Result<()> {
    let still = |job: &Job| job.state == JobState::Paused || job.state.is_final();
    request(&args.selector, "pause", still)
}

/// Resumes jobs.
///
/// # Errors
/// Exit status 2 if a job does not exist or is not paused.
pub(crate) fn resume(args: ResumeArgs) -> anyhow::Result<()> {
    request(&args.selector, "resume", |_| true)
}

/// Cancels jobs, and waits until their ranks have ended.
///
/// # Errors
/// Exit status 2 if a job does not exist or has ended.
pub(crate) fn cancel(args: CancelArgs) -> anyhow::Result<()> {
    request(&args.selector, "cancel", |job| job.state.is_final())
}

/// Queues jobs again.
///
/// # Errors
/// Exit status 2 if a job does not exist or has not ended.
pub(crate) fn retry(args: RetryArgs) -> anyhow::Result<()> {
    request(&args.selector, "retry", |_| true)
}

/// Sends a request for each job, and waits until `done` is true for each job. If a name matches no job, no request is sent. If the server
/// refuses the request for a job, the others are still sent.
fn request(selector: &JobSelector, wish: &str, done: impl Fn(&Job) -> bool) -> anyhow::Result<()> {
    let api = selector.server.api()?;
    block_on(async {
        let mut found = Vec::<Job>::new();
        for name in &selector.jobs {
            let job = match wish {
                // Jobs that have ended are ignored if another job with the same name has not.
                "cancel" => api.find_only_job(name, |state| !state.is_final()).await?,
                _ => api.find_job(name).await?,
            };
            if found.iter().all(|other| other.id != job.id) {
                found.push(job);
            }
        }
        let (mut asked, mut errors) = (Vec::<Job>::new(), Vec::<anyhow::Error>::new());
        for job in &found {
            let response = api.post(&format!("/jobs/{}/{wish}", job.id), &serde_json::json!({})).await;
            response.map_or_else(|error| errors.push(error), |job| asked.push(job));
        }
        let mut ended = Vec::new();
        for job in asked {
            let job = match watch::until(&api, job, &done).await {
                Ok(job) => job,
                Err(error) => {
                    errors.push(error);
                    continue;
                }
            };
            if !selector.server.json {
                // The state already says that the job was cancelled.
                let reason = job.reason.as_ref().filter(|_| job.state != JobState::Cancelled);
                let reason = reason.map(|r| format!(": {r}")).unwrap_or_default();
                output::line(format_args!("{} {}{reason}", job.id, job.state))?;
            }
            ended.push(job);
        }
        if selector.server.json {
            match (&*found, &*ended) {
                ([_], [job]) => output::json(job)?,
                ([_], _) => {}
                _ => output::json(&ended)?,
            }
        }
        // The caller prints the last error.
        let last = errors.pop();
        errors.iter().for_each(|error| output::warn(format_args!("{error:#}")));
        last.map_or(Ok(()), Err)
    })
}
