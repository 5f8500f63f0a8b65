//! `lockstep pause`, `resume`, `cancel` and `retry`, for one or several jobs.

use super::{WrongRequest, api::ServerArgs, block_on, output, usage_error, watch};
use lockstep_protocol::{Job, JobState};

/// Arguments of commands about several jobs.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A job's id, the start of its id, or its name (may be repeated)
    #[arg(required = true, value_name = "JOB")]
    jobs: Vec<String>,
    #[command(flatten)]
    server: ServerArgs,
}

/// Sends a request for each job. `pause` also waits until the jobs are paused, and `cancel` until their ranks have ended. If a name matches
/// no job, no request is sent. If the server refuses the request for a job, the requests for the other jobs are still sent.
///
/// # Errors
/// Exit status 2 if a job does not exist, or its state does not allow the action.
pub(crate) fn run(args: &Args, action: &str) -> anyhow::Result<()> {
    let can_change = |state: JobState| match action {
        "pause" => state != JobState::Paused && !state.is_final(),
        "resume" => state == JobState::Paused,
        "cancel" => !state.is_final(),
        // `retry`.
        _ => matches!(state, JobState::Failed | JobState::Cancelled),
    };
    let is_done = |job: &Job| !matches!(action, "pause" | "cancel") || !can_change(job.state);
    let api = args.server.api()?;
    block_on(async {
        let mut jobs = Vec::<Job>::new();
        for name in &args.jobs {
            // If several jobs have the name, ignores jobs that the action cannot change.
            let job = match action {
                "cancel" => api.find_only_job(name, can_change).await?,
                _ => api.find_job_in_state(name, can_change).await?,
            };
            if jobs.iter().all(|other| other.id != job.id) {
                jobs.push(job);
            }
        }
        let (mut accepted, mut errors) = (Vec::<Job>::new(), Vec::<anyhow::Error>::new());
        for job in &jobs {
            let with_job = |error: anyhow::Error| match &jobs[..] {
                [_] => error,
                _ => error.context(format!("{} {}", job.id, output::one_line(&job.name))),
            };
            match api.post(&format!("/jobs/{}/{action}", job.id), &serde_json::json!({})).await {
                Ok(job) => accepted.push(job),
                // The sweep of the same name may be meant.
                Err(error) if error.is::<WrongRequest>() => {
                    errors.push(with_job(match api.describe_sweep(&job.name).await {
                        Some(sweep) => usage_error(format!("{error}. {sweep}")),
                        None => error,
                    }));
                }
                Err(error) => errors.push(with_job(error)),
            }
        }
        let mut done = Vec::new();
        for job in accepted {
            let job = match watch::wait_until(&api, job, &is_done).await {
                Ok(job) => job,
                Err(error) => {
                    errors.push(error);
                    continue;
                }
            };
            if !args.server.json {
                // The state already says that the job was cancelled.
                let reason = job.reason.as_ref().filter(|_| job.state != JobState::Cancelled);
                let reason = reason.map(|r| format!(": {r}")).unwrap_or_default();
                // Runs from elsewhere can be cancelled, but neither paused, resumed nor retried.
                let note = job
                    .external
                    .as_ref()
                    .map_or("", |_| "; its program is not stopped: stop it where it runs");
                output::line(format_args!("{} {}{reason}{note}", job.id, job.state))?;
            }
            done.push(job);
        }
        if args.server.json {
            match (&*jobs, &*done) {
                ([_], [job]) => output::json(job)?,
                // The request for the only job failed, so there is only an error.
                ([_], _) => {}
                _ => output::json(&done)?,
            }
        }
        // The caller of this command prints the last error.
        let last = errors.pop();
        errors.iter().for_each(|error| output::warn(format_args!("{error:#}")));
        last.map_or(Ok(()), Err)
    })
}
