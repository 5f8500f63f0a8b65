//! Dispatch: slots, devices, leases, restarts.

use crate::{
    agent::{
        Agent, checkpoint, failed, hello, hello_gpus, line, losses, running, server_with_agent, start_job,
        wait_until_offline,
    },
    gangs::register_dataset,
    test_server::{TestServer, assert_mistake, spec, wait_until},
};
use lockstep_protocol::{
    agent::{Ending, FromAgent, Source, ToAgent},
    job::JobState,
};
use serde_json::{Value, json};
use std::time::Duration;

#[tokio::test]
async fn a_failed_job_restarts_from_its_newest_checkpoint_up_to_max_restarts() {
    let (server, mut agent) = server_with_agent(2).await;
    let id = server.submit(|s| s["recovery"] = json!({"max_restarts": 1})).await.id.to_string();
    let first = agent.expect_start().await;
    assert_eq!(first.resume, None);
    let events = vec![running(100, 0), losses(0, 1..=60), checkpoint(50)];
    agent.report(&first.attempt, Source::Rank(0), 0, events).await;
    agent.end(&first.attempt, failed("rank 1 was killed by signal 9 at step 60", true)).await;

    let second = agent.expect_start().await;
    assert_eq!((second.attempt.attempt, second.resume.as_deref()), (2, Some("1-50")));
    let states = server.stored_events(&id).await;
    let reason = states.iter().find(|e| e["state"] == "restarting").unwrap()["reason"].as_str().unwrap();
    assert_eq!(reason, "rank 1 was killed by signal 9 at step 60; attempt 2 starts from step 50");
    agent.report(&second.attempt, Source::Rank(0), 0, vec![running(100, 50)]).await;
    assert_eq!(server.job(&id).await.step, 50);
    agent.end(&second.attempt, failed("rank 0 was killed by signal 9", true)).await;
    let job = server.job(&id).await;
    assert_eq!(job.state, JobState::Failed);
    assert!(job.reason.unwrap().contains("restarted once, as often as recovery.max_restarts allows"));
    // A retry resets the number of restarts.
    server.order(&id, "retry").await;
    let third = agent.expect_start().await;
    assert_eq!(third.resume.as_deref(), Some("1-50"));
    agent.end(&third.attempt, failed("rank 1 was killed by signal 9", true)).await;
    let fourth = agent.expect_start().await;
    // A restart cannot solve this reason.
    agent.end(&fourth.attempt, failed("/some/pictures is gone", false)).await;
    let job = server.job(&id).await;
    assert_eq!((job.state, job.reason.as_deref()), (JobState::Failed, Some("/some/pictures is gone")));
    server.stop().await;
}

#[tokio::test]
async fn a_silent_agent_loses_its_job_and_is_fenced() {
    let server = TestServer::with_lease(Duration::from_secs(4)).await;
    let mut silent = Agent::join_with_dataset(&server, 2).await;
    let (id, first) = silent.start_job(&server, |_| {}).await;
    silent.report(&first, Source::Rank(0), 0, vec![running(100, 0), losses(0, 1..=3)]).await;
    silent.disconnect();

    server.wait_for_state(&id, JobState::Lost).await;
    let stored = server.stored_events(&id).await;
    let lost = stored.iter().find(|e| e["state"] == "lost").unwrap();
    assert_eq!(lost["reason"], "agent \"a\" was silent for 4 s at step 3");
    let restarting = stored.iter().find(|e| e["state"] == "restarting").unwrap();
    let words = restarting["reason"].as_str().unwrap();
    assert!(
        words.ends_with(
            "; attempt 2 starts from the beginning, or from a newer checkpoint if one was written"
        ),
        "{words}"
    );

    let mut agent_b = Agent::connect(&server, hello("b", 2, Vec::new())).await.unwrap();
    let second = agent_b.expect_start().await.attempt;
    assert_eq!(second.attempt, 2);
    agent_b.heartbeat(std::slice::from_ref(&second)).await;
    // When the first agent returns, the server orders it to end its ranks, and refuses their records.
    let mut returned = Agent::connect(&server, hello("a", 2, vec![first.clone()])).await.unwrap();
    assert_eq!(returned.welcome.1, std::slice::from_ref(&first));
    returned.send_report(&first, Source::Rank(0), 2, vec![losses(0, 4..=9)]).await;
    assert!(matches!(returned.next().await, Some(ToAgent::Stop { attempt, .. }) if attempt == first));

    // The second agent sends heartbeats, and so keeps its job longer than a lease.
    let start = tokio::time::Instant::now();
    let mut heartbeats = tokio::time::interval(Duration::from_millis(100));
    while start.elapsed() < Duration::from_secs(5) {
        heartbeats.tick().await;
        agent_b.heartbeat(std::slice::from_ref(&second)).await;
    }
    agent_b.report(&second, Source::Rank(0), 0, vec![running(100, 0)]).await;
    assert!(agent_b.heartbeats > 0);
    let job = server.job(&id).await;
    assert_eq!((job.state, job.attempt, job.agents), (JobState::Running, 2, vec!["b".to_owned()]));
    server.stop().await;
}

