//! Requests to agents about models and data: choice of the agent, waiting, repetition.

use crate::{
    agent::{Agent, checkpoint, dataset_info, hello, running, start_job},
    test_server::{TIMEOUT, TestServer, assert_refused, wait_until},
};
use lockstep_protocol::{
    agent::{AgentReply, AgentRequest, Source, ToAgent},
    dataset::ValidationSet,
    inspect::ModelEvaluation,
};
use serde_json::{Value, json};
use tokio::time::timeout;

async fn join(server: &TestServer, name: &str) -> Agent {
    Agent::connect(server, hello(name, 2, Vec::new())).await.unwrap()
}

/// Returns the next request other than `HasFiles`. Answers each `HasFiles` with `has_files` for every path.
async fn next_request(agent: &mut Agent, has_files: bool) -> (u64, AgentRequest) {
    loop {
        match agent.next().await.expect("a request") {
            ToAgent::Request { id, request: AgentRequest::HasFiles { paths } } => {
                let there = vec![has_files; paths.len()];
                agent.reply(id, Ok(AgentReply::Files { there })).await;
            }
            ToAgent::Request { id, request } => return (id, request),
            other => panic!("{other:?}"),
        }
    }
}

/// Answers `HasFiles`, and fails at any other request.
async fn answer_only_has_files(agent: &mut Agent, has_files: bool) {
    let (_, request) = next_request(agent, has_files).await;
    panic!("unexpected {request:?}");
}

/// Answers `InspectProgress`, and fails at any other request.
async fn answer_only_progress(agent: &mut Agent, inspected: Option<(u64, u64)>) {
    loop {
        let (id, request) = next_request(agent, true).await;
        assert!(matches!(request, AgentRequest::InspectProgress { .. }), "{request:?}");
        agent.reply(id, Ok(AgentReply::Progress { inspected })).await;
    }
}

async fn answer_inspection(agent: &mut Agent, has_files: bool) {
    let (id, request) = next_request(agent, has_files).await;
    let AgentRequest::InspectDataset { path, .. } = request else { panic!("{request:?}") };
    agent.reply(id, Ok(AgentReply::Dataset { path, info: dataset_info() })).await;
}

#[tokio::test]
async fn requests_go_to_an_agent_that_has_the_files() {
    let server = TestServer::new().await;
    // In the order of names, the server would send requests to the agent without the files.
    let (mut without_files, mut with_files) = (join(&server, "a").await, join(&server, "b").await);
    let new = json!({"name": "there", "path": "/only/on/b"});
    let (status, body) = tokio::select! {
        ((status, body), ()) = async { tokio::join!(server.post("/datasets", &new), answer_inspection(&mut with_files, true)) } => (status, body),
        () = answer_only_has_files(&mut without_files, false) => unreachable!(),
    };
    assert_eq!(status, 201, "{body}");

    // If no agent has the files, the error names the path and the agents.
    let nowhere = json!({"name": "nowhere", "path": "/nowhere"});
    let (status, body) = tokio::select! {
        response = server.post("/datasets", &nowhere) => response,
        () = answer_only_has_files(&mut without_files, false) => unreachable!(),
        () = answer_only_has_files(&mut with_files, false) => unreachable!(),
    };
    assert_eq!((status, &body["errors"][0]["pointer"]), (422, &json!("/path")), "{body}");
    let detail = body["errors"][0]["detail"].as_str().unwrap();
    assert!(detail.contains("/nowhere") && detail.contains("a, b"), "{detail}");

    // An agent that does not answer HasFiles gets the request if no other agent has the files.
    let answer_only_inspection = async {
        loop {
            match without_files.next().await.expect("a request") {
                ToAgent::Request { request: AgentRequest::HasFiles { .. }, .. } => {}
                ToAgent::Request { id, request: AgentRequest::InspectDataset { path, .. } } => {
                    let response = Ok(AgentReply::Dataset { path, info: dataset_info() });
                    return without_files.reply(id, response).await;
                }
                other => panic!("{other:?}"),
            }
        }
    };
    let old = json!({"name": "old", "path": "/on/a"});
    let (status, body) = tokio::select! {
        ((status, body), ()) = async { tokio::join!(server.post("/datasets", &old), answer_only_inspection) } => (status, body),
        () = answer_only_has_files(&mut with_files, false) => unreachable!(),
    };
    assert_eq!(status, 201, "{body}");
    server.stop().await;
}

