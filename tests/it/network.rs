//! Hosts as network namespaces on a bridge, each with its own addresses. Creating them needs root, which CI has.

use crate::server::signal;
use rustix::process::Signal;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
};

fn run(program: &str, args: &str) -> bool {
    let done = Command::new(program).args(args.split_whitespace()).output().expect(program);
    if !done.status.success() {
        eprintln!("{program} {args}: {}", String::from_utf8_lossy(&done.stderr));
    }
    done.status.success()
}

fn ip(args: &str) {
    assert!(run("ip", args), "ip {args}");
}

/// The strings of `/proc/PID/cmdline` or `/proc/PID/environ`; empty if the process has ended.
pub(crate) fn read_proc(pid: i32, file: &str) -> Vec<String> {
    let bytes = fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).split('\0').map(str::to_owned).collect()
}

/// The value of an environment variable of a process.
pub(crate) fn variable(pid: i32, name: &str) -> Option<String> {
    let mut strings = read_proc(pid, "environ").into_iter();
    strings.find_map(|string| Some(string.strip_prefix(name)?.strip_prefix('=')?.to_owned()))
}

/// A bridge, and hosts connected to it by cables (veth pairs). The server listens at the bridge.
pub(crate) struct Network {
    number: u32,
    hosts: Vec<u32>,
    /// Hosts with a second interface.
    with_second: Vec<u32>,
}

impl Network {
    pub(crate) fn new() -> Self {
        // Names are unique, as the kernel removes a network's cables only after the network's processes have ended. The number has at
        // most 5 digits, as names of interfaces have at most 15 characters.
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = (std::process::id() + 1009 * COUNT.fetch_add(1, Ordering::Relaxed)) % 60_000;
        let this = Self { number, hosts: Vec::new(), with_second: Vec::new() };
        ip(&format!("link add {} type bridge", this.bridge()));
        ip(&format!("addr add {}/24 dev {}", this.address(254), this.bridge()));
        ip(&format!("link set {} up", this.bridge()));
        this
    }

    fn bridge(&self) -> String {
        format!("lkb{}", self.number)
    }

    pub(crate) fn namespace(&self, host: u32) -> String {
        format!("lk{}-{host}", self.number)
    }

    /// The interface of a host's cable at the bridge.
    fn cable(&self, host: u32) -> String {
        format!("lkv{}-{host}", self.number)
    }

    fn second_cable(&self, host: u32) -> String {
        format!("lkw{}-{host}", self.number)
    }

    pub(crate) fn address(&self, host: u32) -> String {
        format!("10.77.{}.{host}", self.number % 250)
    }

    pub(crate) fn add(&mut self, host: u32) {
        let (space, cable, bridge) = (self.namespace(host), self.cable(host), self.bridge());
        ip(&format!("netns add {space}"));
        self.hosts.push(host);
        ip(&format!("link add {cable} type veth peer name eth0 netns {space}"));
        ip(&format!("link set {cable} master {bridge} up"));
        ip(&format!("-n {space} addr add {}/24 dev eth0", self.address(host)));
        ip(&format!("-n {space} link set eth0 up"));
        ip(&format!("-n {space} link set lo up"));
    }

    /// The address of a host's second interface.
    pub(crate) fn second_address(&self, host: u32) -> String {
        format!("10.78.{}.{host}", self.number % 250)
    }

    /// Gives a host a second interface, `eth1`, in another network.
    pub(crate) fn add_second(&mut self, host: u32) {
        let (space, cable) = (self.namespace(host), self.second_cable(host));
        self.with_second.push(host);
        ip(&format!("link add {cable} type veth peer name eth1 netns {space}"));
        ip(&format!("link set {cable} master {} up", self.bridge()));
        ip(&format!("-n {space} addr add {}/24 dev eth1", self.second_address(host)));
        ip(&format!("-n {space} link set eth1 up"));
    }

    /// The folder whose files replace those of /etc under `ip netns exec`.
    fn etc(&self, host: u32) -> PathBuf {
        Path::new("/etc/netns").join(self.namespace(host))
    }

    /// Gives hosts names that resolve on all hosts: host N is `nodeN`.
    pub(crate) fn name_hosts(&self) {
        let line = |host: &u32| format!("{} node{host}\n", self.address(*host));
        let hosts =
            self.hosts.iter().map(line).fold("127.0.0.1 localhost\n".to_owned(), |all, one| all + &one);
        for host in &self.hosts {
            fs::create_dir_all(self.etc(*host)).expect("a folder");
            fs::write(self.etc(*host).join("hosts"), &hosts).expect("a hosts file");
        }
    }

    /// Wraps a command to run on a host, whose host name is `nodeN`.
    pub(crate) fn on(&self, host: u32, command: &Command) -> Command {
        let mut wrapped = Command::new("ip");
        wrapped.args(["netns", "exec", &self.namespace(host), "unshare", "--uts", "sh", "-c"]);
        wrapped.args(["hostname \"$0\" && exec \"$@\"", &format!("node{host}")]);
        wrapped.arg(command.get_program()).args(command.get_args());
        wrapped.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        if let Some(folder) = command.get_current_dir() {
            wrapped.current_dir(folder);
        }
        wrapped
    }

    /// Bytes that a host has sent over an interface.
    pub(crate) fn sent_bytes(&self, host: u32, interface: &str) -> u64 {
        let file = format!("/sys/class/net/{interface}/statistics/tx_bytes");
        let output = Command::new("ip").args(["netns", "exec", &self.namespace(host), "cat", &file]).output();
        String::from_utf8_lossy(&output.expect("ip").stdout).trim().parse().expect("a number")
    }

    /// Processes on a host.
    pub(crate) fn processes(&self, host: u32) -> Vec<i32> {
        let pids = Command::new("ip").args(["netns", "pids", &self.namespace(host)]).output().expect("ip");
        String::from_utf8_lossy(&pids.stdout).lines().filter_map(|pid| pid.trim().parse().ok()).collect()
    }

    /// The values of a variable in the ranks on a host.
    pub(crate) fn variable_of_ranks(&self, host: u32, name: &str) -> Vec<String> {
        let is_rank = |pid: &i32| read_proc(*pid, "cmdline").get(1).is_some_and(|word| word == "rank");
        self.processes(host).into_iter().filter(is_rank).filter_map(|pid| variable(pid, name)).collect()
    }

    /// Kills all processes of a host and disconnects its cable.
    pub(crate) fn kill(&self, host: u32) {
        self.processes(host).into_iter().for_each(|pid| signal(pid, Signal::KILL));
        self.set_connected(host, false);
    }

    /// Connects or disconnects a host's cable.
    pub(crate) fn set_connected(&self, host: u32, is_connected: bool) {
        ip(&format!("link set {} {}", self.cable(host), if is_connected { "up" } else { "down" }));
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for host in &self.with_second {
            run("ip", &format!("link del {}", self.second_cable(*host)));
        }
        for host in &self.hosts {
            run("ip", &format!("link del {}", self.cable(*host)));
            run("ip", &format!("netns del {}", self.namespace(*host)));
            let _ = fs::remove_dir_all(self.etc(*host));
        }
        run("ip", &format!("link del {}", self.bridge()));
    }
}
