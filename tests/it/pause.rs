//! Pause, resume and fork: a job continues as if it had not been interrupted.

use crate::{
    server::{Server, number},
    socket::{states, stored, wait_for_step},
    specs,
    tensors::tensors,
    train::sets,
};
use lockstep_protocol::JobState::{Paused, Pausing, Queued, Running, Starting, Succeeded};
use serde_json::{Value, json};
use std::fs;

const STEPS: u64 = 120;

/// A job of three epochs of 40 steps, with checkpoints in the middle of epochs.
fn spec(name: &str) -> Value {
    specs::with(
        specs::short(name, "fashion", 2, STEPS),
        json!({
            "data": {"crop_padding": 2, "horizontal_flip": true},
            "train": {"schedule": "cosine"},
            "checkpoint": {"every_epochs": null, "every_steps": 25, "keep": 10},
        }),
    )
}

#[tokio::test]
async fn a_paused_job_frees_its_slots_and_continues_to_the_same_weights() {
    let server = Server::start_slow_training(640, 64).await;
    let undisturbed = server.train(&spec("paused")).await;

    let id = server.submit(&spec("paused")).await;
    wait_for_step(&server, &id, 30).await;
    server.cli(&["pause", &id]).assert_prints(&["paused: paused on request; continues from step"]);
    let job = server.job(&id).await;
    let step = number(&job["step"]);
    assert!((30..STEPS).contains(&step), "{job:#}");
    // There is a checkpoint of this step, and no rank is left.
    assert_eq!(number(&server.checkpoints(&id).await[0]["step"]), step);
    assert!(server.ranks(&id).is_empty());
    server.train(&specs::short("meanwhile", "fashion", 2, 5)).await;
    assert_eq!(server.job(&id).await["state"], "paused");

    let resumed = server.cli(&["resume", "paused"]);
    resumed.ok();
    let note = format!("2 jobs are called paused; the newest is taken: {id}, paused, ");
    assert!(resumed.stderr.contains(&note), "{}", resumed.stderr);
    let job = server.wait_for_success(&id).await;
    assert_eq!(number(&job["attempt"]), 2);
    assert!(
        server.last_model(&id).await == server.last_model(&undisturbed).await,
        "a pause does not change a bit of the weights"
    );
    let states = states(&stored(&server, &id).await);
    assert_eq!(states, [Queued, Starting, Running, Pausing, Paused, Queued, Starting, Running, Succeeded]);
    // The second attempt starts at the step where the first ended: no step is repeated.
    assert_eq!(server.steps(&id).await, (1..=STEPS).collect::<Vec<_>>());
    server.cli(&["pause", &id]).assert_usage_error(&["the job has succeeded"]);
    let both = server.cli(&["pause", &undisturbed, &id]);
    for job in [&undisturbed, &id] {
        both.assert_usage_error(&[&format!("{job} paused: the job has succeeded")]);
    }
    server.cli(&["resume", &id]).assert_usage_error(&["the job has succeeded", "fork it"]);
    server.stop().await;
}

#[tokio::test]
async fn a_waiting_job_is_paused_immediately() {
    let server = Server::start_training(640, 64).await;
    let first = server.submit(&specs::short("first", "fashion", 2, 1_000_000)).await;
    let second = specs::short("second", "fashion", 2, 5);
    let (second, third) = (server.submit(&second).await, server.submit(&second).await);
    wait_for_step(&server, &first, 1).await;
    let pause = async |id: &str| {
        let paused = server.post(&format!("/jobs/{id}/pause"), &json!({})).await;
        assert_eq!((paused.status.as_u16(), paused.json()["state"].as_str()), (202, Some("paused")));
    };
    pause(&second).await;
    pause(&third).await;
    server.cli(&["cancel", &first]).ok();
    // `cancel` refuses a name of several jobs; `pause` and `resume` use the newest that they can change.
    server.cli(&["cancel", "second"]).assert_usage_error(&["several jobs are called second"]);
    server.cli(&["cancel", &third]).ok();
    server.cli(&["pause", "second"]).assert_usage_error(&[
        "2 jobs are called second, and their states forbid this command; give a job's id:",
        &format!("{third}, cancelled, "),
        &format!("{second}, paused, "),
    ]);
    assert_eq!(server.job(&second).await["state"], "paused");
    let resumed = server.cli(&["resume", "second"]);
    resumed.ok();
    let note =
        format!("2 jobs are called second; the newest that this command can use is taken: {second}, paused");
    assert!(resumed.stderr.contains(&note), "{}", resumed.stderr);
    server.wait_for_success(&second).await;
    // Commands that need a checkpoint use the newest job that has trained.
    let downloaded = server.cli(&["download", "second", "-o", "second.safetensors"]);
    downloaded.ok();
    let note = format!(
        "2 jobs are called second; the newest that this command can use is taken: {second}, succeeded"
    );
    assert!(downloaded.stderr.contains(&note), "{}", downloaded.stderr);
    assert_eq!(
        server.post(&format!("/jobs/{second}/resume"), &json!({})).await.problem(409)["state"],
        "succeeded"
    );
    server.stop().await;
}

