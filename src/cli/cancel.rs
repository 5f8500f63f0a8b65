//! `lockstep cancel`: ends a job.

use super::{api::ServerArgs, block_on, output, watch};
use lockstep_protocol::JobState;

/// Cancel a job: its ranks end, its checkpoints stay
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Its id, the start of its id, or its name
    job: String,
    #[command(flatten)]
    server: ServerArgs,
}

/// Asks the server, and waits until the job's ranks are gone.
///
/// # Errors
/// Exit status 2 when there is no such job or it is over.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let api = args.server.api()?;
    block_on(async {
        let job = api.find_job(&args.job).await?;
        let _: serde_json::Value =
            api.post(&format!("/jobs/{}/cancel", job.id), &serde_json::json!({})).await?;
        let job = watch::until(&api, job, |job| job.state.is_final()).await?;
        if args.server.json {
            return output::json(&job);
        }
        let reason = job.reason.as_ref().map(|r| format!(": {r}")).unwrap_or_default();
        let reason = if job.state == JobState::Cancelled { String::new() } else { reason };
        output::line(format_args!("{} {}{reason}", job.id, job.state))
    })
}
