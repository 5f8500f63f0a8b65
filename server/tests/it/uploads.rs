//! The routes by which an agent with its own disk uploads and downloads checkpoints: rights and checks.

use crate::{
    agent::{Agent, checkpoint, failed, hello, running, server_with_agent, start_job},
    gangs::{connect_machines, hello_at, lost_contact, next_attempt, start_gang},
    test_server::{TIMEOUT, TestServer, assert_refused, client, wait_until},
};
use lockstep_protocol::{
    JobId,
    agent::{AttemptEvent, AttemptRef, Ending, FencingToken, FromAgent, Source, ToAgent},
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::{
    fs,
    time::{Duration, Instant},
};

pub(crate) const FILES: [(&str, &[u8]); 3] =
    [("model.safetensors", b"weights"), ("optimizer.safetensors", b"slots"), ("state.json", b"{}")];

pub(crate) fn sha256_hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn manifest(epoch: u32, step: u64) -> Vec<u8> {
    let entry = |bytes: &[u8]| json!({"size_bytes": bytes.len(), "sha256": sha256_hex(bytes)});
    let files: Value = FILES.iter().map(|(name, bytes)| ((*name).to_owned(), entry(bytes))).collect();
    serde_json::to_vec(&json!({"version": 1, "epoch": epoch, "step": step, "files": files})).unwrap()
}

/// Client of the routes for an attempt.
pub(crate) struct AttemptApi<'a> {
    pub(crate) server: &'a TestServer,
    pub(crate) http: reqwest::Client,
    pub(crate) agent_id: String,
    pub(crate) attempt: AttemptRef,
}

impl<'a> AttemptApi<'a> {
    pub(crate) fn new(server: &'a TestServer, token: &str, agent_id: &str, attempt: &AttemptRef) -> Self {
        Self { server, http: client(token), agent_id: agent_id.into(), attempt: attempt.clone() }
    }

    pub(crate) fn build_request(&self, method: &str, path: &str, body: Vec<u8>) -> reqwest::RequestBuilder {
        let AttemptRef { job, attempt, fencing_token } = &self.attempt;
        let url = self.server.url(&format!("/api/v1/agent/attempts/{job}/{attempt}{path}"));
        let request = self.http.request(method.parse().unwrap(), url).body(body);
        let request = request.header("x-lockstep-agent", &self.agent_id);
        request.header("x-lockstep-fencing-token", String::from(*fencing_token))
    }

    pub(crate) async fn request(&self, method: &str, path: &str, body: Vec<u8>) -> (u16, Value) {
        let since = Instant::now();
        loop {
            let (status, response) = self.server.send(self.build_request(method, path, body.clone())).await;
            // Tests share one process, so a child that another test has just forked inherits this server's lock until the child calls exec.
            let is_locked =
                response["detail"].as_str().is_some_and(|why| why.contains("another request works on"));
            if !(status == 503 && is_locked && since.elapsed() < TIMEOUT) {
                return (status, response);
            }
        }
    }

    /// Reports that the agent keeps checkpoints on its own disk.
    pub(crate) async fn report_own_disk(&self) {
        assert_eq!(self.request("POST", "", vec![]).await.0, 204);
    }

    pub(crate) async fn upload(&self, name: &str, manifest: Vec<u8>) -> (u16, Value) {
        assert_eq!(self.request("PUT", &format!("/uploads/{name}/MANIFEST.json"), manifest).await.0, 204);
        for (file, bytes) in FILES {
            let response =
                self.request("PUT", &format!("/uploads/{name}/{file}?offset=0"), bytes.to_vec()).await;
            assert_eq!(response.0, 204, "{}", response.1);
        }
        self.request("POST", &format!("/uploads/{name}"), Vec::new()).await
    }
}

