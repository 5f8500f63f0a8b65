//! Warnings about machines.

use super::NewestSample;
use jiff::Timestamp;
use lockstep_protocol::agent::{Machine, MachineWarning};
use std::time::Duration;

/// Largest difference of clocks, in milliseconds, that is not reported. Such differences do not affect tokens, logs and charts.
pub(super) const MAX_CLOCK_DIFFERENCE_MS: i64 = 5_000;
/// A connected agent without a sample for this time is reported. Agents send a sample every five seconds.
const SAMPLE_TIMEOUT: Duration = Duration::from_secs(30);
/// A disk is reported if less than this fraction and less than [`LOW_DISK_BYTES`] are free.
const LOW_DISK_FRACTION: f64 = 0.05;
const LOW_DISK_BYTES: u64 = 20_000_000_000;
/// A machine is reported if less than this fraction of its memory is free.
const LOW_MEMORY_FRACTION: f64 = 0.04;

/// The state of a machine, from which its warnings follow.
#[derive(Debug)]
pub(crate) struct MachineState<'a> {
    pub(crate) machine: &'a Machine,
    pub(crate) newest: Option<&'a NewestSample>,
    /// The findings of `doctor` when the agent connected.
    pub(crate) findings: &'a [MachineWarning],
    /// When the agent connected. `None` if it is not connected.
    pub(crate) connected_at: Option<Timestamp>,
    pub(crate) last_seen_at: Timestamp,
    /// Number of attempts that the agent runs, or ran when its connection ended.
    pub(crate) attempt_count: usize,
    pub(crate) is_draining: bool,
    pub(crate) now: Timestamp,
}

fn gigabytes(bytes: u64) -> String {
    format!("{:.1} GB", bytes as f64 / 1e9)
}

fn problem(text: String) -> MachineWarning {
    MachineWarning { problem: true, text }
}

fn notice(text: String) -> MachineWarning {
    MachineWarning { problem: false, text }
}

/// The warnings about a machine, problems first.
pub(crate) fn warnings(state: &MachineState<'_>) -> Vec<MachineWarning> {
    let mut found = Vec::new();
    match state.connected_at {
        None => {
            let secs = (state.now.as_second() - state.last_seen_at.as_second()).max(0);
            let duration = match secs {
                0..120 => format!("{secs} s"),
                120..7200 => format!("{} minutes", secs / 60),
                _ => format!("{} hours", secs / 3600),
            };
            let jobs = match state.attempt_count {
                0 => "",
                _ => " Its jobs continue elsewhere, from their newest checkpoint, when their lease ends.",
            };
            let text = format!(
                "Offline for {duration}: see its agent's log, and whether it reaches this server.{jobs}"
            );
            found.push(MachineWarning { problem: state.attempt_count > 0, text });
        }
        Some(since) => warn_about_online(state, since, &mut found),
    }
    let server = env!("CARGO_PKG_VERSION");
    if state.machine.version != server {
        found.push(notice(format!(
            "It runs version {} and the server {server}: install the same version on both.",
            state.machine.version
        )));
    }
    if state.is_draining {
        found.push(notice("Drained: it takes no new work until an admin undrains it.".into()));
    }
    found.extend(state.findings.iter().cloned());
    found.sort_by_key(|warning| !warning.problem);
    found
}

/// Adds the warnings about a machine that has been connected since `since`.
fn warn_about_online(state: &MachineState<'_>, since: Timestamp, found: &mut Vec<MachineWarning>) {
    let connected = Duration::from_secs((state.now.as_second() - since.as_second()).max(0) as u64);
    let Some(newest) = state.newest.filter(|newest| newest.age < SAMPLE_TIMEOUT) else {
        if connected >= SAMPLE_TIMEOUT {
            let text = "It is connected but sends no measurements: a disk or a GPU there may not answer.";
            found.push(notice(text.into()));
        }
        return;
    };
    if let Some(behind) = newest.clock_behind_ms.filter(|ms| ms.abs() > MAX_CLOCK_DIFFERENCE_MS) {
        let (secs, side) = (behind.abs() / 1000, if behind > 0 { "behind" } else { "ahead of" });
        found.push(notice(format!(
            "Its clock is {secs} s {side} the server's: times in its logs are off. Let NTP set both."
        )));
    }
    let sample = &newest.sample;
    let free = sample.disk_bytes.saturating_sub(sample.disk_used_bytes);
    let low = LOW_DISK_BYTES.min((sample.disk_bytes as f64 * LOW_DISK_FRACTION) as u64);
    if sample.disk_bytes > 0 && free < low {
        found.push(problem(format!(
            "The disk of its data directory is nearly full: {} free of {}. Free some, or lower checkpoint.keep.",
            gigabytes(free),
            gigabytes(sample.disk_bytes)
        )));
    }
    let free = sample.memory_bytes.saturating_sub(sample.memory_used_bytes);
    if sample.memory_bytes > 0 && (free as f64) < sample.memory_bytes as f64 * LOW_MEMORY_FRACTION {
        found.push(problem(format!(
            "Its memory is nearly full: {} free of {}. The system ends processes when none is left.",
            gigabytes(free),
            gigabytes(sample.memory_bytes)
        )));
    }
}
