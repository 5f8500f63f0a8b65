//! Preemption: a job of higher priority gets the slots of running preemptible jobs, which write a checkpoint first.

use crate::{
    agent::{Agent, checkpoint, failed, hello, losses, running, server_with_agent},
    test_server::TestServer,
};
use lockstep_protocol::{
    agent::{AgentReply, AttemptRef, Ending, Source, ToAgent},
    job::{Job, JobState},
};
use serde_json::json;
use std::time::Duration;

async fn submit(server: &TestServer, ranks: u32, priority: i32, preemptible: bool) -> Job {
    server
        .submit(|s| {
            s["parallel"]["ranks"] = json!(ranks);
            s["priority"] = json!(priority);
            s["preemptible"] = json!(preemptible);
            s["recovery"] = json!({"max_restarts": 0});
        })
        .await
}

/// Waits for the order to preempt an attempt, whose ranks write a checkpoint and end. Returns the attempt.
async fn expect_preemption(agent: &mut Agent) -> AttemptRef {
    match agent.next().await {
        Some(ToAgent::Stop { attempt, reason, patient: true }) => {
            assert!(reason.contains("being preempted by job"), "{reason}");
            attempt
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_preempted_job_writes_a_checkpoint_and_continues_automatically() {
    let (server, mut agent) = server_with_agent(2).await;
    let low = submit(&server, 2, 0, true).await;
    let first = agent.expect_start().await.attempt;
    agent.report(&first, Source::Rank(0), 0, vec![running(100, 0), losses(0, 1..=7)]).await;
    // A job of equal priority preempts no job.
    let equal = submit(&server, 2, 0, true).await;
    let high = submit(&server, 1, 5, true).await;
    assert_eq!(expect_preemption(&mut agent).await, first);
    let job = server.wait_for_state(low.id.as_str(), JobState::Pausing).await;
    assert_eq!(
        job.reason.unwrap(),
        format!(
            "being preempted by job {} of priority 5: its ranks finish their step and write a checkpoint",
            high.id
        )
    );
    let expected = "waits for 1 slot: 0 of 2 on \"a\" free; jobs of lower priority are being preempted";
    assert_eq!(server.wait_for_reason(high.id.as_str(), expected).await, expected);
    agent.report(&first, Source::Rank(0), 2, vec![checkpoint(8)]).await;
    agent.end(&first, Ending::Stopped).await;
    // The freed slots go to the preempting job.
    let start = agent.expect_start().await;
    assert_eq!((start.attempt.job.clone(), start.ranks), (high.id.clone(), vec![(0, 0)]));
    let job = server.job(low.id.as_str()).await;
    let reason = format!("preempted by job {} of priority 5; continues from step 8", high.id);
    assert_eq!((job.state, job.reason.as_deref()), (JobState::Queued, Some(reason.as_str())));
    let (_, history) = server.get(&format!("/jobs/{}/history", low.id)).await;
    let entries = history["entries"].as_array().unwrap();
    assert!(entries.iter().all(|e| e["what"] != "pause_requested"), "{history}");
    let ended = entries.iter().find(|e| e["what"] == "ended").unwrap();
    assert_eq!((&ended["state"], &ended["reason"]["code"]), (&json!("stopped"), &json!("preempted")));
    assert_eq!((&ended["reason"]["job"], &ended["reason"]["priority"]), (&json!(high.id), &json!(5)));
    // The preempted job waits for the end of the other job, and then continues from its checkpoint. This does not count as a restart.
    let attempt = start.attempt.clone();
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), losses(0, 1..=1)]).await;
    agent.end(&attempt, Ending::Succeeded { step: 100 }).await;
    let second = agent.expect_start().await;
    assert_eq!((second.attempt.job.clone(), second.attempt.attempt), (low.id.clone(), 2));
    assert_eq!(second.resume.as_deref(), Some("1-8"));
    assert_eq!(server.job(equal.id.as_str()).await.attempt, 0);
    server.stop().await;
}

#[tokio::test]
async fn only_preemptible_jobs_are_preempted_and_only_if_that_suffices() {
    let (server, mut agent) = server_with_agent(4).await;
    let mut attempts = Vec::new();
    for (priority, preemptible) in [(0, false), (2, true), (1, true), (1, true)] {
        submit(&server, 1, priority, preemptible).await;
        attempts.push(agent.expect_start().await.attempt);
    }
    let too_large = submit(&server, 4, 9, false).await;
    server.wait_for_reason(too_large.id.as_str(), "waits for 4 slots: 0 of 4").await;
    server.order(too_large.id.as_str(), "cancel").await;
    // The newest preemptible job of the lowest priority is preempted.
    submit(&server, 1, 3, false).await;
    assert_eq!(expect_preemption(&mut agent).await, attempts[3]);
    server.stop().await;
}