#[tokio::test]
async fn the_end_of_an_attempt_is_stored_after_its_checkpoints() {
    for (b_leaves, b_returns) in [(false, true), (true, true), (true, false)] {
        let server = TestServer::new().await;
        let (mut a, mut b) = connect_machines(&server).await;
        let (id, attempt) = start_gang(&server, &mut a, &mut b).await;
        let api_b = AttemptApi::new(&server, &server.agent_token("b").await, "id-b", &attempt);
        api_b.report_own_disk().await;
        a.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
        if b_leaves {
            b.send(FromAgent::Leaving { reason: "the agent was stopped".into() }).await;
            assert!(a.expect_stop().await, "the ranks write a checkpoint first");
        }
        // Renames a column that the server reads when it stores a checkpoint, so that the report fails.
        let rename = async |from: &str, to: &str| {
            server.execute(&format!("ALTER TABLE attempts RENAME COLUMN {from} TO {to}")).await
        };
        rename("own_disks", "elsewhere").await;
        let removed = AttemptEvent::CheckpointRemoved { epoch: 1, step: 10 };
        b.send_report(&attempt, Source::Rank(2), 0, vec![checkpoint(20), removed]).await;
        b.send_report(&attempt, Source::Agent, 0, vec![AttemptEvent::Ended(lost_contact(2))]).await;
        // The server closes the connection, so that the agent sends both reports again.
        assert_eq!(b.next().await, None);
        rename("elsewhere", "own_disks").await;
        if b_leaves {
            // The job waits for the reports of the other machine.
            a.end(&attempt, Ending::Stopped).await;
        }
        if !b_returns {
            // The attempt ends before the lease of the other machine expires.
            let reason = "agent \"b\" was shut down (the agent was stopped)";
            let since = Instant::now();
            let is_reported = |event: &Value| {
                event["state"] == "queued" && event["reason"].as_str().is_some_and(|why| why.contains(reason))
            };
            while !server.stored_events(&id).await.iter().any(is_reported) {
                assert!(since.elapsed() < 2 * TIMEOUT, "{:?}", server.job(&id).await.reason);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            server.stop().await;
            continue;
        }
        let hello = hello_at("b", 2, vec![attempt.clone()], "10.0.0.2");
        let mut b = Agent::connect(&server, hello).await.unwrap();
        assert_eq!(b.welcome.1, []);
        assert_eq!(b.report(&attempt, Source::Rank(2), 0, vec![checkpoint(20)]).await, 1);
        b.end(&attempt, lost_contact(2)).await;
        assert_refused(server.get(&format!("/checkpoints/{id}-1-20")).await, 409, "uploaded from b");
        server.stop().await;
    }
}

#[tokio::test]
async fn an_upload_needs_rank_0s_agent_and_a_reported_checkpoint() {
    let (server, mut agent) = server_with_agent(2).await;
    let token = server.agent_token("a").await;
    let id = server.submit(|_| {}).await.id.to_string();
    let start = agent.expect_start().await;
    let token_of_b = server.agent_token("b").await;
    let _agent_b = Agent::connect_with_token(&server, &token_of_b, hello("b", 1, Vec::new())).await.unwrap();
    // An agent that cannot read this file in the job's folder has its own disk.
    assert_eq!(fs::read_to_string(server.job_dir(&id).join("mark")).ok(), start.files.mark);
    let api =
        |token: &str, agent_id, attempt: &AttemptRef| AttemptApi::new(&server, token, agent_id, attempt);
    let api_a = api(&token, "id-a", &start.attempt);
    agent.report(&start.attempt, Source::Rank(0), 0, vec![running(100, 0), checkpoint(10)]).await;
    // The agent has not reported its own disk yet.
    assert_eq!(api_a.request("GET", "/uploads/1-10", vec![]).await.0, 403);
    api_a.report_own_disk().await;
    let (status, state) = api_a.request("GET", "/uploads/1-10", vec![]).await;
    assert_eq!((status, &state["stored"], &state["received"]), (200, &Value::Null, &json!({})));
    // Refused: b's token with b's id or with a's id; a's token with b's id, with a wrong fencing token, or for another attempt.
    let guessed = AttemptRef {
        fencing_token: FencingToken { secret: 1, ..start.attempt.fencing_token },
        ..start.attempt.clone()
    };
    let second_attempt = AttemptRef { attempt: 2, ..start.attempt.clone() };
    for wrong in [
        api(&token_of_b, "id-b", &start.attempt),
        api(&token_of_b, "id-a", &start.attempt),
        api(&token, "id-b", &start.attempt),
        api(&token, "id-a", &guessed),
        api(&token, "id-a", &second_attempt),
    ] {
        for (method, path) in [
            ("POST", ""),
            ("GET", "/uploads/1-10"),
            ("PUT", "/uploads/1-10/MANIFEST.json"),
            ("POST", "/uploads/1-10"),
            ("POST", "/dataset"),
            ("GET", "/dataset/files"),
            ("POST", "/dataset/files"),
            ("GET", "/checkpoints/x/MANIFEST.json"),
        ] {
            let (status, problem) = wrong.request(method, path, manifest(1, 10)).await;
            assert_eq!(status, 403, "{method} {path} {}: {problem}", wrong.agent_id);
        }
    }
    // An admin's token is refused.
    let admin = api(&server.token, "id-a", &start.attempt);
    assert_eq!(admin.request("GET", "/uploads/1-10", vec![]).await.0, 403);
    // An unreported checkpoint, and invalid names.
    assert_eq!(api_a.request("PUT", "/uploads/1-20/MANIFEST.json", manifest(1, 20)).await.0, 404);
    assert_eq!(api_a.request("PUT", "/uploads/..%2f1-10/MANIFEST.json", manifest(1, 10)).await.0, 404);
    assert_eq!(api_a.request("PUT", "/uploads/1-10/token", b"x".to_vec()).await.0, 422);

    // The checkpoint is not available before its upload is complete.
    let checkpoint_id = format!("{id}-1-10");
    let (_, listed) = server.get(&format!("/jobs/{id}/checkpoints")).await;
    assert_eq!(listed["checkpoints"][0]["uploading_from"], "a", "{listed}");
    assert_eq!(server.get(&format!("/checkpoints/{checkpoint_id}")).await.0, 409);
    assert_eq!(api_a.upload("1-10", manifest(1, 10)).await.0, 204);
    let (status, shown) = server.get(&format!("/checkpoints/{checkpoint_id}")).await;
    assert_eq!((status, shown.get("uploading_from")), (200, None), "{shown}");
    let (_, state) = api_a.request("GET", "/uploads/1-10", vec![]).await;
    assert_eq!(state["stored"], sha256_hex(&manifest(1, 10)));
    // The agent of the attempt can read the files, and no other agent.
    let file = format!("/checkpoints/{checkpoint_id}/state.json");
    assert_eq!(api_a.request("GET", &file, vec![]).await, (200, json!({})));
    assert_eq!(api(&token_of_b, "id-b", &start.attempt).request("GET", &file, vec![]).await.0, 403);

    // The last checkpoint is uploaded after the end of the attempt. Then the agent may delete its files.
    let last = vec![checkpoint(20)];
    agent.report(&start.attempt, Source::Rank(0), 2, last).await;
    agent.end(&start.attempt, Ending::Succeeded { step: 100 }).await;
    assert_eq!(api_a.upload("1-20", manifest(1, 20)).await.0, 204);
    assert_eq!(api_a.request("GET", "", vec![]).await, (200, json!({"needed": "nothing"})));
    assert_eq!(api_a.request("GET", &file, vec![]).await.0, 403, "the attempt has ended");
    server.stop().await;
}

#[tokio::test]
async fn folders_of_attempts_that_the_database_lacks_are_kept() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    let token = server.agent_token("a").await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
    agent.end(&attempt, Ending::Succeeded { step: 100 }).await;
    let (nothing_needed, state_unknown) = (json!({"needed": "nothing"}), json!({"needed": "unknown"}));
    // A restored backup can be older than the retry of the job (`retried`), or older than the job (`unknown`).
    let retried = AttemptRef { attempt: 2, ..attempt.clone() };
    let unknown = AttemptRef { job: JobId::generate(), ..attempt.clone() };
    // The restored database has given the attempt's number to another attempt.
    let same_number =
        AttemptRef { fencing_token: FencingToken { secret: 1, ..attempt.fencing_token }, ..attempt.clone() };
    let needed = async |attempt: &AttemptRef| {
        AttemptApi::new(&server, &token, "id-a", attempt).request("GET", "", vec![]).await
    };
    assert_eq!(needed(&attempt).await, (200, nothing_needed.clone()));
    for lacking in [&retried, &same_number, &unknown] {
        assert_eq!(needed(lacking).await, (200, state_unknown.clone()), "{lacking:?}");
    }
    assert_eq!(server.delete(&format!("/jobs/{id}")).await.0, 204);
    assert_eq!(needed(&retried).await, (200, nothing_needed));
    server.stop().await;
}

