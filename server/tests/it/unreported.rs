//! Checkpoints on the server's disk that no agent has reported.

use crate::{
    agent::{checkpoint, failed, losses, running, start_job},
    artifacts::write_checkpoint,
    uploads::{manifest, sha256_hex},
};
use lockstep_protocol::{agent::Source, job::Measured};
use serde_json::{Value, json};
use std::fs;

/// Ranks keep several checkpoints, and never remove the best, so reported checkpoints may remain.
#[tokio::test]
async fn an_unreported_checkpoint_newer_than_the_remaining_reported_ones_is_used() {
    let (server, mut agent, id, first) = start_job(|_| {}).await;
    let reported = [checkpoint(20), checkpoint(30)];
    agent.report(&first, Source::Rank(0), 0, [running(100, 0)].into_iter().chain(reported).collect()).await;
    for step in [10, 20] {
        write_checkpoint(server.job_dir(&id), step);
    }
    agent.end(&first, failed("by the test", true)).await;
    let second = agent.expect_start().await;
    // Unreported checkpoints before the newest reported one are not used.
    assert_eq!(second.resume.as_deref(), Some("1-20"));
    assert_eq!(server.checkpoint_steps(&id).await, [20]);
    agent.report(&second.attempt, Source::Rank(0), 0, vec![running(100, 20), checkpoint(30)]).await;
    write_checkpoint(server.job_dir(&id), 60);
    agent.end(&second.attempt, failed("by the test", true)).await;
    let third = agent.expect_start().await;
    assert_eq!(third.resume.as_deref(), Some("1-60"));
    assert_eq!(server.checkpoint_steps(&id).await, [60, 20]);
    agent.report(&third.attempt, Source::Rank(0), 0, vec![running(100, 60)]).await;
    write_checkpoint(server.job_dir(&id), 80);
    agent.end(&third.attempt, failed("by the test", true)).await;
    // No reported checkpoint is missing.
    assert_eq!(agent.expect_start().await.resume.as_deref(), Some("1-80"));
    assert_eq!(server.checkpoint_steps(&id).await, [80, 60, 20]);
    server.stop().await;
}

/// While the server or the agent is down, ranks continue, and remove old checkpoints. The job gets the validation of the checkpoint.
#[tokio::test]
async fn an_unreported_checkpoint_is_used_and_a_restart_is_logged() {
    let (server, mut agent, id, first) = start_job(|_| {}).await;
    agent.report(&first, Source::Rank(0), 0, vec![running(100, 0), losses(0, 1..=3), checkpoint(20)]).await;
    let checkpoints = server.job_dir(&id).join("checkpoints");
    let [.., incomplete] = [40, 60, 80].map(|step| write_checkpoint(server.job_dir(&id), step));
    fs::remove_file(incomplete.join("model.safetensors")).unwrap();
    let state = json!({"val_accuracy": 0.75, "val_loss": 0.5, "validation": {"pictures": 200, "fingerprint": "ab"},
        "best": {"epoch": 1, "step": 60}});
    let state = state.to_string().into_bytes();
    let mut files: Value = serde_json::from_slice(&manifest(1, 60)).unwrap();
    files["files"]["state.json"] = json!({"size_bytes": state.len(), "sha256": sha256_hex(&state)});
    fs::write(checkpoints.join("1-60/state.json"), state).unwrap();
    fs::write(checkpoints.join("1-60/MANIFEST.json"), files.to_string()).unwrap();
    fs::write(checkpoints.join("1-9x"), "no checkpoint").unwrap();
    agent.end(&first, failed("by the test", true)).await;
    let second = agent.expect_start().await;
    assert_eq!(second.resume.as_deref(), Some("1-60"));
    let is_logged = async |text: &str| {
        let (_, log) = server.get(&format!("/jobs/{id}/logs?limit=1000")).await;
        log.to_string().contains(text)
    };
    assert!(is_logged("checkpoint 1-60 was written and never reported").await);
    assert!(is_logged("there are no training metrics of steps 4 to 60").await);
    let job = server.job(&id).await;
    let best = Measured { value: 0.75, loss: Some(0.5), step: 60, epoch: 1 };
    assert_eq!((job.best, job.last.val_pictures), (Some(best), Some(200)));
    let (_, metrics) = server.get(&format!("/jobs/{id}/metrics?name=val_accuracy")).await;
    assert_eq!(metrics["series"][0]["mean"], json!([0.75]), "{metrics}");
    assert_eq!(server.checkpoint_steps(&id).await, [60], "the deleted checkpoint is not listed");

    let message = "the known checkpoints are no longer on the server's disk";
    assert!(!is_logged(message).await);
    for step in [40, 60, 80] {
        fs::remove_dir_all(checkpoints.join(format!("1-{step}"))).unwrap();
    }
    agent.end(&second.attempt, failed("by the test", true)).await;
    assert_eq!(agent.expect_start().await.resume, None);
    assert!(is_logged(message).await);
    server.stop().await;
}
