//! `lockstep list`: the jobs.

use super::{api::ServerArgs, block_on, output};
use lockstep_protocol::{Job, JobState};

/// List jobs, newest first
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only jobs in this state
    #[arg(long)]
    state: Option<JobState>,
    /// Only jobs whose name contains this
    #[arg(long)]
    name: Option<String>,
    /// Only jobs of this person, or of the token with this name
    #[arg(long)]
    owner: Option<String>,
    #[command(flatten)]
    server: ServerArgs,
}

/// Prints the jobs.
///
/// # Errors
/// The server is not reachable.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let api = args.server.api()?;
    let mut jobs = block_on(api.jobs())?;
    jobs.retain(|job| {
        args.state.is_none_or(|state| job.state == state)
            && (args.owner.is_none() || job.owner == args.owner)
            && args.name.as_ref().is_none_or(|name| job.name.contains(name.as_str()))
    });
    if args.server.json {
        return output::json(&jobs);
    }
    if jobs.is_empty() {
        return output::line("no jobs; submit one with `lockstep submit JOB.toml`");
    }
    let rows: Vec<_> = jobs.iter().map(row).collect();
    output::table(["JOB", "NAME", "STATE", "RANKS", "PROGRESS", "IMAGES/S", "LOSS", "BEST"], &rows)
}

fn row(job: &Job) -> [String; 8] {
    let progress = match (job.step, job.total_steps) {
        (_, 0) => String::new(),
        (step, total) => format!("{} %", step * 100 / total),
    };
    [
        job.id.to_string(),
        job.name.clone(),
        job.state.to_string(),
        job.ranks.to_string(),
        progress,
        job.images_per_second.map(|v| format!("{v:.0}")).unwrap_or_default(),
        job.last.loss.map(|loss| format!("{loss:.4}")).unwrap_or_default(),
        job.best.map(|best| format!("{:.1} %", best.value * 100.0)).unwrap_or_default(),
    ]
}