#[tokio::test]
async fn another_machine_continues_from_uploaded_checkpoints() {
    let (server, mut agent) = server_with_agent(2).await;
    let token = server.agent_token("a").await;
    let id = server.submit(|_| {}).await.id.to_string();
    let start = agent.expect_start().await;
    assert_eq!((start.files.dataset, start.resume), (None, None));
    let api_a = AttemptApi::new(&server, &token, "id-a", &start.attempt);
    api_a.report_own_disk().await;
    // What the agent's copy of the dataset contains.
    let note = json!({"pictures": 4, "picture_bytes": 100, "sha256": "ab"});
    assert_eq!(api_a.request("POST", "/dataset", note.to_string().into()).await.0, 204);
    assert_eq!(api_a.request("POST", "/dataset", note.to_string().into()).await.0, 204, "the same again");
    let other_note = json!({"pictures": 5, "picture_bytes": 100, "sha256": "ab"});
    let refusal = api_a.request("POST", "/dataset", other_note.to_string().into()).await;
    assert_refused(refusal, 409, "a has 4 pictures of 0 MB, or other content");
    assert_eq!(api_a.request("POST", "/dataset", b"{".to_vec()).await.0, 400);
    let mut long = note.to_string().into_bytes();
    long.resize(64 << 10, b' ');
    assert_eq!(api_a.request("POST", "/dataset", long.clone()).await.0, 204);
    long.push(b' ');
    assert_eq!(api_a.request("POST", "/dataset", long).await.0, 413);

    let events = vec![running(100, 0), checkpoint(10), checkpoint(20), checkpoint(30)];
    agent.report(&start.attempt, Source::Rank(0), 0, events).await;
    // A damaged upload is refused and logged. A second upload is accepted.
    let mut damaged: Value = serde_json::from_slice(&manifest(1, 20)).unwrap();
    damaged["files"]["state.json"]["sha256"] = sha256_hex(b"[]").into();
    let (status, problem) = api_a.upload("1-20", serde_json::to_vec(&damaged).unwrap()).await;
    assert_eq!((status, &problem["code"]), (422, &json!("checkpoint_damaged")), "{problem}");
    assert!(!server.job_dir(&id).join("checkpoints/1-20").exists());
    let (_, logs) = server.get(&format!("/jobs/{id}/logs")).await;
    assert!(logs.to_string().contains("was damaged during the upload to the server"), "{logs}");
    assert_eq!(api_a.upload("1-20", manifest(1, 20)).await.0, 204);
    // The agent ends before it has uploaded the checkpoint of step 30.
    agent.end(&start.attempt, failed("it died", true)).await;
    let second_start = agent.expect_start().await;
    assert_eq!(second_start.resume.as_deref(), Some("1-30"), "the machine has this checkpoint");
    let mut agent_b = Agent::connect(&server, hello("b", 2, Vec::new())).await.unwrap();
    agent.send(FromAgent::Leaving { reason: "it is switched off".into() }).await;
    agent.end(&second_start.attempt, Ending::Stopped).await;
    // The agent disconnects, because a connected agent may still upload its newest checkpoint.
    agent.disconnect();
    let start = agent_b.expect_start().await;
    assert_eq!(start.resume.as_deref(), Some("1-20"), "the newest uploaded checkpoint");
    let note = json!({"pictures": 4, "picture_bytes": 100, "sha256": "ab", "machine": "a"});
    assert_eq!(json!(start.files.dataset), note);
    assert_eq!(server.checkpoint_steps(&id).await, [20]);
    // The attempt of the first machine has ended. The server needs no more of its files.
    assert_eq!(api_a.request("GET", "/uploads/1-30", vec![]).await.0, 404);
    assert_eq!(api_a.request("GET", "", vec![]).await, (200, json!({"needed": "nothing"})));
    server.stop().await;
}

