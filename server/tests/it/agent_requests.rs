//! Which agent gets a request about models and data, and where a request waits.

use crate::{
    agent::{Agent, checkpoint, hello, info, running},
    test_server::{DEADLINE, TestServer},
};
use lockstep_protocol::{
    agent::{AgentReply, AgentRequest, FromAgent, Source, ToAgent},
    dataset::ValidationSet,
    inspect::ModelEvaluation,
};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};

async fn join(server: &TestServer, name: &str) -> Agent {
    Agent::greet(server, hello(name, 2, Vec::new())).await.unwrap()
}

/// The next request, except `HasFiles`: these are replied to, with whether this agent has the files.
async fn next_request(agent: &mut Agent, has_files: bool) -> (u64, AgentRequest) {
    loop {
        match agent.next().await.expect("a request") {
            ToAgent::Request { id, request: AgentRequest::HasFiles { paths } } => {
                let there = vec![has_files; paths.len()];
                agent.send(FromAgent::Reply { id, reply: Ok(AgentReply::Files { there }) }).await;
            }
            ToAgent::Request { id, request: asked } => return (id, asked),
            other => panic!("{other:?}"),
        }
    }
}

/// Says so whether it has files, and nothing else, until something else is asked.
async fn only_looks(agent: &mut Agent, has_files: bool) {
    let (_, asked) = next_request(agent, has_files).await;
    panic!("asked {asked:?}");
}

/// Says how far it is, whenever it is asked.
async fn only_progress(agent: &mut Agent, inspected: Option<(u64, u64)>) {
    loop {
        let (id, asked) = next_request(agent, true).await;
        assert!(matches!(asked, AgentRequest::InspectProgress { .. }), "{asked:?}");
        agent.send(FromAgent::Reply { id, reply: Ok(AgentReply::Progress { inspected }) }).await;
    }
}

async fn answer(agent: &mut Agent, has_files: bool) {
    let (id, asked) = next_request(agent, has_files).await;
    let AgentRequest::InspectDataset { path, .. } = asked else { panic!("{asked:?}") };
    agent.send(FromAgent::Reply { id, reply: Ok(AgentReply::Dataset { path, info: info() }) }).await;
}

#[tokio::test]
async fn requests_go_to_an_agent_that_has_the_files() {
    let server = TestServer::new().await;
    // By their names the first would be asked.
    let (mut without, mut with) = (join(&server, "a").await, join(&server, "b").await);
    let new = json!({"name": "there", "path": "/only/on/b"});
    let (status, body) = tokio::select! {
        ((status, body), ()) = async { tokio::join!(server.post("/datasets", &new), answer(&mut with, true)) } => (status, body),
        () = only_looks(&mut without, false) => unreachable!(),
    };
    assert_eq!(status, 201, "{body}");

    // Nobody has them: the path is named, and who was asked.
    let nowhere = json!({"name": "nowhere", "path": "/nowhere"});
    let (status, body) = tokio::select! {
        answer = server.post("/datasets", &nowhere) => answer,
        () = only_looks(&mut without, false) => unreachable!(),
        () = only_looks(&mut with, false) => unreachable!(),
    };
    assert_eq!((status, &body["errors"][0]["pointer"]), (422, &json!("/path")), "{body}");
    let detail = body["errors"][0]["detail"].as_str().unwrap();
    assert!(detail.contains("/nowhere") && detail.contains("a, b"), "{detail}");

    // One that does not know the request is asked when nobody else has them.
    let silent = async {
        loop {
            match without.next().await.expect("a request") {
                ToAgent::Request { request: AgentRequest::HasFiles { .. }, .. } => {}
                ToAgent::Request { id, request: AgentRequest::InspectDataset { path, .. } } => {
                    let answer = Ok(AgentReply::Dataset { path, info: info() });
                    return without.send(FromAgent::Reply { id, reply: answer }).await;
                }
                other => panic!("{other:?}"),
            }
        }
    };
    let old = json!({"name": "old", "path": "/on/a"});
    let (status, body) = tokio::select! {
        ((status, body), ()) = async { tokio::join!(server.post("/datasets", &old), silent) } => (status, body),
        () = only_looks(&mut with, false) => unreachable!(),
    };
    assert_eq!(status, 201, "{body}");
    server.stop().await;
}

#[tokio::test]
async fn requests_go_to_the_least_busy_agent() {
    let server = TestServer::new().await;
    let mut agent = Agent::with_pictures(&server, 2).await;
    // It trains; the other one is idle.
    server.submit(|_| {}).await;
    agent.started().await;
    let mut idle = join(&server, "b").await;
    let first = json!({"name": "first", "path": "/first"});
    let asked = server.post("/datasets", &first);
    let mut asked = Box::pin(asked);
    let (id, _) = tokio::select! {
        found = next_request(&mut idle, true) => found,
        () = only_looks(&mut agent, true) => unreachable!(),
        answer = &mut asked => panic!("{answer:?}"),
    };
    // Now the other one has a request to reply to.
    let second = json!({"name": "second", "path": "/second"});
    let ((status, body), ()) = tokio::select! {
        both = async { tokio::join!(server.post("/datasets", &second), answer(&mut agent, true)) } => both,
        found = next_request(&mut idle, true) => panic!("asked {found:?}"),
        answer = &mut asked => panic!("{answer:?}"),
    };
    assert_eq!(status, 201, "{body}");
    let path = "/first".to_owned();
    idle.send(FromAgent::Reply { id, reply: Ok(AgentReply::Dataset { path, info: info() }) }).await;
    assert_eq!(timeout(DEADLINE, asked).await.unwrap().0, 201);
    server.stop().await;
}

