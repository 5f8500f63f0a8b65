//! Reads the time that Slurm waits between SIGTERM and SIGKILL for a job's processes: `KillWait` in Slurm's configuration.

use std::{
    io::Read as _,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Time limit for Slurm's response. Without a response, the agent uses its default.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns KillWait in seconds. `None` outside Slurm, or if Slurm does not respond.
pub(super) fn of_slurm() -> Option<u32> {
    std::env::var_os("SLURM_JOB_ID")?;
    let mut asked = Command::new("scontrol");
    asked.args(["show", "config"]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = asked.spawn().ok()?;
    let mut stdout = child.stdout.take()?;
    // The output is longer than the buffer of a pipe, so it is read while the program runs.
    let reading = thread::spawn(move || {
        let mut text = String::new();
        stdout.read_to_string(&mut text).map(|_| text)
    });
    let began = Instant::now();
    while child.try_wait().ok()?.is_none() {
        if began.elapsed() > RESPONSE_TIMEOUT {
            let _ = child.kill();
            let _ = child.wait();
            return None;
        }
        thread::sleep(Duration::from_millis(20));
    }
    seconds(&reading.join().ok()?.ok()?)
}

/// Parses a line such as `KillWait                = 30 sec`.
fn seconds(config: &str) -> Option<u32> {
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
        assert_eq!(seconds(config), Some(75));
        assert_eq!(seconds("KillWait=1 sec"), Some(1));
        for none in [
            "",
            "KillOnBadExit = 30",
            "KillWait = soon",
            "KillWait = 0 sec",
            "KillWait = 86401 sec",
            "KillWaits = 5 sec",
        ] {
            assert_eq!(seconds(none), None, "{none}");
        }
    }
}
