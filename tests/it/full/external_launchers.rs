//! Ranks started by torchrun, Open MPI, Slurm or with MindSpore's variables, or placed by a rank table, give the same weights as on one
//! machine. The command lines are those of docs/launchers.md, except for the output folder.

use crate::{
    cluster::{Slurm, Sshd},
    network::Network,
    pages,
    server::free_port,
    tensors::tensors,
    train::{Bench, assert_success},
};
use serde_json::json;
use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt as _,
    process::{Command, Output, Stdio},
    sync::LazyLock,
};

/// A lower bound of the gradients that each node sends to the other in 24 steps.
const MIN_GRADIENT_BYTES: u64 = 1 << 20;

/// Simulates MindSpore's msrun, whose package has 800 MB.
const MSRUN: &str = include_str!("msrun.py");

/// Runs commands at the same time and returns their outputs.
fn run_together(commands: Vec<Command>) -> Vec<Output> {
    let start = |mut command: Command| {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts")
    };
    let running: Vec<_> = commands.into_iter().map(start).collect();
    running.into_iter().map(|child| child.wait_with_output().expect("it ends")).collect()
}

/// Two nodes, node1 and node2, which are network namespaces. Tests switch shared memory off, which namespaces do not separate.
fn nodes() -> Network {
    let mut network = Network::new();
    [1, 2].into_iter().for_each(|host| network.add(host));
    network.name_hosts();
    network
}

/// Whether a run of four ranks on each of two nodes has the weights of eight ranks on one machine, which are trained once for all
/// tests.
fn has_expected_weights(bench: &Bench, out: &str) -> bool {
    static ALONE: LazyLock<BTreeMap<String, Vec<u8>>> = LazyLock::new(|| {
        let bench = Bench::without_permit();
        bench.train_to_success("alone", &["--ranks", "8"]);
        tensors(&bench.model("alone", "2-24"))
    });
    tensors(&bench.model(out, "2-24")) == *ALONE
}

/// Asserts that only rank 0 reported the result, and that the ranks used TCP.
fn assert_rank_0_reported_all(output: &str) {
    assert_eq!(output.matches("succeeded: validation accuracy").count(), 1, "only rank 0 reports: {output}");
    assert!(output.contains("over TCP"), "{output}");
}

fn assert_gradients_sent(network: &Network) {
    for host in [1, 2] {
        let sent = network.sent_bytes(host, "eth0");
        assert!(sent > MIN_GRADIENT_BYTES, "node {host} has sent {sent} bytes");
    }
}

#[tokio::test]
async fn srun_starts_four_ranks_on_each_of_two_nodes() {
    let bench = Bench::new().await;
    let slurm = Slurm::start_with(bench.folder.path(), 2, 4, 30);
    let mut srun = bench.line(&pages::line("docs/launchers.md", "srun "), "srun");
    // The nodes' names do not resolve.
    srun.envs([("MASTER_ADDR", "127.0.0.1"), ("LOCKSTEP_SHARED_MEMORY", "0")]);
    assert_rank_0_reported_all(&assert_success(
        &srun.env("SLURM_CONF", slurm.config()).output().expect("it runs"),
    ));
    assert!(has_expected_weights(&bench, "srun"));
}

/// torchrun runs on both nodes.
#[tokio::test]
async fn torchrun_starts_four_ranks_on_each_of_two_nodes() {
    let bench = Bench::new().await;
    let network = nodes();
    let on = |host: u32| {
        let mut torchrun = bench.line(&pages::line("docs/launchers.md", "torchrun "), "torchrun");
        torchrun.env("LOCKSTEP_SHARED_MEMORY", "0");
        // Redirects only rank 9, which does not exist: without a value, Debian's PyTorch 1.13 fails under Python 3.11.
        torchrun.envs([("PET_REDIRECTS", "9:1"), ("PET_TEE", "9:1")]);
        network.on(host, &torchrun)
    };
    let output: String = run_together(vec![on(1), on(2)]).iter().map(assert_success).collect();
    assert_rank_0_reported_all(&output);
    assert_gradients_sent(&network);
    assert!(has_expected_weights(&bench, "torchrun"));
}

/// mpirun starts its daemon on the second node through the node's sshd.
#[tokio::test]
async fn mpirun_starts_four_ranks_on_each_of_two_nodes() {
    let bench = Bench::new().await;
    let network = nodes();
    let mut mpirun = bench.line(&pages::line("docs/launchers.md", "mpirun "), "mpirun");
    let variables = ["LOCKSTEP_SHARED_MEMORY=0", &format!("PATH={}", pages::path())];
    let sshd = Sshd::start_with(bench.folder.path(), &network.namespace(2), &network.address(2), &variables);
    mpirun
        .env("LOCKSTEP_SHARED_MEMORY", "0")
        .env("OMPI_MCA_plm_rsh_agent", format!("ssh {}", sshd.options(22).join(" ")));
    // Tests run as root, and the machine may have fewer cores than ranks.
    mpirun.envs(["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"].map(|name| (name, "1")));
    mpirun.envs([("OMPI_MCA_rmaps_base_oversubscribe", "1"), ("OMPI_MCA_hwloc_base_binding_policy", "none")]);
    assert_rank_0_reported_all(&assert_success(&network.on(1, &mpirun).output().expect("it runs")));
    assert_gradients_sent(&network);
    assert!(has_expected_weights(&bench, "mpirun"));
}

