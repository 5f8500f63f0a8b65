//! `lockstep bench`: training throughput of named cases.

/// Measure training throughput
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Runs the cases.
///
/// # Errors
/// A case that names no network.
pub(crate) fn run(_args: Args) -> anyhow::Result<()> {
    anyhow::bail!("not built yet")
}
