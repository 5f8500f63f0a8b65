//! Attempts on several agents: starts, ends, and causes of ends.

use crate::{
    agent::{Agent, hello, line, losses, running, wait_until_offline},
    test_server::{TestServer, spec},
};
use lockstep_protocol::{
    agent::{AttemptEvent, AttemptRef, Ending, FromAgent, Source, StartAttempt, ToAgent},
    job::JobState,
    reason::{FailureCode, ReasonKind},
};
use serde_json::{Value, json};
use std::time::Duration;

/// Same as [`hello`], from a machine at this address.
pub fn hello_at(name: &str, slots: u32, attempts: Vec<AttemptRef>, address: &str) -> FromAgent {
    let mut hello = hello(name, slots, attempts);
    if let FromAgent::Hello { machine, .. } = &mut hello {
        machine.address = Some(address.into());
        machine.interface = Some(format!("if-{name}"));
        machine.network_id = Some(format!("network of {name}"));
    }
    hello
}

/// Registers the dataset of the tests. Afterwards no agent is online.
pub async fn register_dataset(server: &TestServer) {
    Agent::join_with_dataset(server, 2).await.disconnect();
    wait_until_offline(server).await;
}

/// Connects two machines of two slots that can reach each other.
pub async fn connect_machines(server: &TestServer) -> (Agent, Agent) {
    register_dataset(server).await;
    let a = Agent::connect(server, hello_at("a", 2, Vec::new(), "10.0.0.1")).await.unwrap();
    let b = Agent::connect(server, hello_at("b", 2, Vec::new(), "10.0.0.2")).await.unwrap();
    (a, b)
}

async fn send_ready(agent: &mut Agent, start: &StartAttempt, port: Option<u16>) {
    agent.send(FromAgent::Ready { attempt: start.attempt.clone(), port }).await;
}

async fn expect_launch(agent: &mut Agent) -> u16 {
    match agent.next().await {
        Some(ToAgent::Launch { master_port, .. }) => master_port,
        other => panic!("{other:?}"),
    }
}

/// Starts a job of four ranks on both machines.
pub async fn start_gang(server: &TestServer, a: &mut Agent, b: &mut Agent) -> (String, AttemptRef) {
    let id = server.submit(|s| s["parallel"]["ranks"] = json!(4)).await.id.to_string();
    let attempt = next_attempt(a, b).await;
    (id, attempt)
}

/// Starts the next attempt on both machines.
pub async fn next_attempt(a: &mut Agent, b: &mut Agent) -> AttemptRef {
    let (first, second) = (a.expect_start().await, b.expect_start().await);
    send_ready(b, &second, None).await;
    send_ready(a, &first, Some(4321)).await;
    assert_eq!((expect_launch(a).await, expect_launch(b).await), (4321, 4321));
    first.attempt
}

pub fn rank_killed(rank: u32) -> Ending {
    Ending::Failed { reason: ReasonKind::RankKilled { rank, step: 3, signal: 9 }.into(), retriable: true }
}

pub fn lost_contact(rank: u32) -> Ending {
    let detail = "lost the connection".into();
    Ending::Secondary { reason: ReasonKind::RankFailed { rank, step: 3, detail }.into() }
}

pub const LONG_LEASE: Duration = Duration::from_secs(30);

/// A server with long leases and frequent heartbeats, and two machines.
pub async fn with_long_lease() -> (TestServer, Agent, Agent) {
    let server = TestServer::with_lease(LONG_LEASE).await;
    let (a, b) = connect_machines(&server).await;
    (server, a, b)
}

/// Asserts that an attempt that began to end at `start` has ended long before its lease expires.
pub fn assert_before_lease(start: tokio::time::Instant) {
    assert!(start.elapsed() < LONG_LEASE / 2, "after {:?}", start.elapsed());
}

