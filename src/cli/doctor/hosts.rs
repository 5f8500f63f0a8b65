//! `lockstep doctor --hosts`: checks several machines and the links between them. SSH starts `lockstep doctor --peer` on each machine, and
//! this process orders the machines to measure the links to each other.

use super::{
    super::{
        launch::{Host, parse_host_list, read_hostfile},
        output, usage_error,
    },
    Args,
    assessment::{self, MAX_ROUND_TRIP_MS, SLOW_BYTES_PER_SECOND},
    describe_all_reduces,
    examined::{ExaminedMachine, Pair},
    fail_if_any, grade_label,
    peer::{ALL_REDUCE_TIMEOUT, Greeting, Order, PeerMessage},
    remote::{NoGreeting, Remote},
};
use lockstep_protocol::numbers::plural;
use lockstep_worker::doctor::{AllGatherResult, Finding, Grade, LinkMeasurement, finding};
use serde::Serialize;
use std::{
    net::SocketAddr,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// Time limit of a probe. A probe itself has shorter limits for connecting and for each byte.
const PROBE_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of measurements of a link that seems slow.
const MAX_MEASUREMENTS: u32 = 3;
/// The expected time of the measurements is printed if there are more than this number of machines.
const MANY_MACHINES: usize = 8;

#[derive(Serialize)]
struct Report {
    hosts: Vec<ExaminedMachine>,
    pairs: Vec<Pair>,
}

/// A machine that responds.
struct Connected {
    remote: Mutex<Remote>,
    greeting: Greeting,
}

impl Connected {
    fn lock(&self) -> MutexGuard<'_, Remote> {
        self.remote.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn listen_address(&self) -> SocketAddr {
        (self.greeting.facts.address, self.greeting.port).into()
    }
}

/// Checks the machines and prints findings with advice.
///
/// # Errors
/// Exit status 2 for mistakes in the lists, 1 if a finding would prevent training on these machines.
pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let hosts = match (&args.hostfile, args.hosts.as_deref().unwrap_or_default()) {
        (Some(path), _) => read_hostfile(path)?,
        (None, list) => parse_host_list(list).map_err(|e| usage_error(format!("--hosts: {e}")))?,
    };
    let secret = format!("{}{}", uuid::Uuid::new_v4().simple(), uuid::Uuid::new_v4().simple());
    let (machines, connected) = connect(&hosts, args, &secret);
    if hosts.len() > MANY_MACHINES {
        // A round of measurements takes about 3 s.
        let secs = 3 * rounds(hosts.len()).len();
        output::warn(format_args!(
            "{} machines have {} pairs, which are measured in about {secs} s if all machines reach each other",
            hosts.len(),
            hosts.len() * (hosts.len() - 1) / 2
        ));
    }
    let mut pairs = measure(&machines, &connected);
    drop(connected);
    assess(&machines, &mut pairs);
    let report = Report { hosts: machines, pairs };
    if args.json {
        output::json(&report)?;
    } else {
        print_report(&report)?;
    }
    let findings = report.hosts.iter().flat_map(|host| &host.findings);
    let findings = findings.chain(report.pairs.iter().flat_map(|pair| &pair.findings));
    fail_if_any(findings.filter(|finding| finding.grade == Grade::Problem).count(), " on these machines")
}

