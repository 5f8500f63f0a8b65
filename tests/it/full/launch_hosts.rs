//! Launches over two hosts, which are network namespaces. On each host a real sshd starts agents or Open MPI's daemons. Neither host has
//! the server's disk.

use crate::{
    cluster::{Slurm, Sshd},
    full::hosts::Site,
    network::{read_proc, variable},
    server::{Finished, Folder, LOCKSTEP, lockstep, training_permit},
};
use serde_json::{Value, json};
use std::{fs, path::PathBuf};

const STEPS: u64 = 200;
/// Steps of jobs that the test cancels.
const ENDLESS: u64 = 1_000_000;

/// The launchers that start the agents.
const LAUNCHERS: [&str; 2] = ["ssh", "mpirun"];

struct Cluster {
    // The first field, so that the servers end before their namespaces are removed.
    sshds: Vec<Sshd>,
    site: Site,
}

impl Cluster {
    /// Starts two hosts, and returns the weights of a job of two ranks on a third host.
    async fn with_reference_weights() -> (Self, Vec<u8>) {
        let mut this = Self::new().await;
        let id = this.site.submit_ranks(2, STEPS).await;
        let (_, model) = this.site.wait_for_success(&id).await;
        this.site.leave("whole");
        (this, model)
    }

    /// Starts two hosts, and a third host whose agent has inspected a dataset.
    async fn new() -> Self {
        let mut site = Site::new().await;
        (1..=3).for_each(|host| site.network.add(host));
        site.join(3, "whole", 2);
        site.until_online(&["whole"]).await;
        site.register_pictures();
        let mut this = Self { sshds: Vec::new(), site };
        for host in [1, 2] {
            this.sshds.push(this.sshd(host));
        }
        this
    }

    fn folder(&self) -> &Folder {
        &self.site.serve.folder
    }

    fn sshd(&self, host: u32) -> Sshd {
        let (folder, network) = (self.folder().path(), &self.site.network);
        Sshd::start_without(folder, &network.namespace(host), &network.address(host), &folder.join("data"))
    }

    /// A hostfile with the second host first.
    fn hostfile(&self) -> PathBuf {
        let [one, two] = [1, 2].map(|host| self.site.network.address(host));
        let text = format!("{two} slots=1 env:NOTE=\"of the second\"\n{one} slots=1 env:NOTE=first\n");
        self.folder().write("hosts", text)
    }

    fn launch(&self, id: &str, launcher: &str, hosts: &[&str], more: &[&str]) -> Finished {
        let ssh = self.sshds[0].options(22);
        let options = match launcher {
            "ssh" => ssh,
            _ => {
                let network = format!("{}/24", self.site.network.address(0));
                let agent = format!("ssh {}", ssh.join(" "));
                let daemons = ["--mca", "plm_rsh_agent", &agent, "--mca", "oob_tcp_if_include", &network];
                [&["--allow-run-as-root"][..], &daemons].concat().into_iter().map(str::to_owned).collect()
            }
        };
        let dir = self.folder().path().join("launch");
        let dir = dir.to_str().expect("UTF-8");
        let mut args = vec!["launch", id, "--with", launcher, "--program", LOCKSTEP, "--dir", dir];
        args.extend(hosts.iter().chain(more));
        args.push("--");
        args.extend(options.iter().map(String::as_str));
        self.site.cli(&args)
    }

    /// Waits until sshd is the only process on a host.
    async fn until_empty(&self, host: u32) {
        let listener = self.sshds[host as usize - 1].pid();
        let what = format!("only sshd is left on host {host}");
        self.site.until(&what, async || self.site.network.processes(host) == [listener]).await;
    }

    /// Whether the agents of a job are on these hosts, in this order.
    fn are_on(&self, job: &Value, hosts: &[u32]) -> bool {
        let agents = job["agents"].as_array().expect("agents");
        let is_on = |(agent, host): (&Value, &u32)| {
            agent
                .as_str()
                .is_some_and(|name| name.contains(&format!("-{}-", self.site.network.address(*host))))
        };
        agents.len() == hosts.len() && agents.iter().zip(hosts).all(is_on)
    }
}

#[tokio::test]
async fn two_hosts_train_to_one_host_s_weights_and_cancelled_jobs_leave_no_process() {
    let _permit = training_permit().await;
    let (cluster, reference_weights) = Cluster::with_reference_weights().await;
    let site = &cluster.site;
    let hosts = cluster.hostfile();
    let hosts = ["--hostfile", hosts.to_str().expect("UTF-8")];
    for launcher in LAUNCHERS {
        let id = site.submit_ranks(2, STEPS).await;
        cluster.launch(&id, launcher, &hosts, &[]).ok();
        let (job, weights) = site.wait_for_success(&id).await;
        assert!(cluster.are_on(&job, &[2, 1]), "{launcher}: in the hostfile's order: {job:#}");
        assert!(weights == reference_weights, "{launcher}: the same weights");
        for host in [1, 2] {
            cluster.until_empty(host).await;
        }

        let id = site.submit_ranks(2, ENDLESS).await;
        cluster.launch(&id, launcher, &hosts, &["--detach"]).ok();
        site.until_step(&id, 5).await;
        assert_eq!(
            [1, 2].map(|host| site.network.variable_of_ranks(host, "NOTE")),
            [vec!["first".to_owned()], vec!["of the second".to_owned()]],
            "{launcher}"
        );
        site.cli(&["cancel", &id]).ok();
        for host in [1, 2] {
            cluster.until_empty(host).await;
        }
        // If an agent ended before it could report, the job is cancelled when its lease expires.
        site.until("the job is cancelled", async || {
            site.get(&format!("/jobs/{id}")).await["state"] == "cancelled"
        })
        .await;
    }
}

