//! `lockstep delete`: a job and all that belongs to it.
//!
//! On a terminal it asks first, as nothing brings back a checkpoint. With `--json`, and where standard input or standard error is no
//! terminal, it does not: scripts have deleted jobs in this way since there is the command, and what they name is one job or refused
//! (`Api::find_job`). `cancel` and `dataset remove` ask nobody: a cancelled job continues with `retry`, and a dataset's files
//! stay.

use super::{api::ServerArgs, block_on, output, wrong};
use lockstep_protocol::Job;
use reqwest::Method;
use std::io::{self, BufRead, IsTerminal};

/// Delete a job with its history, logs and checkpoints
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Its id, the start of its id, or its name
    job: String,
    /// Do not ask for confirmation on a terminal
    #[arg(long, short)]
    yes: bool,
    #[command(flatten)]
    server: ServerArgs,
}

/// Asks the server.
///
/// # Errors
/// Exit status 2 when there is no such job, it still runs, or the answer is no.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let api = args.server.api()?;
    block_on(async {
        let job = api.find_job(&args.job).await?;
        let asks = !args.yes && !args.server.json && io::stdin().is_terminal() && io::stderr().is_terminal();
        if asks && !confirmed(&job, &mut io::stdin().lock())? {
            return Err(wrong(format!("{} stays as it is", job.id)));
        }
        api.request(Method::DELETE, &format!("/jobs/{}", job.id), None::<&()>).await?;
        if args.server.json {
            return output::json(&serde_json::json!({ "deleted": job.id }));
        }
        output::line(format_args!("{} deleted", job.id))
    })
}

/// Whether a person says yes; an empty answer and no answer are none.
fn confirmed(job: &Job, answers: &mut impl BufRead) -> io::Result<bool> {
    output::warn(format_args!(
        "Delete {} ({}, {}) with its history, logs and checkpoints? Nothing brings them back. [y/N]",
        job.name, job.id, job.state
    ));
    let mut answer = String::new();
    answers.read_line(&mut answer)?;
    Ok(matches!(answer.trim().to_lowercase().as_str(), "y" | "yes"))
}
