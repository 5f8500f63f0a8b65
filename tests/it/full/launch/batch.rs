//! Agents in batch jobs of a real Slurm.

use super::{
    agents_of, endless, job_file, launch, launch_program, server, short, stop, submit, valid_agent_tokens,
};
use crate::{
    cluster::Slurm,
    server::{Finished, LOCKSTEP, Server, number},
};
use serde_json::{Value, json};
use std::{fs, os::unix::fs::PermissionsExt as _};

/// Launches a job with `--detach` and returns the number of Slurm's job.
fn launch_detached(server: &Server, slurm: &Slurm, id: &str, options: &[&str]) -> String {
    let options: Vec<_> = options.iter().map(ToString::to_string).collect();
    let mut command = launch(server, &[id, "--with", "slurm", "--detach"], &options);
    Finished::of(command.env("SLURM_CONF", slurm.config())).ok();
    slurm.job()
}

/// Slurm's KillWait in the test of a slow checkpoint.
const KILL_WAIT_SECS: u64 = 13;

/// Waits until a job trains in at least this attempt and has passed this step.
pub(super) async fn until_past_step(server: &Server, id: &str, attempt: u64, step: u64) -> Value {
    let past = |job: &Value| {
        number(&job["attempt"]) >= attempt && job["state"] == "running" && number(&job["step"]) > step
    };
    server.wait_for_job(id, "the job trains", past).await
}

#[tokio::test]
async fn a_batch_job_runs_the_job_and_ends_with_it() {
    let server = server().await;
    let slurm = Slurm::start(server.folder().path(), 2);
    let id = submit(&server, &short("over-slurm")).await;
    let mut command = launch(&server, &[&id, "--with", "slurm"], &[]);
    let done = Finished::of(command.env("SLURM_CONF", slurm.config()));
    done.ok();
    assert!(done.stderr.contains("Slurm's job is 1; its log will be"), "{}", done.stderr);
    server.wait_for_success(&id).await;
    assert!(agents_of(&server, &id).contains("launch-"), "an agent of the launch ran it");
    slurm.until("Slurm's job has ended", |slurm| slurm.field("1", "%T") == "COMPLETED");
    assert_eq!(valid_agent_tokens(&server).await, 0, "the agent's token is revoked");
    assert!(!server.folder().path().join("launch").join(&id).join("bundle.json").exists());
    stop(slurm, server).await;
}

#[tokio::test]
async fn cancelling_a_job_or_its_batch_job_ends_both() {
    let server = server().await;
    let slurm = Slurm::start(server.folder().path(), 1);
    let id = submit(&server, &endless("cancelled", 2)).await;
    let batch = launch_detached(&server, &slurm, &id, &[]);
    until_past_step(&server, &id, 1, 0).await;
    // Slurm's description of the job contains no token.
    let bundle = server.folder().path().join("launch").join(&id).join("bundle.json");
    let bundle: Value = serde_json::from_slice(&fs::read(bundle).expect("a file")).expect("JSON");
    let token = bundle["nodes"][0]["token"].as_str().expect("a token");
    let shown = slurm.run("scontrol", &["show", "job", &batch])
        + &slurm.run("scontrol", &["write", "batch_script", &batch, "-"]);
    assert!(shown.contains("launched") && !shown.contains(token), "{shown}");
    server.cli(&["cancel", &id]).ok();
    slurm.until_ended(&batch);

    let id = submit(&server, &endless("scancelled", 2)).await;
    let batch = launch_detached(&server, &slurm, &id, &[]);
    let step = number(&until_past_step(&server, &id, 1, 10).await["step"]);
    slurm.run("scancel", &[&batch]);
    let job = server.wait_for_job(&id, "the job is queued again", |job| job["state"] == "queued").await;
    let saved_step = server.checkpoints(&id).await.iter().map(|c| number(&c["step"])).max();
    assert!(
        saved_step.is_some_and(|saved| saved >= step),
        "a checkpoint was written: {saved_step:?}, {step}; {job:#}"
    );
    server.cli(&["cancel", &id]).ok();
    stop(slurm, server).await;
}

/// Asserts that a job that is queued again, here and in Slurm, passes the step of its checkpoint, and cancels the job.
async fn assert_continues_then_cancel(
    server: &Server,
    slurm: &Slurm,
    id: &str,
    batch: &str,
    saved_step: u64,
) {
    slurm.start_now(batch);
    let job = until_past_step(server, id, 2, saved_step).await;
    assert_eq!(job["attempt"], 2, "{job:#}");
    server.cli(&["cancel", id]).ok();
    slurm.until_ended(batch);
}

