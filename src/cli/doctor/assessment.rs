//! Assesses measurements between machines for a job on these machines, with advice.

use super::examined::{ExaminedMachine, Pair};
use lockstep_worker::doctor::{Finding, Grade, LinkMeasurement, finding};

/// Speed in bytes per second below which all-reduces take longer than most steps, so that several machines are not faster than one. A
/// gigabit link transfers about 117 million bytes of TCP data per second.
pub(super) const SLOW_BYTES_PER_SECOND: f64 = 110e6;
/// Speed in bytes per second below which a link is a problem, slightly less than the speed of a 100 Mbit/s link.
const USELESS_BYTES_PER_SECOND: f64 = 11e6;
/// A link gets a finding if another link is faster by this factor.
const SPEED_RATIO: f64 = 2.5;
/// Bytes of ResNet-50's gradients in float32, as an example in messages.
const RESNET_50_BYTES: f64 = 102e6;
/// Maximum round trip time, in milliseconds, between machines in one room.
pub(super) const MAX_ROUND_TRIP_MS: f64 = 1.0;
/// Clock differences in milliseconds that lead to a note and to a problem: from about a second, log lines of the machines are out of order,
/// and from about a minute, certificates may be rejected.
const CLOCK_NOTE_MS: f64 = 1_000.0;
const CLOCK_PROBLEM_MS: f64 = 60_000.0;

/// Compares the versions that must be equal on two machines.
pub(super) fn version_findings(a: &ExaminedMachine, b: &ExaminedMachine) -> Vec<Finding> {
    let mut findings = Vec::new();
    let (name_a, name_b) = (&a.name, &b.name);
    if let (Some(version_a), Some(version_b)) = (&a.lockstep, &b.lockstep)
        && version_a != version_b
    {
        findings.push(finding(
            "Lockstep",
            Grade::Problem,
            format!("{version_a} on {name_a}, {version_b} on {name_b}"),
            "Install the same version on both machines: ranks of different versions refuse each other.",
        ));
    }
    let (Some(facts_a), Some(facts_b)) = (&a.facts, &b.facts) else { return findings };
    if facts_a.network_id == facts_b.network_id {
        findings.push(finding(
            "machine",
            Grade::Note,
            format!("{name_a} and {name_b} are the same machine"),
            "List the machine once, with more slots.",
        ));
    }
    if facts_a.gpus.is_empty() != facts_b.gpus.is_empty() {
        let (with_gpus, without) = if facts_a.gpus.is_empty() { (name_b, name_a) } else { (name_a, name_b) };
        findings.push(finding(
            "GPUs",
            Grade::Note,
            format!("{with_gpus} has GPUs, but {without} has no GPU that a rank can use"),
            format!(
                "A job has GPUs on all its machines or on none: `lockstep doctor` on {without} says what is missing."
            ),
        ));
    }
    if facts_a.gpus.is_empty() || facts_b.gpus.is_empty() {
        return findings;
    }
    let format_version = |version: &Option<String>| version.clone().unwrap_or_else(|| "none".into());
    if facts_a.nccl != facts_b.nccl || facts_a.nccl.is_none() {
        findings.push(finding(
            "NCCL",
            Grade::Problem,
            format!("{} on {name_a}, {} on {name_b}", format_version(&facts_a.nccl), format_version(&facts_b.nccl)),
            "Install the same version on both machines (pip install nvidia-nccl-cu13==VERSION): different versions of NCCL refuse each \
             other or hang.",
        ));
    }
    if facts_a.driver != facts_b.driver {
        let branch = |version: &Option<String>| {
            format_version(version).split('.').next().unwrap_or_default().to_owned()
        };
        let is_same_branch = branch(&facts_a.driver) == branch(&facts_b.driver);
        let grade = if is_same_branch { Grade::Note } else { Grade::Problem };
        findings.push(finding(
            "GPU driver",
            grade,
            format!("{} on {name_a}, {} on {name_b}", format_version(&facts_a.driver), format_version(&facts_b.driver)),
            "Install the same driver on both machines: each driver chooses and compiles kernels, which may differ in speed and rounding.",
        ));
    }
    findings
}

