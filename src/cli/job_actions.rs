//! `lockstep pause`, `resume` and `retry`.

use super::{api::ServerArgs, block_on, output, watch};
use lockstep_protocol::{Job, JobState};

/// The job that a command is about.
#[derive(clap::Args)]
pub(crate) struct JobSelector {
    /// Its id, the start of its id, or its name
    job: String,
    #[command(flatten)]
    server: ServerArgs,
}

/// Pause a job: its ranks write a checkpoint and free their slots
#[derive(clap::Args)]
pub(crate) struct PauseArgs {
    #[command(flatten)]
    selector: JobSelector,
}

/// Resume a paused job; it ends with the weights of one that never paused
#[derive(clap::Args)]
pub(crate) struct ResumeArgs {
    #[command(flatten)]
    selector: JobSelector,
}

/// Retry a failed or cancelled job from its newest checkpoint
#[derive(clap::Args)]
pub(crate) struct RetryArgs {
    #[command(flatten)]
    selector: JobSelector,
}

/// Asks the server, and waits until the job stands still.
///
/// # Errors
/// Exit status 2 when there is no such job or it neither waits nor runs.
pub(crate) fn pause(args: PauseArgs) -> anyhow::Result<()> {
    let still = |job: &Job| job.state == JobState::Paused || job.state.is_final();
    ask(&args.selector, "pause", still)
}

/// Asks the server.
///
/// # Errors
/// Exit status 2 when there is no such job or it is not paused.
pub(crate) fn resume(args: ResumeArgs) -> anyhow::Result<()> {
    ask(&args.selector, "resume", |_| true)
}

/// Asks the server.
///
/// # Errors
/// Exit status 2 when there is no such job or it is not over.
pub(crate) fn retry(args: RetryArgs) -> anyhow::Result<()> {
    ask(&args.selector, "retry", |_| true)
}

fn ask(selector: &JobSelector, wish: &str, done: impl Fn(&Job) -> bool) -> anyhow::Result<()> {
    let api = selector.server.api()?;
    block_on(async {
        let job = api.find_job(&selector.job).await?;
        let job: Job = api.post(&format!("/jobs/{}/{wish}", job.id), &serde_json::json!({})).await?;
        let job = watch::until(&api, job, done).await?;
        if selector.server.json {
            return output::json(&job);
        }
        let reason = job.reason.as_ref().map(|r| format!(": {r}")).unwrap_or_default();
        output::line(format_args!("{} {}{reason}", job.id, job.state))
    })
}
