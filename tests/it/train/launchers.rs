//! Ranks that Open MPI, Slurm and MindSpore's variables start, or a rank table places: the same weights as on one machine.

use super::{Bench, succeeded};
use crate::{
    cluster::{Slurm, Sshd, program},
    network::Network,
    server::{free_port, turn},
};
use serde_json::json;
use std::{
    fs,
    process::{Command, Output, Stdio},
};

/// In 24 steps each node sends more than so many bytes of gradients to the other.
const GRADIENTS: u64 = 1 << 20;

/// The command behind another program.
fn by(program: &mut Command, train: &Command) -> Output {
    program.arg(train.get_program()).args(train.get_args()).stdin(Stdio::null()).output().expect("it runs")
}

fn together(commands: Vec<Command>) -> Vec<Output> {
    let start = |mut command: Command| {
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts")
    };
    let running: Vec<_> = commands.into_iter().map(start).collect();
    running.into_iter().map(|child| child.wait_with_output().expect("it ends")).collect()
}

#[tokio::test]
async fn under_mpirun_and_srun_on_two_nodes_the_weights_are_the_same() {
    let _turn = turn().await;
    let bench = Bench::new();
    succeeded(&bench.train("alone", &[]).output().expect("it runs"));
    let alone = bench.model("alone", "2-24");

    let mut mpirun = Command::new("mpirun");
    mpirun.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"]);
    let said = succeeded(&by(&mut mpirun, &bench.train("mpirun", &[])));
    assert_eq!(said.matches("succeeded: validation accuracy").count(), 1, "rank 0 speaks for all: {said}");
    assert!(bench.model("mpirun", "2-24") == alone);

    let slurm = Slurm::start(bench.folder.path(), 2);
    let mut srun = slurm.command("srun", "slurm-client");
    // Its nodes have names that no resolver knows.
    srun.args(["-N2", "--ntasks-per-node=1"])
        .env("MASTER_ADDR", "127.0.0.1")
        .env("LOCKSTEP_SHARED_MEMORY", "0");
    let said = succeeded(&by(&mut srun, &bench.train("srun", &[])));
    assert_eq!(said.matches("succeeded: validation accuracy").count(), 1, "{said}");
    assert!(bench.model("srun", "2-24") == alone);
}

/// Two nodes of two ranks: network namespaces, in each of which torchrun itself is at work. Its own store has the port that it is given.
#[tokio::test]
async fn torchrun_starts_two_ranks_on_each_of_two_nodes() {
    let _turn = turn().await;
    let bench = Bench::new();
    succeeded(&bench.train("alone", &["--ranks", "4"]).output().expect("it runs"));
    let mut network = Network::new();
    let nodes = [0, 1].map(|node| {
        network.add(node + 1);
        let mut torchrun = Command::new("ip");
        torchrun.args(["netns", "exec", &network.namespace(node + 1)]);
        torchrun.arg(program("torchrun", "python3-torch")).args(["--nnodes=2", "--nproc_per_node=2"]);
        torchrun.arg(format!("--node_rank={node}")).arg(format!("--master_addr={}", network.address(1)));
        torchrun.args(["--master_port=29500", "--no_python"]);
        // For a rank that is not here: Debian's PyTorch 1.13 takes its own defaults for nothing under Python 3.11.
        torchrun.args(["--redirects=9:1", "--tee=9:1"]);
        let train = bench.train("torchrun", &[]);
        torchrun.arg(train.get_program()).args(train.get_args()).stdin(Stdio::null());
        // Namespaces do not keep them from it.
        torchrun.env("LOCKSTEP_SHARED_MEMORY", "0").env("OMP_NUM_THREADS", "1");
        torchrun
    });
    let said: Vec<_> = together(nodes.into()).iter().map(succeeded).collect();
    assert_eq!(
        said[0].matches("succeeded: validation accuracy").count(),
        1,
        "rank 0 speaks for all: {said:?}"
    );
    assert!(said[0].contains("over TCP") && said[1].is_empty(), "{said:?}");
    assert!(bench.model("torchrun", "2-24") == bench.model("alone", "2-24"));
}

/// Two nodes of two ranks: network namespaces with an sshd in each, by which mpirun starts its daemons there.
#[tokio::test]
async fn mpirun_starts_two_ranks_on_each_of_two_nodes() {
    let _turn = turn().await;
    let bench = Bench::new();
    succeeded(&bench.train("alone", &["--ranks", "4"]).output().expect("it runs"));
    let mut network = Network::new();
    [1, 2].into_iter().for_each(|host| network.add(host));
    let [one, two] = [1, 2].map(|host| network.address(host));
    let sshds = [1, 2]
        .map(|host| Sshd::start_in(bench.folder.path(), &network.namespace(host), &network.address(host)));
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]);
    mpirun.args(["--mca", "plm_rsh_agent", &format!("ssh {}", sshds[0].options(22).join(" "))]);
    mpirun.args(["--mca", "oob_tcp_if_include", &format!("{}/24", network.address(0))]);
    mpirun.args(["-H", &format!("{one}:2,{two}:2")]);
    mpirun.args(["-x", &format!("MASTER_ADDR={one}"), "-x", "MASTER_PORT=29500"]);
    // Namespaces do not keep them from it.
    mpirun.args(["-x", "LOCKSTEP_SHARED_MEMORY=0", "-x", "OMP_NUM_THREADS=1"]);
    let said = succeeded(&by(&mut mpirun, &bench.train("mpirun", &[])));
    assert_eq!(said.matches("succeeded: validation accuracy").count(), 1, "rank 0 speaks for all: {said}");
    assert!(said.contains("over TCP"), "{said}");
    for host in [1, 2] {
        let sent = network.sent_bytes(host, "eth0");
        assert!(sent > GRADIENTS, "node {host} has sent {sent} bytes");
    }
    assert!(bench.model("mpirun", "2-24") == bench.model("alone", "2-24"));
}

