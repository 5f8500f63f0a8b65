//! Samples, warnings and removal of machines.

use crate::{
    agent::{Agent, hello, hello_gpus, start_job, wait_until_offline},
    test_server::{TIMEOUT, TestServer, assert_refused, client, wait_until},
};
use lockstep_protocol::{
    agent::{FromAgent, GpuSample, MachineSample, MachineWarning},
    limits::{FINDING_CHARS, MAX_FINDINGS, MAX_MEASURED_GPUS},
};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

fn sample(cpu_utilization: f32, gpus: u32) -> MachineSample {
    let gpu = |slot| GpuSample {
        slot,
        utilization: Some(0.75),
        memory_used_bytes: 1 << 30,
        temperature_celsius: Some(61.0),
        power_watts: Some(f32::NAN),
    };
    MachineSample {
        at: jiff::Timestamp::now(),
        cpus: 2.0,
        host_cpus: 64,
        cpu_utilization: Some(cpu_utilization),
        load: Some(1.5),
        memory_used_bytes: 1 << 30,
        memory_bytes: 4 << 30,
        host_memory_bytes: 256 << 30,
        disk_used_bytes: 100_000_000_000,
        disk_bytes: 1_000_000_000_000,
        disk_read_bytes_per_second: Some(10),
        disk_written_bytes_per_second: None,
        network_received_bytes_per_second: Some(1000),
        network_sent_bytes_per_second: Some(500),
        gpus: (0..gpus).map(gpu).collect(),
    }
}

async fn machine(server: &TestServer) -> Value {
    server.get("/agents").await.1["agents"][0].clone()
}

/// Sends a sample until the server shows a sample for which `is_expected` is true. The server ignores samples that follow too quickly.
async fn send_until_shown(
    server: &TestServer,
    agent: &mut Agent,
    sample: &MachineSample,
    is_expected: impl Fn(&Value) -> bool,
) {
    let since = Instant::now();
    loop {
        let fresh = MachineSample { at: jiff::Timestamp::now(), ..sample.clone() };
        agent.send(FromAgent::Sample(Box::new(fresh))).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        let shown = machine(server).await;
        if is_expected(&shown["sample"]) {
            return;
        }
        assert!(since.elapsed() < TIMEOUT, "{shown}");
    }
}

#[tokio::test]
async fn measurements_of_agents_are_shown_and_survive_a_restart() {
    let server = TestServer::new().await;
    let mut agent = Agent::connect(&server, hello_gpus("a", 2)).await.unwrap();
    let before = machine(&server).await;
    assert_eq!((&before["sample"], before["connected_at"].is_string()), (&Value::Null, true), "{before}");
    send_until_shown(&server, &mut agent, &sample(0.25, 2), |s| s["cpu_utilization"] == 0.25).await;
    send_until_shown(&server, &mut agent, &sample(0.75, 2), |s| s["cpu_utilization"] == 0.75).await;
    let shown = machine(&server).await;
    assert!(shown["sample_age_secs"].as_f64().unwrap() < 20.0, "{shown}");
    assert_eq!(
        shown["sample"]["gpus"][1]["power_watts"],
        Value::Null,
        "a value that is not finite is null: {shown}"
    );
    let (status, metrics) = server.get("/agents/id-a/metrics").await;
    assert_eq!((status, &metrics["machine"]["cpu_utilization"]), (200, &json!([0.25, 0.75])), "{metrics}");
    assert_eq!(metrics["machine"]["disk_written_bytes_per_second"], json!([null, null]));
    assert_eq!(metrics["gpus"][1]["metrics"]["temperature_celsius"], json!([61.0, 61.0]));
    assert_eq!(metrics["at_ms"].as_array().unwrap().len(), 2);
    let since = jiff::Timestamp::now() - Duration::from_secs(100);
    let (_, coarse) = server.get(&format!("/agents/id-a/metrics?since={since}&points=4")).await;
    assert_eq!(coarse["machine"]["cpu_utilization"], json!([null, null, null, 0.5]), "{coarse}");
    let later = jiff::Timestamp::now() + Duration::from_secs(100);
    for points in ["", "&points=2000"] {
        let (status, empty) = server.get(&format!("/agents/id-a/metrics?since={later}{points}")).await;
        assert!(status == 200 && empty["gpus"] == json!([]), "{empty}");
    }
    for wrong in ["since=yesterday", "points=0", "points=2001", "until=now"] {
        assert_eq!(server.get(&format!("/agents/id-a/metrics?{wrong}")).await.0, 400, "{wrong}");
    }
    assert_eq!(server.get("/agents/nobody/metrics").await.0, 404);
    // The current minute is stored at shutdown, and an old minute is removed at the next start.
    agent.disconnect();
    let server = TestServer::open(server.stop().await, |_| {}).await;
    let (_, metrics) = server.get("/agents/id-a/metrics").await;
    let busy: Vec<f64> = serde_json::from_value(metrics["machine"]["cpu_utilization"].clone()).unwrap();
    assert!(busy.iter().all(|b| (0.2..0.8).contains(b)) && (1..=2).contains(&busy.len()), "{metrics}");
    assert_eq!(machine(&server).await["connected_at"], Value::Null);
    let count = "SELECT count(*) FROM machine_minutes";
    let rows = server.query_number(count).await;
    // The table may have two minutes; LIMIT 1 copies only one of them.
    server.execute("INSERT INTO machine_minutes SELECT agent_id, 5, data FROM machine_minutes LIMIT 1").await;
    let server = TestServer::open(server.stop().await, |_| {}).await;
    wait_until("the old minute is removed", async || server.query_number(count).await == rows).await;
    server.stop().await;
}

