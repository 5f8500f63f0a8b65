//! Agents over SSH: one connection to each machine, over whose standard input the agent's description goes.

use super::{
    Args, Bundle, Launch,
    follow::{Launched, follow},
    hosts::Host,
    quoted,
};
use std::process::{Command, ExitStatus};

/// What ssh itself exits with: there was no connection.
const NO_CONNECTION: i32 = 255;
/// What a shell exits with where there is no such program, and where it may not be run.
const NO_PROGRAM: [i32; 2] = [127, 126];

/// The command for a machine. Passwords are not asked for.
pub(super) fn command(args: &Args, host: &Host) -> Command {
    let mut command = Command::new("ssh");
    command.args(["-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15"]);
    command.args(&args.options).arg("--").arg(host.name.trim_matches(['[', ']']));
    command.arg(format!("{} launched -", quoted(&args.program)));
    command
}

/// Starts the agents and follows them.
///
/// # Errors
/// See [`follow`].
pub(super) async fn start(launch: &Launch) -> anyhow::Result<()> {
    let folder = launch.folder()?;
    let mut launched = Vec::new();
    for (host, node) in launch.hosts.iter().zip(&launch.bundle.nodes) {
        let bundle = Bundle { nodes: vec![node.clone()], ..launch.bundle.clone() };
        let log = folder.join(format!("{}.log", node.name));
        let command = command(&launch.args, host);
        launched.push(Launched::start(&host.name, command, &serde_json::to_vec(&bundle)?, &log)?);
    }
    follow(launch, launched, explain).await
}

fn explain(host: &str, status: ExitStatus, last: &str) -> String {
    match status.code() {
        Some(0) => format!("the agent on {host} has ended"),
        Some(NO_CONNECTION) => format!("{host} cannot be reached by ssh: {last}"),
        Some(code) if NO_PROGRAM.contains(&code) => {
            format!("{host} cannot run lockstep: {last}; install it there, or name it with --program")
        }
        _ => format!("the agent on {host} ended ({status}): {last}"),
    }
}
