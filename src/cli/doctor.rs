//! `lockstep doctor`: what this machine has.

/// What this machine has, and whether ranks can talk to each other
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Runs the command.
///
/// # Errors
/// A sentence for a person.
pub(crate) fn run(_args: Args) -> anyhow::Result<()> {
    anyhow::bail!("not built yet")
}