#[tokio::test]
async fn msrun_starts_four_ranks_on_each_of_two_nodes() {
    let bench = Bench::new().await;
    let network = nodes();
    let bin = bench.out("bin");
    fs::create_dir(&bin).expect("a folder");
    fs::write(bin.join("msrun"), MSRUN).expect("a script");
    fs::set_permissions(bin.join("msrun"), fs::Permissions::from_mode(0o755)).expect("a mode");
    let line = pages::line("docs/launchers.md", "LOCAL_WORLD_SIZE=4 msrun ");
    let on = |host: u32| {
        let line = line.replace("--node_rank 0", &format!("--node_rank {}", host - 1));
        let mut msrun = bench.line(&line, "msrun");
        msrun.env("PATH", format!("{}:{}", bin.display(), pages::path())).env("LOCKSTEP_SHARED_MEMORY", "0");
        network.on(host, &msrun)
    };
    run_together(vec![on(1), on(2)]).iter().for_each(|output| drop(assert_success(output)));
    let log = |name: &str| fs::read_to_string(bench.out(name)).expect("a log");
    assert_rank_0_reported_all(&log("worker_0.log"));
    (1..8).for_each(|rank| assert_eq!(log(&format!("worker_{rank}.log")), ""));
    assert!(log("scheduler.log").contains("nothing to do"));
    assert_gradients_sent(&network);
    assert!(has_expected_weights(&bench, "msrun"));
}

#[tokio::test]
async fn with_mindspore_s_variables_workers_train_and_the_scheduler_idles() {
    let bench = Bench::new().await;
    let port = free_port().to_string();
    let process = |role: &str, id: &str| {
        let mut command = bench.train("mindspore", &[]);
        command.envs([
            ("MS_ROLE", role),
            ("MS_WORKER_NUM", "2"),
            ("MS_SCHED_HOST", "127.0.0.1"),
            ("MS_SCHED_PORT", &port),
        ]);
        command.env("MS_NODE_ID", id);
        command
    };
    let scheduler = assert_success(&process("MS_SCHED", "sched").output().expect("it runs"));
    assert!(scheduler.contains("nothing to do"), "{scheduler}");
    assert!(!bench.out("mindspore").exists());
    let outputs: Vec<_> = run_together(vec![process("MS_WORKER", "0"), process("MS_WORKER", "1")])
        .iter()
        .map(assert_success)
        .collect();
    assert!(outputs[0].contains("succeeded: validation accuracy") && outputs[1].is_empty(), "{outputs:?}");
    bench.train_to_success("alone", &[]);
    assert!(bench.model("mindspore", "2-24") == bench.model("alone", "2-24"));
    let refused = process("MS_PSERVER", "0").output().expect("it runs");
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("no parameter servers"));
}

#[tokio::test]
async fn a_rank_table_places_ranks_on_machines() {
    let bench = Bench::new().await;
    // Two addresses of this machine, and rank 0 on the second.
    let device = |rank: u32| json!({"device_id": (rank % 2).to_string(), "device_ip": "192.1.27.6", "rank_id": rank.to_string()});
    let servers = [("127.0.0.2", [2, 3]), ("127.0.0.1", [0, 1])];
    let list: Vec<_> =
        servers.iter().map(|(id, ranks)| json!({"server_id": id, "device": ranks.map(device)})).collect();
    let table = json!({"version": "1.0", "server_count": "2", "server_list": list, "status": "completed"});
    let path = bench.folder.path().join("table.json");
    fs::write(&path, table.to_string()).expect("a table");
    let port = free_port().to_string();
    let replaced = |line: &str, from: &str, to: String, out: &str| {
        assert!(line.contains(from), "{line}");
        let mut command = bench.line(&line.replace(from, &to), out);
        command.env("MASTER_PORT", &port);
        command
    };
    let line = pages::line("docs/launchers.md", "lockstep train job.toml --rank-table");
    let node = |node: u32| replaced(&line, "--node 0", format!("--node {node}"), "nodes");
    let outputs: Vec<_> = run_together(vec![node(0), node(1)]).iter().map(assert_success).collect();
    assert!(outputs[1].contains("succeeded: validation accuracy") && outputs[0].is_empty(), "{outputs:?}");
    let line = pages::line("docs/launchers.md", "RANK_ID=3 lockstep train job.toml --rank-table");
    let rank = |rank: u32| replaced(&line, "RANK_ID=3 ", format!("RANK_ID={rank} "), "ranks");
    run_together((0..4).map(rank).collect()).iter().for_each(|output| drop(assert_success(output)));
    bench.train_to_success("alone", &["--ranks", "4"]);
    for out in ["nodes", "ranks"] {
        assert!(bench.model(out, "2-24") == bench.model("alone", "2-24"), "{out}");
    }
}
