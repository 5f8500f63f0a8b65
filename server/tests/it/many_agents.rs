//! Many machines and a long queue: every job runs once and in its turn, and a server that starts again has all that ran.

use crate::{
    agent::{Agent, hello, running},
    test_server::{TIMEOUT, TestServer},
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
/// The whole queue takes several times as long as any of its steps.
const PATIENCE: Duration = TIMEOUT.saturating_mul(9);

/// Starts that machines have heard, in the order of their fencing tokens: the attempt, all its ranks, and those that have been given out.
type Heard = Arc<Mutex<BTreeMap<u64, (AttemptRef, u32, u32)>>>;

/// From a machine that others reach.
fn hello_at(number: usize, attempts: Vec<AttemptRef>) -> FromAgent {
    let name = format!("machine-{number:02}");
    let mut said = hello(&name, SLOTS, attempts);
    if let FromAgent::Hello { machine, .. } = &mut said {
        machine.address = Some(format!("10.0.0.{number}"));
        machine.network_id = Some(name);
    }
    said
}

async fn end(agent: &mut Agent, start: &StartAttempt) {
    let attempt = &start.attempt;
    if start.ranks.iter().any(|(rank, _)| *rank == 0) {
        let (source, events) = (Source::Rank(0), vec![running(10, 0)]);
        agent.send(FromAgent::Report { attempt: attempt.clone(), source, first: 0, events }).await;
    }
    let events = vec![AttemptEvent::Ended(Ending::Succeeded { step: 10 })];
    agent.send(FromAgent::Report { attempt: attempt.clone(), source: Source::Agent, first: 0, events }).await;
}

/// Trains nothing until the server closes; what ran then. Once it may, every attempt ends at once.
async fn train(
    mut agent: Agent,
    mut held: Vec<StartAttempt>,
    mut may_end: watch::Receiver<bool>,
    heard: Heard,
) -> Vec<StartAttempt> {
    let mut beat = interval(Duration::from_secs(1));
    let mut ended = HashSet::new();
    loop {
        if *may_end.borrow_and_update() {
            for start in &held {
                if ended.insert(start.attempt.clone()) {
                    end(&mut agent, start).await;
                }
            }
        }
        tokio::select! {
            // The end of a connection comes before the next heartbeat, which nobody would take.
            biased;
            message = agent.next() => match message {
                Some(ToAgent::Start(start)) => {
                    let mut heard = heard.lock().unwrap();
                    let unheard = (start.attempt.clone(), start.world_size, 0);
                    let given = heard.entry(start.attempt.fencing_token.number).or_insert(unheard);
                    given.2 += u32::try_from(start.ranks.len()).unwrap();
                    held.push(*start);
                }
                Some(ToAgent::Ack(ack)) => {
                    if ack.source == Source::Agent {
                        held.retain(|start| start.attempt != ack.attempt);
                    }
                }
                // A heartbeat may name what has just ended, before its agent hears that this is stored.
                Some(ToAgent::Stop { attempt, .. }) if ended.contains(&attempt) => {}
                None => return held,
                other => panic!("{other:?}"),
            },
            _ = beat.tick() => {
                let attempts: Vec<_> = held.iter().map(|start| start.attempt.clone()).collect();
                agent.heartbeat(&attempts).await;
            }
            _ = may_end.changed() => {}
        }
    }
}

async fn wait_until(what: &str, is_so: impl AsyncFn() -> bool) {
    let began = Instant::now();
    while !is_so().await {
        assert!(began.elapsed() < PATIENCE, "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// How many ranks each of the jobs has: the first 30 fill 240 slots to the last one, and the others wait.
fn ranks() -> impl Iterator<Item = u32> {
    let filling = [(10, 16), (8, 8), (8, 1), (4, 2)];
    let filling = filling.into_iter().flat_map(|(jobs, ranks)| std::iter::repeat_n(ranks, jobs));
    filling.chain([1, 2, 1, 8, 2, 16, 1, 8, 2, 1].into_iter().cycle()).take(200)
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_jobs_run_once_in_order_across_a_restart() {
    let server = TestServer::new().await;
    Agent::join_with_dataset(&server, 1).await.disconnect();
    wait_until("the agent of the dataset is gone", async || {
        server.get("/agents").await.1["agents"][0]["online"] == false
    })
    .await;
    let (may_end, ending) = watch::channel(false);
    let heard = Heard::default();
    let (mut tokens, mut machines) = (Vec::new(), Vec::<JoinHandle<Vec<StartAttempt>>>::new());
    for number in 0..MACHINES {
        let token = server.agent_token(&format!("machine-{number:02}")).await;
        let agent = Agent::connect_with_token(&server, &token, hello_at(number, Vec::new())).await.unwrap();
        machines.push(tokio::spawn(train(agent, Vec::new(), ending.clone(), heard.clone())));
        tokens.push(token);
    }
    let mut submitted: Vec<(JobId, u32)> = Vec::new();
    for ranks in ranks() {
        let parallel = json!({"ranks": ranks, "device": "cpu"});
        let job =
            server.submit(|spec| (spec["parallel"], spec["train"]["batch_size"]) = (parallel, json!(16)));
        submitted.push((job.await.id, ranks));
    }
    let given = |heard: &Heard| heard.lock().unwrap().values().map(|(_, _, given)| given).sum::<u32>();
    wait_until("all slots are given away", async || given(&heard) == MACHINES as u32 * SLOTS).await;
    let started: HashSet<JobId> = heard.lock().unwrap().values().map(|(at, ..)| at.job.clone()).collect();
    assert_eq!(started, submitted[..30].iter().map(|(id, _)| id.clone()).collect());

    // All machines come back at once, and nothing that runs begins anew.
    let dir = server.stop().await;
    let mut held = Vec::new();
    for machine in machines.drain(..) {
        held.push(machine.await.unwrap());
    }
    let began = Instant::now();
    let server = TestServer::open(dir, |_| {}).await;
    let mut coming = Vec::new();
    for ((number, token), held) in tokens.iter().enumerate().zip(&held) {
        let attempts = held.iter().map(|start| start.attempt.clone()).collect();
        coming.push(Agent::connect_with_token(&server, token, hello_at(number, attempts)));
    }
    for (agent, held) in futures_util::future::join_all(coming).await.into_iter().zip(held) {
        let agent = agent.unwrap();
        assert_eq!(agent.welcome.1, [], "none of its attempts was given away");
        machines.push(tokio::spawn(train(agent, held, ending.clone(), heard.clone())));
    }
    assert!(began.elapsed() < TIMEOUT, "{:?}", began.elapsed());
    let live = "SELECT count(*) FROM jobs WHERE attempt = 1 AND state IN ('starting', 'running')";
    assert_eq!(server.query_number(live).await, 30);

    may_end.send(true).unwrap();
    wait_until("all jobs are over", async || {
        server.query_number("SELECT count(*) FROM jobs WHERE state = 'succeeded'").await == 200
    })
    .await;
    assert_eq!(server.query_number("SELECT count(*) FROM attempts").await, 200);
    let heard = std::mem::take(&mut *heard.lock().unwrap());
    assert_eq!(heard.len(), 200, "each job was started once");
    for of in [1, 2, 8, 16] {
        let all = submitted.iter().filter(|(_, ranks)| *ranks == of).map(|(id, _)| id);
        let in_order = heard.values().filter(|(_, ranks, _)| *ranks == of);
        let in_order = in_order.map(|(attempt, ranks, given)| {
            assert_eq!((attempt.attempt, given), (1, ranks));
            &attempt.job
        });
        assert!(all.eq(in_order), "jobs of {of} ranks start in the order in which they were submitted");
    }
    server.stop().await;
}

#[tokio::test]
async fn dispatch_reads_waiting_jobs_from_the_database() {
    let server = TestServer::new().await;
    let agent = Agent::join_with_dataset(&server, 2).await;
    agent.disconnect();
    wait_until("the agent is gone", async || server.get("/agents").await.1["agents"][0]["online"] == false)
        .await;
    let (first, second) = (server.submit(|_| {}).await.id, server.submit(|_| {}).await.id);
    wait_until("dispatch knows both", async || {
        server.get(&format!("/jobs/{second}")).await.1["queue"]["place"] == 2
    })
    .await;
    // As a transaction does whose connection breaks at its end.
    server
        .execute(&format!("UPDATE jobs SET state = 'paused', last_seq = last_seq + 1 WHERE id = '{first}'"))
        .await;
    wait_until("the other one is first", async || {
        server.get(&format!("/jobs/{second}")).await.1["queue"]["place"] == 1
    })
    .await;
    let mut agent = Agent::join(&server, 2).await;
    assert_eq!(agent.expect_start().await.attempt.job, second);
    // And one that comes back.
    server
        .execute(&format!("UPDATE jobs SET state = 'queued', last_seq = last_seq + 1 WHERE id = '{first}'"))
        .await;
    wait_until("it waits", async || server.get(&format!("/jobs/{first}")).await.1["queue"]["place"] == 1)
        .await;
    server.stop().await;
}
