//! The routes by which an agent with a disk of its own uploads checkpoints and fetches them: who may, and what is taken.

use crate::{
    agent::{Agent, hello, running},
    gangs::{again, hello_at, lost_contact, machines, started, stopped},
    test_server::{DEADLINE, TestServer, client},
};
use lockstep_protocol::{
    JobId,
    agent::{AttemptEvent, AttemptRef, CheckpointInfo, Ending, FencingToken, FromAgent, Source, ToAgent},
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::{
    fs,
    time::{Duration, Instant},
};

pub(crate) const FILES: [(&str, &[u8]); 3] =
    [("model.safetensors", b"weights"), ("optimizer.safetensors", b"slots"), ("state.json", b"{}")];

pub(crate) fn sum(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn manifest(epoch: u32, step: u64) -> Vec<u8> {
    let about = |bytes: &[u8]| json!({"size_bytes": bytes.len(), "sha256": sum(bytes)});
    let files: Value = FILES.iter().map(|(name, bytes)| ((*name).to_owned(), about(bytes))).collect();
    serde_json::to_vec(&json!({"version": 1, "epoch": epoch, "step": step, "files": files})).unwrap()
}

pub(crate) fn checkpoint(step: u64) -> AttemptEvent {
    AttemptEvent::Checkpoint(CheckpointInfo { epoch: 1, step, size_bytes: 14, ..CheckpointInfo::default() })
}

/// Who asks.
pub(crate) struct Asks<'a> {
    pub(crate) server: &'a TestServer,
    pub(crate) http: reqwest::Client,
    pub(crate) agent_id: String,
    pub(crate) attempt: AttemptRef,
}

impl Asks<'_> {
    pub(crate) async fn ask(&self, method: &str, path: &str, body: Vec<u8>) -> (u16, Value) {
        let AttemptRef { job, attempt, fencing_token } = &self.attempt;
        let url = self.server.url(&format!("/api/v1/agent/attempts/{job}/{attempt}{path}"));
        let since = Instant::now();
        loop {
            let request = self.http.request(method.parse().unwrap(), &url).body(body.clone());
            let request = request.header("x-lockstep-agent", &self.agent_id);
            let request = request.header("x-lockstep-fencing-token", String::from(*fencing_token));
            let (status, answer) = self.server.send(request).await;
            // A process that another test has forked may still hold a lock of this server, until it becomes another program.
            let is_locked =
                answer["detail"].as_str().is_some_and(|why| why.contains("another request works on"));
            if !(status == 503 && is_locked && since.elapsed() < DEADLINE) {
                return (status, answer);
            }
        }
    }

    pub(crate) async fn upload(&self, name: &str, manifest: Vec<u8>) -> (u16, Value) {
        assert_eq!(self.ask("PUT", &format!("/uploads/{name}/MANIFEST.json"), manifest).await.0, 204);
        for (file, bytes) in FILES {
            let sent = self.ask("PUT", &format!("/uploads/{name}/{file}?offset=0"), bytes.to_vec()).await;
            assert_eq!(sent.0, 204, "{}", sent.1);
        }
        self.ask("POST", &format!("/uploads/{name}"), Vec::new()).await
    }
}