/// Connects to all machines at the same time.
fn connect(hosts: &[Host], args: &Args, secret: &str) -> (Vec<ExaminedMachine>, Vec<Option<Connected>>) {
    let start = |host: &Host| Remote::start(host, &args.program, &args.options, secret);
    let started: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = hosts.iter().map(|host| scope.spawn(move || start(host))).collect();
        threads.into_iter().map(|thread| thread.join().ok()).collect()
    });
    let examine = |(host, started): (&Host, Option<Result<(Remote, String, Greeting), NoGreeting>>)| {
        let name = host.name.clone();
        let mut machine = ExaminedMachine { name, lockstep: None, facts: None, findings: Vec::new() };
        match started {
            Some(Ok((remote, lockstep, greeting))) => {
                (machine.lockstep, machine.facts) = (Some(lockstep), Some(greeting.facts.clone()));
                (machine, Some(Connected { remote: Mutex::new(remote), greeting }))
            }
            Some(Err(NoGreeting { lockstep, why, advice })) => {
                machine.lockstep = lockstep;
                machine.findings.push(finding("host", Grade::Problem, why, advice));
                (machine, None)
            }
            // The thread panicked.
            None => (machine, None),
        }
    };
    hosts.iter().zip(started).map(examine).unzip()
}

/// Measures each pair of machines that respond. Pairs without a common machine are measured at the same time.
fn measure(machines: &[ExaminedMachine], connected: &[Option<Connected>]) -> Vec<Pair> {
    let responding: Vec<_> = machines
        .iter()
        .zip(connected)
        .filter_map(|(machine, connected)| Some((machine.name.as_str(), connected.as_ref()?)))
        .collect();
    let mut measured: Vec<(usize, usize, Pair)> = Vec::new();
    for round in rounds(responding.len()) {
        let pairs: Vec<_> = std::thread::scope(|scope| {
            let measure_indexes = |(a, b): (usize, usize)| (a, b, measure_pair(responding[a], responding[b]));
            let threads: Vec<_> =
                round.into_iter().map(|pair| scope.spawn(move || measure_indexes(pair))).collect();
            threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
        });
        measured.extend(pairs);
    }
    measured.sort_by_key(|(a, b, _)| (*a, *b));
    measured.into_iter().map(|(_, _, pair)| pair).collect()
}

/// Returns rounds in which each of `count` machines is paired with another machine, until all pairs have occurred (circle method, Lucas
/// 1883).
fn rounds(count: usize) -> Vec<Vec<(usize, usize)>> {
    if count < 2 {
        return Vec::new();
    }
    // With an odd number of machines, one machine pauses in each round.
    let seats = count.next_multiple_of(2) - 1;
    let round = |r: usize| {
        let others = (1..=seats / 2).map(|i| ((r + i) % seats, (r + seats - i) % seats));
        let pairs = std::iter::once((r, seats)).chain(others);
        pairs.filter(|(a, b)| *a < count && *b < count).map(|(a, b)| (a.min(b), a.max(b))).collect()
    };
    (0..seats).map(round).collect()
}

/// Measures the link between two machines. [`assess`] later sets the pair's grade, clocks and findings.
fn measure_pair((a, machine_a): (&str, &Connected), (b, machine_b): (&str, &Connected)) -> Pair {
    // The locks are free, because no other pair of this round uses these machines.
    let (mut remote_a, mut remote_b) = (machine_a.lock(), machine_b.lock());
    let to_b = measure_link(&mut remote_a, machine_b.listen_address());
    let to_a = measure_link(&mut remote_b, machine_a.listen_address());
    let both_have_gpus = [machine_a, machine_b].iter().all(|machine| !machine.greeting.facts.gpus.is_empty());
    let nccl = (both_have_gpus && to_b.is_ok() && to_a.is_ok()).then(|| {
        let rendezvous = (machine_a.greeting.facts.address.to_string(), machine_a.greeting.meeting_port);
        run_all_reduces((a, &mut *remote_a), (b, &mut *remote_b), rendezvous)
    });
    Pair {
        a: a.into(),
        b: b.into(),
        grade: Grade::Ok,
        to_b,
        to_a,
        clock_ahead_ms: None,
        clock_within_ms: None,
        nccl,
        findings: Vec::new(),
    }
}

