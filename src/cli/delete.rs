//! `lockstep delete`: a job and all that belongs to it.
//!
//! It asks first, as nothing brings back a checkpoint; where nobody can be asked, it takes `--yes`. `cancel` asks nobody: a cancelled
//! job continues with `retry`.

use super::{api::ServerArgs, block_on, confirm::confirmed, output};
use reqwest::Method;

/// Delete a job with its history, logs and checkpoints
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Its id, the start of its id, or its name
    job: String,
    /// Do not ask for confirmation; needed where there is no terminal
    #[arg(long, short)]
    yes: bool,
    #[command(flatten)]
    server: ServerArgs,
}

/// Asks a person, then the server.
///
/// # Errors
/// Exit status 2 when there is no such job, it still runs, or nobody has said yes.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let api = args.server.api()?;
    block_on(async {
        let job = api.find_job(&args.job).await?;
        let question = format!(
            "Delete {} ({}, {}) with its history, logs and checkpoints? Nothing brings them back.",
            job.name, job.id, job.state
        );
        confirmed(args.yes, question, &job.id)?;
        api.request(Method::DELETE, &format!("/jobs/{}", job.id), None::<&()>).await?;
        if args.server.json {
            return output::json(&serde_json::json!({ "deleted": job.id }));
        }
        output::line(format_args!("{} deleted", job.id))
    })
}
