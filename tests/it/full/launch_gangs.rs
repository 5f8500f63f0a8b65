//! A job over several launched agents, none of which has slots for all ranks.

use crate::{
    cluster::Slurm,
    full::launch::{launch, server, submit},
    server::Finished,
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
async fn two_nodes_of_slurm_share_a_job_s_ranks() {
    let server = server().await;
    let slurm = Slurm::start(server.folder().path(), 2);
    let id = submit(&server, &spec("two-nodes", 4)).await;
    let mut command = launch(&server, &[&id, "--with", "slurm", "--nodes", "2"], &[]);
    Finished::of(command.env("SLURM_CONF", slurm.config())).ok();
    server.wait_for_success(&id).await;
    // Slurm's folder is in the server's folder.
    drop(slurm);
    server.stop().await;
}