#[tokio::test]
async fn the_end_of_an_attempt_is_stored_after_its_checkpoints() {
    for (leaves, returns) in [(false, true), (true, true), (true, false)] {
        let server = TestServer::new().await;
        let (mut a, mut b) = machines(&server).await;
        let (id, attempt) = started(&server, &mut a, &mut b).await;
        let http = client(&server.agent_token("b").await);
        let of_b = Asks { server: &server, http, agent_id: "id-b".into(), attempt: attempt.clone() };
        assert_eq!(of_b.ask("POST", "", vec![]).await.0, 204);
        a.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
        if leaves {
            b.send(FromAgent::Leaving { reason: "the agent was stopped".into() }).await;
            assert!(stopped(&mut a).await, "with a checkpoint");
        }
        // The server cannot read what it keeps of the job's checkpoints.
        let rename = async |from: &str, to: &str| {
            server.execute(&format!("ALTER TABLE attempts RENAME COLUMN {from} TO {to}")).await
        };
        rename("own_disks", "elsewhere").await;
        let report =
            |source, events| FromAgent::Report { attempt: attempt.clone(), source, first: 0, events };
        let removed = AttemptEvent::CheckpointRemoved { epoch: 1, step: 10 };
        b.send(report(Source::Rank(2), vec![checkpoint(20), removed])).await;
        b.send(report(Source::Agent, vec![AttemptEvent::Ended(lost_contact(2))])).await;
        let answer = b.next().await;
        assert!(answer.is_none(), "it is to send both again: {answer:?}");
        rename("elsewhere", "own_disks").await;
        if leaves {
            // The job waits for what the other machine has still to say.
            a.end(&attempt, Ending::Stopped).await;
        }
        if !returns {
            // Long before its lease ends.
            let words = "agent \"b\" was shut down (the agent was stopped)";
            let since = Instant::now();
            let says = |event: &Value| {
                event["state"] == "queued" && event["reason"].as_str().is_some_and(|why| why.contains(words))
            };
            while !server.stored(&id).await.iter().any(says) {
                assert!(since.elapsed() < 2 * DEADLINE, "{:?}", server.job(&id).await.reason);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            server.stop().await;
            continue;
        }
        let back = hello_at("b", 2, vec![attempt.clone()], "10.0.0.2");
        let mut b = Agent::greet(&server, back).await.unwrap();
        assert_eq!(b.welcome.1, []);
        assert_eq!(b.report(&attempt, Source::Rank(2), 0, vec![checkpoint(20)]).await, 1);
        b.end(&attempt, lost_contact(2)).await;
        let (status, shown) = server.get(&format!("/checkpoints/{id}-1-20")).await;
        let is_known = shown["detail"].as_str().is_some_and(|detail| detail.contains("uploaded from b"));
        assert!(status == 409 && is_known, "{shown}");
        server.stop().await;
    }
}

#[tokio::test]
async fn only_the_agent_of_rank_0_uploads_and_only_what_it_reported() {
    let server = TestServer::new().await;
    let token = server.agent_token("a").await;
    let mut agent = Agent::greet_with(&server, &token, hello("a", 2, Vec::new())).await.unwrap();
    agent.register(&server).await;
    let id = server.submit(|_| {}).await.id.to_string();
    let start = agent.started().await;
    let other = server.agent_token("b").await;
    let _other = Agent::greet_with(&server, &other, hello("b", 1, Vec::new())).await.unwrap();
    assert_eq!(
        fs::read_to_string(server.dir.path().join("jobs").join(&id).join("mark")).ok(),
        start.files.mark
    );
    let asks = |token: &str, agent_id: &str, attempt: AttemptRef| Asks {
        server: &server,
        http: client(token),
        agent_id: agent_id.into(),
        attempt,
    };
    let own = asks(&token, "id-a", start.attempt.clone());
    agent.report(&start.attempt, Source::Rank(0), 0, vec![running(100, 0), checkpoint(10)]).await;
    // Before it says that it has a disk of its own.
    assert_eq!(own.ask("GET", "/uploads/1-10", vec![]).await.0, 403);
    assert_eq!(own.ask("POST", "", vec![]).await.0, 204);
    let (status, state) = own.ask("GET", "/uploads/1-10", vec![]).await;
    assert_eq!((status, &state["stored"], &state["received"]), (200, &Value::Null, &json!({})));
    // Another agent, by its own name or by this one's; an attempt that it does not have; a token that was guessed.
    let guessed = AttemptRef {
        fencing_token: FencingToken { secret: 1, ..start.attempt.fencing_token },
        ..start.attempt.clone()
    };
    let next = AttemptRef { attempt: 2, ..start.attempt.clone() };
    for wrong in [
        asks(&other, "id-b", start.attempt.clone()),
        asks(&other, "id-a", start.attempt.clone()),
        asks(&token, "id-b", start.attempt.clone()),
        asks(&token, "id-a", guessed),
        asks(&token, "id-a", next),
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
            let (status, problem) = wrong.ask(method, path, manifest(1, 10)).await;
            assert_eq!(status, 403, "{method} {path} {}: {problem}", wrong.agent_id);
        }
    }
    // Nobody with another kind of token.
    assert_eq!(
        asks(&server.token, "id-a", start.attempt.clone()).ask("GET", "/uploads/1-10", vec![]).await.0,
        403
    );
    // A checkpoint that was not reported, and a name that is none.
    assert_eq!(own.ask("PUT", "/uploads/1-20/MANIFEST.json", manifest(1, 20)).await.0, 404);
    assert_eq!(own.ask("PUT", "/uploads/..%2f1-10/MANIFEST.json", manifest(1, 10)).await.0, 404);
    assert_eq!(own.ask("PUT", "/uploads/1-10/token", b"x".to_vec()).await.0, 422);

    // Not to be had before all has come.
    let checkpoint_id = format!("{id}-1-10");
    let (_, listed) = server.get(&format!("/jobs/{id}/checkpoints")).await;
    assert_eq!(listed["checkpoints"][0]["uploading_from"], "a", "{listed}");
    assert_eq!(server.get(&format!("/checkpoints/{checkpoint_id}")).await.0, 409);
    assert_eq!(own.upload("1-10", manifest(1, 10)).await.0, 204);
    let (status, shown) = server.get(&format!("/checkpoints/{checkpoint_id}")).await;
    assert_eq!((status, shown.get("uploading_from")), (200, None), "{shown}");
    let (_, state) = own.ask("GET", "/uploads/1-10", vec![]).await;
    assert_eq!(state["stored"], sum(&manifest(1, 10)));
    // The agent that has the attempt reads it, nobody else.
    let file = format!("/checkpoints/{checkpoint_id}/state.json");
    assert_eq!(own.ask("GET", &file, vec![]).await, (200, json!({})));
    assert_eq!(asks(&other, "id-b", start.attempt.clone()).ask("GET", &file, vec![]).await.0, 403);

    // The last one comes after the end of the attempt; then the agent may clear up.
    let last = vec![checkpoint(20)];
    agent.report(&start.attempt, Source::Rank(0), 2, last).await;
    agent.end(&start.attempt, Ending::Succeeded { step: 100 }).await;
    assert_eq!(own.upload("1-20", manifest(1, 20)).await.0, 204);
    assert_eq!(own.ask("GET", "", vec![]).await, (200, json!({"keep": false})));
    assert_eq!(own.ask("GET", &file, vec![]).await.0, 403, "its attempt is over");
    server.stop().await;
}

