//! `lockstep rank`: one rank of an attempt, started by an agent or by `lockstep train`.

use super::{init_tracing, usage_error};
use lockstep_host::gpu::RankGpu;
use std::path::PathBuf;

/// One rank of an attempt (started by agents and by `lockstep train`)
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Configuration file: `rank.<r>.json` in the attempt's folder
    #[arg(required_unless_present = "spare")]
    config: Option<PathBuf>,
    /// Open this GPU (JSON: its index and the visible GPUs), read the path of a configuration file from standard input,
    /// and become its rank
    #[arg(long, value_name = "GPU", conflicts_with = "config")]
    spare: Option<String>,
    /// Shown in process lists; the configuration file has the same value
    #[arg(long)]
    job: Option<String>,
    /// Shown in process lists, like --job
    #[arg(long)]
    attempt: Option<u32>,
    /// Shown in process lists, like --job
    #[arg(long)]
    rank: Option<u32>,
}

/// Trains, then exits with a rank's exit status.
///
/// # Errors
/// Exit status 2 if the arguments are wrong. The rank's records contain the reason of a failure.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    init_tracing("warn");
    // These arguments are only for process lists.
    let _ = (args.job, args.attempt, args.rank);
    match (args.config, args.spare) {
        (Some(config), _) => lockstep_worker::rank::run(&config),
        (None, spare) => {
            let gpu: RankGpu = serde_json::from_str(&spare.unwrap_or_default())
                .map_err(|error| usage_error(format!("--spare: {error}")))?;
            lockstep_worker::rank::run_spare(&gpu)
        }
    }
}