#[tokio::test]
async fn a_batch_job_writes_a_checkpoint_and_requeues_before_its_time_limit() {
    let server = server().await;
    let slurm = Slurm::start(server.folder().path(), 1);
    let id = submit(&server, &endless("requeued", 2)).await;
    let batch = launch_detached(&server, &slurm, &id, &["--time=60"]);
    let step = number(&until_past_step(&server, &id, 1, 10).await["step"]);
    // The signal that Slurm sends two minutes before the time limit.
    slurm.run("scancel", &["--batch", "--signal=USR1", &batch]);
    server.wait_for_job(&id, "the job is queued again", |job| job["state"] == "queued").await;
    slurm.until("Slurm's job is queued", |slurm| slurm.field(&batch, "%T") == "PENDING");
    let saved_step =
        server.checkpoints(&id).await.iter().map(|c| number(&c["step"])).max().expect("a checkpoint");
    assert!(saved_step >= step, "{saved_step} and {step}");
    assert_continues_then_cancel(&server, &slurm, &id, &batch, saved_step).await;
    stop(slurm, server).await;
}

/// Slurm checks time limits every 30 s, so it sends a signal that is due 30 s before the limit of two minutes 60 to 90 s after the start, when
/// the job trains.
#[tokio::test]
async fn a_time_limit_that_slurm_itself_enforces_costs_no_step() {
    let mut server = server().await;
    let slurm = Slurm::start(server.folder().path(), 1);
    let id = submit(&server, &endless("time-limit", 2)).await;
    let batch = launch_detached(&server, &slurm, &id, &["--time=2", "--signal=B:USR1@30"]);
    let step = number(&until_past_step(&server, &id, 1, 10).await["step"]);
    // Later steps are slow, so other tests may train.
    server.permit = None;
    let job = server.wait_for_job(&id, "the job is queued again", |job| job["state"] == "queued").await;
    slurm.until("Slurm's job is queued", |slurm| slurm.field(&batch, "%T") == "PENDING");
    let saved_step =
        server.checkpoints(&id).await.iter().map(|c| number(&c["step"])).max().expect("a checkpoint");
    assert!(
        saved_step >= step && saved_step == number(&job["step"]),
        "{saved_step} is the last step: {job:#}"
    );
    let reason = server.attempts(&id).await[0]["reason"].to_string();
    assert!(reason.contains("was shut down"), "{reason}");
    let log = server.folder().path().join("launch").join(&id).join(format!("slurm-{batch}.log"));
    let log = fs::read_to_string(log).expect("its log");
    assert!(log.contains("Slurm's time limit is near") && log.contains("this job is requeued"), "{log}");
    assert_continues_then_cancel(&server, &slurm, &id, &batch, saved_step).await;
    stop(slurm, server).await;
}

/// Slurm ends a requeued job like a preempted job: SIGTERM, and SIGKILL after KillWait. Only an unfinished checkpoint is lost.
#[tokio::test]
async fn a_checkpoint_slower_than_slurm_s_kill_wait_is_the_only_loss() {
    let server = server().await;
    let slurm = Slurm::start_with(server.folder().path(), 1, 2, KILL_WAIT_SECS);
    let id = submit(&server, &endless("too-slow", 2)).await;
    // The third checkpoint hangs while it is written.
    let hold = server.folder().path().join("hold");
    let fault = format!("checkpoint.model:hold@3:{}", hold.display());
    let mut command = launch(&server, &[&id, "--with", "slurm", "--detach"], &[]);
    Finished::of(command.env("SLURM_CONF", slurm.config()).env("LOCKSTEP_FAULT", fault)).ok();
    let batch = slurm.job();
    server.wait_for_job(&id, "the third checkpoint is being written", |_| hold.exists()).await;
    // The second checkpoint, as `endless` jobs write one every 50 steps.
    let saved_step = 100;
    let has_two =
        async |s: &Server| s.checkpoints(&id).await.iter().any(|c| number(&c["step"]) == saved_step);
    server.until("two checkpoints are written", has_two).await;
    let rank = server.attempt_dir(&id, 1).join("rank.0.json");
    let rank: Value = serde_json::from_slice(&fs::read(rank).expect("a file")).expect("JSON");
    assert_eq!(rank["stop_within_secs"], KILL_WAIT_SECS - 10, "the agent has read Slurm's KillWait");
    slurm.run("scontrol", &["requeue", &batch]);
    let job = server.wait_for_job(&id, "the job is queued again", |job| job["state"] == "queued").await;
    assert!(number(&job["step"]) > saved_step, "later steps are lost: {job:#}");
    let logs = server.get(&format!("/jobs/{id}/logs")).await.to_string();
    assert!(logs.contains("was not done within") && logs.contains("lost"), "{logs}");
    slurm.start_now(&batch);
    until_past_step(&server, &id, 2, saved_step).await;
    let attempts = server.attempts(&id).await;
    let begun = attempts[1]["checkpoint"].as_str().expect("a checkpoint");
    assert!(begun.ends_with("-100"), "{attempts:#?}");
    server.cli(&["cancel", &id]).ok();
    slurm.until_ended(&batch);
    stop(slurm, server).await;
}

