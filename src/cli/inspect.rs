//! `lockstep inspect`: handles one request about a model or a dataset, for the agent that starts it.

/// Handle a request about a model or a dataset (started by agents)
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Reads the request from standard input, writes the reply to standard output.
///
/// # Errors
/// Those pipes.
pub(crate) fn run(_: Args) -> anyhow::Result<()> {
    Ok(lockstep_worker::inspect::run()?)
}