/// Runs all-reduces between two machines as a group of two ranks. The first machine is rank 0, to which the other connects.
fn run_all_reduces(
    (a, remote_a): (&str, &mut Remote),
    (b, remote_b): (&str, &mut Remote),
    (addr, port): (String, u16),
) -> Result<AllGatherResult, String> {
    remote_a.send(&Order::Meet { rank: 0, addr: addr.clone(), port })?;
    // After an error, rank 0 still waits for rank 1. Rank 0's late response would be taken for the response to the next order, so its
    // connection is closed.
    remote_b.send(&Order::Meet { rank: 1, addr, port }).inspect_err(|_| remote_a.close())?;
    let timeout = ALL_REDUCE_TIMEOUT + Duration::from_secs(20);
    let responses = [remote_a.wait_for_response(timeout), remote_b.wait_for_response(timeout)];
    let mut measured = None;
    for (name, response) in [a, b].iter().zip(responses) {
        match response {
            Ok(PeerMessage::Met(Ok(gathered))) => measured = measured.or(gathered),
            Ok(PeerMessage::Met(Err(why))) | Err(why) => return Err(format!("on {name}: {why}")),
            Ok(other) => return Err(format!("{name} answers {other:?}")),
        }
    }
    measured.ok_or_else(|| "rank 0 reported no measurement".to_owned())
}

/// Measures a link, and measures again if the link seems slow: a machine may be busy for a moment.
fn measure_link(remote: &mut Remote, to: SocketAddr) -> Result<LinkMeasurement, String> {
    let mut best = probe(remote, to)?;
    for _ in 1..MAX_MEASUREMENTS {
        if best.bytes_per_second >= SLOW_BYTES_PER_SECOND && best.round_trip_ms <= MAX_ROUND_TRIP_MS {
            break;
        }
        // If a repetition fails, the earlier measurement is kept.
        let Ok(repetition) = probe(remote, to) else { break };
        best = best.best(repetition);
    }
    Ok(best)
}

fn probe(remote: &mut Remote, to: SocketAddr) -> Result<LinkMeasurement, String> {
    remote.send(&Order::Probe { to })?;
    match remote.wait_for_response(PROBE_TIMEOUT)? {
        PeerMessage::Link(link) => link,
        other => Err(format!("the machine gave an unexpected answer: {other:?}")),
    }
}

/// Adds findings from the measurements.
fn assess(machines: &[ExaminedMachine], pairs: &mut [Pair]) {
    let links = pairs.iter().flat_map(|pair| [&pair.to_a, &pair.to_b]);
    let fastest = links.filter_map(|link| Some(link.as_ref().ok()?.bytes_per_second)).fold(0.0, f64::max);
    let find = |name: &str| machines.iter().find(|machine| machine.name == name);
    for pair in pairs {
        (pair.clock_ahead_ms, pair.clock_within_ms) = assessment::clock_difference(pair).unzip();
        let mut findings = assessment::pair_findings(pair, fastest);
        if let (Some(a), Some(b)) = (find(&pair.a), find(&pair.b)) {
            findings.extend(assessment::version_findings(a, b));
        }
        pair.grade = assessment::worst_grade(&findings);
        pair.findings = findings;
    }
}

fn print_report(report: &Report) -> anyhow::Result<()> {
    let names = report.hosts.iter().map(|host| host.name.len());
    let pairs = report.pairs.iter().map(|pair| pair.a.len() + pair.b.len() + 3);
    let width = names.chain(pairs).max().unwrap_or(0);
    let print_line = |grade: Grade, what: &str, found: &str| {
        output::line(format_args!("{:<8} {what:<width$}  {found}", grade_label(grade)))
    };
    let print_findings = |findings: &[Finding]| -> anyhow::Result<()> {
        for Finding { what, grade, found, advice } in findings {
            print_line(*grade, "", &format!("{what}: {found}"))?;
            if let Some(advice) = advice {
                output::line(format_args!("{:<8} {:<width$}  -> {advice}", "", ""))?;
            }
        }
        Ok(())
    };
    for host in &report.hosts {
        print_line(assessment::worst_grade(&host.findings), &host.name, &describe_host(host))?;
        print_findings(&host.findings)?;
    }
    for pair in &report.pairs {
        print_line(pair.grade, &format!("{} - {}", pair.a, pair.b), &describe_pair(pair))?;
        print_findings(&pair.findings)?;
    }
    Ok(())
}