#[tokio::test]
async fn a_sweep_is_an_array_with_a_task_for_each_job() {
    let server = server().await;
    let slurm = Slurm::start(server.folder().path(), 2);
    let file = &*job_file(&server, "swept", 1, "steps = 6");
    let mistaken = [file, "--with", "slurm", "--sweep", "train.lr=0.1,-1", "--sweep", "train.seed=1,2"];
    let refused = Finished::of(launch(&server, &mistaken, &[]).env("SLURM_CONF", slurm.config()));
    refused.assert_fails(2, &["train.lr: must be a number above 0"]);
    assert_eq!(refused.stderr.matches("must be").count(), 1, "named once: {}", refused.stderr);
    assert_eq!(server.get("/jobs").await["jobs"], json!([]), "no job is submitted");
    let swept = ["--sweep", "train.lr=0.1,0.05", "--sweep", "train.seed=1,2", "--at-once", "1"];
    let args = [&[file, "--with", "slurm"][..], &swept].concat();
    let done = Finished::of(launch(&server, &args, &[]).env("SLURM_CONF", slurm.config()));
    let output = done.ok();
    let tag = output.split_whitespace().find(|word| word.starts_with("sweep-")).expect("an id").to_owned();
    let jobs = server.get(&format!("/jobs?tag={tag}")).await["jobs"].as_array().expect("jobs").clone();
    let mut settings: Vec<_> = jobs
        .iter()
        .map(|job| {
            assert_eq!(job["state"], "succeeded", "{job:#}");
            let train = &job["spec"]["train"];
            (job["spec"]["name"].as_str().unwrap_or_default(), train["lr"].as_f64(), train["seed"].as_u64())
        })
        .collect();
    settings.sort_by_key(|(name, ..)| *name);
    let expected = [
        ("swept lr=0.05 seed=1", Some(0.05), Some(1)),
        ("swept lr=0.05 seed=2", Some(0.05), Some(2)),
        ("swept lr=0.1 seed=1", Some(0.1), Some(1)),
        ("swept lr=0.1 seed=2", Some(0.1), Some(2)),
    ];
    assert_eq!(settings, expected);
    // With --at-once 1, each job starts after another has ended.
    let time = |job: &Value, key: &str| job[key].as_str().expect("a time").to_owned();
    let mut times: Vec<_> =
        jobs.iter().map(|job| (time(job, "started_at"), time(job, "finished_at"))).collect();
    times.sort();
    assert!(times.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{times:?}");
    assert_eq!(valid_agent_tokens(&server).await, 0, "the agents' tokens are revoked");
    let bundles: Vec<_> = fs::read_dir(server.folder().path().join("launch").join(&tag))
        .expect("a folder")
        .filter_map(Result::ok)
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("bundle"))
        .collect();
    assert!(bundles.is_empty(), "{bundles:?}");
    stop(slurm, server).await;
}

#[tokio::test]
async fn cancelling_a_job_of_a_sweep_ends_only_its_task() {
    let server = server().await;
    let slurm = Slurm::start(server.folder().path(), 1);
    let file = &*job_file(&server, "swept", 2, "");
    // The first job trains on the only machine; the second waits.
    let args = [file, "--with", "slurm", "--sweep", "train.steps=1000000,6"];
    let mut following = launch(&server, &args, &[]);
    following
        .env("SLURM_CONF", slurm.config())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    let following = following.spawn().expect("lockstep");
    let long = async |server: &Server| {
        let jobs = server.get("/jobs").await["jobs"].as_array().cloned().unwrap_or_default();
        jobs.into_iter().find(|job| job["spec"]["train"]["steps"] == 1_000_000 && job["state"] == "running")
    };
    server.until("the first trains", async |server: &Server| long(server).await.is_some()).await;
    let first = long(&server).await.expect("it trains")["id"].as_str().expect("an id").to_owned();
    // Without the sweep's tag, the list does not show the job, which still exists.
    let patched =
        server.http.patch(server.api(&format!("/jobs/{first}"))).json(&json!({"tags": []})).send().await;
    assert!(patched.is_ok_and(|response| response.status().is_success()));
    server.cli(&["cancel", &first]).ok();
    let done = following.wait_with_output().expect("it ends");
    let stderr = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("1 of 2 jobs succeeded") && !stderr.contains("is deleted"), "{stderr}");
    slurm.until("both tasks have ended", |slurm| slurm.run("squeue", &["-h"]).trim().is_empty());
    stop(slurm, server).await;
}

#[tokio::test]
async fn tasks_that_outlive_their_job_are_cancelled() {
    let server = server().await;
    let slurm = Slurm::start(server.folder().path(), 1);
    let file = &*job_file(&server, "hangs", 1, "");
    let hangs = server.folder().write("hangs", format!("#!/bin/sh\n'{LOCKSTEP}' \"$@\"\nexec sleep 3600\n"));
    fs::set_permissions(&hangs, fs::Permissions::from_mode(0o755)).expect("a mode");
    let args = [file, "--with", "slurm", "--sweep", "train.steps=6"];
    let mut command = launch_program(&server, hangs.to_str().expect("a path"), &args, &[]);
    Finished::of(command.env("SLURM_CONF", slurm.config())).assert_prints(&["succeeded"]);
    slurm.until("the task has ended", |slurm| slurm.run("squeue", &["-h"]).trim().is_empty());
    assert_eq!(valid_agent_tokens(&server).await, 0, "the agent's token is revoked");
    stop(slurm, server).await;
}