/// Two nodes of two ranks: network namespaces, with what msrun sets for each worker.
#[tokio::test]
async fn with_mindspore_s_variables_two_workers_on_each_of_two_nodes_train() {
    let _turn = turn().await;
    let bench = Bench::new();
    succeeded(&bench.train("alone", &["--ranks", "4"]).output().expect("it runs"));
    let mut network = Network::new();
    [1, 2].into_iter().for_each(|host| network.add(host));
    let worker = |id: u32| {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &network.namespace(1 + id / 2)]);
        let train = bench.train("mindspore", &[]);
        command.arg(train.get_program()).args(train.get_args()).stdin(Stdio::null());
        command.envs([("MS_ROLE", "MS_WORKER"), ("MS_WORKER_NUM", "4"), ("MS_SCHED_PORT", "8118")]);
        command.env("MS_SCHED_HOST", network.address(1)).env("MS_NODE_ID", id.to_string());
        command.env("DEVICE_ID", (id % 2).to_string()).env("LOCAL_WORLD_SIZE", "2");
        command.env("LOCKSTEP_SHARED_MEMORY", "0").env("OMP_NUM_THREADS", "1");
        command
    };
    let said: Vec<_> = together((0..4).map(worker).collect()).iter().map(succeeded).collect();
    assert_eq!(said[0].matches("succeeded: validation accuracy").count(), 1, "{said:?}");
    assert!(said[0].contains("over TCP") && said[1..].iter().all(String::is_empty), "{said:?}");
    for host in [1, 2] {
        let sent = network.sent_bytes(host, "eth0");
        assert!(sent > GRADIENTS, "node {host} has sent {sent} bytes");
    }
    assert!(bench.model("mindspore", "2-24") == bench.model("alone", "2-24"));
}

#[tokio::test]
async fn with_mindspore_s_variables_workers_train_and_the_scheduler_has_nothing_to_do() {
    let _turn = turn().await;
    let bench = Bench::new();
    let port = free_port().to_string();
    let of = |role: &str, id: &str| {
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
    let scheduler = succeeded(&of("MS_SCHED", "sched").output().expect("it runs"));
    assert!(scheduler.contains("nothing to do"), "{scheduler}");
    assert!(!bench.out("mindspore").exists());
    let said: Vec<_> =
        together(vec![of("MS_WORKER", "0"), of("MS_WORKER", "1")]).iter().map(succeeded).collect();
    assert!(said[0].contains("succeeded: validation accuracy") && said[1].is_empty(), "{said:?}");
    succeeded(&bench.train("alone", &[]).output().expect("it runs"));
    assert!(bench.model("mindspore", "2-24") == bench.model("alone", "2-24"));
    let refused = of("MS_PSERVER", "0").output().expect("it runs");
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("no parameter servers"));
}

#[tokio::test]
async fn a_rank_table_places_ranks_on_machines() {
    let _turn = turn().await;
    let bench = Bench::new();
    // Two addresses of this machine, and rank 0 on the second.
    let device =
        |rank: u32| json!([{"device_id": "0", "device_ip": "192.1.27.6", "rank_id": rank.to_string()}]);
    let servers = [("127.0.0.2", 1), ("127.0.0.1", 0)];
    let list: Vec<_> =
        servers.iter().map(|(id, rank)| json!({"server_id": id, "device": device(*rank)})).collect();
    let table = json!({"version": "1.0", "server_count": "2", "server_list": list, "status": "completed"});
    let path = bench.folder.path().join("rank_table.json");
    fs::write(&path, table.to_string()).expect("a table");
    let path = path.to_str().expect("a path");
    let port = free_port().to_string();
    let with = |out: &str, more: &[&str]| {
        let mut command = bench.train(out, &[&["--rank-table", path], more].concat());
        command.env("MASTER_PORT", &port);
        command
    };
    let nodes = together(vec![with("nodes", &["--node", "0"]), with("nodes", &["--node", "1"])]);
    let said: Vec<_> = nodes.iter().map(succeeded).collect();
    assert!(said[1].contains("succeeded: validation accuracy") && said[0].is_empty(), "{said:?}");
    let rank = |id: &str| {
        let mut command = with("ranks", &[]);
        command.env("RANK_ID", id);
        command
    };
    together(vec![rank("0"), rank("1")]).iter().for_each(|output| drop(succeeded(output)));
    succeeded(&bench.train("alone", &[]).output().expect("it runs"));
    for out in ["nodes", "ranks"] {
        assert!(bench.model(out, "2-24") == bench.model("alone", "2-24"), "{out}");
    }
    for (more, said) in [
        (&["--rank-table", path][..], "say which one this is with --node"),
        (&["--rank-table", path, "--node", "2"], "has 2 machines"),
        (&["--node", "0"], "--rank-table"),
        (&["--rank-table", "/none.json", "--node", "0"], "/none.json"),
    ] {
        let refused = bench.train("refused", more).output().expect("it runs");
        assert_eq!(refused.status.code(), Some(2), "{more:?}");
        let error = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(error.contains(said), "{more:?}: {error}");
    }
}