#[tokio::test]
async fn a_job_paused_or_cancelled_during_preemption_ends_as_requested() {
    let (server, mut agent) = server_with_agent(3).await;
    let mut jobs = Vec::new();
    for _ in 0..3 {
        let job = submit(&server, 1, 0, true).await;
        jobs.push((job, agent.expect_start().await.attempt));
    }
    let high = submit(&server, 3, 1, false).await;
    for _ in 0..3 {
        expect_preemption(&mut agent).await;
    }
    server.order(jobs[0].0.id.as_str(), "pause").await;
    server.order(jobs[1].0.id.as_str(), "cancel").await;
    // The agent gets another order for both attempts, because of the pause and the cancellation.
    assert!(agent.expect_stop().await);
    assert!(!agent.expect_stop().await);
    agent.end(&jobs[0].1, Ending::Stopped).await;
    agent.end(&jobs[1].1, Ending::Stopped).await;
    agent.end(&jobs[2].1, failed("rank 0 was killed by signal 9", true)).await;
    assert_eq!(agent.expect_start().await.attempt.job, high.id);
    let states = [JobState::Paused, JobState::Cancelled, JobState::Queued];
    for ((job, _), state) in jobs.iter().zip(states) {
        assert_eq!(server.job(job.id.as_str()).await.state, state);
    }
    let reason = server.job(jobs[2].0.id.as_str()).await.reason.unwrap();
    let expected = format!(
        "preempted by job {} of priority 1 (rank 0 was killed by signal 9); continues from the beginning",
        high.id
    );
    assert_eq!(reason, expected);
    server.stop().await;
}

#[tokio::test]
async fn a_restarted_server_keeps_freed_slots_for_the_preempting_job() {
    let (server, mut agent) = server_with_agent(1).await;
    let low = submit(&server, 1, 0, true).await;
    let attempt = agent.expect_start().await.attempt;
    let high = submit(&server, 1, 1, false).await;
    expect_preemption(&mut agent).await;
    drop(agent);
    let server = TestServer::open(server.stop().await, |_| {}).await;
    let mut agent = Agent::connect(&server, hello("a", 1, vec![attempt.clone()])).await.unwrap();
    // The restarted server repeats the order.
    assert_eq!(expect_preemption(&mut agent).await, attempt);
    agent.end(&attempt, Ending::Stopped).await;
    assert_eq!(agent.expect_start().await.attempt.job, high.id);
    let reason = server.job(low.id.as_str()).await.reason.unwrap();
    assert!(reason.starts_with("preempted by job"), "{reason}");
    server.stop().await;
}

/// Waits until a job waits for a slot, and asserts that no job is preempted for it.
async fn expect_wait_without_preemption(server: &TestServer, job: &Job) {
    let reason = server.wait_for_reason(job.id.as_str(), "waits for 1 slot: 0 of").await;
    assert!(!reason.contains("preempted"), "{reason}");
}

#[tokio::test]
async fn no_job_is_preempted_if_slots_of_ending_jobs_suffice() {
    let (server, mut agent) = server_with_agent(2).await;
    submit(&server, 1, 0, true).await;
    agent.expect_start().await;
    let equal = submit(&server, 1, 3, false).await;
    let attempt = agent.expect_start().await.attempt;
    server.order(equal.id.as_str(), "pause").await;
    assert!(agent.expect_stop().await);
    let high = submit(&server, 1, 3, false).await;
    expect_wait_without_preemption(&server, &high).await;
    // No order for the job of lower priority arrives in between.
    agent.end(&attempt, Ending::Stopped).await;
    let start = agent.expect_start().await;
    assert_eq!((start.attempt.job, start.ranks), (high.id, vec![(0, 1)]));
    assert_eq!(server.job(equal.id.as_str()).await.state, JobState::Paused);
    server.stop().await;
}

#[tokio::test]
async fn preemption_waits_for_ended_jobs_that_still_have_slots() {
    let lease = Duration::from_secs(4);
    let server = TestServer::with(|c| c.lease = lease).await;
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    let preemptible = submit(&server, 1, 0, true).await;
    let preemptible_attempt = agent.expect_start().await.attempt;
    let ended = submit(&server, 1, 0, true).await;
    agent.expect_start().await;
    // Stores the end of the job in the database. Its slots become free when the lease expires.
    let end = format!("UPDATE jobs SET state = 'succeeded', fencing_token = NULL WHERE id = '{}'", ended.id);
    assert_eq!(server.execute(&end).await, 1);
    let high = submit(&server, 1, 5, false).await;
    let mut heartbeats = tokio::time::interval(lease / 8);
    let message = loop {
        tokio::select! {
            message = agent.next() => break message,
            _ = heartbeats.tick() => agent.heartbeat(std::slice::from_ref(&preemptible_attempt)).await,
        }
    };
    // The agent may be told to stop the ended job, but never the preemptible job.
    let mut messages = vec![message];
    if matches!(messages[0], Some(ToAgent::Stop { .. })) {
        messages.push(agent.next().await);
    }
    for message in &messages {
        assert!(
            !matches!(message, Some(ToAgent::Stop { attempt, .. }) if attempt.job == preemptible.id),
            "{messages:?}"
        );
    }
    let Some(Some(ToAgent::Start(start))) = messages.pop() else { panic!("no start") };
    assert_eq!((start.attempt.job, start.ranks), (high.id, vec![(0, 1)]));
    server.stop().await;
}

