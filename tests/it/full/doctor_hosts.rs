//! `lockstep doctor --hosts`: three hosts, each a network namespace with a real sshd. One host has a slow link, one has another version,
//! and a firewall separates two hosts.

use crate::{
    cluster::Sshd,
    network::Network,
    server::{Finished, Folder, LOCKSTEP, lockstep, training_permit},
};
use serde_json::Value;
use std::{fs, os::unix::fs::PermissionsExt as _, process::Command};

/// Three hosts.
struct Hosts {
    // The first field, so that the servers end before their namespaces are removed.
    sshds: Vec<Sshd>,
    network: Network,
    folder: Folder,
}

impl Hosts {
    fn new() -> Self {
        let folder = Folder::new();
        let mut network = Network::new();
        let start = |host: u32| {
            network.add(host);
            Sshd::start_in(folder.path(), &network.namespace(host), &network.address(host))
        };
        let sshds = (1..=3).map(start).collect();
        Self { sshds, network, folder }
    }

    /// Runs `lockstep doctor` on hosts that have this program.
    fn doctor(&self, hosts: &[&str], program: &str) -> Finished {
        let mut command = lockstep();
        command.current_dir(self.folder.path()).args(["doctor", "--json", "--hosts", &hosts.join(",")]);
        command.args(["--program", program, "--"]).args(self.sshds[0].options(22));
        Finished::of(&mut command)
    }

    fn in_host(&self, host: u32, program: &str, args: &str) {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.network.namespace(host), program]).args(args.split_whitespace());
        assert!(command.status().expect(program).success(), "{program} {args}");
    }
}

fn pair<'a>(report: &'a Value, a: &str, b: &str) -> &'a Value {
    let pairs = report["pairs"].as_array().expect("pairs");
    pairs
        .iter()
        .find(|pair| pair["a"] == a && pair["b"] == b)
        .unwrap_or_else(|| panic!("{a} {b}: {report:#}"))
}

/// The findings of one kind: (grade, text).
fn findings<'a>(report: &'a Value, what: &str) -> Vec<(&'a str, &'a str)> {
    let findings = report["findings"].as_array().expect("findings").iter().filter(|one| one["what"] == what);
    let text = |one: &'a Value, key: &str| one[key].as_str().unwrap_or_default();
    findings
        .map(|one| {
            assert!(text(one, "advice").len() > 20, "advice for {one:#}");
            (text(one, "grade"), text(one, "found"))
        })
        .collect()
}