#[tokio::test]
async fn folders_of_attempts_that_the_database_lacks_are_kept() {
    let server = TestServer::new().await;
    let token = server.agent_token("a").await;
    let mut agent = Agent::greet_with(&server, &token, hello("a", 2, Vec::new())).await.unwrap();
    agent.register(&server).await;
    let id = server.submit(|_| {}).await.id.to_string();
    let attempt = agent.started().await.attempt;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
    agent.end(&attempt, Ending::Succeeded { step: 100 }).await;
    let (needless, kept) = (json!({"keep": false}), json!({"keep": true, "unknown": true}));
    // After the restore of a backup from before the retry of the job, and from before the job.
    let retried = AttemptRef { attempt: 2, ..attempt.clone() };
    let unknown = AttemptRef { job: JobId::generate(), ..attempt.clone() };
    let needed = async |attempt: &AttemptRef| {
        let (http, attempt) = (client(&token), attempt.clone());
        Asks { server: &server, http, agent_id: "id-a".into(), attempt }.ask("GET", "", vec![]).await
    };
    assert_eq!(needed(&attempt).await, (200, needless.clone()));
    assert_eq!(needed(&retried).await, (200, kept.clone()));
    assert_eq!(needed(&unknown).await, (200, kept));
    assert_eq!(server.delete(&format!("/jobs/{id}")).await.0, 204);
    assert_eq!(needed(&retried).await, (200, needless));
    server.stop().await;
}