#[tokio::test]
async fn a_lost_preemption_order_is_repeated() {
    let (server, mut agent) = server_with_agent(1).await;
    let low = submit(&server, 1, 0, true).await;
    let attempt = agent.expect_start().await.attempt;
    // Simulates a failure of the database right after it has stored the change.
    let cause =
        json!({"code": "preempting", "priority": 5, "words": "being preempted by job x of priority 5"});
    let query = format!("UPDATE jobs SET state = 'pausing', cause = '{cause}' WHERE id = '{}'", low.id);
    assert_eq!(server.execute(&query).await, 1);
    let high = submit(&server, 1, 5, false).await;
    let Some(ToAgent::Stop { attempt: reported, patient: true, .. }) = agent.next().await else {
        panic!("no order")
    };
    assert_eq!(reported, attempt);
    // The order is sent only once.
    server.wait_for_reason(high.id.as_str(), "are being preempted").await;
    agent.end(&attempt, Ending::Stopped).await;
    assert_eq!(agent.expect_start().await.attempt.job, high.id);
    server.stop().await;
}

#[tokio::test]
async fn jobs_with_unknown_states_are_not_preempted() {
    let (server, mut agent) = server_with_agent(2).await;
    let low = submit(&server, 1, 0, true).await;
    let attempt = agent.expect_start().await.attempt;
    let unknown = submit(&server, 1, 0, true).await;
    agent.expect_start().await;
    let query = format!("UPDATE jobs SET state = 'dreaming' WHERE id = '{}'", unknown.id);
    assert_eq!(server.execute(&query).await, 1);
    submit(&server, 1, 5, false).await;
    // The newest job of the lowest priority has an unknown state.
    assert_eq!(expect_preemption(&mut agent).await, attempt);
    let second = submit(&server, 1, 5, false).await;
    expect_wait_without_preemption(&server, &second).await;
    assert_eq!(server.job(low.id.as_str()).await.state, JobState::Pausing);
    assert_eq!(server.query_number("SELECT COUNT(*) FROM jobs WHERE state = 'dreaming'").await, 1);
    server.stop().await;
}

#[tokio::test]
async fn a_private_preempting_job_is_not_named() {
    let (server, mut agent) = server_with_agent(1).await;
    let low = submit(&server, 1, 0, true).await;
    let attempt = agent.expect_start().await.attempt;
    let high = server
        .submit(|s| {
            s["parallel"]["ranks"] = json!(1);
            s["priority"] = json!(5);
            s["private"] = json!(true);
        })
        .await;
    let Some(ToAgent::Stop { reason, .. }) = agent.next().await else { panic!("no order") };
    assert!(reason.starts_with("being preempted by a job of priority 5: "), "{reason}");
    agent.end(&attempt, Ending::Stopped).await;
    agent.expect_start().await;
    let reason = server.job(low.id.as_str()).await.reason.unwrap();
    assert_eq!(reason, "preempted by a job of priority 5; continues from the beginning");
    for path in ["", "/history"] {
        let (_, reported) = server.get(&format!("/jobs/{}{path}", low.id)).await;
        assert!(!reported.to_string().contains(high.id.as_str()), "{reported}");
    }
    assert!(
        server.stored_events(low.id.as_str()).await.iter().all(|e| !e.to_string().contains(high.id.as_str()))
    );
    server.stop().await;
}

#[tokio::test]
async fn no_job_is_preempted_for_a_job_that_cannot_start() {
    let (server, mut agent) = server_with_agent(1).await;
    let first = submit(&server, 1, 0, false).await;
    let attempt = agent.expect_start().await.attempt;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), checkpoint(8)]).await;
    agent.end(&attempt, Ending::Succeeded { step: 8 }).await;
    let low = submit(&server, 1, 0, true).await;
    let attempt = agent.expect_start().await.attempt;
    assert_eq!(server.post("/agents/id-a/drain", &json!({})).await.0, 204);
    let submitted = server.submit(|s| {
        s["parallel"]["ranks"] = json!(1);
        s["priority"] = json!(5);
        s["model"]["pretrained"] = json!(format!("{}-1-8", first.id));
    });
    let fit = AgentReply::Weights { mistake: None };
    let (high, _) = tokio::join!(submitted, agent.answer_fit_weights(fit));
    assert_eq!(server.delete(&format!("/jobs/{}", first.id)).await.0, 204);
    assert_eq!(server.post("/agents/id-a/undrain", &json!({})).await.0, 204);
    let high = server.wait_for_state(high.id.as_str(), JobState::Failed).await;
    assert!(high.reason.as_ref().unwrap().contains("no longer exists"), "{high:?}");
    assert_eq!(server.job(low.id.as_str()).await.state, JobState::Starting);
    // The next message is the acknowledgement, not an order to stop.
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
    server.stop().await;
}
