//! The routes by which an agent copies the dataset of its attempt: content, rights and limits.

use crate::{
    agent::{Agent, dataset_info, failed, hello, running, server_with_agent},
    test_server::TestServer,
    uploads::AttemptApi,
};
use lockstep_protocol::{
    agent::{
        ANEW_BYTES, AttemptRef, DATASET_PART_BYTES, DATASET_PARTS, DATASET_PARTS_BYTES, DatasetEntry,
        DatasetPart, Ending, Source,
    },
    reason::ReasonKind,
};
use serde_json::{Value, json};
use std::{fs, path::Path};
use tempfile::TempDir;

/// Client of the routes for the dataset of an attempt.
struct DatasetApi<'a>(AttemptApi<'a>);

impl<'a> DatasetApi<'a> {
    fn new(server: &'a TestServer, token: &str, agent_id: &str, attempt: &AttemptRef) -> Self {
        Self(AttemptApi::new(server, token, agent_id, attempt))
    }

    async fn request(&self, method: &str, body: &Value) -> (u16, Vec<u8>) {
        let request = self.0.build_request(method, "/dataset/files", body.to_string().into());
        let response = request.send().await.unwrap();
        (response.status().as_u16(), response.bytes().await.unwrap().to_vec())
    }

    async fn list(&self) -> Vec<DatasetEntry> {
        let (status, text) = self.request("GET", &Value::Null).await;
        let text = String::from_utf8(text).unwrap();
        assert_eq!(status, 200, "{text}");
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    async fn parts(&self, parts: &[DatasetPart], copied_bytes: u64) -> (u16, Vec<u8>) {
        self.request("POST", &json!({"parts": parts, "copied_bytes": copied_bytes, "total_bytes": 10})).await
    }

    async fn logs(&self) -> String {
        self.0.server.get(&format!("/jobs/{}/logs", self.0.attempt.job)).await.1.to_string()
    }

    /// Returns status and detail of an error.
    async fn request_error(&self, method: &str, body: &Value) -> (u16, String) {
        let (status, text) = self.request(method, body).await;
        let problem: Value = serde_json::from_slice(&text).unwrap_or_default();
        (status, problem["detail"].as_str().unwrap_or_default().to_owned())
    }
}

/// Connects an agent and starts an attempt on the dataset at `path`.
async fn start_attempt(server: &TestServer, token: &str, path: &Path) -> (Agent, AttemptRef) {
    let mut agent = Agent::connect_with_token(server, token, hello("a", 2, Vec::new())).await.unwrap();
    let new = json!({"name": "pictures", "path": path});
    agent.register_dataset(server, &new, dataset_info()).await;
    let (_, attempt) = agent.start_job(server, |_| {}).await;
    (agent, attempt)
}

/// Starts an attempt on a folder with only the file `x`, which has ten bytes. Returns the folder and the token of the attempt's agent, too.
async fn start_attempt_on_one_file() -> (TestServer, TempDir, String, Agent, AttemptRef) {
    let server = TestServer::new().await;
    let data = tempfile::tempdir().unwrap();
    fs::write(data.path().join("x"), "0123456789").unwrap();
    let token = server.agent_token("a").await;
    let (agent, attempt) = start_attempt(&server, &token, data.path()).await;
    (server, data, token, agent, attempt)
}

#[tokio::test]
async fn an_attempt_s_agent_can_read_only_the_files_of_its_dataset() {
    let server = TestServer::new().await;
    let data = tempfile::tempdir().unwrap();
    let path = data.path().join("pictures");
    fs::create_dir_all(path.join("train")).unwrap();
    fs::write(path.join("train/1"), "0123456789").unwrap();
    let token = server.agent_token("a").await;
    let (mut agent, attempt) = start_attempt(&server, &token, &path).await;
    let token_of_b = server.agent_token("b").await;
    let _agent_b = Agent::connect_with_token(&server, &token_of_b, hello("b", 1, Vec::new())).await.unwrap();
    let api = |token: &str, agent_id: &str| DatasetApi::new(&server, token, agent_id, &attempt);
    let api_a = api(&token, "id-a");
    let list = api_a.list().await;
    let DatasetEntry::File(name, 10, changed_ns) = &list[2] else { panic!("{list:?}") };
    assert_eq!(name, "train/1");
    assert_eq!(list[..2], [DatasetEntry::Begin(String::new()), DatasetEntry::Folder("train".into())]);
    assert_eq!(list[3..], [DatasetEntry::End(1, 10)]);
    let part = |path: &str, offset, length| DatasetPart {
        path: path.into(),
        size_bytes: 10,
        changed_ns: *changed_ns,
        offset,
        length,
    };
    // A part may begin at any byte.
    let (status, response) = api_a.parts(&[part("train/1", 0, 10), part("train/1", 4, 3)], 0).await;
    assert_eq!((status, response.len()), (200, 1 + 10 + 32 + 1 + 3 + 32));
    assert_eq!((&response[1..11], &response[44..47]), (&b"0123456789"[..], &b"456"[..]));

    // Refused: b's token with either agent's id, a's token with b's id, and an admin's token.
    for wrong in
        [api(&token_of_b, "id-b"), api(&token_of_b, "id-a"), api(&token, "id-b"), api(&server.token, "id-a")]
    {
        for method in ["GET", "POST"] {
            let (status, detail) = wrong.request_error(method, &json!({"parts": []})).await;
            assert_eq!(status, 403, "{method} {}: {detail}", wrong.0.agent_id);
        }
    }
    // After the end of the attempt, its agent is refused, too.
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
    agent.end(&attempt, Ending::Succeeded { step: 100 }).await;
    assert_eq!(api_a.request_error("GET", &Value::Null).await.0, 403);
    assert_eq!(api_a.parts(&[part("train/1", 0, 10)], 0).await.0, 403);
    server.stop().await;
}

#[tokio::test]
async fn requests_for_parts_are_limited_and_progress_is_logged() {
    let (server, data, token, _agent, attempt) = start_attempt_on_one_file().await;
    let api_a = DatasetApi::new(&server, &token, "id-a", &attempt);
    let part = |length| DatasetPart { path: "x".into(), size_bytes: 10, changed_ns: 1, offset: 0, length };
    let max_full_parts = usize::try_from(DATASET_PARTS_BYTES / DATASET_PART_BYTES).unwrap();
    for (parts, status) in [
        (vec![], 422),
        (vec![part(DATASET_PART_BYTES)], 200),
        (vec![part(DATASET_PART_BYTES + 1)], 422),
        (vec![part(1); DATASET_PARTS], 200),
        (vec![part(1); DATASET_PARTS + 1], 422),
        (vec![part(DATASET_PART_BYTES); max_full_parts], 200),
        ([vec![part(DATASET_PART_BYTES); max_full_parts], vec![part(1)]].concat(), 422),
    ] {
        assert_eq!(api_a.parts(&parts, 0).await.0, status, "{} parts", parts.len());
    }
    assert_eq!(api_a.request_error("POST", &json!("x")).await.0, 400);
    for copied_bytes in [0, 4, 5, 5, 9] {
        api_a.parts(&[part(1)], copied_bytes).await;
    }
    let logs = api_a.logs().await;
    for (line, times) in [
        ("a copies the dataset pictures (0.0 MB) from the server", 1),
        ("a has copied 40 % of the dataset pictures", 1),
        ("a has copied 50 % of the dataset pictures", 1),
        ("a has copied 90 % of the dataset pictures", 1),
    ] {
        assert_eq!(logs.matches(line).count(), times, "{line}: {logs}");
    }
    // The file is deleted on the server's machine.
    fs::remove_file(data.path().join("x")).unwrap();
    let (status, detail) = api_a.request_error("GET", &Value::Null).await;
    assert!(status == 404 && detail.contains("the server's machine has no files at"), "{status} {detail}");
    assert_eq!(api_a.parts(&[part(1)], 0).await.0, 404);
    server.stop().await;
}

#[tokio::test]
async fn reported_progress_of_a_copy_is_bounded_and_monotonic() {
    let (server, _data, token, _agent, attempt) = start_attempt_on_one_file().await;
    let api_a = DatasetApi::new(&server, &token, "id-a", &attempt);
    let part = json!({"path": "x", "size_bytes": 10, "changed_ns": 1, "offset": 0, "length": 1});
    let progress =
        |copied: u64, total: u64| json!({"parts": [part], "copied_bytes": copied, "total_bytes": total});
    for (copied, total, message) in [
        (11, 10, "copied_bytes (11) must be at most total_bytes (10)"),
        (u64::MAX, 10, "must be at most total_bytes"),
        (0, 9, "total_bytes must be at least the size of \"x\""),
    ] {
        let (status, why) = api_a.request_error("POST", &progress(copied, total)).await;
        assert!(status == 422 && why.contains(message), "{status} {why}");
    }
    for copied in [10, 3, 10] {
        assert_eq!(api_a.request("POST", &progress(copied, 10)).await.0, 200, "{copied}");
    }
    let logs = api_a.logs().await;
    assert!(logs.contains("has copied 100 %") && !logs.contains("30 %"), "{logs}");

    // The dataset changes: the log says so, and the copy begins again.
    let restarted = |why: &str| json!({"parts": [part], "copied_bytes": 2, "total_bytes": 20, "anew": why});
    assert_eq!(api_a.request("POST", &restarted("x has changed since it was listed")).await.0, 200);
    assert_eq!(api_a.request("POST", &progress(10, 20)).await.0, 200);
    let logs = api_a.logs().await;
    assert!(
        logs.contains("the dataset pictures changed while a copied it (x has changed since it was listed)"),
        "{logs}"
    );
    assert!(logs.contains("a has copied 50 % of the dataset pictures"), "{logs}");
    assert_eq!(api_a.request("POST", &restarted(&"x".repeat(ANEW_BYTES))).await.0, 200);
    assert_eq!(api_a.request_error("POST", &restarted(&"x".repeat(ANEW_BYTES + 1))).await.0, 422);
    server.stop().await;
}

#[tokio::test]
async fn the_log_names_a_copying_machine_after_a_restart_of_the_server() {
    let (server, _data, token, agent, attempt) = start_attempt_on_one_file().await;
    agent.disconnect();
    let server = TestServer::open(server.stop().await, |_| {}).await;
    // The agent requests files before it connects to the new server.
    let api_a = DatasetApi::new(&server, &token, "id-a", &attempt);
    let part = DatasetPart { path: "x".into(), size_bytes: 10, changed_ns: 1, offset: 0, length: 1 };
    assert_eq!(api_a.parts(&[part], 9).await.0, 200);
    let logs = api_a.logs().await;
    assert!(logs.contains("a has copied 90 % of the dataset") && !logs.contains("id-a"), "{logs}");
    server.stop().await;
}

#[tokio::test]
async fn an_agent_that_ended_before_starting_ranks_costs_no_restart() {
    let (server, mut agent) = server_with_agent(2).await;
    let id = server.submit(|spec| spec["recovery"] = json!({"max_restarts": 0})).await.id.to_string();
    let restarted = || failed(ReasonKind::AgentRestarted { agent: "a".into() }, true);
    for number in 1..=5 {
        let attempt = agent.expect_start().await.attempt;
        assert_eq!(attempt.attempt, number);
        agent.end(&attempt, restarted()).await;
    }
    let attempt = agent.expect_start().await.attempt;
    let (_, list) = server.get(&format!("/jobs/{id}/attempts")).await;
    assert_eq!(list["attempts"][2]["reason"]["code"], "agent_restarted", "{list}");
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
    agent.end(&attempt, Ending::Succeeded { step: 100 }).await;
    assert_eq!(server.job(&id).await.state, lockstep_protocol::JobState::Succeeded);
    // A job fails after six consecutive attempts that end in this way.
    let id = server.submit(|spec| spec["recovery"] = json!({"max_restarts": 0})).await.id.to_string();
    for _ in 1..=6 {
        let attempt = agent.expect_start().await.attempt;
        agent.end(&attempt, restarted()).await;
    }
    server.wait_for_state(&id, lockstep_protocol::JobState::Failed).await;
    server.stop().await;
}
