//! `lockstep rank`: one rank of an attempt, started by an agent or by `lockstep train`.

use super::init_tracing;
use std::path::PathBuf;

/// One rank of an attempt (started by agents and by `lockstep train`)
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Configuration file: `rank.<r>.json` in the attempt's folder
    config: PathBuf,
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

/// Trains, then ends the process with a rank's exit status.
///
/// # Errors
/// Never returns an error: the rank's records contain the reason of a failure.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    init_tracing("warn");
    let _ = (args.job, args.attempt, args.rank);
    lockstep_worker::rank::run(&args.config)
}
