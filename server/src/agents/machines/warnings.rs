//! Warnings about machines.

use super::Newest;
use jiff::Timestamp;
use lockstep_protocol::agent::{Machine, MachineWarning};
use std::time::Duration;

/// Smallest difference of clocks, in milliseconds, that is reported. Smaller differences do not affect tokens, logs and charts.
pub(super) const CLOCK_MS: i64 = 5_000;
/// A connected agent without a sample for this time is reported. Agents send a sample every five seconds.
const SAMPLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Free space below which a disk is reported: the smaller of this fraction of the disk and this number of bytes.
const LOW_DISK: (f64, u64) = (0.05, 20_000_000_000);
/// Fraction of the memory: a machine with less free memory is reported.
const LOW_MEMORY: f64 = 0.04;

/// The state of a machine, from which its warnings follow.
#[derive(Debug)]
pub(crate) struct MachineState<'a> {
    pub(crate) machine: &'a Machine,
    pub(crate) newest: Option<&'a Newest>,
    /// The findings of `doctor` when the agent connected.
    pub(crate) findings: &'a [MachineWarning],
    /// When the agent connected. `None` if it is not connected.
    pub(crate) connected_at: Option<Timestamp>,
    pub(crate) last_seen_at: Timestamp,
    /// Number of attempts that the agent runs, or ran when its connection ended.
    pub(crate) attempts: usize,
    pub(crate) draining: bool,
    pub(crate) now: Timestamp,
}

fn gigabytes(bytes: u64) -> String {
    format!("{:.1} GB", bytes as f64 / 1e9)
}

/// The warnings about a machine, most severe first.
pub(crate) fn warnings(state: &MachineState<'_>) -> Vec<MachineWarning> {
    let mut found = Vec::new();
    let mut warn = |problem, text: String| found.push(MachineWarning { problem, text });
    match state.connected_at {
        None => {
            let secs = (state.now.as_second() - state.last_seen_at.as_second()).max(0);
            let since = match secs {
                0..120 => format!("{secs} s"),
                120..7200 => format!("{} minutes", secs / 60),
                _ => format!("{} hours", secs / 3600),
            };
            let jobs = match state.attempts {
                0 => "",
                _ => " Its jobs continue elsewhere, from their newest checkpoint, when their lease ends.",
            };
            warn(
                state.attempts > 0,
                format!(
                    "Offline for {since}: see its agent's log, and whether it reaches this server.{jobs}"
                ),
            );
        }
        Some(since) => online(state, since, &mut warn),
    }
    let server = env!("CARGO_PKG_VERSION");
    if state.machine.version != server {
        warn(
            false,
            format!(
                "It runs version {} and the server {server}: install the same version on both.",
                state.machine.version
            ),
        );
    }
    if state.draining {
        warn(false, "Drained: it takes no new work until an admin undrains it.".into());
    }
    found.extend(state.findings.iter().cloned());
    found.sort_by_key(|warning| !warning.problem);
    found
}

/// Warnings about a connected machine.
fn online(state: &MachineState<'_>, since: Timestamp, warn: &mut impl FnMut(bool, String)) {
    let connected = Duration::from_secs((state.now.as_second() - since.as_second()).max(0) as u64);
    let Some(newest) = state.newest.filter(|newest| newest.age < SAMPLE_TIMEOUT) else {
        if connected >= SAMPLE_TIMEOUT {
            let why = "a disk or a GPU there may not answer";
            warn(false, format!("It is connected but sends no measurements: {why}."));
        }
        return;
    };
    if let Some(behind) = newest.clock_behind_ms.filter(|ms| ms.abs() > CLOCK_MS) {
        let (secs, side) = (behind.abs() / 1000, if behind > 0 { "behind" } else { "ahead of" });
        warn(
            false,
            format!(
                "Its clock is {secs} s {side} the server's: times in its logs are off. Let NTP set both."
            ),
        );
    }
    let sample = &newest.sample;
    let free = sample.disk_bytes.saturating_sub(sample.disk_used_bytes);
    let low = LOW_DISK.1.min((sample.disk_bytes as f64 * LOW_DISK.0) as u64);
    if sample.disk_bytes > 0 && free < low {
        warn(
            true,
            format!(
                "The disk of its data directory is nearly full: {} free of {}. Free some, or lower checkpoint.keep.",
                gigabytes(free),
                gigabytes(sample.disk_bytes)
            ),
        );
    }
    let free = sample.memory_bytes.saturating_sub(sample.memory_used_bytes);
    if sample.memory_bytes > 0 && (free as f64) < sample.memory_bytes as f64 * LOW_MEMORY {
        warn(
            true,
            format!(
                "Its memory is nearly full: {} free of {}. The system ends processes when none is left.",
                gigabytes(free),
                gigabytes(sample.memory_bytes)
            ),
        );
    }
}