#[tokio::test]
async fn after_a_lost_rank_one_agent_at_a_time_uploads() {
    let server = TestServer::new().await;
    let tokens = [server.agent_token("a").await, server.agent_token("b").await];
    let mut a = Agent::connect_with_token(&server, &tokens[0], hello_at("a", 2, Vec::new(), "10.0.0.1"))
        .await
        .unwrap();
    a.register(&server).await;
    let mut b = Agent::connect_with_token(&server, &tokens[1], hello_at("b", 2, Vec::new(), "10.0.0.2"))
        .await
        .unwrap();
    let id = server.submit(|s| s["parallel"]["ranks"] = json!(4)).await.id.to_string();
    let attempt = next_attempt(&mut a, &mut b).await;
    let api_a = AttemptApi::new(&server, &tokens[0], "id-a", &attempt);
    let api_b = AttemptApi::new(&server, &tokens[1], "id-b", &attempt);
    // The agent has not reported its own disk yet.
    assert_eq!(api_b.request("GET", "/uploads/1-17", vec![]).await.0, 403);
    for api in [&api_a, &api_b] {
        api.report_own_disk().await;
    }
    a.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), checkpoint(10)]).await;
    // The second agent has not reported the checkpoint.
    assert_eq!(api_b.request("GET", "/uploads/1-10", vec![]).await.0, 404);
    // No agent has reported the checkpoint.
    assert_eq!(api_b.request("GET", "/uploads/1-17", vec![]).await.0, 404);
    // A rank is lost. The second machine reports its checkpoint first.
    b.report(&attempt, Source::Rank(2), 0, vec![checkpoint(17)]).await;
    assert_eq!(api_b.request("GET", "/uploads/1-17", vec![]).await.0, 200);
    // The first agent has not reported the checkpoint.
    assert_eq!(api_a.request("GET", "/uploads/1-17", vec![]).await.0, 404);
    a.report(&attempt, Source::Rank(0), 2, vec![checkpoint(17)]).await;
    assert_eq!(api_a.request("GET", "/uploads/1-17", vec![]).await.0, 200);
    assert_eq!(api_b.request("GET", "/uploads/1-17", vec![]).await.0, 503, "one agent uploads at a time");
    let uploads_from = async || {
        let (_, listed) = server.get(&format!("/jobs/{id}/checkpoints")).await;
        listed["checkpoints"][0]["uploading_from"].clone()
    };
    assert_eq!(uploads_from().await, "a");
    // The first machine disconnects during its upload. The second machine continues.
    a.disconnect();
    wait_until("the second machine uploads", async || uploads_from().await == "b").await;
    assert_eq!(api_b.upload("1-17", manifest(1, 17)).await.0, 204);
    assert_eq!(uploads_from().await, Value::Null);
    // A checkpoint that the agent has not reported is refused: with 404 during the attempt, with 403 after its end.
    assert_eq!(api_b.request("GET", "/uploads/1-10", vec![]).await.0, 404);
    b.end(&attempt, Ending::Secondary { reason: "lost contact".into() }).await;
    assert_eq!(api_b.request("GET", "/uploads/1-10", vec![]).await.0, 403, "after the end of the attempt");
    server.stop().await;
}