#[tokio::test]
async fn requests_go_to_the_least_busy_agent() {
    let server = TestServer::new().await;
    let mut training = Agent::join_with_dataset(&server, 2).await;
    server.submit(|_| {}).await;
    training.expect_start().await;
    let mut idle = join(&server, "b").await;
    let first = json!({"name": "first", "path": "/first"});
    let pending = server.post("/datasets", &first);
    let mut pending = Box::pin(pending);
    let (id, _) = tokio::select! {
        request = next_request(&mut idle, true) => request,
        () = answer_only_has_files(&mut training, true) => unreachable!(),
        response = &mut pending => panic!("{response:?}"),
    };
    // Now the idle agent works on a request.
    let second = json!({"name": "second", "path": "/second"});
    let ((status, body), ()) = tokio::select! {
        response = async { tokio::join!(server.post("/datasets", &second), answer_inspection(&mut training, true)) } => response,
        request = next_request(&mut idle, true) => panic!("unexpected {request:?}"),
        response = &mut pending => panic!("{response:?}"),
    };
    assert_eq!(status, 201, "{body}");
    let path = "/first".to_owned();
    idle.reply(id, Ok(AgentReply::Dataset { path, info: dataset_info() })).await;
    assert_eq!(timeout(TIMEOUT, pending).await.unwrap().0, 201);
    server.stop().await;
}

#[tokio::test]
async fn a_waiting_evaluation_reports_its_agent_and_place() {
    let server = TestServer::with(|c| c.response_wait = std::time::Duration::from_millis(50)).await;
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    let (id, attempt) = agent.start_job(&server, |_| {}).await;
    let mut events = vec![running(100, 0)];
    events.extend((1..=3).map(checkpoint));
    agent.report(&attempt, Source::Rank(0), 0, events).await;
    let ask = async |step: u64| {
        let folder = server.job_dir(&id).join(format!("checkpoints/1-{step}"));
        std::fs::create_dir_all(folder).unwrap();
        server.get(&format!("/jobs/{id}/evaluation?checkpoint={step}")).await
    };
    // An agent computes two evaluations at a time.
    for (step, text, ahead) in [
        (1, "is being evaluated on a", 0),
        (2, "is being evaluated on a", 1),
        (3, "waits on a, behind 2 other evaluations", 2),
    ] {
        wait_until("an agent gets a request", async || !ask(step).await.1["agent"].is_null()).await;
        let (status, body) = ask(step).await;
        assert_eq!((status, &body["agent"], &body["ahead"]), (202, &json!("a"), &json!(ahead)), "{body}");
        assert!(body["detail"].as_str().unwrap().contains(text), "{body}");
    }
    // When the first evaluation ends, the third begins.
    let (id, _) = next_request(&mut agent, true).await;
    agent.reply(id, Err("no".into())).await;
    wait_until("the third evaluation moves up", async || ask(3).await.1["ahead"] == 1).await;
    server.stop().await;
}

#[tokio::test]
async fn repeated_requests_join_an_inspection_and_report_its_progress() {
    let server = TestServer::new().await;
    let mut agent = join(&server, "a").await;
    let new = json!({"name": "large", "path": "/large"});
    let ask = async |wait: &str| server.post(&format!("/datasets?wait_secs={wait}"), &new).await;
    let (status, body) = ask("0").await;
    assert_eq!((status, &body["inspected"]), (202, &Value::Null), "{body}");
    let (id, request) = next_request(&mut agent, true).await;
    assert_eq!(request, AgentRequest::InspectDataset { path: "/large".into(), allowed: None });
    // A repeated request does not start another inspection: the server only asks the agent for the progress.
    let (status, body) = tokio::select! {
        response = ask("0") => response,
        () = answer_only_progress(&mut agent, Some((300_000, 1_300_000))) => unreachable!(),
    };
    assert_eq!(
        (status, &body["inspected"], &body["total"]),
        (202, &json!(300_000), &json!(1_300_000)),
        "{body}"
    );
    assert_eq!(body["detail"], "a is inspecting /large: 300000 of 1300000 so far; ask again");
    // An agent inspects two datasets at a time; the third inspection waits.
    for path in ["/second", "/third"] {
        let new = json!({"name": &path[1..], "path": path});
        assert_eq!(server.post("/datasets?wait_secs=0", &new).await.0, 202);
        let request = loop {
            match next_request(&mut agent, true).await {
                // The server may have responded to the previous request before the agent read this request.
                (_, AgentRequest::InspectProgress { .. }) => {}
                (_, request) => break request,
            }
        };
        assert_eq!(request, AgentRequest::InspectDataset { path: path.into(), allowed: None });
    }
    let log = server.get_ok("/audit?q=datasets").await;
    assert_eq!(log["entries"], json!([]), "no dataset has been added");
    let third = json!({"name": "third", "path": "/third"});
    let (_, body) = tokio::select! {
        response = server.post("/datasets?wait_secs=0", &third) => response,
        () = answer_only_progress(&mut agent, None) => unreachable!(),
    };
    assert_eq!(body["detail"], "the inspection of /third waits on a, behind 2 other requests; ask again");
    // The inspection may end during or just before a waiting request.
    let done = Ok(AgentReply::Dataset { path: "/large".into(), info: dataset_info() });
    let reply = agent.reply(id, done);
    let ((status, body), ()) = tokio::join!(ask("120"), reply);
    assert_eq!((status, &body["name"]), (201, &json!("large")), "{body}");
    assert_eq!(ask("0").await.0, 409, "the name is taken");
    assert_refused(
        server.post("/datasets/inspect?wait_secs=121", &json!({"path": "/large"})).await,
        400,
        "but must be 0 to 120",
    );
    // An error is returned once. The next request starts another inspection.
    let wrong = json!({"name": "wrong", "path": "/wrong"});
    for detail in ["holds nothing", "holds nothing yet"] {
        let fail = async {
            let (id, _) = next_request(&mut agent, true).await;
            agent.reply(id, Err(detail.into())).await;
        };
        let ((status, body), ()) = tokio::join!(server.post("/datasets", &wrong), fail);
        assert_eq!((status, &body["errors"][0]["detail"]), (422, &json!(detail)), "{body}");
    }
    server.stop().await;
}

