//! Compares the OpenAPI document with real responses: every status and media type of a response is documented, and every
//! documented success occurs.

use crate::{
    agent::{Agent, best_checkpoint, dataset_info, hello, line, losses, running},
    test_server::{TestServer, spec, wait_until},
};
use lockstep_protocol::{
    agent::{AgentReply, AgentRequest, Ending, Source, ToAgent},
    dataset::PicturesFingerprint,
    inspect::{EvaluateModel, ModelEvaluation, NearestNeighbours, Prediction, Samples},
};
use lockstep_server::Bundled;
use reqwest::RequestBuilder;
use serde_json::{Value, json};
use std::collections::BTreeSet;

mod checked_api;
mod common_errors;

use checked_api::CheckedApi;

/// Returns method, path and description of every operation of the document.
fn operations(document: &Value) -> Vec<(String, String, Value)> {
    let paths = document["paths"].as_object().unwrap().iter();
    let calls = paths.flat_map(|(path, item)| {
        let methods = item.as_object().unwrap().iter().filter(|(method, _)| *method != "parameters");
        methods.map(move |(method, operation)| (method.clone(), path.clone(), operation.clone()))
    });
    calls.collect()
}

/// Answers every request of the server.
async fn answer_all(mut agent: Agent) {
    while let Some(message) = agent.next().await {
        let ToAgent::Request { id, request } = message else { continue };
        let response = match request {
            AgentRequest::HasFiles { paths } => AgentReply::Files { there: vec![true; paths.len()] },
            AgentRequest::InspectDataset { path, .. } => AgentReply::Dataset { path, info: dataset_info() },
            AgentRequest::InspectProgress { .. } => AgentReply::Progress { inspected: None },
            AgentRequest::Fingerprint { .. } => {
                AgentReply::Fingerprint { found: PicturesFingerprint::default() }
            }
            AgentRequest::ValidationSet { .. } => AgentReply::ValidationSet { found: None },
            AgentRequest::Samples { .. } => {
                AgentReply::Samples(Samples { total: 0, classes: Vec::new(), samples: Vec::new() })
            }
            AgentRequest::Evaluate(EvaluateModel { neighbours: Some(k), .. }) => {
                AgentReply::Neighbours(NearestNeighbours {
                    k,
                    gallery: 1,
                    samples: 1,
                    validation: None,
                    listed: None,
                    note: None,
                    weighted: 1.0,
                    majority: 1.0,
                    secs: 0.0,
                })
            }
            AgentRequest::Evaluate(_) => AgentReply::Evaluation(Box::new(ModelEvaluation {
                samples: 1,
                validation: None,
                listed: None,
                trained_on: None,
                note: None,
                accuracy: 1.0,
                interval: [0.2, 1.0],
                loss: 0.0,
                secs: 0.0,
                classes: Vec::new(),
                confusion: Vec::new(),
                mistakes: Vec::new(),
                right: Vec::new(),
            })),
            AgentRequest::FitWeights(_) => AgentReply::Weights { mistake: None },
            AgentRequest::Predict { pictures, .. } => AgentReply::Predictions {
                predictions: pictures
                    .into_iter()
                    .map(|p| Prediction { name: p.name, classes: Vec::new(), embedding: None, error: None })
                    .collect(),
            },
        };
        agent.reply(id, Ok(response)).await;
    }
}

/// Creates a job that has failed after a checkpoint, whose files exist. Returns the ids of job and checkpoint.
pub async fn create_failed_job(
    server: &TestServer,
    agent: &mut Agent,
    change: impl FnOnce(&mut Value),
) -> (String, String) {
    let (id, attempt) = agent.start_job(server, change).await;
    let events = vec![running(100, 0), losses(0, 1..=5), line(0, 1, "a line"), best_checkpoint(1, 5, 0.5)];
    agent.report(&attempt, Source::Rank(0), 0, events).await;
    agent.end(&attempt, Ending::Failed { reason: "the end".into(), retriable: false }).await;
    let folder = server.job_dir(&id).join("checkpoints/1-5");
    std::fs::create_dir_all(&folder).unwrap();
    for file in ["model.safetensors", "optimizer.safetensors", "state.json"] {
        std::fs::write(folder.join(file), "0123456789").unwrap();
    }
    let sum = "84d89877f0d4041efb6bf91a16f0248f2fd573e6af05c19f96bedb9f882f7882";
    let file = json!({"size_bytes": 10, "sha256": sum});
    let manifest = json!({"files": {"model.safetensors": file, "state.json": file}});
    std::fs::write(folder.join("MANIFEST.json"), manifest.to_string()).unwrap();
    let (_, list) = server.get(&format!("/jobs/{id}/checkpoints")).await;
    (id, list["checkpoints"][0]["id"].as_str().unwrap().to_owned())
}

