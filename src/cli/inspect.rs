//! `lockstep inspect`: handles one request about a model or a dataset for the agent that started it.

/// Handle a request about a model or a dataset (started by agents)
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Reads the request from standard input and writes the response to standard output.
///
/// # Errors
/// Standard input or output is closed.
pub(crate) fn run(_: Args) -> anyhow::Result<()> {
    Ok(lockstep_worker::inspect::run()?)
}
