//! `lockstep delete`: deletes jobs and everything that belongs to them.
//!
//! The command asks for confirmation, because a deleted checkpoint cannot be restored. Without a terminal it needs `--yes`. `cancel` does
//! not ask, because `retry` continues a cancelled job.

use super::{
    WrongRequest,
    api::{Api, ServerArgs},
    block_on,
    confirm::confirm,
    output, usage_error,
};
use lockstep_protocol::{Job, JobId};
use serde_json::json;

/// Delete jobs with their history, logs and checkpoints
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A job's id, the start of its id, or its name (may be repeated)
    #[arg(required = true, value_name = "JOB")]
    jobs: Vec<String>,
    /// Do not ask for confirmation; required without a terminal
    #[arg(long, short)]
    yes: bool,
    #[command(flatten)]
    server: ServerArgs,
}

/// Asks for confirmation, then deletes the jobs. If a name matches no job, no job is deleted.
///
/// # Errors
/// Exit status 2 if a job does not exist or still runs, or if the deletion is not confirmed.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let api = args.server.api()?;
    block_on(async {
        let mut jobs = Vec::<Job>::new();
        for name in &args.jobs {
            let job = api.find_only_job(name, |_| true).await.map_err(|error| {
                if error.is::<WrongRequest>() && args.jobs.len() > 1 {
                    usage_error(format!("{error}; no job is deleted"))
                } else {
                    error
                }
            })?;
            if jobs.iter().all(|other| other.id != job.id) {
                jobs.push(job);
            }
        }
        let named: Vec<_> =
            jobs.iter().map(|job| format!("{} ({}, {})", job.name, job.id, job.state)).collect();
        let its = if jobs.len() == 1 { "its" } else { "their" };
        let question = format!(
            "Delete {} with {its} history, logs and checkpoints? This cannot be undone.",
            named.join(", ")
        );
        let ids: Vec<_> = jobs.into_iter().map(|job| job.id).collect();
        confirm(args.yes, question, ids.iter().map(JobId::as_str).collect::<Vec<_>>().join(", "))?;
        delete_all(&api, &ids, args.server.json).await?;
        match &ids[..] {
            _ if !args.server.json => Ok(()),
            [id] => output::json(&json!({ "deleted": id })),
            ids => output::json(&ids.iter().map(|id| json!({ "deleted": id })).collect::<Vec<_>>()),
        }
    })
}

/// Deletes jobs, and prints a line for each deleted job unless `is_quiet`.
///
/// # Errors
/// The server refuses to delete a job. Then the jobs after it are not deleted.
pub(super) async fn delete_all(api: &Api, ids: &[JobId], is_quiet: bool) -> anyhow::Result<()> {
    for id in ids {
        api.delete(&format!("/jobs/{id}")).await?;
        if !is_quiet {
            output::line(format_args!("{id} deleted"))?;
        }
    }
    Ok(())
}
