//! Orders to start that never reach their agent, and agents that lose what they were told to start.

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

/// The next order to start, for an agent that says that it has nothing.
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

/// The job once it is over, while its agent says that it has nothing.
async fn over(server: &TestServer, agent: &mut Agent, id: &str) -> Job {
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
    let server = TestServer::with(|c| {
        c.lease = Duration::from_secs(2);
        c.heartbeat = Duration::from_millis(100);
    })
    .await;
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    let no_restart = |spec: &mut serde_json::Value| spec["recovery"] = json!({"max_restarts": 0});
    let id = server.submit(no_restart).await.id.to_string();
    // Five attempts in a row may end before a rank of theirs has begun; the sixth is one too many.
    for number in 1..=6 {
        let start = tokio::time::timeout(Duration::from_secs(60), next_start(&mut agent)).await;
        assert_eq!(start.expect("it is tried again").attempt, number);
    }
    let job = over(&server, &mut agent, &id).await;
    assert_eq!((job.state, job.attempt), (JobState::Failed, 6), "{:?}", job.reason);
    let stored = server.stored_events(&id).await;
    let lost = stored.iter().filter(|event| event["state"] == "lost");
    let said: Vec<_> = lost.map(|event| event["reason"].as_str().unwrap_or_default().to_owned()).collect();
    assert!(
        said.len() == 6 && said[0] == "the order to start attempt 1 did not reach agent \"a\"",
        "{said:?}"
    );

    // One that the agent has had and has no more is a restart like any other.
    let id = server.submit(no_restart).await.id.to_string();
    let attempt = next_start(&mut agent).await;
    agent.heartbeat(std::slice::from_ref(&attempt)).await;
    let job = over(&server, &mut agent, &id).await;
    assert_eq!((job.state, job.attempt), (JobState::Failed, 1), "{:?}", job.reason);
    assert!(
        job.reason.as_ref().is_some_and(|why| why.contains("has no ranks of attempt 1")),
        "{:?}",
        job.reason
    );
    server.stop().await;
}

/// A server that was killed while the order was on its way does not know whether it came.
#[tokio::test]
async fn a_start_order_lost_with_its_server_costs_no_restart() {
    let quick = |c: &mut ServeConfig| {
        c.lease = Duration::from_secs(6);
        c.heartbeat = Duration::from_millis(100);
    };
    let server = TestServer::with(quick).await;
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    let id = server.submit(|spec| spec["recovery"] = json!({"max_restarts": 0})).await.id.to_string();
    assert_eq!(agent.expect_start().await.attempt.attempt, 1);
    let server = TestServer::open(server.stop().await, quick).await;
    let mut agent = Agent::join(&server, 2).await;
    let start = tokio::time::timeout(Duration::from_secs(60), next_start(&mut agent)).await;
    let attempt = start.expect("it is tried again");
    assert_eq!((attempt.job.as_str(), attempt.attempt), (id.as_str(), 2));

    // That it came is known where it has trained.
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
    let server = TestServer::open(server.stop().await, quick).await;
    let mut agent = Agent::join(&server, 2).await;
    let job = over(&server, &mut agent, &id).await;
    let why = job.reason.as_deref().unwrap_or_default();
    assert!(job.state == JobState::Failed && why.contains("has no ranks of attempt 2"), "{why}");
    server.stop().await;
}
