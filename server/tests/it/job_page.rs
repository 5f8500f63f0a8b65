//! The page of a job as the server writes it, before any script runs.

use crate::{
    agent::{Agent, losses, running},
    gangs::{connect_machines, rank_killed, start_gang},
    test_server::{TIMEOUT, TestServer},
};
use lockstep_protocol::{
    agent::{AttemptEvent, CheckpointInfo, Ending, Evaluation, Source, ToAgent},
    job::JobState,
    metric::MetricColumn,
};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// The page, and the data in it.
async fn page(server: &TestServer, id: &str) -> (String, Value) {
    let (status, html) = server.get_text(&format!("/jobs/{id}")).await;
    assert_eq!(status, 200, "{html}");
    let (_, data) = html.split_once("<script type=\"application/json\" id=\"data\">").unwrap();
    let data = serde_json::from_str(data.split_once("</script>").unwrap().0).unwrap();
    (html, data)
}

fn seats(data: &Value) -> Vec<&str> {
    data["ranks"].as_array().unwrap().iter().map(|seat| seat["agent"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn ranks_are_shown_with_their_machines_after_the_attempt() {
    let server = TestServer::new().await;
    let (mut a, mut b) = connect_machines(&server).await;
    let (id, attempt) = start_gang(&server, &mut a, &mut b).await;
    a.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), losses(0, 1..=3)]).await;
    assert_eq!(seats(&page(&server, &id).await.1), ["a", "a", "b", "b"]);
    b.end(&attempt, Ending::Succeeded { step: 100 }).await;
    a.end(&attempt, Ending::Succeeded { step: 100 }).await;
    assert_eq!(server.job(&id).await.state, JobState::Succeeded);
    assert_eq!(seats(&page(&server, &id).await.1), ["a", "a", "b", "b"]);
    server.stop().await;
}

#[tokio::test]
async fn a_restarting_job_shows_its_place_and_reason() {
    let server = TestServer::new().await;
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    let id = server.submit(|_| {}).await.id.to_string();
    let attempt = agent.expect_start().await.attempt;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), losses(0, 1..=3)]).await;
    server.submit(|s| s["priority"] = json!(5)).await;
    agent.end(&attempt, rank_killed(1)).await;
    assert_ne!(agent.expect_start().await.attempt.job.as_str(), id, "the other one is first");
    let since = Instant::now();
    let html = loop {
        let (html, _) = page(&server, &id).await;
        if html.contains("waits for 2 slots") {
            break html;
        }
        assert!(since.elapsed() < TIMEOUT, "{html}");
    };
    for words in [
        "<b id=\"banner-what\">Starting again, number 1 in the queue:</b>",
        "waits for 2 slots: 0 of 2 on",
        "Before: rank 1 was killed by signal 9 at step 3",
    ] {
        assert!(html.contains(words), "{words}: {html}");
    }
    server.stop().await;
}

fn evaluation(epoch: u32, accuracy: f64) -> AttemptEvent {
    let step = u64::from(epoch) * 25;
    AttemptEvent::Evaluation(Evaluation { epoch, step, accuracy, loss: 1.0, samples: 200, secs: 0.1 })
}

#[tokio::test]
async fn best_accuracy_and_best_checkpoint_are_shown_if_they_differ() {
    let server = TestServer::new().await;
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    let id = server.submit(|_| {}).await.id.to_string();
    let attempt = agent.expect_start().await.attempt;
    let checkpoint = CheckpointInfo {
        epoch: 2,
        step: 50,
        val_accuracy: Some(0.632),
        val_loss: Some(1.0),
        validation: None,
        best: true,
        size_bytes: 1,
    };
    let events = vec![running(100, 0), losses(0, 1..=50), evaluation(2, 0.632)];
    agent.report(&attempt, Source::Rank(0), 0, events).await;
    agent.report(&attempt, Source::Rank(0), 3, vec![AttemptEvent::Checkpoint(checkpoint)]).await;
    assert!(page(&server, &id).await.0.contains(">best 63.2 % at 2</small>"));
    // Of this epoch no checkpoint is kept.
    agent.report(&attempt, Source::Rank(0), 4, vec![evaluation(3, 0.822)]).await;
    let (html, _) = page(&server, &id).await;
    assert!(html.contains(">best 82.2 % at 3, best checkpoint 63.2 %</small>"), "{html}");
    server.stop().await;
}