#[tokio::test]
async fn another_machine_continues_from_uploaded_checkpoints() {
    let server = TestServer::new().await;
    let token = server.agent_token("a").await;
    let mut agent = Agent::greet_with(&server, &token, hello("a", 2, Vec::new())).await.unwrap();
    agent.register(&server).await;
    let id = server.submit(|_| {}).await.id.to_string();
    let start = agent.started().await;
    assert_eq!((start.files.dataset, start.resume), (None, None));
    let own = Asks {
        server: &server,
        http: client(&token),
        agent_id: "id-a".into(),
        attempt: start.attempt.clone(),
    };
    assert_eq!(own.ask("POST", "", vec![]).await.0, 204);
    let note = json!({"pictures": 4, "picture_bytes": 100, "sha256": "ab"});
    assert_eq!(own.ask("POST", "/dataset", note.to_string().into()).await.0, 204);
    assert_eq!(own.ask("POST", "/dataset", note.to_string().into()).await.0, 204, "the same again");
    let (status, problem) = own.ask("POST", "/dataset", b"{\"pictures\": 5}".to_vec()).await;
    assert_eq!(status, 409);
    assert_eq!(problem["detail"], "a has 4 pictures of 0 MB, or other content", "whose the kept one is");
    assert_eq!(own.ask("POST", "/dataset", b"{".to_vec()).await.0, 400);
    let mut long = note.to_string().into_bytes();
    long.resize(64 << 10, b' ');
    assert_eq!(own.ask("POST", "/dataset", long.clone()).await.0, 204);
    long.push(b' ');
    assert_eq!(own.ask("POST", "/dataset", long).await.0, 413);

    let events = vec![running(100, 0), checkpoint(10), checkpoint(20), checkpoint(30)];
    agent.report(&start.attempt, Source::Rank(0), 0, events).await;
    // A damaged one is refused and said; sent anew it is taken.
    let mut damaged: Value = serde_json::from_slice(&manifest(1, 20)).unwrap();
    damaged["files"]["state.json"]["sha256"] = sum(b"[]").into();
    let (status, problem) = own.upload("1-20", serde_json::to_vec(&damaged).unwrap()).await;
    assert_eq!((status, &problem["code"]), (422, &json!("checkpoint_damaged")), "{problem}");
    assert!(!server.dir.path().join("jobs").join(&id).join("checkpoints/1-20").exists());
    let (_, logs) = server.get(&format!("/jobs/{id}/logs")).await;
    assert!(logs.to_string().contains("was damaged during the upload to the server"), "{logs}");
    assert_eq!(own.upload("1-20", manifest(1, 20)).await.0, 204);
    // The agent leaves for good: of step 30 nothing came.
    agent.end(&start.attempt, Ending::Failed { reason: "it died".to_owned().into(), retriable: true }).await;
    let again = agent.started().await;
    assert_eq!(again.resume.as_deref(), Some("1-30"), "on the machine that has it");
    let mut next = Agent::greet(&server, hello("b", 2, Vec::new())).await.unwrap();
    agent.send(FromAgent::Leaving { reason: "it is switched off".into() }).await;
    agent.end(&again.attempt, Ending::Stopped).await;
    // As long as it is there, its newest checkpoint may still come.
    agent.vanish();
    let start = next.started().await;
    assert_eq!(start.resume.as_deref(), Some("1-20"), "on one that has not");
    let kept = json!({"pictures": 4, "picture_bytes": 100, "sha256": "ab", "machine": "a"});
    assert_eq!(start.files.dataset, Some(kept));
    let (_, listed) = server.get(&format!("/jobs/{id}/checkpoints")).await;
    let steps: Vec<_> = listed["checkpoints"].as_array().unwrap().iter().map(|c| c["step"].clone()).collect();
    assert_eq!(steps, [20], "{listed}");
    // The first machine is back, and its attempt is over: of what it has nothing is wanted any more.
    assert_eq!(own.ask("GET", "/uploads/1-30", vec![]).await.0, 404);
    assert_eq!(own.ask("GET", "", vec![]).await, (200, json!({"keep": false})));
    server.stop().await;
}

