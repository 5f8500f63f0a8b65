//! Starts agents over SSH, with one connection to each machine. The agent's bundle is sent over standard input.

use super::{
    Args, Bundle, Launch,
    bundle::BUNDLE_BYTES,
    follow::{LauncherProcess, follow},
    hosts::Host,
    quote,
};
use std::process::{Command, ExitStatus};

/// Exit status of ssh if the connection fails.
const NO_CONNECTION: i32 = 255;
/// Exit statuses of a shell if a program is not found or may not be executed.
const NO_PROGRAM: [i32; 2] = [127, 126];

/// Returns the ssh command for a machine. ssh must not ask for a password.
pub(super) fn command(args: &Args, host: &Host) -> Command {
    shell_command(&args.options, &host.name, &format!("{} launched -", quote(&args.program)))
}

/// Returns the ssh command that runs a command line in a shell on `host`. `options` are the user's options for ssh.
pub(crate) fn shell_command(options: &[String], host: &str, command_line: &str) -> Command {
    let mut command = Command::new("ssh");
    command.args(["-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15"]);
    command.args(options).arg("--").arg(without_brackets(host)).arg(command_line);
    command
}

/// Returns `USER@HOST` for ssh, which accepts IPv6 addresses only without brackets.
fn without_brackets(host: &str) -> String {
    let (user, host) = host.rsplit_once('@').map_or(("", host), |(user, host)| (user, host));
    let host = host.trim_matches(['[', ']']);
    if user.is_empty() { host.to_owned() } else { format!("{user}@{host}") }
}

/// Starts the agents and follows them.
///
/// # Errors
/// See [`follow`].
pub(super) async fn start(launch: &Launch) -> anyhow::Result<()> {
    let folder = launch.create_folder()?;
    let mut processes = Vec::new();
    for (host, node) in launch.hosts.iter().zip(&launch.bundle.nodes) {
        let bundle = Bundle { nodes: vec![node.clone()], ..launch.bundle.clone() };
        let log = folder.join(format!("{}.log", node.name));
        let command = command(&launch.args, host);
        let text = bundle.to_json(BUNDLE_BYTES)?;
        processes.push(LauncherProcess::start(&host.name, command, text.as_bytes(), &log, explain)?);
    }
    follow(launch, processes).await
}

fn explain(host: &str, status: ExitStatus, last: &str) -> String {
    match explain_no_start(host, status, last) {
        Some((why, _)) => why,
        None if status.success() => format!("the agent on {host} has ended"),
        None => format!("the agent on {host} ended ({status}): {last}"),
    }
}

/// Explains why Lockstep did not start on a machine, with advice. `None` if ssh ended for another reason.
pub(crate) fn explain_no_start(host: &str, status: ExitStatus, last: &str) -> Option<(String, String)> {
    match status.code()? {
        NO_CONNECTION => Some((
            format!("{host} cannot be reached by ssh: {last}"),
            format!("Try ssh -o BatchMode=yes {host} true: the command must need no password."),
        )),
        code if NO_PROGRAM.contains(&code) => Some((
            format!(
                "{host} cannot run lockstep: {last}; install lockstep on this machine, or name its path with --program"
            ),
            "Install lockstep on this machine, or name its path with --program.".into(),
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ssh_gets_addresses_without_brackets() {
        let hosts = [
            ("[fd00::1]", "fd00::1"),
            ("me@[fd00::1]", "me@fd00::1"),
            ("me@node", "me@node"),
            ("a@b@c", "a@b@c"),
        ];
        for (host, expected) in hosts {
            assert_eq!(without_brackets(host), expected);
        }
    }
}