#[tokio::test]
async fn a_finished_job_says_why_its_accuracy_is_low() {
    let server = TestServer::new().await;
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    let id = server.submit(|_| {}).await.id.to_string();
    let attempt = agent.expect_start().await.attempt;
    let column = |name: &str, steps: &[u64], values: &[f32]| MetricColumn {
        name: name.into(),
        steps: steps.to_vec(),
        values: values.to_vec(),
    };
    let metrics = |rank: u32, accuracies: &[f32]| {
        let mut columns = vec![column("accuracy", &[1, 49, 60, 100], accuracies)];
        if rank == 0 {
            columns.push(column("val_accuracy", &[50, 60, 100], &[0.7, 0.705, 0.71]));
        }
        AttemptEvent::Metrics { rank, columns }
    };
    let of_first = vec![running(100, 0), losses(0, 1..=100), metrics(0, &[0.1, 0.2, 0.98, 1.0])];
    agent.report(&attempt, Source::Rank(0), 0, of_first).await;
    agent.report(&attempt, Source::Rank(1), 0, vec![metrics(1, &[0.1, 0.2, 0.97, 0.97])]).await;
    let measured = Evaluation { epoch: 2, step: 100, accuracy: 0.71, loss: 1.0, samples: 2000, secs: 0.1 };
    agent.report(&attempt, Source::Rank(0), 3, vec![AttemptEvent::Evaluation(measured)]).await;
    let (_, job) = server.get(&format!("/jobs/{id}")).await;
    assert_eq!(job.get("diagnosis"), None, "it still runs");
    agent.end(&attempt, Ending::Succeeded { step: 100 }).await;
    // Of the last epoch's steps, over both ranks.
    let (_, job) = server.get(&format!("/jobs/{id}")).await;
    let said = job["diagnosis"].as_str().unwrap();
    assert!(said.starts_with("Training accuracy is 98.0 %, validation accuracy 71.0 %: "), "{said}");
    let (html, _) = page(&server, &id).await;
    assert!(html.contains(&format!("id=\"diagnosis\">{said}</p>")), "{html}");
    let (_, list) = server.get("/jobs").await;
    assert_eq!(list["jobs"][0].get("diagnosis"), None);
    server.stop().await;
}

#[tokio::test]
async fn the_run_time_of_a_job_excludes_pauses() {
    let server = TestServer::new().await;
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    let id = server.submit(|_| {}).await.id.to_string();
    let attempt = agent.expect_start().await.attempt;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), losses(0, 1..=3)]).await;
    assert_eq!(server.job(&id).await.ran_secs, None, "it still runs");
    assert_eq!(server.post(&format!("/jobs/{id}/pause"), &json!({})).await.0, 202);
    assert!(matches!(agent.next().await, Some(ToAgent::Stop { patient: true, .. })));
    agent.end(&attempt, Ending::Stopped).await;
    let first = server.wait_for_state(&id, JobState::Paused).await.ran_secs.unwrap();
    // The pause that must not count.
    let pause = Duration::from_secs(2);
    tokio::time::sleep(pause).await;
    assert_eq!(server.post(&format!("/jobs/{id}/resume"), &json!({})).await.0, 202);
    let attempt = agent.expect_start().await.attempt;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), losses(0, 1..=3)]).await;
    agent.end(&attempt, Ending::Succeeded { step: 100 }).await;
    let job = server.job(&id).await;
    let (ran, whole) =
        (job.ran_secs.unwrap(), job.finished_at.unwrap().duration_since(job.started_at.unwrap()));
    assert!(ran >= first, "{ran} after {first}");
    assert!(ran <= whole.as_secs_f64() - pause.as_secs_f64(), "{ran} s of {whole:?}");
    // The same on the page and in the list.
    let shown = format!("0:{:02}", ran.round());
    let (html, _) = page(&server, &id).await;
    assert!(html.contains("<dt>Ran for</dt>") && html.contains(&format!(">{shown}</span>")), "{html}");
    let (_, list) = server.get_text("/jobs").await;
    assert!(list.contains(&format!(">ran for {shown}</span>")), "{list}");
    server.stop().await;
}
