//! Assesses measurements between machines for a job on these machines, with advice.

use super::examined::{ExaminedMachine, Pair};
use lockstep_worker::doctor::{Finding, Grade, LinkMeasurement};

/// Speed in bytes per second below which all-reduces take longer than most steps, so that several machines are not faster than one. A
/// gigabit link transfers about 117 million bytes of TCP data per second.
pub(super) const SLOW_BYTES_PER_SECOND: f64 = 110e6;
const USELESS_BYTES_PER_SECOND: f64 = 11e6;
/// A link gets a finding if another link is faster by this factor.
const SPEED_RATIO: f64 = 2.5;
/// Bytes of ResNet-50's gradients in float32, as an example in messages.
const RESNET_50_BYTES: f64 = 102e6;
/// Maximum round trip time, in milliseconds, between machines in one room.
pub(super) const MAX_ROUND_TRIP_MS: f64 = 1.0;
/// Clock differences in milliseconds that lead to a note and to a problem: log lines are in order to about a second, and certificates may
/// be rejected from about a minute.
const CLOCK_NOTE_MS: f64 = 1_000.0;
const CLOCK_PROBLEM_MS: f64 = 60_000.0;

pub(super) fn finding(what: &str, grade: Grade, found: String, advice: impl Into<String>) -> Finding {
    Finding { what: what.into(), grade, found, advice: Some(advice.into()) }
}

/// Compares the versions that must be equal on two machines.
pub(super) fn version_findings(a: &ExaminedMachine, b: &ExaminedMachine) -> Vec<Finding> {
    let mut findings = Vec::new();
    let (one, other) = (&a.name, &b.name);
    if let (Some(x), Some(y)) = (&a.lockstep, &b.lockstep)
        && x != y
    {
        findings.push(finding(
            "Lockstep",
            Grade::Problem,
            format!("{x} on {one}, {y} on {other}"),
            "Install the same version on both: ranks of different versions refuse each other.",
        ));
    }
    let (Some(of_a), Some(of_b)) = (&a.facts, &b.facts) else { return findings };
    if of_a.network_id == of_b.network_id {
        findings.push(finding(
            "machine",
            Grade::Note,
            format!("{one} and {other} are the same machine"),
            "List the machine once, with more slots.",
        ));
    }
    if of_a.gpus.is_empty() != of_b.gpus.is_empty() {
        let (has, not) = if of_a.gpus.is_empty() { (other, one) } else { (one, other) };
        findings.push(finding(
            "GPUs",
            Grade::Note,
            format!("{has} has GPUs, but {not} has no GPU that a rank can use"),
            format!("A job has GPUs on all its machines or on none: `lockstep doctor` on {not} says what is missing."),
        ));
    }
    if of_a.gpus.is_empty() || of_b.gpus.is_empty() {
        return findings;
    }
    let shown = |version: &Option<String>| version.clone().unwrap_or_else(|| "none".into());
    if of_a.nccl != of_b.nccl || of_a.nccl.is_none() {
        findings.push(finding(
            "NCCL",
            Grade::Problem,
            format!("{} on {one}, {} on {other}", shown(&of_a.nccl), shown(&of_b.nccl)),
            "Install the same version on both (pip install nvidia-nccl-cu13==VERSION): NCCL refuses or hangs with another.",
        ));
    }
    if of_a.driver != of_b.driver {
        let branch =
            |version: &Option<String>| shown(version).split('.').next().unwrap_or_default().to_owned();
        let same_branch = branch(&of_a.driver) == branch(&of_b.driver);
        let grade = if same_branch { Grade::Note } else { Grade::Problem };
        findings.push(finding(
            "GPU driver",
            grade,
            format!("{} on {one}, {} on {other}", shown(&of_a.driver), shown(&of_b.driver)),
            "Install the same driver on both: each driver chooses and compiles kernels, which may differ in speed and rounding.",
        ));
    }
    findings
}

/// Returns how far the clock of `b` is ahead of the clock of `a` and the uncertainty, both in milliseconds, from the direction with the
/// smaller uncertainty.
pub(super) fn clock_difference(pair: &Pair) -> Option<(f64, f64)> {
    let there = pair.to_b.as_ref().ok().map(|link| (link.clock_ahead_ms, link.clock_within_ms));
    let back = pair.to_a.as_ref().ok().map(|link| (-link.clock_ahead_ms, link.clock_within_ms));
    [there, back].into_iter().flatten().min_by(|x, y| x.1.total_cmp(&y.1))
}

