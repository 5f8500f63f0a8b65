//! Jobs that continue with fewer ranks after machines are lost.

use crate::{
    agent::{Agent, losses, running},
    gangs::{LONG_LEASE, connect_machines, hello_at, next_attempt, rank_killed, report_lost_contact},
    test_server::TestServer,
};
use lockstep_protocol::{
    agent::{AttemptRef, Ending, FromAgent, Source},
    job::JobState,
};
use serde_json::{Value, json};
use std::time::Duration;

/// Time without a message. It covers many rounds of dispatch.
const QUIET: Duration = Duration::from_millis(1500);

/// Sends heartbeats for `limit`, and fails if the agent gets a message.
async fn expect_no_message(agent: &mut Agent, limit: Duration) {
    let mut heartbeats = tokio::time::interval(Duration::from_millis(200));
    let end = tokio::time::sleep(limit);
    tokio::pin!(end);
    loop {
        tokio::select! {
            _ = heartbeats.tick() => agent.heartbeat(&[]).await,
            message = agent.next() => panic!("{message:?}"),
            () = &mut end => return,
        }
    }
}

/// Starts a job of four ranks on two machines.
async fn start_gang(
    server: &TestServer,
    a: &mut Agent,
    b: &mut Agent,
    change: impl FnOnce(&mut Value),
) -> (String, AttemptRef) {
    let four_ranks = |s: &mut Value| {
        s["parallel"]["ranks"] = json!(4);
        change(s);
    };
    let id = server.submit(four_ranks).await.id.to_string();
    let attempt = next_attempt(a, b).await;
    a.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
    (id, attempt)
}

/// Starts a job of four ranks on two machines. Then the second machine is lost.
async fn start_and_lose_machine(
    server: &TestServer,
    a: &mut Agent,
    mut b: Agent,
    change: impl FnOnce(&mut Value),
) -> String {
    let (id, attempt) = start_gang(server, a, &mut b, change).await;
    b.disconnect();
    report_lost_contact(a, &attempt, 1, vec![2]).await;
    server.wait_for_state(&id, JobState::Restarting).await;
    id
}

#[tokio::test]
async fn a_job_that_lost_a_machine_runs_one_attempt_with_fewer_ranks() {
    let server = TestServer::with_lease(LONG_LEASE).await;
    let (mut a, b) = connect_machines(&server).await;
    let recovery = json!({"min_ranks": 1, "wait_seconds": 1});
    let start_time = tokio::time::Instant::now();
    let id = start_and_lose_machine(&server, &mut a, b, |s| s["recovery"] = recovery).await;
    let start = a.expect_start().await;
    assert!(start_time.elapsed() >= Duration::from_secs(1), "the job waits for all ranks first");
    // The job uses all free slots, with the same global batch size.
    assert_eq!((start.attempt.attempt, start.world_size, &start.ranks), (2, 2, &vec![(0, 0), (1, 1)]));
    assert_eq!((start.spec.parallel.ranks, start.spec.train.accumulate), (2, 1));
    assert_eq!((start.spec.micro_batch_size(), start.spec.global_batch_size()), (20, 40));
    assert!(start.network.is_none(), "all ranks are on one machine");
    let expected = "trains with 2 of 4 ranks, because for 1 s there were not enough free slots for all; the last attempt: agent \"b\" was silent";
    let job = server.job(&id).await;
    assert_eq!((job.state, job.ranks, job.rank_count_now()), (JobState::Starting, 4, 2));
    assert!(job.reason.unwrap().starts_with(expected));
    a.report(&start.attempt, Source::Rank(0), 0, vec![running(100, 3), losses(0, 4..=5)]).await;
    let job = server.job(&id).await;
    assert_eq!((job.state, job.rank_count_now(), job.step), (JobState::Running, 2, 5));
    let reason = job.reason.unwrap();
    assert!(reason.starts_with(expected) && !reason.contains("starts from"), "{reason}");
    let (_, history) = server.get(&format!("/jobs/{id}/history")).await;
    let starts = history["entries"].as_array().unwrap().iter().filter(|entry| entry["what"] == "started");
    let starts: Vec<_> = starts.map(|entry| entry["reason"].clone()).collect();
    assert_eq!((starts.len(), &starts[0]), (2, &Value::Null), "{history:#}");
    assert_eq!((&starts[1]["code"], &starts[1]["ranks"]), (&json!("fewer_ranks"), &json!(2)), "{history:#}");
    assert_eq!(starts[1]["words"], json!(reason));
    let (_, list) = server.get(&format!("/jobs/{id}/attempts")).await;
    let ranks: Vec<_> =
        list["attempts"].as_array().unwrap().iter().map(|attempt| &attempt["ranks"]).collect();
    assert_eq!(ranks, [&json!(4), &json!(2)], "{list:#}");

    // A new machine does not change the running attempt. The next attempt has all ranks.
    let mut b = Agent::connect(&server, hello_at("b", 2, Vec::new(), "10.0.0.2")).await.unwrap();
    expect_no_message(&mut b, QUIET).await;
    assert_eq!(server.job(&id).await.state, JobState::Running);
    a.end(&start.attempt, rank_killed(1)).await;
    let attempt = next_attempt(&mut a, &mut b).await;
    assert_eq!(attempt.attempt, 3);
    a.report(&attempt, Source::Rank(0), 0, vec![running(100, 5)]).await;
    let job = server.job(&id).await;
    assert_eq!((job.state, job.rank_count_now(), job.reason), (JobState::Running, 4, None));
    server.stop().await;
}