fn describe_host(host: &ExaminedMachine) -> String {
    let version =
        host.lockstep.as_ref().map_or_else(|| "Lockstep unknown".into(), |v| format!("Lockstep {v}"));
    let Some(facts) = &host.facts else { return version };
    let interface = facts.interface.as_ref().map(|name| format!(" ({name})")).unwrap_or_default();
    let gpus = match &facts.gpus[..] {
        [] => "no GPU".to_owned(),
        [one] => one.clone(),
        [first, ..] => format!("{} GPUs, the first {first}", facts.gpus.len()),
    };
    let driver = facts.driver.as_ref().map(|v| format!(", driver {v}")).unwrap_or_default();
    let nccl = facts.nccl.as_ref().map(|v| format!(", NCCL {v}")).unwrap_or_default();
    let cores = plural(facts.cores as u64, "core");
    format!("{version} at {}{interface}: {cores}, {gpus}{driver}{nccl}", facts.address)
}

fn describe_pair(pair: &Pair) -> String {
    let mut message = match (&pair.to_b, &pair.to_a) {
        // `to_a` measures data that `a` sends.
        (Ok(to_b), Ok(to_a)) => format!(
            "round trip {}, {} there and {} back",
            assessment::format_duration(to_b.round_trip_ms.min(to_a.round_trip_ms)),
            assessment::format_speed(to_a.bytes_per_second),
            assessment::format_speed(to_b.bytes_per_second)
        ),
        _ => "one or both machines do not reach the other".into(),
    };
    if let (Some(ahead), Some(within)) = (pair.clock_ahead_ms, pair.clock_within_ms) {
        message += &format!(
            ", clocks {} apart, ± {}",
            assessment::format_duration(ahead.abs()),
            assessment::format_duration(within)
        );
    }
    if let Some(Ok(gathered)) = &pair.nccl {
        message += &format!("; NCCL: {}", describe_all_reduces(gathered));
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{collections::BTreeSet, process::Command};

    #[test]
    fn each_pair_is_measured_once_and_rounds_are_disjoint() {
        for n in [0, 1, 2, 3, 4, 5, 8, 255, 256] {
            let rounds = rounds(n);
            let mut measured = BTreeSet::new();
            for round in &rounds {
                let machines: BTreeSet<_> = round.iter().flat_map(|(a, b)| [*a, *b]).collect();
                assert_eq!(machines.len(), 2 * round.len(), "{n}: {round:?}");
                assert!(
                    round.iter().all(|pair| pair.0 < pair.1 && pair.1 < n && measured.insert(*pair)),
                    "{n}"
                );
            }
            assert_eq!(measured.len(), n * n.saturating_sub(1) / 2, "{n}");
            assert!(rounds.len() <= n, "{n}");
        }
    }

    #[test]
    fn after_a_failed_order_to_rank_1_rank_0_gets_no_more_orders() {
        // The first machine responds to every order; the connection to the second is closed.
        let mut a = Remote::run(Command::new("cat")).expect("cat");
        let mut b = Remote::run(Command::new("cat")).expect("cat");
        b.close();
        let rendezvous = ("10.0.0.1".to_owned(), 4);
        let error = run_all_reduces(("a", &mut a), ("b", &mut b), rendezvous).expect_err("no rank 1");
        assert!(error.contains("the connection is closed"), "{error}");
        // A late response to the first order must not count as the response to this order.
        let address = ([10, 0, 0, 2], 5).into();
        assert!(probe(&mut a, address).expect_err("it is closed").contains("the connection is closed"));
    }
}