fn clock_finding(pair: &Pair) -> Option<Finding> {
    let (ahead, within) = pair.clock_ahead_ms.zip(pair.clock_within_ms)?;
    let apart = ahead.abs() - within;
    if apart <= CLOCK_NOTE_MS {
        return None;
    }
    let (grade, why) = if apart > CLOCK_PROBLEM_MS {
        (
            Grade::Problem,
            "Certificates and tokens of one machine may not be valid yet on the other, or may have expired.",
        )
    } else {
        (Grade::Note, "Lines of their logs are out of order.")
    };
    let (fast, slow) = if ahead > 0.0 { (&pair.b, &pair.a) } else { (&pair.a, &pair.b) };
    let found = format!("the clock of {fast} is {} ahead of the clock of {slow}", duration(ahead.abs()));
    Some(finding(
        "clocks",
        grade,
        found,
        format!("{why} Let NTP set both clocks (timedatectl set-ntp true)."),
    ))
}

/// Formats a time in milliseconds with a suitable unit.
pub(super) fn duration(ms: f64) -> String {
    match ms {
        ms if ms < 1.0 => format!("{:.0} us", ms * 1e3),
        ms if ms < 1e3 => format!("{ms:.1} ms"),
        ms if ms < 120e3 => format!("{:.1} s", ms / 1e3),
        ms => format!("{:.0} min", ms / 60e3),
    }
}

/// Formats a speed: `9.41 Gbit/s`.
pub(super) fn speed(bytes_per_second: f64) -> String {
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
    if let (Ok(there), Ok(back)) = (&pair.to_b, &pair.to_a) {
        findings.extend(speed_findings(pair, there, back, fastest));
    }
    findings.extend(clock_finding(pair));
    if let Some(Err(why)) = &pair.nccl {
        findings.push(finding(
            "NCCL",
            Grade::Problem,
            why.clone(),
            format!(
                "The machines reach each other, their GPUs do not. Name the interface for NCCL in the hostfile \
                 (env:NCCL_SOCKET_IFNAME=eth1), and try env:NCCL_DEBUG=INFO; without a working InfiniBand env:NCCL_IB_DISABLE=1. \
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
        "Open TCP from {from} to {to} in firewalls and security groups, to all ports that a kernel chooses \
         (sysctl net.ipv4.ip_local_port_range on {to}). If {to} has another address for this, name its interface in the hostfile: \
         env:NCCL_SOCKET_IFNAME=eth1."
    )
}

fn speed_findings(
    pair: &Pair,
    there: &LinkMeasurement,
    back: &LinkMeasurement,
    fastest: f64,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    // `to_b` measures data that `b` sends.
    let (least, slow_from, slow_to) = if there.bytes_per_second < back.bytes_per_second {
        (there.bytes_per_second, &pair.b, &pair.a)
    } else {
        (back.bytes_per_second, &pair.a, &pair.b)
    };
    let most = there.bytes_per_second.max(back.bytes_per_second);
    let takes = duration(2.0 * RESNET_50_BYTES / least * 1e3);
    let meaning = format!("an all-reduce of ResNet-50's gradients over many machines takes {takes}");
    if least < USELESS_BYTES_PER_SECOND {
        findings.push(finding(
            "speed",
            Grade::Problem,
            format!("{} from {slow_from} to {slow_to}: {meaning}", speed(least)),
            "Look at the link's speed (ethtool INTERFACE), the cable and the switch, and for a rate limit or a tunnel between the machines; otherwise \
             leave one of the two out.",
        ));
    } else if least * SPEED_RATIO < most {
        findings.push(finding(
            "speed",
            Grade::Note,
            format!("{} from {slow_from} to {slow_to}, {} the other way", speed(least), speed(most)),
            "Look for errors and a half-duplex link (ethtool -S INTERFACE), and for other traffic in that direction.",
        ));
    } else if least * SPEED_RATIO < fastest {
        findings.push(finding(
            "speed",
            Grade::Note,
            format!(
                "{}, and {} between others: a ring is as fast as its slowest link",
                speed(least),
                speed(fastest)
            ),
            "Check that both use the same interface as the others, and check its speed (ethtool INTERFACE).",
        ));
    } else if least < SLOW_BYTES_PER_SECOND {
        findings.push(finding(
            "speed",
            Grade::Note,
            format!("{}: {meaning}", speed(least)),
            "Use a faster network, a larger train.accumulate (fewer all-reduces), or fewer machines.",
        ));
    }
    let far = there.round_trip_ms.min(back.round_trip_ms);
    if far > MAX_ROUND_TRIP_MS {
        findings.push(finding(
            "round trip",
            Grade::Note,
            format!("{}: a step waits for two round trips for each machine in the ring", duration(far)),
            "Between machines in one room it is 0.1 ms. Larger batches or train.accumulate cause fewer waits; parallel.sync_batch_norm = false \
             avoids most of them.",
        ));
    }
    findings
}

/// Returns the worst grade among the findings.
pub(super) fn worst(findings: &[Finding]) -> Grade {
    findings.iter().map(|finding| finding.grade).max().unwrap_or(Grade::Ok)
}

#[cfg(test)]
mod tests;