#[tokio::test]
async fn a_job_without_min_ranks_or_with_too_few_slots_for_it_waits() {
    for (recovery, note) in [
        (json!({"wait_seconds": 0}), ""),
        (json!({"min_ranks": 4, "wait_seconds": 0}), ""),
        // The remaining machine has two slots.
        (json!({"min_ranks": 3, "wait_seconds": 0}), "after 0 s it starts on fewer ranks, at least 3"),
    ] {
        let server = TestServer::with_lease(LONG_LEASE).await;
        let (mut a, b) = connect_machines(&server).await;
        start_and_lose_machine(&server, &mut a, b, |s| {
            (s["recovery"], s["train"]["batch_size"]) = (recovery.clone(), json!(12));
        })
        .await;
        expect_no_message(&mut a, QUIET).await;
        let (_, queue) = server.get("/queue").await;
        let words = queue["jobs"][0]["reason"]["words"].as_str().unwrap_or_default();
        assert!(words.contains("needs 4 slots") && words.contains(note), "{recovery}: {queue:#}");
        server.stop().await;
    }
}

#[tokio::test]
async fn a_machine_that_shuts_down_counts_as_lost_and_a_pause_does_not() {
    let server = TestServer::with_lease(LONG_LEASE).await;
    let (mut a, mut b) = connect_machines(&server).await;
    let recovery = json!({"min_ranks": 2, "wait_seconds": 1});
    let (id, attempt) = start_gang(&server, &mut a, &mut b, |s| s["recovery"] = recovery.clone()).await;
    b.send(FromAgent::Leaving { reason: "the agent was stopped".into() }).await;
    assert!(a.expect_stop().await, "the ranks write a checkpoint first");
    b.end(&attempt, Ending::Stopped).await;
    a.end(&attempt, Ending::Stopped).await;
    b.disconnect();
    let start = a.expect_start().await;
    assert_eq!((start.attempt.attempt, start.world_size), (2, 2));
    a.report(&start.attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
    assert!(server.job(&id).await.reason.unwrap().contains("agent \"b\" was shut down"));

    server.order(&id, "pause").await;
    assert!(a.expect_stop().await);
    a.end(&start.attempt, Ending::Stopped).await;
    server.wait_for_state(&id, JobState::Paused).await;
    server.order(&id, "resume").await;
    expect_no_message(&mut a, QUIET).await;
    assert_eq!(server.job(&id).await.state, JobState::Queued, "a resumed job waits for all ranks");
    server.stop().await;
}