#[tokio::test]
async fn invalid_values_of_machines_are_omitted_and_the_agent_stays_connected() {
    let server = TestServer::new().await;
    let mut agent = Agent::connect(&server, hello_gpus("a", MAX_MEASURED_GPUS as u32 + 1)).await.unwrap();
    let mut invalid = sample(7.0, MAX_MEASURED_GPUS as u32 + 1);
    invalid.gpus[0].slot = 5000;
    invalid.network_sent_bytes_per_second = Some(u64::MAX);
    send_until_shown(&server, &mut agent, &invalid, |s| s["load"] == 1.5).await;
    let shown = machine(&server).await;
    assert_eq!(shown["sample"]["cpu_utilization"], Value::Null, "{shown}");
    assert_eq!(shown["sample"]["gpus"].as_array().unwrap().len(), MAX_MEASURED_GPUS);
    let finding = MachineWarning { problem: true, text: "x".repeat(FINDING_CHARS + 1) };
    agent.send(FromAgent::Findings { findings: vec![finding; MAX_FINDINGS + 1] }).await;
    agent.heartbeat(&[]).await;
    let mut lengths = Vec::new();
    wait_until("the findings are shown", async || {
        let machine = machine(&server).await;
        let texts =
            machine["warnings"].as_array().unwrap().iter().map(|warning| warning["text"].as_str().unwrap());
        lengths = texts.filter(|text| text.starts_with('x')).map(str::len).collect();
        !lengths.is_empty()
    })
    .await;
    assert_eq!(lengths, [FINDING_CHARS; MAX_FINDINGS]);
    // The test agent's version is 0.
    let (_, page) = server.get_text("/machines").await;
    assert!(page.contains("It runs version 0 and the server"), "{page}");
    server.stop().await;
}

#[tokio::test]
async fn viewers_see_machines_and_machines_may_have_no_metrics() {
    let server = TestServer::new().await;
    let _agent = Agent::join(&server, 1).await;
    let (_, reader) = server.make_token(&json!({"name": "r", "scope": "read"})).await;
    let cases = [(reader, 200), (server.agent_token("a2").await, 403), (String::new(), 401)];
    for (token, expected) in cases {
        let response = client(&token).get(server.url("/api/v1/agents/id-a/metrics")).send().await.unwrap();
        assert_eq!(response.status(), expected);
    }
    let (_, metrics) = server.get("/agents/id-a/metrics").await;
    assert_eq!((&metrics["at_ms"], &metrics["gpus"]), (&json!([]), &json!([])));
    let (_, page) = server.get_text("/machines").await;
    assert!(page.contains("online"), "{page}");
    server.stop().await;
}

/// Removes a machine as soon as the server considers it offline. Returns the response.
async fn remove_when_offline(server: &TestServer, id: &str) -> (u16, Value) {
    let since = Instant::now();
    loop {
        let (status, body) = server.delete(&format!("/agents/{id}")).await;
        if !body["detail"].as_str().is_some_and(|detail| detail.contains("is online")) {
            return (status, body);
        }
        assert!(since.elapsed() < TIMEOUT, "{body}");
    }
}

