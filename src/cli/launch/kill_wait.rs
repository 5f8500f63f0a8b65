//! Reads the time that Slurm waits between SIGTERM and SIGKILL for a job's processes: `KillWait` in Slurm's configuration.

use super::super::block_on;
use std::{process::Stdio, time::Duration};
use tokio::{process::Command, time::timeout};

/// Time limit for Slurm's response. Without a response, the agent uses its default.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns KillWait in seconds. `None` outside Slurm, or if Slurm does not respond.
pub(super) fn read() -> Option<u32> {
    std::env::var_os("SLURM_JOB_ID")?;
    let printed = block_on(async {
        let mut command = Command::new("scontrol");
        command.args(["show", "config"]).stdin(Stdio::null()).kill_on_drop(true);
        Ok(timeout(RESPONSE_TIMEOUT, command.output()).await??)
    });
    parse_kill_wait(&String::from_utf8_lossy(&printed.ok()?.stdout))
}

/// Parses a line such as `KillWait                = 30 sec`.
fn parse_kill_wait(config: &str) -> Option<u32> {
    let line = config.lines().find_map(|line| line.trim_start().strip_prefix("KillWait")?.split_once('='));
    let (name, value) = line?;
    let value = value.trim().strip_suffix("sec").unwrap_or(value).trim();
    value.parse().ok().filter(|secs| name.trim().is_empty() && (1..=86_400).contains(secs))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kill_wait_is_parsed_from_slurm_s_output() {
        let config = "KeepAliveTime           = SYSTEM_DEFAULT\nKillOnBadExit           = 0\nKillWait                = 75 sec\nLaunchParameters        = (null)\n";
        assert_eq!(parse_kill_wait(config), Some(75));
        assert_eq!(parse_kill_wait("KillWait=1 sec"), Some(1));
        for invalid in [
            "",
            "KillOnBadExit = 30",
            "KillWait = soon",
            "KillWait = 0 sec",
            "KillWait = 86401 sec",
            "KillWaits = 5 sec",
        ] {
            assert_eq!(parse_kill_wait(invalid), None, "{invalid}");
        }
    }
}
