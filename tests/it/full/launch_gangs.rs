//! One job over several launched agents: none of them has slots for all of its ranks.

use crate::{
    cluster::{Slurm, Sshd},
    full::launch::{launch, server, submit},
    server::{Finished, turn},
    specs,
};
use serde_json::{Value, json};

fn spec(name: &str, ranks: u32) -> Value {
    specs::with(
        specs::short(name, "fashion", ranks, 20),
        json!({"checkpoint": {"every_epochs": null, "every_steps": 20}, "train": {"seed": 3}}),
    )
}

#[tokio::test]
async fn two_machines_over_ssh_train_a_job_to_the_same_weights() {
    let _turn = turn().await;
    let server = server().await;
    let sshd = Sshd::start(server.folder().path());
    let options = sshd.options(sshd.port);
    let alone = submit(&server, &spec("alone", 2)).await;
    Finished::of(&mut launch(&server, &[&alone, "--with", "ssh", "-H", "127.0.0.1:2"], &options)).ok();
    let both = submit(&server, &spec("both", 2)).await;
    let hosts = ["--with", "ssh", "-H", "127.0.0.1:1,localhost:1"];
    Finished::of(&mut launch(&server, &[&[&both[..]], &hosts[..]].concat(), &options)).ok();
    server.succeeded(&both).await;
    assert!(server.last_model(&both).await == server.last_model(&alone).await);
    server.stop().await;
}

#[tokio::test]
async fn two_nodes_of_slurm_share_a_job_s_ranks() {
    let _turn = turn().await;
    let server = server().await;
    let slurm = Slurm::start(server.folder().path(), 2);
    let id = submit(&server, &spec("two-nodes", 4)).await;
    let mut command = launch(&server, &[&id, "--with", "slurm", "--nodes", "2"], &[]);
    Finished::of(command.env("SLURM_CONF", slurm.config())).ok();
    server.succeeded(&id).await;
    let mpi = submit(&server, &spec("two-processes", 2)).await;
    let hosts = server.folder().write("two", "127.0.0.1 slots=1\nlocalhost slots=1\n");
    let options = ["--allow-run-as-root", "--oversubscribe"].map(String::from);
    let hosts = hosts.to_str().expect("a path");
    Finished::of(&mut launch(&server, &[&mpi, "--with", "mpirun", "--hostfile", hosts], &options)).ok();
    server.succeeded(&mpi).await;
    // Its folder is in the server's.
    drop(slurm);
    server.stop().await;
}