#[tokio::test]
async fn all_responses_are_documented() {
    let files = || vec![("pictures".to_owned(), b"pixels"[..].into())];
    let bundled = Bundled { name: "fashion-mnist", files };
    let server = TestServer::with(|c| c.bundled = Some(bundled)).await;
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    let (job, checkpoint) = create_failed_job(&server, &mut agent, |_| {}).await;
    let answering = tokio::spawn(answer_all(agent));
    let (_, document) = server.get("/openapi.json").await;
    let calls = operations(&document);
    let mut api = CheckedApi { server: &server, document, seen: BTreeSet::new() };
    // The agent is drained until the end, so that no job starts.
    let drain = ("/api/v1/agents/{id}/drain", "/api/v1/agents/id-a/drain");
    assert_eq!(api.request("post", drain.0, drain.1, |r| r).await.0, 204);
    let id_of = |path: &str| if path.contains("/checkpoints/") { checkpoint.clone() } else { job.clone() };
    let filled = |path: &str, id: &str| {
        let path = path.replace("{version}", "1").replace("{alias}", "champion");
        path.replace("{id}", id).replace("{name}", "pictures").replace("{file}", "model.safetensors")
    };

    // Errors of every operation: missing objects, invalid names, another host, another origin, invalid parameters and bodies.
    for (method, path, operation) in &calls {
        let (method, path) = (method.as_str(), path.as_str());
        let target = filled(path, &id_of(path));
        let missing = path.replace("{id}", "j00000000000000000000000000").replace("{name}", "nothing");
        api.request(method, path, &missing.replace("{file}", "nothing"), |r| r).await;
        if path.contains('{') {
            let unreadable = path.replace("{id}", "%ff").replace("{name}", "%ff").replace("{file}", "%ff");
            api.request(method, path, &unreadable, |r| r).await;
        }
        api.request(method, path, &target, |r| r.header("host", "evil.example")).await;
        if method != "get" {
            api.request(method, path, &target, |r| r.header("origin", "http://evil.example")).await;
        }
        let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
        for parameter in parameters.iter().filter(|p| p["in"] == "query") {
            for value in ["☃", "-1", "99999999999999999999", "18446744073709551615", "1", "", "a%00b"] {
                let query = format!("{target}?{}={value}", parameter["name"].as_str().unwrap());
                // Only GET, so that no job is created or changed.
                if method == "get" {
                    api.request(method, path, &query, |r| r).await;
                }
            }
        }
        if operation["requestBody"].is_object() {
            for mime in [
                "application/json",
                "text/plain",
                "application/toml",
                "multipart/form-data; boundary=B",
                "application/octet-stream",
            ] {
                for body in [
                    "",
                    "{",
                    "[]",
                    "{}",
                    "null",
                    "x = = 1",
                    "{\"path\": 1}",
                    "--B--\r\n",
                    "{\"a\": 1, \"a\": 2}",
                ] {
                    // An empty request for a fork is valid.
                    if path.ends_with("/fork") && body == "{}" {
                        continue;
                    }
                    api.request(method, path, &target, |r| r.header("content-type", mime).body(body)).await;
                }
                // With a wrong type, the server may close the connection before the client reads the response.
                let body = vec![b' '; (1 << 20) + 1];
                if mime == "application/json" && !path.ends_with("/predict") && !path.ends_with("/file") {
                    api.request(method, path, &target, |r| r.header("content-type", mime).body(body)).await;
                }
            }
        }
    }

    // Successes of every operation.
    let v1 = |path: &str| format!("/api/v1{path}");
    let json_of = |body: Value| move |r: RequestBuilder| r.json(&body);
    let mut expect = async |method: &str, path: &str, id: &str, body: Option<Value>, expected: u16| {
        let target = filled(&v1(path), id);
        let (status, response) = match body {
            Some(body) => api.request(method, &v1(path), &target, json_of(body)).await,
            None => api.request(method, &v1(path), &target, |r| r).await,
        };
        assert_eq!(status, expected, "{method} {path}: {response}");
        response
    };
    for path in [
        "/jobs",
        "/jobs/{id}",
        "/jobs/{id}/size",
        "/annotations",
        "/projects",
        "/queue",
        "/jobs/{id}/events",
        "/jobs/{id}/metrics",
        "/jobs/{id}/metrics.csv",
        "/jobs/{id}/logs",
        "/jobs/{id}/checkpoints",
        "/jobs/{id}/attempts",
        "/jobs/{id}/history",
        "/jobs/{id}/panels",
        "/jobs/{id}/histograms",
        "/jobs/{id}/network",
        "/jobs/{id}/evaluation",
        "/jobs/{id}/evaluation/neighbours",
        "/datasets",
        "/datasets/{name}",
        "/datasets/{name}/samples",
        "/agents",
        "/openapi.json",
    ] {
        expect("get", path, &job, None, 200).await;
    }
    expect("get", "/agents/{id}/metrics", "id-a", None, 200).await;
    let person = json!({"name": "pictures", "role": "viewer", "password": "correct horse"});
    expect("post", "/people", "", Some(person), 201).await;
    expect("patch", "/people/{name}", "", Some(json!({"role": "member"})), 200).await;
    for path in ["/tokens", "/audit", "/people"] {
        expect("get", path, "", None, 200).await;
    }
    let token = json!({"name": "t", "scope": "read"});
    let token = expect("post", "/tokens", "", Some(token), 201).await;
    expect("delete", "/tokens/{id}", token["id"].as_str().unwrap(), None, 204).await;
    expect("delete", "/people/{name}", "", None, 204).await;
    expect("post", "/login-links", "", None, 201).await;
    let webhook = json!({"url": "http://localhost:1/"});
    let webhook = expect("post", "/webhooks", "", Some(webhook), 201).await;
    let webhook = webhook["id"].as_str().unwrap();
    expect("get", "/webhooks", "", None, 200).await;
    expect("patch", "/webhooks/{id}", webhook, Some(json!({"enabled": false})), 200).await;
    expect("post", "/webhooks/{id}/test", webhook, None, 200).await;
    expect("get", "/webhooks/{id}/deliveries", webhook, None, 200).await;
    expect("delete", "/webhooks/{id}", webhook, None, 204).await;
    expect("get", "/checkpoints/{id}", &checkpoint, None, 200).await;
    expect("get", "/checkpoints/{id}/{file}", &checkpoint, None, 200).await;
    expect("post", "/jobs/validate", "", Some(spec()), 200).await;
    expect("post", "/datasets/inspect", "", Some(json!({"path": "/x"})), 200).await;
    expect("post", "/datasets/{name}/inspect", "", None, 200).await;
    expect("post", "/datasets", "", Some(json!({"name": "more", "path": "/x"})), 201).await;
    expect("patch", "/jobs/{id}", &job, Some(json!({"notes": "n"})), 200).await;
    expect("post", "/jobs/{id}/fork/check", &job, Some(json!({})), 200).await;
    let fork = expect("post", "/jobs/{id}/fork", &job, Some(json!({})), 201).await;
    let fork = fork["id"].as_str().unwrap();
    expect("post", "/jobs/{id}/pause", fork, None, 202).await;
    let paused = expect("post", "/jobs", "", Some(spec()), 201).await;
    let paused = paused["id"].as_str().unwrap();
    expect("post", "/jobs/{id}/pause", paused, None, 202).await;
    for body in
        [json!({"name": "pictures", "job": job}), json!({"name": "pictures", "checkpoint": checkpoint})]
    {
        expect("post", "/models", "", Some(body), 201).await;
    }
    expect("put", "/models/{name}/aliases/{alias}", "", Some(json!({"version": 1})), 200).await;
    for path in
        ["/models", "/models/{name}", "/models/{name}/versions/{version}", "/models/{name}/aliases/{alias}"]
    {
        expect("get", path, "", None, 200).await;
    }
    // A job with model versions cannot be deleted.
    assert_eq!(server.delete(&format!("/jobs/{job}")).await.0, 409);
    expect("delete", "/models/{name}/aliases/{alias}", "", None, 204).await;
    expect("delete", "/models/{name}/versions/{version}", "", None, 204).await;
    assert_eq!(server.delete("/models/pictures/versions/2").await.0, 204);
    expect("post", "/jobs/{id}/retry", &job, None, 202).await;
    let run = json!({"id": "a-run", "name": "a run"});
    expect("post", "/runs", "", Some(run.clone()), 201).await;
    expect("post", "/runs", "", Some(run), 200).await;
    let records = json!({"first": 1, "records": [{"step": 1, "values": {"a/b": 1}}]});
    expect("post", "/runs/{id}/records", "a-run", Some(records), 200).await;
    expect("patch", "/runs/{id}", "a-run", Some(json!({"state": "succeeded"})), 200).await;
    expect("get", "/runs/{id}/files", "a-run", None, 200).await;
    let archive = crate::dataset_uploads::zip_file(&["cat/1.png", "dog/2.png"]);
    let target = "/api/v1/datasets/uploads/zipped/archive";
    assert_eq!(
        api.request("put", "/api/v1/datasets/uploads/{name}/archive", target, |r| r.body(archive)).await.0,
        204
    );
    let empty_body = |r: RequestBuilder| r.json(&json!({}));
    assert_eq!(
        api.request("post", "/api/v1/datasets/uploads/{name}", "/api/v1/datasets/uploads/zipped", empty_body)
            .await
            .0,
        201
    );
    let (template, file) = ("/api/v1/runs/{id}/file", "/api/v1/runs/a-run/file?path=a/b.txt");
    assert_eq!(api.request("put", template, file, |r| r.body("0123456789")).await.0, 200);
    for (name, value, expected) in [
        ("accept", "*/*", 200),
        ("range", "bytes=2-4", 206),
        ("range", "bytes=20-", 416),
        ("if-modified-since", "Fri, 01 Jan 2100 00:00:00 GMT", 304),
    ] {
        assert_eq!(
            api.request("get", template, file, |r| r.header(name, value)).await.0,
            expected,
            "{value}"
        );
    }
    assert_eq!(api.request("delete", template, file, |r| r).await.0, 204);
    // The requests above may have registered the bundled pictures already.
    let bundled = v1("/datasets/bundled");
    let (status, response) = api.request("post", &bundled, &bundled, |r| r).await;
    assert!([201, 409].contains(&status), "{response}");
    let with_key =
        |key: &'static str| move |r: RequestBuilder| r.header("idempotency-key", key).json(&spec());
    assert_eq!(api.request("post", "/api/v1/jobs", "/api/v1/jobs", with_key("k")).await.0, 201);
    assert_eq!(api.request("post", "/api/v1/jobs", "/api/v1/jobs", with_key("k")).await.0, 200);
    assert_eq!(api.request("post", "/api/v1/jobs", "/api/v1/jobs", with_key("")).await.0, 400);
    let pictures = format!("/api/v1/jobs/{job}/samples?indices=1,2");
    assert_eq!(api.request("get", "/api/v1/jobs/{id}/samples", &pictures, |r| r).await.0, 200);
    let groups = "/api/v1/jobs/groups?by=owner,train.lr&metrics=best,loss&count=true";
    assert_eq!(api.request("get", "/api/v1/jobs/groups", groups, |r| r).await.0, 200);
    let metrics = format!("/api/v1/metrics/query?jobs={job}&name=loss");
    assert_eq!(api.request("get", "/api/v1/metrics/query", &metrics, |r| r).await.0, 200);
    for (template, target) in [
        ("/api/v1/jobs/{id}", format!("/api/v1/jobs/{job}")),
        ("/api/v1/jobs/{id}/checkpoints", format!("/api/v1/jobs/{job}/checkpoints")),
        ("/api/v1/datasets", "/api/v1/datasets".into()),
        ("/api/v1/datasets/{name}", "/api/v1/datasets/pictures".into()),
    ] {
        assert_eq!(api.request("get", template, &target, |r| r.header("if-none-match", "*")).await.0, 304);
    }
    let logs = format!("/api/v1/jobs/{job}/logs");
    api.request("get", "/api/v1/jobs/{id}/logs", &logs, |r| r.header("accept", "text/plain")).await;
    let panels = json!({"panels": [{"title": "t", "metrics": ["loss"]}]});
    for (template, target) in [
        ("/api/v1/jobs/{id}/panels", format!("/api/v1/jobs/{job}/panels")),
        ("/api/v1/projects/{name}/panels", "/api/v1/projects/default/panels".into()),
    ] {
        assert_eq!(api.request("put", template, &target, |r| r.json(&panels)).await.0, 200);
        assert_eq!(api.request("get", template, &target, |r| r).await.0, 200);
    }
    let target = format!("/api/v1/jobs/{job}/panels");
    assert_eq!(api.request("delete", "/api/v1/jobs/{id}/panels", &target, |r| r).await.0, 204);
    let predict = format!("/api/v1/checkpoints/{checkpoint}/predict");
    let picture = |r: RequestBuilder| r.header("content-type", "image/png").body("x");
    assert_eq!(api.request("post", "/api/v1/checkpoints/{id}/predict", &predict, picture).await.0, 200);

    // Files: complete, ranges, cached, and invalid ranges.
    let (template, file) =
        ("/api/v1/checkpoints/{id}/{file}", format!("/api/v1/checkpoints/{checkpoint}/model.safetensors"));
    let header = |pairs: &'static [(&'static str, &'static str)]| {
        move |r: RequestBuilder| pairs.iter().fold(r, |r, (name, value)| r.header(*name, *value))
    };
    for (pairs, expected) in [
        (&[("range", "bytes=2-4")][..], 206),
        (&[("range", "bytes=20-")][..], 416),
        (
            &[("if-none-match", "\"84d89877f0d4041efb6bf91a16f0248f2fd573e6af05c19f96bedb9f882f7882\"")][..],
            304,
        ),
        (
            &[
                (
                    "if-none-match",
                    "\"x\", W/\"84d89877f0d4041efb6bf91a16f0248f2fd573e6af05c19f96bedb9f882f7882\"",
                ),
                ("range", "bytes=2-4"),
            ][..],
            304,
        ),
        (&[("if-none-match", "\"abc\""), ("if-modified-since", "Fri, 01 Jan 2100 00:00:00 GMT")][..], 200),
        (
            &[
                ("range", "bytes=2-4"),
                ("if-range", "\"84d89877f0d4041efb6bf91a16f0248f2fd573e6af05c19f96bedb9f882f7882\""),
            ][..],
            206,
        ),
        (&[("range", "bytes=2-4"), ("if-range", "\"other\"")][..], 200),
        (&[("range", "bytes=2-4"), ("if-range", "Fri, 01 Jan 2100 00:00:00 GMT")][..], 200),
    ] {
        let (status, _) = api.request("get", template, &file, header(pairs)).await;
        assert_eq!(status, expected, "{pairs:?}");
    }
    let state = file.replace("model.safetensors", "state.json");
    assert_eq!(api.request("get", template, &state, |r| r).await.0, 200);
    assert_eq!(api.request("get", template, &state, header(&[("range", "bytes=2-4")])).await.0, 206);

    for id in [fork, paused] {
        let path_of = |what: &str| format!("/api/v1/jobs/{id}{what}");
        assert_eq!(api.request("post", "/api/v1/jobs/{id}/resume", &path_of("/resume"), |r| r).await.0, 202);
        assert_eq!(api.request("post", "/api/v1/jobs/{id}/cancel", &path_of("/cancel"), |r| r).await.0, 202);
    }
    assert_eq!(api.request("delete", "/api/v1/datasets/{name}", "/api/v1/datasets/more", |r| r).await.0, 204);
    let (_, list) = server.get("/jobs?state=cancelled").await;
    let cancelled = list["jobs"][0]["id"].as_str().expect("a cancelled job").to_owned();
    let target = format!("/api/v1/jobs/{cancelled}");
    assert_eq!(api.request("delete", "/api/v1/jobs/{id}", &target, |r| r).await.0, 204);
    let mut sweep_spec = spec();
    sweep_spec["sweep"] = json!({"method": "grid", "parameters": {"train.lr": {"values": [0.1]}}});
    let sweep = || {
        let sweep_spec = sweep_spec.clone();
        move |r: RequestBuilder| r.header("idempotency-key", "s").json(&sweep_spec)
    };
    let (status, created) = api.request("post", "/api/v1/sweeps", "/api/v1/sweeps", sweep()).await;
    assert_eq!(status, 201, "{created}");
    assert_eq!(api.request("post", "/api/v1/sweeps", "/api/v1/sweeps", sweep()).await.0, 200);
    let target = format!("/api/v1/sweeps/{}", created["id"].as_str().unwrap());
    for action in ["pause", "resume", "cancel"] {
        let (template, target) = (format!("/api/v1/sweeps/{{id}}/{action}"), format!("{target}/{action}"));
        assert_eq!(api.request("post", &template, &target, |r| r).await.0, 202, "{action}");
    }
    assert_eq!(api.request("get", "/api/v1/sweeps", "/api/v1/sweeps", |r| r).await.0, 200);
    assert_eq!(api.request("get", "/api/v1/sweeps/{id}", &target, |r| r).await.0, 200);
    wait_until("the trial ends, so that its sweep can be deleted", async || {
        api.request("delete", "/api/v1/sweeps/{id}", &target, |r| r).await.0 == 204
    })
    .await;
    let undrain = ("/api/v1/agents/{id}/undrain", "/api/v1/agents/id-a/undrain");
    assert_eq!(api.request("post", undrain.0, undrain.1, |r| r).await.0, 204);
    Agent::connect(&server, hello("gone", 1, Vec::new())).await.unwrap().disconnect();
    let gone = ("/api/v1/agents/{id}", "/api/v1/agents/id-gone");
    wait_until(
        "the server notices the end of the connection, so that the agent can be deleted",
        async || api.request("delete", gone.0, gone.1, |r| r).await.0 == 204,
    )
    .await;
    for path in ["/healthz", "/readyz", "/metrics"] {
        assert_eq!(api.request("get", path, path, |r| r).await.0, 200);
    }

    // Other tests cover websockets, uploads of checkpoints, changes of passwords, and forks with an idempotency key. A status 202 of evaluations
    // and inspections would take 20 s and two minutes.
    let is_tested_elsewhere = |call: &str, status: u16| {
        status == 101
            || call.contains(" /api/v1/agent/attempts/")
            || (call.starts_with("get /api/v1/jobs/{id}/evaluation") && status == 202)
            || (call, status) == ("post /api/v1/password", 204)
            || (call.starts_with("post /api/v1/datasets") && status == 202)
            || (call, status) == ("post /api/v1/jobs/{id}/fork", 200)
    };
    for (method, path, operation) in &calls {
        for status in operation["responses"].as_object().unwrap().keys() {
            let (call, status) = (format!("{method} {path}"), status.parse::<u16>().unwrap());
            let occurs = api.seen.contains(&(call.clone(), status));
            assert!(
                status >= 400 || is_tested_elsewhere(&call, status) || occurs,
                "{call}: {status} never occurs"
            );
        }
    }
    answering.abort();
    server.stop().await;
}

/// docs/api.md lists every operation whose response has pages.
#[tokio::test]
async fn docs_api_names_every_list() {
    let server = TestServer::new().await;
    let (_, document) = server.get("/openapi.json").await;
    let page = include_str!("../../../docs/api.md");
    let mut lists = 0;
    for (method, path, operation) in operations(&document) {
        let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
        if method != "get" || !parameters.iter().any(|parameter| parameter["name"] == "cursor") {
            continue;
        }
        lists += 1;
        let path = path.trim_start_matches("/api/v1");
        assert!(page.contains(&format!("`GET {path}")), "docs/api.md does not name GET {path}");
    }
    assert!(lists > 10, "{lists} lists");
    server.stop().await;
}