/// Reports that rank 0, which has reported `first` records, has lost other ranks. The machines of the ranks `unreachable` do not respond.
pub async fn report_lost_contact(agent: &mut Agent, attempt: &AttemptRef, first: u64, unreachable: Vec<u32>) {
    let reason = "lost the connection".to_owned();
    let (code, retriable, secondary) = (FailureCode::Other, true, true);
    let failed =
        AttemptEvent::RankFailed { rank: 0, step: 3, reason, code, retriable, secondary, unreachable };
    for (source, first, event) in
        [(Source::Rank(0), first, failed), (Source::Agent, 0, AttemptEvent::Ended(lost_contact(0)))]
    {
        agent.send_report(attempt, source, first, vec![event]).await;
    }
    let mut stored = 0;
    while stored < 2 {
        match agent.next().await {
            Some(ToAgent::Ack(_)) => stored += 1,
            // The server may stop the attempt in between.
            Some(ToAgent::Stop { .. }) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn machines_learn_rank_0_s_address_and_start_once_all_are_ready() {
    let server = TestServer::new().await;
    let (mut a, mut b) = connect_machines(&server).await;
    let id = server.submit(|s| s["parallel"]["ranks"] = json!(4)).await.id.to_string();
    let (first, second) = (a.expect_start().await, b.expect_start().await);
    assert_eq!((&first.ranks, &second.ranks), (&vec![(0, 0), (1, 1)], &vec![(2, 0), (3, 1)]));
    assert_eq!(
        (first.attempt.clone(), first.secret.clone()),
        (second.attempt.clone(), second.secret.clone())
    );
    for start in [&first, &second] {
        assert_eq!((start.master_addr.as_str(), start.master_port, start.world_size), ("10.0.0.1", 0, 4));
    }
    let network = second.network.as_ref().unwrap();
    assert_eq!((network.address.as_str(), network.interface.as_deref()), ("10.0.0.2", Some("if-b")));
    // Only the port of rank 0's machine counts.
    send_ready(&mut b, &second, Some(1)).await;
    send_ready(&mut a, &first, Some(4321)).await;
    assert_eq!((expect_launch(&mut a).await, expect_launch(&mut b).await), (4321, 4321));
    // An agent that missed Launch gets it again after it reconnects.
    b.disconnect();
    let mut b =
        Agent::connect(&server, hello_at("b", 2, vec![second.attempt.clone()], "10.0.0.2")).await.unwrap();
    assert_eq!(b.welcome.1, []);
    send_ready(&mut b, &second, None).await;
    assert_eq!((expect_launch(&mut a).await, expect_launch(&mut b).await), (4321, 4321));

    a.report(&first.attempt, Source::Rank(0), 0, vec![running(100, 0), losses(0, 1..=3)]).await;
    b.report(&first.attempt, Source::Rank(2), 0, vec![losses(2, 1..=3)]).await;
    // Each agent reports own records in addition to the records of its ranks.
    b.end(&first.attempt, Ending::Succeeded { step: 100 }).await;
    assert_eq!(server.job(&id).await.state, JobState::Running, "rank 0 still writes its checkpoint");
    let (_, machines) = server.get("/agents").await;
    let in_use = |n: usize| {
        let slots = machines["agents"][n]["slots"].as_array().unwrap();
        slots.iter().filter(|slot| !slot["job"].is_null()).count()
    };
    assert_eq!((in_use(0), in_use(1)), (2, 0), "the second machine's slots are free: {machines:#}");
    a.end(&first.attempt, Ending::Succeeded { step: 100 }).await;
    let job = server.job(&id).await;
    assert_eq!((job.state, job.agents), (JobState::Succeeded, vec!["a".to_owned(), "b".to_owned()]));
    server.stop().await;
}

#[tokio::test]
async fn the_first_cause_explains_the_end_and_the_next_attempt_waits_for_all() {
    let server = TestServer::new().await;
    let (mut a, mut b) = connect_machines(&server).await;
    let (id, attempt) = start_gang(&server, &mut a, &mut b).await;
    a.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), losses(0, 1..=3)]).await;
    // The first machine reports first, but only that it has lost other ranks.
    a.end(&attempt, lost_contact(0)).await;
    assert!(!b.expect_stop().await, "the other machine is told to end its ranks at once");
    assert_eq!(server.job(&id).await.state, JobState::Running, "the other machine's ranks may still run");
    b.end(&attempt, rank_killed(2)).await;
    let next = next_attempt(&mut a, &mut b).await;
    let states = server.stored_events(&id).await;
    let restart = states.iter().find(|e| e["state"] == "restarting").unwrap();
    assert_eq!(
        restart["reason"],
        "rank 2 was killed by signal 9 at step 3; attempt 2 starts from the beginning"
    );

    // A restarted server knows which machine has ended, and tells the other machine.
    a.end(&next, rank_killed(1)).await;
    let dir = server.stop().await;
    let server = TestServer::open(dir, |_| {}).await;
    let mut b = Agent::connect(&server, hello_at("b", 2, vec![next.clone()], "10.0.0.2")).await.unwrap();
    assert_eq!(b.welcome.1, [], "the records of its ranks are still accepted");
    assert!(!b.expect_stop().await);
    b.report(&next, Source::Rank(2), 0, vec![losses(2, 1..=3)]).await;
    b.end(&next, Ending::Stopped).await;
    let job = server.wait_for_state(&id, JobState::Restarting).await;
    assert!(job.reason.unwrap().contains("rank 1 was killed"));
    server.stop().await;
}

