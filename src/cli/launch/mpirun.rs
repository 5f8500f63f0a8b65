//! Starts agents with Open MPI's mpirun, one process on each machine. The bundle is in an environment variable, which mpirun's daemons pass
//! on.

use super::{
    Args, Launch,
    follow::{LauncherProcess, follow},
    hosts::Host,
    node::BUNDLE_VARIABLE,
};
use std::process::{Command, ExitStatus};

/// Maximum size of a bundle in an environment variable, for which the kernel allows 128 KiB.
const MAX_BYTES: u64 = 120 << 10;

/// Returns the command, without the environment variable for the bundle.
pub(super) fn command(args: &Args, hosts: &[Host]) -> Command {
    let names: Vec<_> = hosts.iter().map(|host| format!("{}:1", host.name)).collect();
    let mut command = Command::new("mpirun");
    // Starts one process per machine, on all cores of the machine: the agent starts the ranks.
    command.args(["-H", &names.join(","), "-np", &hosts.len().to_string(), "--bind-to", "none"]);
    command.args(["-x", BUNDLE_VARIABLE]).args(&args.options).args([&args.program, "launched", "env"]);
    command
}

/// Starts the agents and follows them.
///
/// # Errors
/// The bundle is too long. Also see [`follow`].
pub(super) async fn start(launch: &Launch) -> anyhow::Result<()> {
    let text = launch.bundle.to_json(MAX_BYTES)?;
    let mut command = command(&launch.args, &launch.hosts);
    command.env(BUNDLE_VARIABLE, text).env_remove("LOCKSTEP_TOKEN");
    let log = launch.create_folder()?.join("mpirun.log");
    let process = LauncherProcess::start("mpirun", command, &[], &log, explain)?;
    follow(launch, vec![process]).await
}

fn explain(_: &str, status: ExitStatus, last: &str) -> String {
    if status.success() { "mpirun has ended".into() } else { format!("mpirun ended ({status}): {last}") }
}