#[tokio::test]
async fn after_a_server_restart_agents_have_one_lease_to_return() {
    let (server, mut agent, id, attempt) = start_job(|s| s["recovery"] = json!({"max_restarts": 0})).await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
    let dir = server.stop().await;
    let server = TestServer::open(dir, |c| c.lease = Duration::from_millis(500)).await;
    let job = server.wait_for_state(&id, JobState::Failed).await;
    assert!(job.reason.unwrap().contains("was silent"));
    server.stop().await;
}

#[tokio::test]
async fn an_agent_stopped_in_order_puts_its_job_back_into_the_queue() {
    let (server, mut agent) = server_with_agent(2).await;
    let one_rank = |s: &mut Value| s["parallel"]["ranks"] = json!(1);
    let ids = [server.submit(one_rank).await.id, server.submit(one_rank).await.id];
    let (first, second) = (agent.expect_start().await.attempt, agent.expect_start().await.attempt);
    for attempt in [&first, &second] {
        agent.report(attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
    }
    agent.send(FromAgent::Leaving { reason: "the agent was stopped".into() }).await;
    // Only one attempt reports its end before the agent disconnects.
    agent.end(&first, Ending::Stopped).await;
    agent.disconnect();
    for id in &ids {
        let reason = "agent \"a\" was shut down (the agent was stopped); continues from the beginning";
        assert_eq!(server.wait_for_reason(id.as_str(), "continues").await, reason);
        assert_eq!(server.job(id.as_str()).await.state, JobState::Queued);
    }
    // The next agent continues both jobs. This does not count as a restart.
    let mut agent = Agent::connect(&server, hello("b", 2, Vec::new())).await.unwrap();
    assert_eq!(agent.expect_start().await.attempt.attempt, 2);
    assert_eq!(agent.expect_start().await.attempt.attempt, 2);
    server.stop().await;
}

#[tokio::test]
async fn without_an_agent_a_job_waits_with_a_reason() {
    let server = TestServer::new().await;
    register_dataset(&server).await;
    let id = server.submit(|_| {}).await.id.to_string();
    server.wait_for_reason(&id, "no agent is online").await;
    server.order(&id, "cancel").await;
    let (status, body) = server.post("/datasets", &json!({"name": "more", "path": "/x"})).await;
    assert_eq!(status, 503, "{body}");
    server.stop().await;
}

#[tokio::test]
async fn an_incompatible_agent_is_refused_with_a_reason() {
    // Without tokens, because a token's check would refuse a foreign name earlier.
    let server = TestServer::with(|c| c.no_auth = true).await;
    let _agent = Agent::join(&server, 1).await;
    let mut same_name = hello("a", 1, Vec::new());
    let mut other_version = hello("b", 1, Vec::new());
    if let FromAgent::Hello { agent_id, .. } = &mut same_name {
        *agent_id = "another".into();
    }
    if let FromAgent::Hello { protocol, .. } = &mut other_version {
        *protocol += 1;
    }
    for (hello, text) in [
        (same_name, "named \"a\" is connected already"),
        (other_version, "run the same version"),
        (FromAgent::Heartbeat { attempts: Vec::new(), no_work: None }, "must be Hello"),
    ] {
        let reason = Agent::connect(&server, hello).await.err().expect("refused");
        assert!(reason.contains(text), "{reason}");
    }
    // The same agent may connect again. Its old connection ends.
    assert!(Agent::connect(&server, hello("a", 1, Vec::new())).await.is_ok());
    server.stop().await;
}

#[tokio::test]
async fn a_job_cancelled_while_its_agent_is_offline_ends_and_the_agent_is_told_later() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(10, 0), line(0, 1, "x")]).await;
    agent.disconnect();
    wait_until_offline(&server).await;
    let (_, body) = server.post(&format!("/jobs/{id}/cancel"), &Value::Null).await;
    assert_eq!(body["state"], "cancelled");
    let agent = Agent::connect(&server, hello("a", 2, vec![attempt.clone()])).await.unwrap();
    assert_eq!(agent.welcome.1, [attempt]);
    server.stop().await;
}