#[tokio::test]
async fn a_waiting_evaluation_says_where_it_waits() {
    let server = TestServer::with(|c| c.evaluation_wait = std::time::Duration::from_millis(50)).await;
    let mut agent = Agent::with_pictures(&server, 2).await;
    let id = server.submit(|_| {}).await.id.to_string();
    let attempt = agent.started().await.attempt;
    let mut events = vec![running(100, 0)];
    events.extend((1..=3).map(checkpoint));
    agent.report(&attempt, Source::Rank(0), 0, events).await;
    let ask = async |step: u64| {
        let folder = server.dir.path().join(format!("jobs/{id}/checkpoints/1-{step}"));
        std::fs::create_dir_all(folder).unwrap();
        server.get(&format!("/jobs/{id}/evaluation?checkpoint={step}")).await
    };
    // Two are computed at a time.
    for (step, words, ahead) in [
        (1, "is being evaluated on a", 0),
        (2, "is being evaluated on a", 1),
        (3, "waits on a, behind 2 others", 2),
    ] {
        let deadline = Instant::now() + DEADLINE;
        let (status, body) = loop {
            let (status, body) = ask(step).await;
            if body["agent"] != Value::Null {
                break (status, body);
            }
            assert!(Instant::now() < deadline, "nobody was asked: {body}");
        };
        assert_eq!((status, &body["agent"], &body["ahead"]), (202, &json!("a"), &json!(ahead)), "{body}");
        assert!(body["detail"].as_str().unwrap().contains(words), "{body}");
    }
    // The first ends, and the third is computed.
    let (id, _) = next_request(&mut agent, true).await;
    agent.send(FromAgent::Reply { id, reply: Err("no".into()) }).await;
    let deadline = Instant::now() + DEADLINE;
    while ask(3).await.1["ahead"] != 1 {
        assert!(Instant::now() < deadline, "it moves up");
    }
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
    // Asked again, it is not inspected again: the agent only reports the progress.
    let (status, body) = tokio::select! {
        answer = ask("0") => answer,
        () = only_progress(&mut agent, Some((300_000, 1_300_000))) => unreachable!(),
    };
    assert_eq!(
        (status, &body["inspected"], &body["total"]),
        (202, &json!(300_000), &json!(1_300_000)),
        "{body}"
    );
    assert_eq!(body["detail"], "a is inspecting /large: 300000 of 1300000 so far; ask again");
    // An agent inspects two at a time; the third waits.
    for path in ["/second", "/third"] {
        let new = json!({"name": &path[1..], "path": path});
        assert_eq!(server.post("/datasets?wait_secs=0", &new).await.0, 202);
        let asked = loop {
            match next_request(&mut agent, true).await {
                // Of the request before, which may have been quicker than the inspection.
                (_, AgentRequest::InspectProgress { .. }) => {}
                (_, asked) => break asked,
            }
        };
        assert_eq!(asked, AgentRequest::InspectDataset { path: path.into(), allowed: None });
    }
    let third = json!({"name": "third", "path": "/third"});
    let (_, body) = tokio::select! {
        answer = server.post("/datasets?wait_secs=0", &third) => answer,
        () = only_progress(&mut agent, None) => unreachable!(),
    };
    assert_eq!(body["detail"], "the inspection of /third waits on a, behind 2 others; ask again");
    // It ends while somebody waits, and for one who comes a moment later.
    let done = Ok(AgentReply::Dataset { path: "/large".into(), info: info() });
    let answered = agent.send(FromAgent::Reply { id, reply: done });
    let ((status, body), ()) = tokio::join!(ask("120"), answered);
    assert_eq!((status, &body["name"]), (201, &json!("large")), "{body}");
    assert_eq!(ask("0").await.0, 409, "the name is taken");
    let (status, body) = server.post("/datasets/inspect?wait_secs=121", &json!({"path": "/large"})).await;
    assert!(status == 400 && body["detail"].as_str().unwrap().contains("it may be 0 to 120"), "{body}");
    // An error of the files is the answer to the next request, and then they are inspected anew.
    let wrong = json!({"name": "wrong", "path": "/wrong"});
    for detail in ["holds nothing", "holds nothing yet"] {
        let asked = async {
            let (id, _) = next_request(&mut agent, true).await;
            agent.send(FromAgent::Reply { id, reply: Err(detail.into()) }).await;
        };
        let ((status, body), ()) = tokio::join!(server.post("/datasets", &wrong), asked);
        assert_eq!((status, &body["errors"][0]["detail"]), (422, &json!(detail)), "{body}");
    }
    server.stop().await;
}

