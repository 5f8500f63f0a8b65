//! Reports that are repeated, late, out of order, or invalid.

use crate::{
    agent::{Agent, hello, losses, running, start_job, unknown_attempt},
    test_server::wait_until,
};
use lockstep_protocol::{
    agent::{AttemptEvent, Ending, Evaluation, Source, ToAgent},
    metric::MetricColumn,
};
use serde_json::{Value, json};

/// Metrics of rank 0.
fn metrics(name: &str, steps: Vec<u64>, values: Vec<f32>) -> AttemptEvent {
    AttemptEvent::Metrics { rank: 0, columns: vec![MetricColumn { name: name.into(), steps, values }] }
}

#[tokio::test]
async fn overlapping_reports_are_stored_once() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    let events: Vec<AttemptEvent> =
        [running(10, 0)].into_iter().chain((1..=5).map(|s| losses(0, s..=s))).collect();
    assert_eq!(agent.report(&attempt, Source::Rank(0), 0, events[..4].to_vec()).await, 4);
    assert_eq!(agent.report(&attempt, Source::Rank(0), 2, events[2..].to_vec()).await, 6);
    assert_eq!(agent.report(&attempt, Source::Rank(0), 0, events.clone()).await, 6);
    // queued, starting, running, plan, and the new losses of two reports.
    let stored = server.stored_events(&id).await;
    assert_eq!(stored.len(), 4 + 2);
    assert_eq!((&stored[4]["steps"], &stored[5]["steps"]), (&json!([1, 2, 3]), &json!([4, 5])));
    // The end of an attempt can also be repeated, in case its acknowledgement was lost.
    agent.end(&attempt, Ending::Succeeded { step: 5 }).await;
    agent.end(&attempt, Ending::Succeeded { step: 5 }).await;
    assert_eq!(server.stored_events(&id).await.len(), 4 + 2 + 1);
    server.stop().await;
}

#[tokio::test]
async fn records_after_a_gap_are_not_stored_and_the_agent_retries() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(10, 0)]).await;
    agent.send_report(&attempt, Source::Rank(0), 3, vec![losses(0, 3..=3)]).await;
    assert_eq!(agent.next().await, None, "the server closes the connection");
    let mut agent = Agent::connect(&server, hello("a", 2, vec![attempt.clone()])).await.unwrap();
    assert_eq!(agent.welcome.0[0].records, 1);
    assert_eq!(agent.report(&attempt, Source::Rank(0), 1, vec![losses(0, 1..=3)]).await, 2);
    assert_eq!(server.stored_events(&id).await.len(), 4 + 1);
    server.stop().await;
}

#[tokio::test]
async fn a_job_whose_reports_cannot_be_stored_says_so() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(10, 0)]).await;
    let reason = async || server.job(&id).await.reason.unwrap_or_default();
    assert_eq!(reason().await, "");
    // Without this table, no report can be stored, as on a full disk.
    server.execute("ALTER TABLE acknowledged RENAME TO away").await;
    agent.send_report(&attempt, Source::Rank(0), 1, vec![losses(0, 1..=3)]).await;
    wait_until("the job says why nothing is stored", async || {
        reason().await.contains("the server cannot store what the job reports")
    })
    .await;
    server.execute("ALTER TABLE away RENAME TO acknowledged").await;
    assert!(matches!(agent.next().await, Some(ToAgent::Ack(ack)) if ack.records == 2));
    assert_eq!(reason().await, "");
    server.stop().await;
}

#[tokio::test]
async fn reports_without_permission_store_nothing() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    let stored = server.stored_events(&id).await.len();

    let mut earlier = attempt.clone();
    earlier.fencing_token.number -= 1;
    let mut later = attempt.clone();
    later.attempt += 1;
    for stale in [earlier, later, unknown_attempt()] {
        agent.send_report(&stale, Source::Rank(0), 0, vec![running(10, 0)]).await;
        assert!(matches!(agent.next().await, Some(ToAgent::Stop { attempt, .. }) if attempt == stale));
    }
    assert_eq!(server.stored_events(&id).await.len(), stored);

    // Invalid records are skipped.
    let invalid = vec![
        running(10, 0),
        losses(7, 1..=2),
        metrics("<script>", vec![1], vec![1.0]),
        metrics("loss", vec![1, 2], vec![f32::NAN]),
    ];
    agent.report(&attempt, Source::Rank(0), 0, invalid).await;
    assert_eq!(server.stored_events(&id).await.len(), stored + 2, "running and plan");
    server.stop().await;
}

#[tokio::test]
async fn a_loss_that_is_not_a_number_is_null() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    let losses = metrics("loss", vec![1, 2], vec![1.5, f32::NAN]);
    agent.report(&attempt, Source::Rank(0), 0, vec![running(10, 0), losses]).await;
    let stored = server.stored_events(&id).await;
    assert_eq!(stored.last().unwrap()["values"], serde_json::json!([1.5, null]));
    let (_, metrics) = server.get(&format!("/jobs/{id}/metrics?name=loss")).await;
    assert_eq!(metrics["series"][0]["mean"], serde_json::json!([1.5, null]));
    let (_, job) = server.get(&format!("/jobs/{id}")).await;
    assert_eq!(job["last"]["loss"], serde_json::Value::Null);
    server.stop().await;
}

#[tokio::test]
async fn invalid_step_numbers_and_accuracies_are_skipped() {
    const MAX: u64 = (1 << 53) - 1;
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    let before = server.stored_events(&id).await.len();
    let invalid = [running(10, 11), running(10, u64::MAX), running(MAX + 1, 0), running(u64::MAX, u64::MAX)];
    agent.report(&attempt, Source::Rank(0), 0, invalid.into()).await;
    assert_eq!(server.stored_events(&id).await.len(), before, "invalid step numbers are skipped");
    let evaluation = |accuracy| {
        AttemptEvent::Evaluation(Evaluation {
            epoch: 1,
            step: 10,
            samples: 5,
            accuracy,
            loss: 0.5,
            secs: 0.1,
        })
    };
    let accuracies = [-0.1, 1.000_001, 1e308].map(evaluation);
    agent.report(&attempt, Source::Rank(0), 4, accuracies.into()).await;
    let (_, job) = server.get(&format!("/jobs/{id}")).await;
    assert_eq!((&job["best"], &job["last"]["val_accuracy"]), (&Value::Null, &Value::Null));
    // Values at the limits are valid.
    agent.report(&attempt, Source::Rank(0), 7, vec![running(MAX, MAX), evaluation(1.0)]).await;
    let (_, job) = server.get(&format!("/jobs/{id}")).await;
    assert_eq!((job["step"].as_u64(), &job["best"]["value"]), (Some(MAX), &json!(1.0)), "{job}");
    server.stop().await;
}