/// Returns how far the clock of `b` is ahead of the clock of `a`, and the uncertainty, both in milliseconds. Of the two measurements, takes
/// the measurement with the smaller uncertainty.
pub(super) fn clock_difference(pair: &Pair) -> Option<(f64, f64)> {
    let to_b = pair.to_b.as_ref().ok().map(|link| (link.clock_ahead_ms, link.clock_within_ms));
    let to_a = pair.to_a.as_ref().ok().map(|link| (-link.clock_ahead_ms, link.clock_within_ms));
    [to_b, to_a].into_iter().flatten().min_by(|(_, x), (_, y)| x.total_cmp(y))
}

fn clock_finding(pair: &Pair) -> Option<Finding> {
    let (ahead_ms, uncertainty_ms) = pair.clock_ahead_ms.zip(pair.clock_within_ms)?;
    let min_difference = ahead_ms.abs() - uncertainty_ms;
    if min_difference <= CLOCK_NOTE_MS {
        return None;
    }
    let (grade, why) = if min_difference > CLOCK_PROBLEM_MS {
        (
            Grade::Problem,
            "Certificates and tokens of one machine may not be valid yet on the other, or may have expired.",
        )
    } else {
        (Grade::Note, "Lines of their logs are out of order.")
    };
    let (fast, slow) = if ahead_ms > 0.0 { (&pair.b, &pair.a) } else { (&pair.a, &pair.b) };
    let found =
        format!("the clock of {fast} is {} ahead of the clock of {slow}", format_duration(ahead_ms.abs()));
    Some(finding(
        "clocks",
        grade,
        found,
        format!("{why} Let NTP set both clocks (timedatectl set-ntp true)."),
    ))
}

/// Formats a time in milliseconds with a suitable unit.
pub(super) fn format_duration(ms: f64) -> String {
    match ms {
        ms if ms < 1.0 => format!("{:.0} us", ms * 1e3),
        ms if ms < 1e3 => format!("{ms:.1} ms"),
        ms if ms < 120e3 => format!("{:.1} s", ms / 1e3),
        ms => format!("{:.0} min", ms / 60e3),
    }
}

/// Formats a speed: `9.41 Gbit/s`.
pub(super) fn format_speed(bytes_per_second: f64) -> String {
    let bits = bytes_per_second * 8.0;
    match bits {
        bits if bits >= 1e9 => format!("{:.2} Gbit/s", bits / 1e9),
        bits if bits >= 1e6 => format!("{:.1} Mbit/s", bits / 1e6),
        bits => format!("{:.1} kbit/s", bits / 1e3),
    }
}

/// Returns the findings about a measured pair. `fastest` is the speed of the fastest link among all pairs, in bytes per second.
pub(super) fn pair_findings(pair: &Pair, fastest: f64) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (from, to, link) in [(&pair.a, &pair.b, &pair.to_b), (&pair.b, &pair.a, &pair.to_a)] {
        if let Err(why) = link {
            let advice = reach_advice(from, to, why);
            findings.push(finding(
                "reach",
                Grade::Problem,
                format!("{from} does not reach {to}: {why}"),
                advice,
            ));
        }
    }
    if let (Ok(to_b), Ok(to_a)) = (&pair.to_b, &pair.to_a) {
        // A connection from `a` to `b` measures data that `b` sends.
        findings.extend(speed_findings(pair, to_b, to_a, fastest));
    }
    findings.extend(clock_finding(pair));
    if let Some(Err(why)) = &pair.nccl {
        findings.push(finding(
            "NCCL",
            Grade::Problem,
            why.clone(),
            format!(
                "The machines reach each other, but their GPUs do not. Name the interface for NCCL in the hostfile \
                 (env:NCCL_SOCKET_IFNAME=eth1), and try env:NCCL_DEBUG=INFO; if InfiniBand does not work, set env:NCCL_IB_DISABLE=1. \
                 The ranks were on the first GPU of {} and of {}.",
                pair.a, pair.b
            ),
        ));
    }
    findings
}

