//! Many machines and a long queue: every job runs once and in order, also across a restart of the server.

use crate::{
    agent::{Agent, running, server_with_agent, wait_until_offline},
    gangs::hello_at,
    test_server::{TIMEOUT, TestServer, wait_until, wait_until_within},
};
use lockstep_protocol::{
    agent::{AttemptEvent, AttemptRef, Ending, FromAgent, Source, StartAttempt, ToAgent},
    job::JobId,
};
use serde_json::json;
use std::{
    collections::{BTreeMap, HashSet},
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::{
    sync::watch,
    task::JoinHandle,
    time::{Instant, interval},
};

const MACHINES: usize = 30;
const SLOTS: u32 = 8;
/// Time limit of a wait for many jobs.
const PATIENCE: Duration = TIMEOUT.saturating_mul(9);

/// Attempts that machines were told to start, by fencing token: the attempt, its number of ranks, and the number of ranks started so far.
type Starts = Arc<Mutex<BTreeMap<u64, (AttemptRef, u32, u32)>>>;

/// `Hello` of a machine that other machines can reach.
fn hello(number: usize, attempts: Vec<AttemptRef>) -> FromAgent {
    hello_at(&format!("machine-{number:02}"), SLOTS, attempts, &format!("10.0.0.{number}"))
}

/// Reports that the agent's ranks have succeeded.
async fn report_end(agent: &mut Agent, start: &StartAttempt) {
    if start.has_rank_0() {
        agent.send_report(&start.attempt, Source::Rank(0), 0, vec![running(10, 0)]).await;
    }
    let end = AttemptEvent::Ended(Ending::Succeeded { step: 10 });
    agent.send_report(&start.attempt, Source::Agent, 0, vec![end]).await;
}

/// Simulates an agent until the server closes the connection, and returns the attempts that still run. Attempts end as soon as
/// `may_end` is true.
async fn simulate_agent(
    mut agent: Agent,
    mut unfinished: Vec<StartAttempt>,
    mut may_end: watch::Receiver<bool>,
    starts: Starts,
) -> Vec<StartAttempt> {
    let mut heartbeat = interval(Duration::from_secs(1));
    let mut ended = HashSet::new();
    loop {
        if *may_end.borrow_and_update() {
            for start in &unfinished {
                if ended.insert(start.attempt.clone()) {
                    report_end(&mut agent, start).await;
                }
            }
        }
        tokio::select! {
            // Handles the end of the connection before it sends a heartbeat, which would fail.
            biased;
            message = agent.next() => match message {
                Some(ToAgent::Start(start)) => {
                    let mut starts = starts.lock().unwrap();
                    let new = (start.attempt.clone(), start.world_size, 0);
                    let entry = starts.entry(start.attempt.fencing_token.number).or_insert(new);
                    entry.2 += u32::try_from(start.ranks.len()).unwrap();
                    unfinished.push(*start);
                }
                Some(ToAgent::Ack(ack)) => {
                    if ack.source == Source::Agent {
                        unfinished.retain(|start| start.attempt != ack.attempt);
                    }
                }
                // A heartbeat may name an attempt that has just ended, before its acknowledgement arrives.
                Some(ToAgent::Stop { attempt, .. }) if ended.contains(&attempt) => {}
                None => return unfinished,
                other => panic!("{other:?}"),
            },
            _ = heartbeat.tick() => {
                let attempts: Vec<_> = unfinished.iter().map(|start| start.attempt.clone()).collect();
                agent.heartbeat(&attempts).await;
            }
            _ = may_end.changed() => {}
        }
    }
}

/// Numbers of ranks of the jobs. The first 30 jobs use all 240 slots, and the others wait.
fn ranks() -> impl Iterator<Item = u32> {
    let filling = [(10, 16), (8, 8), (8, 1), (4, 2)];
    let filling = filling.into_iter().flat_map(|(jobs, ranks)| std::iter::repeat_n(ranks, jobs));
    filling.chain([1, 2, 1, 8, 2, 16, 1, 8, 2, 1].into_iter().cycle()).take(200)
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_jobs_run_once_in_order_across_a_restart() {
    let server = TestServer::new().await;
    Agent::join_with_dataset(&server, 1).await.disconnect();
    wait_until_offline(&server).await;
    let (may_end, ending) = watch::channel(false);
    let starts = Starts::default();
    let (mut tokens, mut machines) = (Vec::new(), Vec::<JoinHandle<Vec<StartAttempt>>>::new());
    for number in 0..MACHINES {
        let token = server.agent_token(&format!("machine-{number:02}")).await;
        let agent = Agent::connect_with_token(&server, &token, hello(number, Vec::new())).await.unwrap();
        machines.push(tokio::spawn(simulate_agent(agent, Vec::new(), ending.clone(), starts.clone())));
        tokens.push(token);
    }
    let mut submitted: Vec<(JobId, u32)> = Vec::new();
    for ranks in ranks() {
        let parallel = json!({"ranks": ranks, "device": "cpu"});
        let job =
            server.submit(|spec| (spec["parallel"], spec["train"]["batch_size"]) = (parallel, json!(16)));
        submitted.push((job.await.id, ranks));
    }
    let started_ranks = |starts: &Starts| {
        starts.lock().unwrap().values().map(|(_, _, started_ranks)| started_ranks).sum::<u32>()
    };
    wait_until_within(PATIENCE, "all slots are in use", async || {
        started_ranks(&starts) == MACHINES as u32 * SLOTS
    })
    .await;
    let started: HashSet<JobId> =
        starts.lock().unwrap().values().map(|(attempt, ..)| attempt.job.clone()).collect();
    assert_eq!(started, submitted[..30].iter().map(|(id, _)| id.clone()).collect());

    // All machines reconnect at once, and no running attempt is restarted.
    let dir = server.stop().await;
    let mut unfinished = Vec::new();
    for machine in machines.drain(..) {
        unfinished.push(machine.await.unwrap());
    }
    let start_time = Instant::now();
    let server = TestServer::open(dir, |_| {}).await;
    let mut connections = Vec::new();
    for ((number, token), unfinished) in tokens.iter().enumerate().zip(&unfinished) {
        let attempts = unfinished.iter().map(|start| start.attempt.clone()).collect();
        connections.push(Agent::connect_with_token(&server, token, hello(number, attempts)));
    }
    for (agent, unfinished) in futures_util::future::join_all(connections).await.into_iter().zip(unfinished) {
        let agent = agent.unwrap();
        assert_eq!(agent.welcome.1, [], "no attempt is revoked");
        machines.push(tokio::spawn(simulate_agent(agent, unfinished, ending.clone(), starts.clone())));
    }
    assert!(start_time.elapsed() < TIMEOUT, "{:?}", start_time.elapsed());
    let active_jobs = "SELECT count(*) FROM jobs WHERE attempt = 1 AND state IN ('starting', 'running')";
    assert_eq!(server.query_number(active_jobs).await, 30);

    may_end.send(true).unwrap();
    wait_until_within(PATIENCE, "all jobs have succeeded", async || {
        server.query_number("SELECT count(*) FROM jobs WHERE state = 'succeeded'").await == 200
    })
    .await;
    assert_eq!(server.query_number("SELECT count(*) FROM attempts").await, 200);
    let starts = std::mem::take(&mut *starts.lock().unwrap());
    assert_eq!(starts.len(), 200, "each job was started once");
    for size in [1, 2, 8, 16] {
        let submitted_ids = submitted.iter().filter(|(_, ranks)| *ranks == size).map(|(id, _)| id);
        let in_order = starts.values().filter(|(_, ranks, _)| *ranks == size);
        let in_order = in_order.map(|(attempt, ranks, started_ranks)| {
            assert_eq!((attempt.attempt, started_ranks), (1, ranks));
            &attempt.job
        });
        assert!(submitted_ids.eq(in_order), "jobs of {size} ranks start in the order of submission");
    }
    server.stop().await;
}

#[tokio::test]
async fn dispatch_reads_waiting_jobs_from_the_database() {
    let (server, agent) = server_with_agent(2).await;
    agent.disconnect();
    wait_until_offline(&server).await;
    let (first, second) = (server.submit(|_| {}).await.id, server.submit(|_| {}).await.id);
    wait_until("dispatch knows both jobs", async || {
        server.get(&format!("/jobs/{second}")).await.1["queue"]["place"] == 2
    })
    .await;
    // Simulates a transaction that was committed although its connection failed.
    server
        .execute(&format!("UPDATE jobs SET state = 'paused', last_seq = last_seq + 1 WHERE id = '{first}'"))
        .await;
    wait_until("the other job is first", async || {
        server.get(&format!("/jobs/{second}")).await.1["queue"]["place"] == 1
    })
    .await;
    let mut agent = Agent::join(&server, 2).await;
    assert_eq!(agent.expect_start().await.attempt.job, second);
    // The same for a job that is queued again.
    server
        .execute(&format!("UPDATE jobs SET state = 'queued', last_seq = last_seq + 1 WHERE id = '{first}'"))
        .await;
    wait_until("the job waits", async || {
        server.get(&format!("/jobs/{first}")).await.1["queue"]["place"] == 1
    })
    .await;
    server.stop().await;
}
