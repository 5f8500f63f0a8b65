//! `Start` messages that do not reach their agent, and agents that lose an attempt.

use crate::{
    agent::{Agent, running},
    test_server::TestServer,
};
use lockstep_protocol::{
    agent::{AttemptRef, Source, ToAgent},
    job::{Job, JobState},
};
use lockstep_server::ServeConfig;
use serde_json::json;
use std::time::Duration;

/// Returns the next attempt that the server starts, while the agent reports no attempts.
async fn next_start(agent: &mut Agent) -> AttemptRef {
    loop {
        agent.heartbeat(&[]).await;
        match tokio::time::timeout(Duration::from_millis(50), agent.next()).await {
            Ok(Some(ToAgent::Start(start))) => return start.attempt,
            Ok(None) => panic!("the connection has ended"),
            _ => {}
        }
    }
}

/// Waits for the end of a job, while its agent reports no attempts.
async fn wait_for_end(server: &TestServer, agent: &mut Agent, id: &str) -> Job {
    loop {
        agent.heartbeat(&[]).await;
        let job = server.job(id).await;
        if job.state.is_final() {
            return job;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_start_order_lost_with_its_connection_costs_no_restart() {
    let server = TestServer::with_lease(Duration::from_secs(2)).await;
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    let no_restart = |spec: &mut serde_json::Value| spec["recovery"] = json!({"max_restarts": 0});
    let id = server.submit(no_restart).await.id.to_string();
    // Five attempts in a row may end before a rank has started. After the sixth the job fails.
    for number in 1..=6 {
        let start = tokio::time::timeout(Duration::from_secs(60), next_start(&mut agent)).await;
        assert_eq!(start.expect("another attempt").attempt, number);
    }
    let job = wait_for_end(&server, &mut agent, &id).await;
    assert_eq!((job.state, job.attempt), (JobState::Failed, 6), "{:?}", job.reason);
    let stored = server.stored_events(&id).await;
    let lost = stored.iter().filter(|event| event["state"] == "lost");
    let reasons: Vec<_> = lost.map(|event| event["reason"].as_str().unwrap_or_default().to_owned()).collect();
    assert!(
        reasons.len() == 6 && reasons[0] == "the order to start attempt 1 did not reach agent \"a\"",
        "{reasons:?}"
    );

    // An attempt that the agent had received and then lost counts as a restart.
    let id = server.submit(no_restart).await.id.to_string();
    let attempt = next_start(&mut agent).await;
    agent.heartbeat(std::slice::from_ref(&attempt)).await;
    let job = wait_for_end(&server, &mut agent, &id).await;
    assert_eq!((job.state, job.attempt), (JobState::Failed, 1), "{:?}", job.reason);
    assert!(
        job.reason.as_ref().is_some_and(|reason| reason.contains("has no ranks of attempt 1")),
        "{:?}",
        job.reason
    );
    server.stop().await;
}

/// A server that stops while it sends `Start` does not know whether the agent got the message.
#[tokio::test]
async fn a_start_order_lost_with_its_server_costs_no_restart() {
    let short_lease = |c: &mut ServeConfig| {
        c.lease = Duration::from_secs(6);
        c.heartbeat = Duration::from_millis(100);
    };
    let server = TestServer::with(short_lease).await;
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    let id = server.submit(|spec| spec["recovery"] = json!({"max_restarts": 0})).await.id.to_string();
    assert_eq!(agent.expect_start().await.attempt.attempt, 1);
    let server = TestServer::open(server.stop().await, short_lease).await;
    let mut agent = Agent::join(&server, 2).await;
    let start = tokio::time::timeout(Duration::from_secs(60), next_start(&mut agent)).await;
    let attempt = start.expect("another attempt");
    assert_eq!((attempt.job.as_str(), attempt.attempt), (id.as_str(), 2));

    // If the attempt has trained, the server knows that the agent got the message.
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
    let server = TestServer::open(server.stop().await, short_lease).await;
    let mut agent = Agent::join(&server, 2).await;
    let job = wait_for_end(&server, &mut agent, &id).await;
    let reason = job.reason.as_deref().unwrap_or_default();
    assert!(job.state == JobState::Failed && reason.contains("has no ranks of attempt 2"), "{reason}");
    server.stop().await;
}
