//! Jobs from submission to deletion; pages and the form.

use crate::{
    agent::{best_checkpoint, checkpoint, line, losses, running, server_with_agent, start_job},
    test_server::{client_without_redirects, wait_until},
};
use lockstep_protocol::{
    agent::{AttemptEvent, Ending, Evaluation, RankReport, Source, ToAgent},
    job::JobState,
};
use serde_json::{Value, json};

#[tokio::test]
async fn a_job_succeeds_and_its_data_can_be_read_and_deleted() {
    let (server, mut agent) = server_with_agent(2).await;
    let job = server.submit(|_| {}).await;
    let id = job.id.to_string();
    assert_eq!((job.state, job.attempt, job.ranks), (JobState::Queued, 0, 2));

    let start = agent.expect_start().await;
    assert_eq!((start.world_size, start.ranks.len(), start.attempt.attempt), (2, 2, 1));
    assert_eq!(start.dataset_path, "/some/pictures");
    let folder = std::path::PathBuf::from(start.job_dir.clone().unwrap());
    assert!(folder.join("spec.json").is_file(), "the job's folder has its specification");
    let attempt = start.attempt;

    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
    let report = RankReport {
        status: "training".into(),
        step: 50,
        epoch: 1,
        step_ms: 2.0,
        all_reduce_ms: 0.5,
        data_ms: 0.1,
        images_per_second: 100.0,
        pid: 7,
        device: "CPU, 1 thread".into(),
        axis_ms: None,
    };
    let mut first_events: Vec<_> = (1..=50).map(|s| losses(0, s..=s)).collect();
    first_events.push(line(0, 1, "epoch: 1 step: 1, loss is 2.3025854"));
    first_events.push(AttemptEvent::Rank { rank: 0, report });
    agent.report(&attempt, Source::Rank(0), 1, first_events).await;
    agent.report(&attempt, Source::Rank(1), 0, vec![losses(1, 1..=50), line(1, 1, "hello from one")]).await;

    let shown = server.job(&id).await;
    assert_eq!((shown.state, shown.step, shown.epoch, shown.total_steps), (JobState::Running, 50, 1, 100));
    assert_eq!(shown.agents, ["a"]);
    assert!((shown.last.loss.unwrap() - 0.02).abs() < 1e-6 && shown.sparkline.len() == 20, "{shown:?}");

    let evaluation = Evaluation { epoch: 2, step: 100, samples: 200, accuracy: 0.84, loss: 0.4, secs: 0.1 };
    let last_events = vec![
        best_checkpoint(1, 50, 0.5),
        losses(0, 51..=100),
        AttemptEvent::Evaluation(evaluation),
        checkpoint(100),
    ];
    agent.report(&attempt, Source::Rank(0), 53, last_events).await;
    agent.end(&attempt, Ending::Succeeded { step: 100 }).await;
    let finished = server.job(&id).await;
    assert_eq!((finished.state, finished.step, finished.reason.clone()), (JobState::Succeeded, 100, None));
    assert_eq!(finished.best.unwrap().value, 0.84);
    assert!(finished.finished_at.is_some() && finished.eta_secs.is_none());

    // Metrics: every point once, with lower resolution, and as CSV.
    let (_, exact) = server.get(&format!("/jobs/{id}/metrics?name=loss&ranks=0")).await;
    assert_eq!(exact["exact"], true);
    let steps: Vec<u64> = serde_json::from_value(exact["series"][0]["steps"].clone()).unwrap();
    assert_eq!(steps, (1..=100).collect::<Vec<_>>());
    let (_, coarse) = server.get(&format!("/jobs/{id}/metrics?name=loss&points=10")).await;
    assert_eq!(coarse["exact"], false);
    assert_eq!(coarse["series"][0]["steps"].as_array().unwrap().len(), 10);
    assert_eq!(coarse["as_of_seq"], finished.last_seq);
    let (_, csv) = server.get_text(&format!("/api/v1/jobs/{id}/metrics.csv")).await;
    assert_eq!(csv.lines().count(), 1 + 100 + 50, "a header and every point");
    assert!(csv.contains("\n1,1,loss,50,0.02\n"), "{csv}");

    // Logs.
    let (_, logs) = server.get(&format!("/jobs/{id}/logs")).await;
    assert_eq!(logs["lines"].as_array().unwrap().len(), 2);
    assert_eq!(logs["lines"][0]["number"], 1);
    let (_, matching) = server.get(&format!("/jobs/{id}/logs?q=from+one&rank=1")).await;
    assert_eq!(matching["lines"][0]["text"], "hello from one");
    assert_eq!(logs["next_cursor"], Value::Null, "{logs}");
    let plain = server.http.get(server.url(&format!("/api/v1/jobs/{id}/logs?rank=0")));
    let plain = plain.header("accept", "text/plain").send().await.unwrap().text().await.unwrap();
    assert_eq!(plain, "epoch: 1 step: 1, loss is 2.3025854\n");

    // Checkpoints and their files.
    let (_, list) = server.get(&format!("/jobs/{id}/checkpoints")).await;
    let ids: Vec<&str> =
        list["checkpoints"].as_array().unwrap().iter().map(|c| c["id"].as_str().unwrap()).collect();
    assert_eq!(list["checkpoints"][0]["step"], 100);
    assert_eq!(list["checkpoints"][1]["best"], true);
    let dir = folder.join("checkpoints/1-100");
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("model.safetensors"), b"hello world").unwrap();
    let sum = crate::uploads::sha256_hex(b"hello world");
    let manifest = json!({"files": {"model.safetensors": {"size_bytes": 11, "sha256": sum}}});
    std::fs::write(dir.join("MANIFEST.json"), manifest.to_string()).unwrap();
    let url = server.url(&format!("/api/v1/checkpoints/{}/model.safetensors", ids[0]));
    let complete = server.http.get(&url).send().await.unwrap();
    assert_eq!(complete.headers()["etag"], format!("\"{sum}\""));
    assert_eq!(complete.text().await.unwrap(), "hello world");
    let part = server.http.get(&url).header("range", "bytes=6-").send().await.unwrap();
    assert_eq!((part.status().as_u16(), part.text().await.unwrap().as_str()), (206, "world"));
    for path in [
        format!("{}/../spec.json", ids[0]),
        format!("{}/..%2f..%2fspec.json", ids[0]),
        format!("{}/x", ids[0]),
    ] {
        let (status, _) = server.get(&format!("/checkpoints/{path}")).await;
        assert_eq!(status, 404, "{path}");
    }

    // Deleting the job deletes its folder.
    assert_eq!(server.delete(&format!("/jobs/{id}")).await.0, 204);
    wait_until("the job's folder is deleted", async || !folder.exists()).await;
    assert_eq!(server.get(&format!("/jobs/{id}")).await.0, 404);
    server.stop().await;
}