#[tokio::test]
async fn a_failed_check_on_one_machine_prevents_ranks_on_all() {
    let server = TestServer::new().await;
    let (mut a, mut b) = connect_machines(&server).await;
    let id = server.submit(|s| s["parallel"]["ranks"] = json!(4)).await.id.to_string();
    let (first, second) = (a.expect_start().await, b.expect_start().await);
    send_ready(&mut a, &first, Some(4321)).await;
    let detail = "/some/pictures is not there".into();
    let reason = ReasonKind::DatasetUnusable { rank: None, step: None, detail }.into();
    b.end(&second.attempt, Ending::Failed { reason, retriable: false }).await;
    assert!(!a.expect_stop().await);
    a.end(&first.attempt, Ending::Stopped).await;
    let job = server.job(&id).await;
    let reason = job.reason.as_deref();
    assert_eq!(
        (job.state, reason),
        (JobState::Failed, Some("the ranks were not started: /some/pictures is not there"))
    );
    server.stop().await;
}

#[tokio::test]
async fn a_leaving_machine_causes_a_checkpoint_and_a_silent_machine_is_named() {
    let server = TestServer::with_lease(Duration::from_secs(8)).await;
    let (mut a, mut b) = connect_machines(&server).await;
    let (id, attempt) = start_gang(&server, &mut a, &mut b).await;
    a.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
    b.send(FromAgent::Leaving { reason: "the agent was stopped".into() }).await;
    assert!(a.expect_stop().await, "the ranks write a checkpoint first");
    b.end(&attempt, Ending::Stopped).await;
    a.end(&attempt, Ending::Stopped).await;
    b.disconnect();
    let job = server.wait_for_state(&id, JobState::Queued).await;
    assert!(job.reason.unwrap().contains("agent \"b\" was shut down (the agent was stopped)"));

    let mut b = Agent::connect(&server, hello_at("b", 2, Vec::new(), "10.0.0.2")).await.unwrap();
    let attempt = next_attempt(&mut a, &mut b).await;
    a.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
    b.disconnect();
    // The first machine still sends heartbeats; its ranks have lost contact with the other ranks.
    let mut heartbeats = tokio::time::interval(Duration::from_millis(100));
    loop {
        tokio::select! {
            _ = heartbeats.tick() => a.heartbeat(std::slice::from_ref(&attempt)).await,
            patient = a.expect_stop() => {
                assert!(!patient);
                break;
            }
        }
    }
    a.end(&attempt, lost_contact(0)).await;
    let job = server.wait_for_state(&id, JobState::Restarting).await;
    assert!(job.reason.unwrap().starts_with("agent \"b\" was silent for 8 s"));
    // The second machine returns with ranks of the ended attempt.
    let mut b = Agent::connect(&server, hello_at("b", 2, vec![attempt.clone()], "10.0.0.2")).await.unwrap();
    assert_eq!(b.welcome.1, std::slice::from_ref(&attempt));
    b.send_report(&attempt, Source::Agent, 0, vec![AttemptEvent::Ended(rank_killed(2))]).await;
    let mut messages = vec![b.next().await.unwrap(), b.next().await.unwrap()];
    messages.sort_by_key(|message| matches!(message, ToAgent::Start(_)));
    assert!(matches!(&messages[0], ToAgent::Stop { attempt: old, .. } if *old == attempt), "{messages:?}");
    assert!(matches!(&messages[1], ToAgent::Start(start) if start.attempt.attempt == 3), "{messages:?}");
    server.stop().await;
}