#[tokio::test]
async fn a_host_that_dies_is_named_and_a_second_launch_continues_without_it() {
    let _permit = training_permit().await;
    let (mut cluster, reference_weights) = Cluster::with_reference_weights().await;
    for launcher in LAUNCHERS {
        let site = &cluster.site;
        let hosts = cluster.hostfile();
        let id = site.submit_ranks(2, STEPS).await;
        cluster.launch(&id, launcher, &["--hostfile", hosts.to_str().expect("UTF-8")], &["--detach"]).ok();
        site.until_step(&id, 45).await;
        site.network.kill(1);
        let attempts = format!("/jobs/{id}/attempts");
        let dead = site.network.address(1);
        site.until("the dead host is reported", async || {
            let all = site.get(&attempts).await;
            let first =
                all["attempts"].as_array().expect("attempts").iter().find(|one| one["attempt"] == 1).cloned();
            let reason = first.map(|first| first["reason"].to_string()).unwrap_or_default();
            // mpirun ends the other agent, perhaps before the dead agent's lease expires.
            reason.contains(&dead) || launcher == "mpirun" && reason.contains("was shut down")
        })
        .await;
        let job = site.get(&format!("/jobs/{id}")).await;
        assert!(["queued", "restarting"].iter().any(|state| job["state"] == *state), "{launcher}: {job:#}");
        // The other host gets slots for both ranks.
        let other_host = format!("{}:2", site.network.address(2));
        cluster.launch(&id, launcher, &["-H", &other_host], &[]).ok();
        let (job, weights) = site.wait_for_success(&id).await;
        assert!(cluster.are_on(&job, &[2]) && job["attempt"] == json!(2), "{launcher}: {job:#}");
        assert!(weights == reference_weights, "{launcher}: the same weights after a host was lost");
        cluster.until_empty(2).await;
        cluster.site.network.set_connected(1, true);
        cluster.sshds[0] = cluster.sshd(1);
    }
}

#[tokio::test]
async fn a_rank_table_decides_which_host_has_rank_0() {
    let _permit = training_permit().await;
    let (cluster, reference_weights) = Cluster::with_reference_weights().await;
    let site = &cluster.site;
    let server = |host: u32, rank: u32| {
        let device = json!({"device_id": "0", "device_ip": "192.168.0.1", "rank_id": rank.to_string()});
        json!({"server_id": site.network.address(host), "device": [device], "host_nic_ip": "reserve"})
    };
    // As other tools write a table: servers sorted by address, not by rank.
    let list = json!([server(1, 1), server(2, 0)]);
    let table = json!({"version": "1.0", "server_count": "2", "server_list": list, "status": "completed"});
    let table = cluster.folder().write("table.json", table.to_string());
    let table = ["--rank-table", table.to_str().expect("UTF-8")];
    let id = site.submit_ranks(2, STEPS).await;
    cluster.launch(&id, "ssh", &table, &[]).ok();
    let (job, weights) = site.wait_for_success(&id).await;
    assert!(cluster.are_on(&job, &[2, 1]), "in the order of the ranks: {job:#}");
    assert!(weights == reference_weights, "the same weights");
    for host in [1, 2] {
        cluster.until_empty(host).await;
    }
}

/// Slurm sorts lists of machines by its own rules.
#[tokio::test]
async fn machines_of_a_hostfile_keep_their_slots_and_order_under_slurm() {
    let _permit = training_permit().await;
    let mut cluster = Cluster::new().await;
    cluster.site.leave("whole");
    let site = &cluster.site;
    let slurm = Slurm::start(cluster.folder().path(), 2);
    let id = site.submit_ranks(3, ENDLESS).await;
    let hosts = cluster.folder().write("nodes", "n1 slots=1\nn0 slots=2\n");
    let mut launch = lockstep();
    launch
        .args(["launch", &id, "--with", "slurm", "--detach", "--program", LOCKSTEP, "--hostfile"])
        .arg(hosts);
    launch.arg("--dir").arg(cluster.folder().path().join("launch"));
    launch.args(["--server", &site.url, "--ca-file"]).arg(&site.ca).env("SLURM_CONF", slurm.config());
    launch.arg("--token-file").arg(cluster.folder().path().join("data/token"));
    Finished::of(launch.current_dir(cluster.folder().path())).ok();
    site.until_step(&id, 5).await;
    let job = site.get(&format!("/jobs/{id}")).await;
    let agents: Vec<_> = job["agents"].as_array().expect("agents").iter().filter_map(Value::as_str).collect();
    assert!(agents.len() == 2 && agents[0].contains("-0-n1-") && agents[1].contains("-1-n0-"), "{agents:?}");
    let pids = fs::read_dir("/proc")
        .expect("processes")
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let pids: Vec<i32> = pids.collect();
    for (agent, node) in agents.iter().zip(["n1", "n0"]) {
        let is_agent = |pid: &&i32| {
            read_proc(**pid, "cmdline").windows(2).any(|pair| pair[0] == "--name" && pair[1] == *agent)
        };
        let pid = pids.iter().find(is_agent).expect("its process");
        assert_eq!(variable(*pid, "SLURMD_NODENAME").as_deref(), Some(node), "{agent}");
    }
    site.cli(&["cancel", &id]).ok();
    slurm.until("Slurm's job has ended", |slurm| slurm.run("squeue", &["-h"]).trim().is_empty());
    // Slurm's folder is in the server's folder.
    drop(slurm);
}