#[tokio::test]
async fn cancel_ends_queued_jobs_at_once_and_running_jobs_after_their_ranks() {
    let (server, mut agent) = server_with_agent(2).await;
    let running_job = server.submit(|_| {}).await.id.to_string();
    let queued = server.submit(|_| {}).await.id.to_string();
    let start = agent.expect_start().await;
    assert_eq!(start.attempt.job.as_str(), running_job);
    agent.report(&start.attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;

    let (status, body) = server.post(&format!("/jobs/{queued}/cancel"), &Value::Null).await;
    assert_eq!((status, &body["state"]), (202, &json!("cancelled")));
    let (status, body) = server.delete(&format!("/jobs/{running_job}")).await;
    assert_eq!((status, &body["state"]), (409, &json!("running")), "a running job is not deleted");

    let (status, body) = server.post(&format!("/jobs/{running_job}/cancel"), &Value::Null).await;
    assert_eq!((status, &body["state"]), (202, &json!("running")), "its ranks still run");
    assert!(body["reason"].as_str().unwrap().contains("cancel"));
    assert!(matches!(agent.next().await, Some(ToAgent::Stop { attempt, .. }) if attempt == start.attempt));
    agent.end(&start.attempt, Ending::Stopped).await;
    assert_eq!(server.job(&running_job).await.state, JobState::Cancelled);

    let (status, body) = server.post(&format!("/jobs/{running_job}/cancel"), &Value::Null).await;
    assert_eq!((status, &body["state"]), (409, &json!("cancelled")));

    // A retry starts the next attempt.
    let (status, body) = server.post(&format!("/jobs/{running_job}/retry"), &Value::Null).await;
    assert_eq!((status, &body["reason"]), (202, &json!("retried on request")), "no checkpoint is known");
    let second_start = agent.expect_start().await;
    assert_eq!((second_start.attempt.attempt, second_start.resume), (2, None));
    assert!(second_start.attempt.fencing_token > start.attempt.fencing_token);
    server.stop().await;
}

#[tokio::test]
async fn pages_show_stored_values() {
    let (server, _agent, id, _) = start_job(|spec| spec["name"] = json!("<b>bold</b>")).await;
    for path in [
        "/jobs",
        "/jobs/new",
        "/datasets",
        "/machines",
        &format!("/jobs/{id}"),
        &format!("/jobs/new?from={id}"),
    ] {
        let (status, html) = server.get_text(path).await;
        assert_eq!(status, 200, "{path} {html}");
        assert!(html.contains("<!doctype html>") || html.contains("<!DOCTYPE html>"), "{path}");
        assert!(!html.contains("<b>bold</b>"), "{path} escapes names");
    }
    assert!(server.get_text(&format!("/jobs/{id}")).await.1.contains("&#60;b&#62;bold"));
    let (_, clone) = server.get_text(&format!("/jobs/new?from={id}&set=train.lr=0.7")).await;
    assert!(clone.contains(r#"name="train.lr" value="0.7""#), "a clone with a changed setting: {clone}");
    assert!(clone.contains("except Learning rate ") && clone.contains("→ 0.7."), "{clone}");
    assert!(server.get_text("/machines").await.1.contains(&id), "a slot links to its job");
    assert_eq!(server.get_text("/jobs/j00").await.0, 404);
    let (status, script) = server.get_text("/static/stream.js").await;
    assert!(status == 200 && script.contains("WebSocket"));
    assert_eq!(server.get_text("/static/../Cargo.toml").await.0, 404);

    // The form without scripts: mistakes are shown next to the fields, and the input stays.
    let client = client_without_redirects(&server.token);
    let form = |lr: &str, dataset: &str| {
        let body =
            format!("name=from+a+form&data.dataset={dataset}&train.lr={lr}&train.epochs=1&parallel.ranks=2");
        let request = client.post(server.url("/jobs/new")).body(body);
        request.header("content-type", "application/x-www-form-urlencoded").send()
    };
    let response = form("fast", "pictures").await.unwrap();
    assert_eq!(response.status().as_u16(), 422);
    let html = response.text().await.unwrap();
    assert!(html.contains("from a form") && html.contains("value=\"fast\""), "the input stays");
    let response = form("0.1", "pictures").await.unwrap();
    assert_eq!(response.status().as_u16(), 303);
    let location = response.headers()["location"].to_str().unwrap().to_owned();
    assert_eq!(server.get_text(&location).await.0, 200);

    // With scripts, the page shows the job file that the form describes.
    let fields =
        json!({"name": "x", "train.lr": "1e-1", "train.gamma": "0.1", "data.image_size": "1: 16, 2: 24"});
    let form = json!({"fields": fields, "sweep": {"method": "grid"}});
    let (status, file) = server.post("/jobs/form", &form).await;
    let train = &file["document"]["train"];
    assert_eq!((status, &train["lr"], &train["gamma"]), (200, &json!(0.1), &Value::Null), "{file}");
    let toml = file["toml"].as_str().unwrap();
    assert!(toml.starts_with("name = \"x\"\n"), "{toml}");
    assert!(toml.contains("\nimage_size = [[1, 16], [2, 24]]\n") && toml.contains("\n[sweep]\n"), "{toml}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_changes_of_a_note_and_of_tags_are_both_kept() {
    let (server, _agent, id, _) = start_job(|_| {}).await;
    let change = async |body: Value| server.patch(&format!("/jobs/{id}"), &body).await;
    for round in 0..30 {
        let (note, tag) = (format!("note {round}"), format!("tag {round}"));
        let (first, second) = tokio::join!(change(json!({"notes": note})), change(json!({"tags": [tag]})));
        assert_eq!((first.0, second.0), (200, 200));
        let stored = &server.get("/annotations").await.1["jobs"][&id];
        assert_eq!((&stored["notes"], &stored["tags"]), (&json!(note), &json!([tag])));
    }
    server.stop().await;
}