#[tokio::test]
async fn remaining_machines_upload_their_checkpoints_one_at_a_time() {
    let server = TestServer::new().await;
    let tokens = [server.agent_token("a").await, server.agent_token("b").await];
    let mut a =
        Agent::greet_with(&server, &tokens[0], hello_at("a", 2, Vec::new(), "10.0.0.1")).await.unwrap();
    a.register(&server).await;
    let mut b =
        Agent::greet_with(&server, &tokens[1], hello_at("b", 2, Vec::new(), "10.0.0.2")).await.unwrap();
    let id = server.submit(|s| s["parallel"]["ranks"] = json!(4)).await.id.to_string();
    let attempt = again(&mut a, &mut b).await;
    let asks = |n: usize| Asks {
        server: &server,
        http: client(&tokens[n]),
        agent_id: ["id-a", "id-b"][n].into(),
        attempt: attempt.clone(),
    };
    let (of_a, of_b) = (asks(0), asks(1));
    assert_eq!(
        of_b.ask("GET", "/uploads/1-17", vec![]).await.0,
        403,
        "before it says that its disk is its own"
    );
    for of in [&of_a, &of_b] {
        assert_eq!(of.ask("POST", "", vec![]).await.0, 204);
    }
    a.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), checkpoint(10)]).await;
    assert_eq!(
        of_b.ask("GET", "/uploads/1-10", vec![]).await.0,
        404,
        "its report that it has it, too, may come"
    );
    assert_eq!(of_b.ask("GET", "/uploads/1-17", vec![]).await.0, 404, "its report may come");
    // A rank is lost. The second machine tells first what it has kept.
    b.report(&attempt, Source::Rank(2), 0, vec![checkpoint(17)]).await;
    assert_eq!(of_b.ask("GET", "/uploads/1-17", vec![]).await.0, 200);
    assert_eq!(of_a.ask("GET", "/uploads/1-17", vec![]).await.0, 404, "it asks before its report has come");
    a.report(&attempt, Source::Rank(0), 2, vec![checkpoint(17)]).await;
    assert_eq!(of_a.ask("GET", "/uploads/1-17", vec![]).await.0, 200);
    assert_eq!(of_b.ask("GET", "/uploads/1-17", vec![]).await.0, 503, "one at a time");
    let uploads_from = async || {
        let (_, listed) = server.get(&format!("/jobs/{id}/checkpoints")).await;
        listed["checkpoints"][0]["uploading_from"].clone()
    };
    assert_eq!(uploads_from().await, "a");
    // That one goes away, too.
    a.vanish();
    let until = tokio::time::Instant::now() + DEADLINE;
    while uploads_from().await != "b" {
        assert!(tokio::time::Instant::now() < until);
    }
    assert_eq!(of_b.upload("1-17", manifest(1, 17)).await.0, 204);
    assert_eq!(uploads_from().await, Value::Null);
    // A checkpoint that it has not reported is refused after its end.
    assert_eq!(of_b.ask("GET", "/uploads/1-10", vec![]).await.0, 404);
    b.end(&attempt, Ending::Secondary { reason: "lost it".into() }).await;
    assert_eq!(of_b.ask("GET", "/uploads/1-10", vec![]).await.0, 403, "it is rank 0's");
    server.stop().await;
}

#[tokio::test]
async fn after_a_failed_upload_the_job_gets_its_freed_slots() {
    let server = TestServer::with(|c| c.checkpoint_wait = Duration::from_millis(300)).await;
    let token = server.agent_token("stuck").await;
    let mut stuck = Agent::greet_with(&server, &token, hello("stuck", 1, Vec::new())).await.unwrap();
    stuck.register(&server).await;
    let with = |priority: i32| {
        move |s: &mut Value| {
            s["parallel"]["ranks"] = json!(1);
            s["priority"] = json!(priority);
            s["preemptible"] = json!(true);
        }
    };
    let high = server.submit(with(5)).await;
    let first = stuck.started().await.attempt;
    let own =
        Asks { server: &server, http: client(&token), agent_id: "id-stuck".into(), attempt: first.clone() };
    assert_eq!(own.ask("POST", "", vec![]).await.0, 204);
    stuck.report(&first, Source::Rank(0), 0, vec![running(100, 0), checkpoint(10)]).await;
    let mut agent = Agent::greet(&server, hello("a", 1, Vec::new())).await.unwrap();
    server.submit(with(0)).await;
    let low = agent.started().await.attempt;
    // The machine that has the checkpoint stays online, uploads nothing and takes no work.
    assert_eq!(server.post("/agents/id-stuck/drain", &json!({})).await.0, 204);
    stuck.end(&first, Ending::Failed { reason: "it died".to_owned().into(), retriable: true }).await;
    match agent.next().await {
        Some(ToAgent::Stop { attempt, patient: true, .. }) => assert_eq!(attempt, low),
        other => panic!("{other:?}"),
    }
    agent.end(&low, Ending::Stopped).await;
    let start = agent.started().await;
    assert_eq!((start.attempt.job, start.attempt.attempt), (high.id, 2));
    assert_eq!(start.resume, None, "nothing has come");
    server.stop().await;
}