#[tokio::test]
async fn an_evaluation_can_be_requested_again_after_its_agent_left() {
    let server = TestServer::new().await;
    let mut agent = Agent::with_pictures(&server, 2).await;
    let id = server.submit(|_| {}).await.id.to_string();
    let attempt = agent.started().await.attempt;
    let events = vec![running(100, 0), checkpoint(1)];
    agent.report(&attempt, Source::Rank(0), 0, events).await;
    let folder = server.dir.path().join(format!("jobs/{id}/checkpoints/1-1"));
    std::fs::create_dir_all(folder).unwrap();
    let path = format!("/jobs/{id}/evaluation?checkpoint=1");
    // What it says of the files is about the request, and stays so.
    let refuses = async {
        let (id, _) = next_request(&mut agent, true).await;
        agent.send(FromAgent::Reply { id, reply: Err("the model is of other classes".into()) }).await;
    };
    let ((status, body), ()) = tokio::join!(server.get(&path), refuses);
    assert_eq!((status, &body["detail"]), (422, &json!("the model is of other classes")), "{body}");
    // A group of processes that is ended together: the one that computes goes first, and its agent still says so.
    let killed = async {
        let (id, _) = next_request(&mut agent, true).await;
        let said = "the process that looks at files ended with signal: 15 (SIGTERM)";
        agent.send(FromAgent::Reply { id, reply: Err(said.into()) }).await;
    };
    let ((status, body), ()) = tokio::join!(server.get(&path), killed);
    assert_eq!(status, 503, "{body}");
    assert!(body["detail"].as_str().unwrap().contains("signal: 15 (SIGTERM); try again"), "{body}");
    let dies = async {
        let (_, asked) = next_request(&mut agent, true).await;
        assert!(matches!(asked, AgentRequest::Evaluate(_)), "{asked:?}");
        drop(agent);
    };
    let ((status, body), ()) = tokio::join!(server.get(&path), dies);
    assert_eq!(status, 503, "{body}");
    assert_eq!(body["detail"], "a disconnected or did not respond in time; try again");
    // Nobody is there now; one that comes is asked.
    let (status, body) = server.get(&path).await;
    assert_eq!(status, 503, "{body}");
    let mut other = join(&server, "b").await;
    let asked = async {
        tokio::select! { found = next_request(&mut other, true) => found, (status, body) = server.get(&path) => panic!("{status} {body}") }
    };
    assert!(matches!(asked.await.1, AgentRequest::Evaluate(_)));
    server.stop().await;
}

#[tokio::test]
async fn an_evaluation_is_repeated_for_other_validation_pictures() {
    let server = TestServer::new().await;
    let mut agent = Agent::with_pictures(&server, 2).await;
    let id = server.submit(|_| {}).await.id.to_string();
    let attempt = agent.started().await.attempt;
    let events = vec![running(100, 0), checkpoint(1)];
    agent.report(&attempt, Source::Rank(0), 0, events).await;
    std::fs::create_dir_all(server.dir.path().join(format!("jobs/{id}/checkpoints/1-1"))).unwrap();
    let set = |pictures| Some(ValidationSet { pictures, fingerprint: format!("{pictures:016x}") });
    let evaluation = |samples| ModelEvaluation {
        samples,
        validation: set(samples),
        // One of them cannot be decoded.
        listed: set(samples + 1),
        trained_on: Some(0),
        note: None,
        accuracy: 0.5,
        loss: 1.0,
        secs: 0.1,
        classes: Vec::new(),
        confusion: Vec::new(),
        mistakes: Vec::new(),
        right: Vec::new(),
    };
    let path = format!("/jobs/{id}/evaluation?checkpoint=1");
    // Pictures that there are now, and whether it is computed.
    for (pictures, is_computed) in [(30, true), (30, false), (31, true), (31, false)] {
        let replies = async {
            let mut computed = false;
            loop {
                let (id, asked) = next_request(&mut agent, true).await;
                let reply = match asked {
                    AgentRequest::ValidationSet { .. } => {
                        AgentReply::ValidationSet { found: set(pictures + 1) }
                    }
                    AgentRequest::Evaluate(_) => {
                        computed = true;
                        AgentReply::Evaluation(Box::new(evaluation(pictures)))
                    }
                    other => panic!("{other:?}"),
                };
                agent.send(FromAgent::Reply { id, reply: Ok(reply) }).await;
                if computed == is_computed {
                    return;
                }
            }
        };
        let ((status, body), ()) = tokio::join!(server.get(&path), replies);
        assert_eq!((status, &body["validation"]["pictures"]), (200, &json!(pictures)), "{body}");
    }
    // Without an agent the stored one stands: it says of which pictures it is.
    drop(agent);
    let (status, body) = server.get(&path).await;
    assert_eq!((status, &body["samples"]), (200, &json!(31)), "{body}");
    server.stop().await;
}