#[tokio::test]
async fn an_agent_of_one_job_leaves_the_list_when_it_ends_with_its_job() {
    let (server, _agent, _, _) = start_job(|spec| spec["parallel"]["ranks"] = json!(1)).await;
    // The job waits for both slots.
    let job = server.submit(|spec| spec["parallel"]["ranks"] = json!(2)).await.id;
    let read_agents_of_job = async || {
        let (_, list) = server.get("/agents").await;
        let agents = list["agents"].as_array().unwrap().iter();
        let mut agents: Vec<_> =
            agents.map(|agent| (agent["name"].clone(), agent["online"].clone())).collect();
        agents.retain(|(name, _)| name == "own");
        agents
    };
    let mut hello = hello("own", 1, Vec::new());
    if let FromAgent::Hello { only_job, .. } = &mut hello {
        *only_job = Some(job.clone());
    }
    let agent_of_job = Agent::connect(&server, hello.clone()).await.unwrap();
    agent_of_job.disconnect();
    // The agent stays listed while its job may have another attempt.
    wait_until("the agent is offline", async || read_agents_of_job().await == [(json!("own"), json!(false))])
        .await;
    let agent_of_job = Agent::connect(&server, hello).await.unwrap();
    server.order(job.as_str(), "cancel").await;
    server.wait_for_state(job.as_str(), lockstep_protocol::JobState::Cancelled).await;
    agent_of_job.disconnect();
    wait_until("the agent leaves the list", async || read_agents_of_job().await.is_empty()).await;
    server.stop().await;
}

#[tokio::test]
async fn an_offline_machine_without_jobs_can_be_removed() {
    let server = TestServer::with(|c| c.lease = Duration::from_secs(10)).await;
    let token = server.agent_token("a").await;
    let mut agent = Agent::connect_with_token(&server, &token, hello("a", 2, Vec::new())).await.unwrap();
    agent.register(&server).await;
    let id = server.submit(|_| {}).await.id;
    agent.expect_start().await;
    assert_refused(server.delete("/agents/id-a").await, 409, "\"a\" is online: stop its agent first");
    agent.disconnect();
    let refusal = remove_when_offline(&server, "id-a").await;
    assert_refused(refusal, 409, &format!("may still have ranks of job {id}"));
    assert_eq!(server.get("/agents").await.1["agents"].as_array().unwrap().len(), 1);
    // The machine can be removed once its lease has expired.
    server.wait_for_state(id.as_str(), lockstep_protocol::JobState::Restarting).await;
    assert_eq!(server.delete("/agents/id-a").await.0, 204);
    assert_eq!(server.get("/agents").await.1["agents"], json!([]));
    assert_eq!(server.delete("/agents/id-a").await.0, 404);
    let (_, audit) = server.get("/audit").await;
    let entries: Vec<_> = audit["entries"].as_array().unwrap().iter().collect();
    let entry = entries.iter().find(|entry| entry["status"] == 204).unwrap();
    assert_eq!(
        (&entry["action"], &entry["object"]),
        (&json!("DELETE /api/v1/agents/{id}"), &json!("/api/v1/agents/id-a")),
        "{entry}"
    );
    // The machine can connect again with its token.
    let _agent = Agent::connect_with_token(&server, &token, hello("a", 2, Vec::new())).await.unwrap();
    assert_eq!(machine(&server).await["online"], true);
    server.stop().await;
}

#[tokio::test]
async fn the_page_shows_only_addresses_that_other_machines_can_use() {
    let server = TestServer::new().await;
    let port = server.address.port();
    for host in ["127.0.0.1", "localhost", "0.0.0.0"] {
        let request = server.http.get(server.url("/machines")).header("host", format!("{host}:{port}"));
        let response = request.send().await.unwrap();
        if host == "0.0.0.0" && response.status() != 200 {
            // The server does not accept this name.
            assert_eq!(response.status(), 421);
            continue;
        }
        let html = response.text().await.unwrap();
        assert!(html.contains("only this machine reaches it"), "{host}: {html}");
        assert!(
            html.contains(&format!("lockstep serve --listen 0.0.0.0:{port} --tls-own-ca")),
            "{host}: {html}"
        );
        assert!(html.contains("--advertise ADDRESS"), "{html}");
        assert!(
            !html.contains(&format!("--server http://{host}:{port}")) || host == "127.0.0.1",
            "{host}: {html}"
        );
    }
    server.stop().await;
}

#[tokio::test]
async fn a_new_machine_with_an_old_name_is_distinguished() {
    // Without tokens, because tokens prevent two agents of one name.
    let server = TestServer::with(|config| config.no_auth = true).await;
    Agent::connect_with_token(&server, "", hello("a", 2, Vec::new())).await.unwrap().disconnect();
    wait_until_offline(&server).await;
    assert!(!server.get_text("/machines").await.1.contains(">id id-a<"), "a unique name needs no id");
    let mut new = hello("b", 2, Vec::new());
    if let FromAgent::Hello { name, .. } = &mut new {
        *name = "a".into();
    }
    let _agent = Agent::connect_with_token(&server, "", new).await.unwrap();
    let (_, html) = server.get_text("/machines").await;
    for id in ["id-a", "id-b"] {
        assert!(
            html.contains(&format!("<h2>a</h2><span class=\"small\" title=\"{id}\">id {id}</span>")),
            "{html}"
        );
    }
    server.stop().await;
}