#[tokio::test]
async fn each_pair_of_hosts_is_measured_and_problems_name_the_pair() {
    let _permit = training_permit().await;
    let hosts = Hosts::new();
    let names = [1, 2, 3].map(|host| hosts.network.address(host));
    let [one, two, three] = names.each_ref().map(String::as_str);
    // The second host reports an older version, as a machine that was not updated.
    let old = hosts.folder.path().join("lockstep");
    let script = format!(
        "#!/bin/sh\n[ \"$1\" = --version ] && case \"$SSH_CONNECTION\" in *' {two} 22') echo lockstep 0.0.1; exit;; esac\n\
         exec {LOCKSTEP} \"$@\"\n"
    );
    fs::write(&old, script).expect("a program");
    fs::set_permissions(&old, fs::Permissions::from_mode(0o755)).expect("its mode");
    let program = old.to_str().expect("a path");
    // The third host has a slow link, much slower than the others even on a busy machine, and a firewall drops its packets to the
    // first host.
    hosts.in_host(3, "tc", "qdisc add dev eth0 root tbf rate 4mbit burst 32kb latency 100ms");
    hosts.in_host(3, "ip", &format!("rule add to {one} prohibit priority 20"));

    let done = hosts.doctor(&[one, two, three], program);
    assert_eq!(done.status, 1, "{}{}", done.stdout, done.stderr);
    let report: Value = serde_json::from_str(&done.stdout).expect("JSON");
    assert_eq!(report["pairs"].as_array().map(Vec::len), Some(3), "{report:#}");
    let host = &report["hosts"][1];
    assert_eq!(
        (&host["lockstep"], &host["address"], &host["interface"]),
        (&"0.0.1".into(), &two.into(), &"eth0".into())
    );

    // The first two hosts differ only in the version.
    let good = pair(&report, one, two);
    let version = findings(good, "Lockstep");
    assert!(version.len() == 1 && version[0].0 == "problem" && version[0].1.contains("0.0.1 on"), "{good:#}");
    assert_eq!(good["grade"], "problem");
    for direction in ["to_a", "to_b"] {
        assert!(good[direction]["round_trip_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{good:#}");
    }
    assert!(findings(good, "speed").iter().all(|(grade, _)| *grade != "problem"), "{good:#}");
    let clocks = ["clock_ahead_ms", "clock_within_ms"].map(|key| good[key].as_f64().expect("a number"));
    assert!(clocks[0].abs() <= clocks[1] + 1.0, "one clock: {good:#}");
    assert_eq!(good["nccl"], Value::Null);

    // The first and the third host cannot reach each other.
    let blocked = pair(&report, one, three);
    let reach = findings(blocked, "reach");
    assert_eq!(reach.len(), 2, "{blocked:#}");
    assert!(
        reach.iter().all(|(grade, found)| *grade == "problem" && found.contains("does not reach")),
        "{reach:?}"
    );
    assert!(reach[0].1.starts_with(one) && reach[1].1.starts_with(three), "{reach:?}");

    // Traffic from the third host is slow, traffic to it is not.
    let slow = pair(&report, two, three);
    let speed = findings(slow, "speed");
    assert_eq!(speed.len(), 1, "{slow:#}");
    assert!(speed[0].0 == "problem" && speed[0].1.contains(&format!("from {three} to {two}")), "{slow:#}");
    let from_third = slow["to_b"]["bytes_per_second"].as_f64().expect("a number");
    assert!((1e5..1e6).contains(&from_third), "4 Mbit/s are 0.5 MB/s less headers: {slow:#}");
    for direction in [&slow["to_a"], &good["to_a"], &good["to_b"]] {
        assert!(
            direction["bytes_per_second"].as_f64().is_some_and(|speed| speed > 4.0 * from_third),
            "{report:#}"
        );
    }

    // Without these faults no problem is reported.
    hosts.in_host(3, "tc", "qdisc del dev eth0 root");
    hosts.in_host(3, "ip", "rule del priority 20");
    let file = hosts.folder.write("hosts", format!("{one} slots=1\n{three} env:NCCL_SOCKET_IFNAME=eth0\n"));
    let mut command = lockstep();
    command.current_dir(hosts.folder.path()).args(["doctor", "--hostfile"]).arg(file);
    let done = Finished::of(command.args(["--program", LOCKSTEP, "--"]).args(hosts.sshds[0].options(22)));
    let output = done.ok();
    assert!(
        output.contains(&format!("{one} - {three}  round trip ")) && output.contains(" apart, ± "),
        "{output}"
    );
    assert!(!output.contains("PROBLEM"), "{output}");
}

#[tokio::test]
async fn other_hosts_are_measured_if_one_does_not_respond() {
    let _permit = training_permit().await;
    let mut hosts = Hosts::new();
    let [one, two, three] = [1, 2, 3].map(|host| hosts.network.address(host));
    drop(hosts.sshds.remove(1));
    let done = hosts.doctor(&[&one, &two, &three], LOCKSTEP);
    assert_eq!(done.status, 1, "{}{}", done.stdout, done.stderr);
    let report: Value = serde_json::from_str(&done.stdout).expect("JSON");
    let host = findings(&report["hosts"][1], "host");
    assert!(
        host[0].0 == "problem"
            && host[0].1.contains("cannot be reached by ssh")
            && host[0].1.contains("refused"),
        "{host:?}"
    );
    assert_eq!(report["pairs"].as_array().map(Vec::len), Some(1), "{report:#}");
    assert_ne!(pair(&report, &one, &three)["grade"], "problem", "{report:#}");

    let done = hosts.doctor(&[&one], "/nowhere/lockstep");
    assert!(
        done.stdout.contains("cannot run lockstep") && done.stdout.contains("--program"),
        "{}",
        done.stdout
    );
    // A version without this command.
    let old = hosts.folder.path().join("old");
    fs::write(&old, "#!/bin/sh\n[ \"$1\" = --version ] && echo lockstep 0.0.1 && exit\necho \"error: unexpected argument '--peer' found\" >&2\nexit 2\n")
        .expect("a program");
    fs::set_permissions(&old, fs::Permissions::from_mode(0o755)).expect("its mode");
    let done = hosts.doctor(&[&one], old.to_str().expect("a path"));
    assert!(
        done.stdout.contains("its Lockstep 0.0.1 cannot examine the machine: error: unexpected argument"),
        "{}",
        done.stdout
    );

    for (args, message) in [
        (&["--hosts", "a,a"][..], "a is named twice"),
        (&["--hosts", ""], "not a machine's name"),
        (&["--hosts", "a", "--ranks", "2"], "cannot be used with"),
        (&["--quick", "--", "-v"], "give --hosts"),
    ] {
        let done = Finished::of(lockstep().arg("doctor").args(args));
        assert!(done.status == 2 && done.stderr.contains(message), "{args:?}: {}", done.stderr);
    }
}
