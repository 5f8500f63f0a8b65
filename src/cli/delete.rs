//! `lockstep delete`: deletes a job and everything that belongs to it.
//!
//! The command asks for confirmation, because a deleted checkpoint cannot be restored. Without a terminal it needs `--yes`. `cancel` does
//! not ask, because `retry` continues a cancelled job.

use super::{api::ServerArgs, block_on, confirm::confirm, output};

/// Delete a job with its history, logs and checkpoints
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The job's id, the start of its id, or its name
    job: String,
    /// Do not ask for confirmation; required without a terminal
    #[arg(long, short)]
    yes: bool,
    #[command(flatten)]
    server: ServerArgs,
}

/// Asks for confirmation, then deletes the job.
///
/// # Errors
/// Exit status 2 if the job does not exist or still runs, or if the deletion is not confirmed.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let api = args.server.api()?;
    block_on(async {
        let job = api.find_only_job(&args.job, |_| true).await?;
        let question = format!(
            "Delete {} ({}, {}) with its history, logs and checkpoints? This cannot be undone.",
            job.name, job.id, job.state
        );
        confirm(args.yes, question, &job.id)?;
        api.delete(&format!("/jobs/{}", job.id)).await?;
        let value = serde_json::json!({ "deleted": job.id });
        output::print(args.server.json, &value, format_args!("{} deleted", job.id))
    })
}