#[tokio::test]
async fn a_fork_continues_from_any_checkpoint_with_other_settings_and_ranks() {
    let server = Server::start_training(640, 64).await;
    let id = server.train(&spec("origin")).await;
    let model = server.last_model(&id).await;

    // With unchanged settings, the final weights are the same at any number of ranks.
    let unchanged = server.cli(&["fork", &id, "--checkpoint", "50", "--json"]).json();
    let one_rank = sets(&["parallel.ranks=1", "train.batch_size=16"]);
    let one_rank = [&["fork", &id, "--checkpoint", "75", "--json"], &one_rank[..]].concat();
    let one_rank = server.cli(&one_rank).json();
    let request = json!({"checkpoint": 50, "set": {"train": {"lr": 0.001}, "name": "lower_lr"}});
    let lower_lr = server.post(&format!("/jobs/{id}/fork"), &request).await;
    assert_eq!(lower_lr.status.as_u16(), 201, "{}", lower_lr.text);
    for (fork, from) in [(&unchanged, 50), (&one_rank, 75), (&lower_lr.json(), 50)] {
        let fork_id = fork["id"].as_str().expect("an id");
        let reason = fork["reason"].as_str().expect("the reason");
        assert!(reason.contains("origin") && reason.contains(&format!("step {from}")), "{reason}");
        let parent = &fork["parent"];
        assert_eq!(parent["job"], id.as_str());
        let shown = server.cli(&["show", fork_id]).ok().to_owned();
        assert!(
            shown
                .contains(&format!("job {id}, checkpoint {}", parent["checkpoint"].as_str().expect("an id"))),
            "{shown}"
        );
        let done = server.wait_for_success(fork_id).await;
        assert_eq!(done["spec"]["data"], server.job(&id).await["spec"]["data"]);
        assert_eq!(server.steps(fork_id).await, (from + 1..=STEPS).collect::<Vec<_>>());
    }
    let model_of = async |job: &Value| server.last_model(job["id"].as_str().expect("an id")).await;
    assert!(model_of(&unchanged).await == model, "unchanged settings give the same model");
    assert!(
        tensors(&model_of(&one_rank).await) == tensors(&model),
        "the same weights at another number of ranks"
    );
    assert!(tensors(&model_of(&lower_lr.json()).await) != tensors(&model));
    assert_eq!(lower_lr.json()["name"], "lower_lr");

    // The fork keeps its checkpoint after the origin is deleted.
    let manifest =
        server.job_dir(unchanged["id"].as_str().expect("an id")).join("checkpoints/2-50/MANIFEST.json");
    server.cli(&["delete", &id, "--yes"]).ok();
    assert!(fs::metadata(manifest).is_ok());

    let unchanged_id = unchanged["id"].as_str().expect("an id").to_owned();
    let path = format!("/jobs/{unchanged_id}/fork");
    let fork = async |request: Value| server.post(&path, &request).await;
    let missing = fork(json!({"checkpoint": 51})).await.problem(409);
    assert!(missing["detail"].as_str().is_some_and(|detail| detail.contains("step")), "{missing}");
    fork(json!({})).await.assert_invalid(&[("/train/steps", &["no steps are left"])]);
    fork(json!({"set": {"train.batch_size": 16, "train.steps": 60}}))
        .await
        .assert_invalid(&[("/train/steps", &["counts as step 60 of the fork", "no steps are left"])]);
    let further = server.create(&path, &json!({"set": {"train.steps": STEPS + 10}})).await;
    assert_eq!(number(&server.wait_for_success(&further).await["step"]), STEPS + 10);
    // With twice the batch size, step 100 becomes step 50, which is also in the middle of the third epoch.
    let larger = json!({"checkpoint": 100, "set": {"train": {"batch_size": 16, "steps": 52}}});
    let larger = server.create(&path, &larger).await;
    server.wait_for_success(&larger).await;
    assert_eq!(server.steps(&larger).await, [51, 52]);

    let listed = server.cli(&["checkpoints", &unchanged_id]);
    assert!(listed.ok().lines().count() > 3 && listed.stdout.contains("STEP"), "{}", listed.stdout);
    let csv = server.cli(&["metrics", &unchanged_id, "loss", "--csv"]);
    assert_eq!(csv.ok().lines().count(), 1 + 2 * 70, "a heading and every point of two ranks");
    assert!(server.cli(&["metrics", &unchanged_id]).ok().contains("val_loss"));

    // A checkpoint can also be another job's pretrained weights.
    let teacher = server.checkpoints(&unchanged_id).await[0]["id"].as_str().expect("an id").to_owned();
    let fresh = specs::short("fresh", "fashion", 2, 5);
    let tuned = specs::with(fresh.clone(), json!({"name": "tuned", "model": {"pretrained": teacher}}));
    let (tuned, fresh) = (server.submit(&tuned).await, server.submit(&fresh).await);
    server.wait_for_success(&tuned).await;
    server.wait_for_success(&fresh).await;
    let first_loss = async |id: &str| server.points(id, "loss").await[0].value;
    assert!(first_loss(&tuned).await < first_loss(&fresh).await - 0.3, "the loss starts lower");
    server.stop().await;
}