#[tokio::test]
async fn a_silent_machine_neither_delays_the_end_nor_gets_work() {
    let (server, mut a, mut b) = with_long_lease().await;
    let (id, attempt) = start_gang(&server, &mut a, &mut b).await;
    a.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
    // The second machine's cable is unplugged: the connection is open, but no message arrives. The first machine's ranks have lost contact
    // with the second machine's ranks.
    let start = tokio::time::Instant::now();
    report_lost_contact(&mut a, &attempt, 1, vec![2]).await;
    let job = server.wait_for_state(&id, JobState::Restarting).await;
    assert_before_lease(start);
    let reason = job.reason.unwrap();
    assert!(reason.starts_with("agent \"b\" was silent for "), "{reason}");
    assert!(reason.contains("the ranks of other machines have lost contact with its ranks"), "{reason}");
    // Waits several rounds of dispatch. The machine seems free, but its ranks may still run.
    a.expect_silence(1500).await;
    b.heartbeat(std::slice::from_ref(&attempt)).await;
    // The machine still has ranks of the attempt.
    a.expect_silence(1500).await;
    b.heartbeat(&[]).await;
    let first = a.expect_start().await;
    assert_eq!(first.attempt.attempt, 2);
    let second = loop {
        match b.next().await {
            Some(ToAgent::Stop { attempt: old, .. }) => assert_eq!(old, attempt),
            Some(ToAgent::Start(start)) => break start,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(second.attempt, first.attempt);
    server.stop().await;
}

#[tokio::test]
async fn the_end_waits_for_slow_machines_but_not_for_disconnected_machines() {
    let (server, mut a, mut b) = with_long_lease().await;
    let (id, attempt) = start_gang(&server, &mut a, &mut b).await;
    a.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
    // A rank of the first machine has lost another rank, but no rank reports that the second machine is unreachable.
    report_lost_contact(&mut a, &attempt, 1, Vec::new()).await;
    assert!(!b.expect_stop().await);
    // The second machine is silent for many heartbeats.
    a.expect_silence(2500).await;
    assert_eq!(server.job(&id).await.state, JobState::Running);
    // The silent machine's report is stored.
    assert_eq!(b.report(&attempt, Source::Rank(2), 0, vec![line(2, 1, "kept")]).await, 1);
    b.end(&attempt, lost_contact(2)).await;
    let attempt = next_attempt(&mut a, &mut b).await;
    assert_eq!(attempt.attempt, 2);
    a.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;

    let start = tokio::time::Instant::now();
    b.disconnect();
    report_lost_contact(&mut a, &attempt, 1, Vec::new()).await;
    let is_reported = |frame: &Value| {
        let reason = frame["reason"].as_str().unwrap_or_default();
        frame["type"] == "state" && reason.starts_with("agent \"b\" was silent for ")
    };
    server.stream(&id, 0).await.until(is_reported).await;
    assert_before_lease(start);
    server.stop().await;
}

#[tokio::test]
async fn machines_that_cannot_reach_each_other_share_no_job_with_a_reason() {
    let server = TestServer::new().await;
    register_dataset(&server).await;
    let mut four_ranks = spec();
    four_ranks["parallel"]["ranks"] = json!(4);
    let id = server.submit(|s| *s = four_ranks.clone()).await.id.to_string();
    let _a = Agent::connect(&server, hello_at("a", 2, Vec::new(), "127.0.0.1")).await.unwrap();
    let _b = Agent::connect(&server, hello_at("b", 2, Vec::new(), "10.0.0.2")).await.unwrap();
    let expected = "needs 4 slots; the online machines have enough together, but other machines cannot reach a: start that agent";
    let reason = server.wait_for_reason(&id, expected).await;
    assert!(reason.contains("--advertise ADDRESS"), "{reason}");
    let (status, body) = server.post("/jobs/validate", &four_ranks).await;
    assert_eq!(status, 422, "{body}");
    server.stop().await;
}

#[tokio::test]
async fn an_agent_cannot_report_ranks_of_another_machine() {
    let server = TestServer::new().await;
    let (mut a, mut b) = connect_machines(&server).await;
    let (id, attempt) = start_gang(&server, &mut a, &mut b).await;
    b.send_report(&attempt, Source::Rank(0), 0, vec![running(100, 0), losses(0, 2..=2)]).await;
    while let Some(message) = b.next().await {
        assert!(!matches!(message, ToAgent::Ack(_)), "{message:?}");
    }
    // The report of rank 0's agent is stored.
    a.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), losses(0, 1..=1)]).await;
    let (_, metrics) = server.get(&format!("/jobs/{id}/metrics?name=loss&points=10")).await;
    assert_eq!(metrics["series"][0]["steps"], json!([1]), "{metrics}");
    server.stop().await;
}
