//! `lockstep look`: answers one question about a model or a dataset, for the agent that asks.

/// Answer a question about a model or a dataset (started by agents)
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Reads the question from standard input, writes the answer to standard output.
///
/// # Errors
/// Those pipes.
pub(crate) fn run(_: Args) -> anyhow::Result<()> {
    Ok(lockstep_worker::look::run()?)
}