fn reach_advice(from: &str, to: &str, why: &str) -> String {
    if why.contains("during a bulk transfer") {
        return format!(
            "The network between {from} and {to} drops long packets: give both interfaces the same MTU (ip link show), and let \
             ICMP \"fragmentation needed\" pass."
        );
    }
    if why.contains("does not answer as Lockstep") {
        return format!(
            "Another program, such as a proxy, answers at the address of {to}: let {from} connect to {to} directly."
        );
    }
    format!(
        "Open TCP from {from} to {to} in firewalls and security groups, to the ports that Linux on {to} assigns \
         (sysctl net.ipv4.ip_local_port_range). If ranks must use another address of {to}, name the interface of this \
         address in the hostfile: env:NCCL_SOCKET_IFNAME=eth1."
    )
}

fn speed_findings(
    pair: &Pair,
    a_from_b: &LinkMeasurement,
    b_from_a: &LinkMeasurement,
    fastest: f64,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let (slower, slow_from, slow_to) = if a_from_b.bytes_per_second < b_from_a.bytes_per_second {
        (a_from_b.bytes_per_second, &pair.b, &pair.a)
    } else {
        (b_from_a.bytes_per_second, &pair.a, &pair.b)
    };
    let faster = a_from_b.bytes_per_second.max(b_from_a.bytes_per_second);
    // In a ring of many machines, each machine sends about twice the bytes of the gradients.
    let time = format_duration(2.0 * RESNET_50_BYTES / slower * 1e3);
    let meaning = format!("an all-reduce of ResNet-50's gradients over many machines takes {time}");
    if slower < USELESS_BYTES_PER_SECOND {
        findings.push(finding(
            "speed",
            Grade::Problem,
            format!("{} from {slow_from} to {slow_to}: {meaning}", format_speed(slower)),
            "Look at the link's speed (ethtool INTERFACE), the cable and the switch, and for a rate limit or a tunnel between the \
             machines; otherwise leave one of the two machines out.",
        ));
    } else if slower * SPEED_RATIO < faster {
        findings.push(finding(
            "speed",
            Grade::Note,
            format!("{} from {slow_from} to {slow_to}, {} the other way", format_speed(slower), format_speed(faster)),
            "Look for errors and a half-duplex link (ethtool -S INTERFACE), and for other traffic in that direction.",
        ));
    } else if slower * SPEED_RATIO < fastest {
        findings.push(finding(
            "speed",
            Grade::Note,
            format!(
                "{}, and {} between other machines: a ring is as fast as its slowest link",
                format_speed(slower),
                format_speed(fastest)
            ),
            "Check that both machines use the same interface as the other machines, and check the interface's speed (ethtool INTERFACE).",
        ));
    } else if slower < SLOW_BYTES_PER_SECOND {
        findings.push(finding(
            "speed",
            Grade::Note,
            format!("{}: {meaning}", format_speed(slower)),
            "Use a faster network, a larger train.accumulate (fewer all-reduces), or fewer machines.",
        ));
    }
    let round_trip_ms = a_from_b.round_trip_ms.min(b_from_a.round_trip_ms);
    if round_trip_ms > MAX_ROUND_TRIP_MS {
        findings.push(finding(
            "round trip",
            Grade::Note,
            format!(
                "{}: a step waits for two round trips for each machine in the ring",
                format_duration(round_trip_ms)
            ),
            "Between machines in one room, a round trip takes 0.1 ms. Larger batches or train.accumulate cause fewer waits; \
             parallel.sync_batch_norm = false avoids most waits.",
        ));
    }
    findings
}

/// Returns the worst grade among the findings.
pub(super) fn worst_grade(findings: &[Finding]) -> Grade {
    findings.iter().map(|finding| finding.grade).max().unwrap_or(Grade::Ok)
}

#[cfg(test)]
mod tests;
