//! `lockstep fork`: starts a new job from a checkpoint of another job.

use super::{api::ServerArgs, block_on, checkpoint_choice::choose, job_file, output, watch};
use lockstep_protocol::Job;
use serde_json::json;

/// Start a new job from a checkpoint of another job, with changed settings
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The job's id, the start of its id, or its name
    job: String,
    /// best, latest, a step, or epoch and step (`2-54`)
    #[arg(long, default_value = "latest")]
    checkpoint: String,
    /// Change a key of the job's specification, such as train.lr=0.1 or parallel.ranks=4 (may be repeated); an empty value, as in
    /// train.epochs=, removes the key
    #[arg(long = "set", value_name = "KEY.PATH=VALUE")]
    sets: Vec<String>,
    /// Show the new job's progress until it ends; exit with status 1 unless it succeeds
    #[arg(long)]
    watch: bool,
    #[command(flatten)]
    server: ServerArgs,
}

/// Sends the request and prints the new job.
///
/// # Errors
/// Exit status 2 if the job or the checkpoint does not exist, or the changed settings have mistakes.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let mut changes = json!({});
    job_file::apply_sets(&mut changes, &args.sets)?;
    let api = args.server.api()?;
    block_on(async {
        let source = api.find_trained_job(&args.job).await?;
        let chosen = choose(&api, &source, &args.checkpoint).await?;
        let request = json!({"checkpoint": chosen.id, "set": changes});
        let job: Job = api.post(&format!("/jobs/{}/fork", source.id), &request).await?;
        output::warn_each(&job.warnings);
        if args.watch {
            return watch::show_to_end(&api, job, args.server.json).await;
        }
        output::print(args.server.json, &job, format_args!("{0}  {1}/jobs/{0}", job.id, api.base))
    })
}
