//! A Slurm cluster on this machine, of Debian's packages: munged, slurmctld, and a slurmd for each node.

use super::{program, run_ok, terminate};
use crate::{
    network::read_proc,
    server::{Process, TIMEOUT, free_port},
};
use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

pub(crate) struct Slurm {
    folder: PathBuf,
    nodes: Vec<String>,
}

impl Slurm {
    /// A cluster whose nodes have two cores each.
    pub(crate) fn start(folder: &Path, nodes: u16) -> Self {
        Self::start_with(folder, nodes, 2, 30)
    }

    /// A cluster with this number of cores per node, which sends SIGKILL `kill_wait_secs` after SIGTERM.
    pub(crate) fn start_with(folder: &Path, nodes: u16, cores: u16, kill_wait_secs: u64) -> Self {
        let folder = folder.join("slurm");
        fs::create_dir_all(folder.join("state")).expect("a folder");
        // munged refuses a socket in a folder to which others can write.
        for path in [folder.parent().expect("a parent"), &folder] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("a mode");
        }
        let shown = folder.display();
        let key = folder.join("munge.key");
        fs::write(&key, [7_u8; 1024]).expect("a key");
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).expect("a mode");
        let option = |name: &str, file: &str| format!("--{name}={shown}/{file}");
        let mut munged = Command::new(program("munged", "munge"));
        munged.args([
            option("key-file", "munge.key"),
            option("socket", "munge.socket"),
            option("pid-file", "munged.pid"),
        ]);
        munged.args([option("log-file", "munged.log"), option("seed-file", "munge.seed"), "--force".into()]);
        run_ok(&mut munged);
        let host = run_ok(&mut Command::new("hostname"));
        let host = host.trim();
        let ports: Vec<_> = (0..nodes).map(|_| free_port()).collect();
        let mut config = format!(
            "ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={}\nAuthType=auth/munge\nAuthInfo=socket={shown}/munge.socket\n\
             SlurmUser=root\nSlurmdUser=root\nStateSaveLocation={shown}/state\nSlurmdSpoolDir={shown}/spool.%n\n\
             SlurmctldPidFile={shown}/slurmctld.pid\nSlurmdPidFile={shown}/slurmd.%n.pid\nSlurmctldLogFile={shown}/slurmctld.log\n\
             SlurmdLogFile={shown}/slurmd.%n.log\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none\n\
             SchedulerType=sched/builtin\nSelectType=select/cons_tres\nSelectTypeParameters=CR_Core\nReturnToService=2\nMailProg=/bin/true\n\
             SlurmdTimeout=5\nKillWait={kill_wait_secs}\nOverTimeLimit=0\nSlurmdParameters=config_overrides\n",
            free_port()
        );
        for (node, port) in ports.iter().enumerate() {
            config += &format!(
                "NodeName=n{node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cores} State=UNKNOWN\n"
            );
        }
        config += "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n";
        fs::write(folder.join("slurm.conf"), config).expect("a configuration");
        let nodes: Vec<_> = (0..nodes).map(|node| format!("n{node}")).collect();
        let slurm = Self { folder, nodes };
        run_ok(&mut slurm.command("slurmctld", "slurmctld"));
        for node in &slurm.nodes {
            fs::create_dir_all(slurm.folder.join(format!("spool.{node}"))).expect("a folder");
            run_ok(slurm.command("slurmd", "slurmd").args(["-N", node]));
        }
        slurm.until("all nodes are idle", |slurm| {
            // sinfo fails until the controller responds.
            let output = slurm.client("sinfo", &["-h", "-N", "-o", "%T"]).output().expect("sinfo");
            let states = String::from_utf8_lossy(&output.stdout).into_owned();
            states.lines().count() == slurm.nodes.len() && states.lines().all(|state| state == "idle")
        });
        slurm
    }

    /// A command of Slurm for this cluster, from one of Debian's packages.
    fn command(&self, name: &str, package: &str) -> Command {
        let mut command = Command::new(program(name, package));
        command.env("SLURM_CONF", self.config()).current_dir(&self.folder);
        command
    }

    pub(crate) fn config(&self) -> PathBuf {
        self.folder.join("slurm.conf")
    }

    /// One of the commands with which users control Slurm.
    fn client(&self, name: &str, args: &[&str]) -> Command {
        let mut command = self.command(name, "slurm-client");
        command.args(args);
        command
    }

    /// Runs a command of Slurm and returns its output.
    pub(crate) fn run(&self, name: &str, args: &[&str]) -> String {
        run_ok(&mut self.client(name, args))
    }

    /// A field of a job from `squeue`; empty once Slurm has forgotten the job.
    pub(crate) fn field(&self, job: &str, field: &str) -> String {
        let output = self.client("squeue", &["-h", "-t", "all", "-j", job, "-o", field]).output();
        String::from_utf8_lossy(&output.expect("squeue").stdout).trim().to_owned()
    }

    /// The number of the only job.
    pub(crate) fn job(&self) -> String {
        self.until("there is a job", |slurm| !slurm.run("squeue", &["-h", "-o", "%i"]).trim().is_empty());
        self.run("squeue", &["-h", "-o", "%i"]).trim().to_owned()
    }

    /// Kills a node's daemon and all processes that the daemon has started, as a power failure does.
    pub(crate) fn kill_node(&self, node: &str) {
        let step = format!("slurmstepd: [{}.", self.job());
        let daemon =
            fs::read_to_string(self.folder.join(format!("slurmd.{node}.pid"))).expect("its process id");
        kill(daemon.trim().parse().expect("a number"));
        let pids: Vec<i32> = fs::read_dir("/proc")
            .expect("processes")
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .collect();
        // Processes of this cluster have its configuration in their environment. slurmstepd hides its environment, and has the same name on all
        // nodes, so the parents of a node's processes are killed, too.
        let on_node: Vec<_> = pids.iter().copied().filter(|pid| self.is_on(*pid, node)).collect();
        let parents: Vec<_> = on_node.iter().filter_map(|pid| Process::parent_of(*pid)).collect();
        let is_step = |pid: &&i32| parents.contains(pid) && read_proc(**pid, "cmdline")[0].starts_with(&step);
        pids.iter().filter(is_step).chain(&on_node).for_each(|pid| kill(*pid));
    }

    /// Whether a process runs on a node of this cluster, according to its environment.
    fn is_on(&self, pid: i32, node: &str) -> bool {
        let folder = self.folder.to_string_lossy();
        let environment = read_proc(pid, "environ");
        environment.iter().any(|word| *word == format!("SLURMD_NODENAME={node}"))
            && environment.iter().any(|word| word.contains(&*folder))
    }

    /// Starts a requeued job as soon as possible; Slurm would delay it by two minutes.
    pub(crate) fn start_now(&self, job: &str) {
        self.until("Slurm's job is queued again", |slurm| slurm.field(job, "%T") == "PENDING");
        // slurmd compares whole seconds: a run that starts in the second in which the last run was killed counts as killed, too.
        std::thread::sleep(Duration::from_secs(2));
        self.until("Slurm's job runs again", |slurm| {
            // Slurm refuses the update while it cleans up after the job's last run.
            let _ = slurm.client("scontrol", &["update", &format!("JobId={job}"), "StartTime=now"]).output();
            slurm.field(job, "%T") == "RUNNING"
        });
    }

    /// Waits until a cancelled job has ended.
    pub(crate) fn until_ended(&self, job: &str) {
        self.until("Slurm's job has ended", |slurm| {
            ["", "COMPLETED", "FAILED"].contains(&&*slurm.field(job, "%T"))
        });
    }

    /// Starts a node's daemon again.
    pub(crate) fn start_node(&self, node: &str) {
        run_ok(self.command("slurmd", "slurmd").args(["-N", node]));
    }

    /// Waits for a condition.
    pub(crate) fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + 2 * TIMEOUT;
        while !holds(self) {
            if Instant::now() > deadline {
                let queue = self.client("squeue", &["-t", "all"]).output().expect("squeue");
                panic!("not in time: {what}; {}", String::from_utf8_lossy(&queue.stdout));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

fn kill(pid: i32) {
    crate::server::signal(pid, rustix::process::Signal::KILL);
}

impl Drop for Slurm {
    fn drop(&mut self) {
        let _ = self.client("scancel", &["--quiet", "--user=root"]).output();
        for node in &self.nodes {
            terminate(&self.folder.join(format!("slurmd.{node}.pid")));
        }
        terminate(&self.folder.join("slurmctld.pid"));
        terminate(&self.folder.join("munged.pid"));
    }
}