#[tokio::test]
async fn jobs_run_on_agents_with_their_device() {
    let server = TestServer::new().await;
    let mut cpu = Agent::join_with_dataset(&server, 4).await;
    let wants = |device: &'static str, precision: &'static str| {
        move |spec: &mut Value| {
            spec["parallel"] = json!({"ranks": 2, "device": device});
            spec["train"]["precision"] = json!(precision);
        }
    };
    // No machine has a GPU: the submission is refused with a hint.
    let assert_refused = async |change: &dyn Fn(&mut Value), pointer: &str, hint: &str| {
        let mut spec = spec();
        change(&mut spec);
        assert_mistake(server.post("/jobs", &spec).await, pointer, hint);
    };
    assert_refused(&wants("cuda", "auto"), "/parallel/device", "no machine online has a GPU").await;
    assert_refused(&wants("auto", "bf16"), "/train/precision", "fp32").await;

    let mut gpu = Agent::connect(&server, hello_gpus("gpus", 4)).await.unwrap();
    let (_, list) = server.get("/agents").await;
    let machine = list["agents"].as_array().unwrap().iter().find(|a| a["name"] == "gpus").unwrap();
    let slot = &machine["slots"][2];
    assert_eq!((&slot["device"], &slot["name"]), (&json!("cuda"), &json!("NVIDIA H200")));
    assert!(slot["uuid"].as_str().unwrap().starts_with("GPU-2"), "{slot}");
    assert_eq!(slot["memory_bytes"], json!(150_754_820_096u64));

    server.submit(wants("cpu", "auto")).await;
    cpu.expect_start().await;
    server.submit(wants("cuda", "fp16")).await;
    gpu.expect_start().await;
    // Half precision needs a GPU, also with the device "auto".
    server.submit(wants("auto", "bf16")).await;
    gpu.expect_start().await;
    // All four GPUs are in use: the next job waits, with a reason.
    let waiting = server.submit(wants("cuda", "auto")).await.id.to_string();
    let reason = server.wait_for_reason(&waiting, "waits for").await;
    assert_eq!(reason, "waits for 2 GPUs: 0 of 4 on \"gpus\" free");
    for (device, hint) in [
        ("cuda", "use at most 4, or join a machine with more"),
        (
            "cpu",
            "use at most 4, or join a machine with more, or give a machine more slots: `lockstep serve --cpu-slots N`",
        ),
    ] {
        let wants = |spec: &mut Value| spec["parallel"] = json!({"ranks": 8, "device": device});
        assert_refused(&wants, "/parallel/ranks", hint).await;
    }
    server.stop().await;
}

#[tokio::test]
async fn a_machine_with_gpus_runs_cpu_jobs_on_request() {
    let server = TestServer::new().await;
    let _pictures = Agent::join_with_dataset(&server, 1).await;
    let mut gpu = Agent::connect(&server, hello_gpus("gpus", 2)).await.unwrap();
    server.submit(|spec| spec["parallel"] = json!({"ranks": 2, "device": "cpu"})).await;
    let start = gpu.expect_start().await;
    assert_eq!(start.ranks, [(0, 0), (1, 1)]);
    server.stop().await;
}

