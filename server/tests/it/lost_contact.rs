//! A restart of the server while the machines of an attempt have lost contact to each other.

use crate::{
    agent::{Agent, running},
    gangs::{LONG_LEASE, assert_before_lease, hello_at, report_lost_contact, start_gang, with_long_lease},
    test_server::TestServer,
};
use lockstep_protocol::{
    agent::{AttemptEvent, Ending, Source, ToAgent},
    job::JobState,
};
use lockstep_server::ServeConfig;
use std::time::Duration;

fn long_lease(config: &mut ServeConfig) {
    (config.lease, config.heartbeat) = (LONG_LEASE, Duration::from_millis(100));
}

#[tokio::test]
async fn unresponsive_machines_are_not_waited_for_after_a_server_restart() {
    let (server, mut a, mut b) = with_long_lease().await;
    let (id, attempt) = start_gang(&server, &mut a, &mut b).await;
    a.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
    // A heartbeat, so that the server does not end the attempt before its restart.
    b.heartbeat(std::slice::from_ref(&attempt)).await;
    report_lost_contact(&mut a, &attempt, 1, vec![2]).await;
    let server = TestServer::open(server.stop().await, long_lease).await;
    let start = tokio::time::Instant::now();
    let mut a = Agent::connect(&server, hello_at("a", 2, Vec::new(), "10.0.0.1")).await.unwrap();
    let job = server.wait_for_state(&id, JobState::Restarting).await;
    assert_before_lease(start);
    let reason = job.reason.unwrap();
    assert!(
        reason.contains("agent \"b\" was silent") && reason.contains("have lost contact with its ranks"),
        "{reason}"
    );

    // The lost machine returns. Its old ranks still use memory, so no rank of the next attempt starts there.
    let server = TestServer::open(server.stop().await, long_lease).await;
    let hello = hello_at("a", 2, Vec::new(), "10.0.0.1");
    drop(a);
    a = Agent::connect(&server, hello).await.unwrap();
    let mut b = Agent::connect(&server, hello_at("b", 2, vec![attempt.clone()], "10.0.0.2")).await.unwrap();
    assert_eq!(b.welcome.1, std::slice::from_ref(&attempt), "the server revokes the old attempt");
    a.expect_silence(1500).await;
    b.heartbeat(&[]).await;
    assert_eq!(a.expect_start().await.attempt.attempt, 2);
    server.stop().await;
}

#[tokio::test]
async fn a_machine_gets_work_again_after_reporting_the_end_of_old_ranks() {
    let (server, mut a, mut b) = with_long_lease().await;
    let (id, attempt) = start_gang(&server, &mut a, &mut b).await;
    a.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
    b.disconnect();
    report_lost_contact(&mut a, &attempt, 1, vec![2]).await;
    server.wait_for_state(&id, JobState::Restarting).await;
    let mut b = Agent::connect(&server, hello_at("b", 2, vec![attempt.clone()], "10.0.0.2")).await.unwrap();
    a.expect_silence(1000).await;
    b.send_report(&attempt, Source::Agent, 0, vec![AttemptEvent::Ended(Ending::Stopped)]).await;
    let attempt_number = loop {
        match b.next().await {
            Some(ToAgent::Stop { .. }) => {}
            Some(ToAgent::Start(start)) => break start.attempt.attempt,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(attempt_number, 2);
    server.stop().await;
}
