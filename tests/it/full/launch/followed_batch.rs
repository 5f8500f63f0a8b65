//! Launches that follow a batch job to its end and report its states, and a job that loses a node.

use super::{
    batch::until_past_step, endless, launch, pods::Following, server, stop, submit, valid_agent_tokens,
};
use crate::{
    cluster::Slurm,
    server::{Server, number},
    specs,
};
use serde_json::{Value, json};

const STEPS: u64 = 160;
/// The step at which a job loses a node: two regular checkpoints are written, and most steps remain.
const LOST_AT: u64 = 60;

fn follow(server: &Server, slurm: &Slurm, id: &str, args: &[&str], options: &[&str]) -> Following {
    let options: Vec<_> = options.iter().map(ToString::to_string).collect();
    let mut command = launch(server, &[&[id, "--with", "slurm"], args].concat(), &options);
    command.env("SLURM_CONF", slurm.config()).env("LOCKSTEP_FAULT", "step:slow");
    Following::start(server, command)
}

#[tokio::test]
async fn following_a_batch_job_shows_its_states_and_its_end() {
    let server = server().await;
    let slurm = Slurm::start(server.folder().path(), 1);
    let id = submit(&server, &endless("followed", 2)).await;
    let following = follow(&server, &slurm, &id, &[], &["--hold"]);
    following.wait_for_output(&server, "Slurm's job 1: PENDING (JobHeldUser)").await;
    slurm.run("scontrol", &["release", "1"]);
    following.wait_for_output(&server, "Slurm's job 1: RUNNING (None)").await;
    until_past_step(&server, &id, 1, 0).await;
    slurm.run("scancel", &["1"]);
    let (status, output) = following.end();
    assert_eq!(status.code(), Some(1), "{output}");
    assert!(output.contains("Slurm's job 1 is over (CANCELLED"), "{output}");
    let next =
        format!("and the job is queued; `lockstep launch {id} --with slurm` starts agents for it again");
    assert!(output.contains(&next), "{output}");
    server.cli(&["cancel", &id]).ok();
    stop(slurm, server).await;
}

/// Four ranks, two on each of two nodes.
fn over_two_nodes(name: &str) -> Value {
    specs::with(
        specs::short(name, "fashion", 4, STEPS),
        json!({"checkpoint": {"every_epochs": null, "every_steps": 20}, "train": {"seed": 3}}),
    )
}

#[tokio::test]
async fn after_losing_a_node_a_job_ends_on_a_third_with_the_same_weights() {
    let server = server().await;
    let slurm = Slurm::start(server.folder().path(), 3);
    let undisturbed = submit(&server, &over_two_nodes("undisturbed")).await;
    let (status, output) = follow(&server, &slurm, &undisturbed, &["--nodes", "2"], &[]).end();
    assert!(status.success(), "{output}");
    slurm.until("Slurm's job has ended", |slurm| slurm.field("1", "%T") == "COMPLETED");

    let id = submit(&server, &over_two_nodes("node-lost")).await;
    let following = follow(&server, &slurm, &id, &["--nodes", "2"], &[]);
    following.wait_for_output(&server, "Slurm's job 2: RUNNING").await;
    until_past_step(&server, &id, 1, LOST_AT).await;
    assert_eq!(slurm.field("2", "%N"), "n[0-1]");
    slurm.kill_node("n1");
    slurm.until("Slurm has queued the job again", |slurm| slurm.field("2", "%T") == "PENDING");
    slurm.start_now("2");
    let (status, output) = following.end();
    assert!(status.success(), "{output}");
    assert!(output.contains("Slurm's job 2: PENDING"), "{output}");
    assert_eq!(slurm.field("2", "%N"), "n[0,2]");
    let job = server.wait_for_success(&id).await;
    assert_eq!(job["attempt"], 2, "{job:#}");
    let attempts = server.attempts(&id).await;
    let begun = attempts[1]["checkpoint"].as_str().unwrap_or_else(|| panic!("{attempts:#?}"));
    let begun: u64 = begun.rsplit('-').next().and_then(|step| step.parse().ok()).expect("a step");
    assert!((LOST_AT - 20..STEPS).contains(&begun), "the newest checkpoint: {attempts:#?}");
    let losses = server.points(&id, "loss").await;
    let last_step = losses.iter().filter(|p| p.attempt == 1).map(|p| p.step).max();
    assert!(
        last_step.is_some_and(|last| last >= begun && last < number(&job["step"])),
        "{last_step:?}, {begun}"
    );
    assert!(server.last_model(&id).await == server.last_model(&undisturbed).await, "the same weights");
    assert_eq!(valid_agent_tokens(&server).await, 0, "the agents' tokens are revoked");
    slurm.start_node("n1");
    stop(slurm, server).await;
}