#[tokio::test]
async fn a_job_starts_without_a_checkpoint_that_is_not_uploaded_in_time() {
    let server = TestServer::with(|c| c.checkpoint_wait = Duration::from_millis(300)).await;
    let token = server.agent_token("stuck").await;
    let mut stuck = Agent::connect_with_token(&server, &token, hello("stuck", 1, Vec::new())).await.unwrap();
    stuck.register(&server).await;
    let with_priority = |priority: i32| {
        move |s: &mut Value| {
            s["parallel"]["ranks"] = json!(1);
            s["priority"] = json!(priority);
            s["preemptible"] = json!(true);
        }
    };
    let high = server.submit(with_priority(5)).await;
    let attempt = stuck.expect_start().await.attempt;
    let api = AttemptApi::new(&server, &token, "id-stuck", &attempt);
    api.report_own_disk().await;
    stuck.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), checkpoint(10)]).await;
    let mut agent = Agent::connect(&server, hello("a", 1, Vec::new())).await.unwrap();
    server.submit(with_priority(0)).await;
    let low_attempt = agent.expect_start().await.attempt;
    // The machine with the checkpoint stays online, but uploads nothing and is drained.
    assert_eq!(server.post("/agents/id-stuck/drain", &json!({})).await.0, 204);
    stuck.end(&attempt, failed("by the test", true)).await;
    match agent.next().await {
        Some(ToAgent::Stop { attempt, patient: true, .. }) => assert_eq!(attempt, low_attempt),
        other => panic!("{other:?}"),
    }
    agent.end(&low_attempt, Ending::Stopped).await;
    let start = agent.expect_start().await;
    assert_eq!((start.attempt.job, start.attempt.attempt), (high.id, 2));
    assert_eq!(start.resume, None, "no checkpoint was uploaded");
    server.stop().await;
}

#[tokio::test]
async fn a_part_of_a_checkpoint_upload_has_at_most_8_mib() {
    const MAX: usize = 8 << 20;
    let (server, mut agent, _, attempt) = start_job(|_| {}).await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), checkpoint(10)]).await;
    let api = AttemptApi::new(&server, &server.agent_token("a").await, "id-a", &attempt);
    api.report_own_disk().await;
    let mut manifest: Value = serde_json::from_slice(&manifest(1, 10)).unwrap();
    manifest["files"]["model.safetensors"]["size_bytes"] = json!(2 * MAX);
    let put =
        async |file: &str, body: Vec<u8>| api.request("PUT", &format!("/uploads/1-10/{file}"), body).await;
    assert_eq!(put("MANIFEST.json", manifest.to_string().into()).await.0, 204);
    assert_refused(put("model.safetensors?offset=0", vec![7; MAX + 1]).await, 413, "at most 8388608 bytes");
    assert_eq!(put("model.safetensors?offset=0", vec![7; MAX]).await.0, 204);
    // Files that the server reads into memory have a lower limit.
    manifest["files"]["state.json"]["size_bytes"] = json!((1 << 20) + 1);
    assert_refused(
        put("MANIFEST.json", manifest.to_string().into()).await,
        422,
        "names a state.json of 1048577 bytes",
    );
    server.stop().await;
}