#[tokio::test]
async fn an_evaluation_can_be_requested_again_after_its_agent_disconnected() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    let events = vec![running(100, 0), checkpoint(1)];
    agent.report(&attempt, Source::Rank(0), 0, events).await;
    let folder = server.job_dir(&id).join("checkpoints/1-1");
    std::fs::create_dir_all(folder).unwrap();
    let path = format!("/jobs/{id}/evaluation?checkpoint=1");
    // If the files do not fit, the server refuses the request.
    let refuse = async {
        let (id, _) = next_request(&mut agent, true).await;
        agent.reply(id, Err("the model is of other classes".into())).await;
    };
    let (refusal, ()) = tokio::join!(server.get(&path), refuse);
    assert_refused(refusal, 422, "the model is of other classes");
    // If all processes of an agent get a signal, the computing process ends first, and the agent can still report its end.
    let report_signal = async {
        let (id, _) = next_request(&mut agent, true).await;
        let error = "the process that looks at files ended with signal: 15 (SIGTERM)";
        agent.reply(id, Err(error.into())).await;
    };
    let (refusal, ()) = tokio::join!(server.get(&path), report_signal);
    assert_refused(
        refusal,
        503,
        "signal: 15 (SIGTERM). It may have run out of memory, or stopped with its agent; try again",
    );
    let disconnect = async {
        let (_, request) = next_request(&mut agent, true).await;
        assert!(matches!(request, AgentRequest::Evaluate(_)), "{request:?}");
        drop(agent);
    };
    let (refusal, ()) = tokio::join!(server.get(&path), disconnect);
    assert_refused(refusal, 503, "a disconnected or did not respond in time; try again");
    // Without an agent, requests fail. An agent that connects later gets the next request.
    let (status, body) = server.get(&path).await;
    assert_eq!(status, 503, "{body}");
    let mut other = join(&server, "b").await;
    let request = async {
        tokio::select! { found = next_request(&mut other, true) => found, (status, body) = server.get(&path) => panic!("{status} {body}") }
    };
    assert!(matches!(request.await.1, AgentRequest::Evaluate(_)));
    server.stop().await;
}

#[tokio::test]
async fn an_evaluation_is_repeated_for_other_validation_pictures() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    let events = vec![running(100, 0), checkpoint(1)];
    agent.report(&attempt, Source::Rank(0), 0, events).await;
    std::fs::create_dir_all(server.job_dir(&id).join("checkpoints/1-1")).unwrap();
    let set = |pictures| Some(ValidationSet { pictures, fingerprint: format!("{pictures:016x}") });
    let evaluation = |samples| ModelEvaluation {
        samples,
        validation: set(samples),
        // One picture of the list cannot be decoded.
        listed: set(samples + 1),
        trained_on: Some(0),
        ..ModelEvaluation::default()
    };
    let path = format!("/jobs/{id}/evaluation?checkpoint=1");
    // The current number of pictures, and whether the agent must compute the evaluation.
    for (pictures, must_compute) in [(30, true), (30, false), (31, true), (31, false)] {
        let replies = async {
            let mut has_computed = false;
            loop {
                let (id, request) = next_request(&mut agent, true).await;
                let reply = match request {
                    AgentRequest::ValidationSet { .. } => {
                        AgentReply::ValidationSet { found: set(pictures + 1) }
                    }
                    AgentRequest::Evaluate(_) => {
                        has_computed = true;
                        AgentReply::Evaluation(Box::new(evaluation(pictures)))
                    }
                    other => panic!("{other:?}"),
                };
                agent.reply(id, Ok(reply)).await;
                if has_computed == must_compute {
                    return;
                }
            }
        };
        let ((status, body), ()) = tokio::join!(server.get(&path), replies);
        assert_eq!((status, &body["validation"]["pictures"]), (200, &json!(pictures)), "{body}");
    }
    // Without an agent, the response is the stored evaluation with its pictures.
    drop(agent);
    let (status, body) = server.get(&path).await;
    assert_eq!((status, &body["samples"]), (200, &json!(31)), "{body}");
    server.stop().await;
}