#[tokio::test]
async fn a_lost_machine_counts_as_a_restart_only_without_progress() {
    let server = TestServer::with_lease(Duration::from_secs(2)).await;
    let mut first_agent = Some(Agent::join_with_dataset(&server, 2).await);
    let id = server.submit(|s| s["recovery"] = json!({"max_restarts": 1})).await.id.to_string();
    let lose = async |mut agent: Agent, number: u64, has_checkpoint: bool| {
        let start = agent.expect_start().await;
        assert_eq!(u64::from(start.attempt.attempt), number);
        let mut events =
            vec![running(1000, (number - 1) * 10), losses(0, (number - 1) * 10 + 1..=number * 10)];
        events.extend(has_checkpoint.then(|| checkpoint(number * 10)));
        agent.report(&start.attempt, Source::Rank(0), 0, events).await;
        agent.disconnect();
        wait_until(&format!("attempt {number} is lost"), async || {
            let events = server.stored_events(&id).await;
            events.iter().filter(|event| event["state"] == "lost").count() >= number as usize
        })
        .await;
    };
    // Attempts with a newer checkpoint do not count as restarts. Five such attempts are lost, then two without a checkpoint.
    for number in 1..=7 {
        let agent = match first_agent.take() {
            Some(agent) => agent,
            None => Agent::connect(&server, hello(&format!("a{number}"), 2, Vec::new())).await.unwrap(),
        };
        lose(agent, number, number <= 5).await;
    }
    let job = server.wait_for_state(&id, JobState::Failed).await;
    assert!(job.reason.unwrap().contains("restarted once, as often as recovery.max_restarts allows"));
    server.stop().await;
}

#[tokio::test]
async fn too_large_jobs_name_drained_machines_that_would_suffice() {
    let server = TestServer::new().await;
    let _small = Agent::join_with_dataset(&server, 2).await;
    let mut large = Agent::connect(&server, hello("b", 4, Vec::new())).await.unwrap();
    server.submit(|s| s["parallel"]["ranks"] = json!(3)).await;
    large.expect_start().await;
    let waiting = server.submit(|s| s["parallel"]["ranks"] = json!(4)).await.id.to_string();
    let wait_for_reason = async |end: &str| {
        wait_until(&format!("the job's reason ends with {end:?}"), async || {
            server.job(&waiting).await.reason.unwrap_or_default().ends_with(end)
        })
        .await;
    };
    assert_eq!(server.post("/agents/id-b/drain", &json!({})).await.0, 204);
    wait_for_reason("the only online machine for it, \"a\", has 2; drained: b (`lockstep machine undrain` or the page Machines gives them work again)").await;
    assert_eq!(server.post("/agents/id-a/drain", &json!({})).await.0, 204);
    wait_for_reason("no online agent takes this job; drained: a, b (`lockstep machine undrain` or the page Machines gives them work again)").await;
    assert_eq!(server.post("/agents/id-b/undrain", &json!({})).await.0, 204);
    wait_for_reason("1 of 4 on \"b\" free").await;
    server.stop().await;
}

#[tokio::test]
async fn machines_that_join_or_leave_cause_no_events_of_waiting_jobs() {
    let server = TestServer::new().await;
    // The jobs are submitted while a large enough machine is online.
    let mut large = Agent::join_with_dataset(&server, 100).await;
    let running = server.submit(|s| s["parallel"]["ranks"] = json!(100)).await.id.to_string();
    large.expect_start().await;
    let mut last = String::new();
    for _ in 0..20 {
        last = server.submit(|s| s["parallel"]["ranks"] = json!(100)).await.id.to_string();
    }
    large.disconnect();
    let mut first = Agent::connect(&server, hello("b0", 2, Vec::new())).await.unwrap();
    let wait_for_total = async |slots: usize| {
        wait_until(&format!("the last job waits for {slots} slots"), async || {
            let (_, queue) = server.get("/queue?limit=100").await;
            let job = queue["jobs"].as_array().unwrap().iter().find(|j| j["id"] == *last).unwrap();
            job.to_string().contains(&format!("\"slots_total\":{slots},"))
        })
        .await;
    };
    wait_for_total(2).await;
    // Each job gets an event with the reason that no machine is large enough. Waits until all are stored.
    let changed = "SELECT count(*) FROM jobs WHERE reason LIKE '%the only online machine%'";
    wait_until("all reasons are stored", async || server.query_number(changed).await == 20).await;
    let events = format!("SELECT CAST(sum(last_seq) AS BIGINT) FROM jobs WHERE id <> '{running}'");
    let before = server.query_number(&events).await;
    let mut others = Vec::new();
    for n in 1..=6 {
        others.push(Agent::connect(&server, hello(&format!("b{n}"), n + 2, Vec::new())).await.unwrap());
        wait_for_total(n as usize + 2).await;
    }
    while let Some(other) = others.pop() {
        other.disconnect();
    }
    wait_for_total(2).await;
    first.heartbeat(&[]).await;
    assert_eq!(server.query_number(&events).await, before);
    server.stop().await;
}
