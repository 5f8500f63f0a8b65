//! `lockstep delete`: a job and all that belongs to it.

use super::{
    api::{Api, ServerArgs},
    block_on, output,
};
use reqwest::Method;

/// Delete a job with its history, logs and checkpoints
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Its id, the start of its id, or its name
    job: String,
    #[command(flatten)]
    server: ServerArgs,
}

/// Asks the server.
///
/// # Errors
/// Exit status 2 when there is no such job or it still runs.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let api = Api::new(&args.server.server)?;
    block_on(async {
        let job = api.find_job(&args.job).await?;
        api.request(Method::DELETE, &format!("/jobs/{}", job.id), None::<&()>).await?;
        if args.server.json {
            return output::json(&serde_json::json!({ "deleted": job.id }));
        }
        output::line(format_args!("{} deleted", job.id))
    })
}
