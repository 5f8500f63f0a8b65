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
            AgentRequest::Evaluate(_) => {
                let evaluation = ModelEvaluation { samples: 1, accuracy: 1.0, ..ModelEvaluation::default() };
                AgentReply::Evaluation(Box::new(evaluation))
            }
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
    api.expect("post", "/agents/id-a/drain", None, 204).await;
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
        api.request(method, &missing.replace("{file}", "nothing"), |r| r).await;
        if path.contains('{') {
            let unreadable = path.replace("{id}", "%ff").replace("{name}", "%ff").replace("{file}", "%ff");
            api.request(method, &unreadable, |r| r).await;
        }
        api.request(method, &target, |r| r.header("host", "evil.example")).await;
        if method != "get" {
            api.request(method, &target, |r| r.header("origin", "http://evil.example")).await;
        }
        let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
        for parameter in parameters.iter().filter(|p| p["in"] == "query") {
            for value in ["☃", "-1", "99999999999999999999", "18446744073709551615", "1", "", "a%00b"] {
                let query = format!("{target}?{}={value}", parameter["name"].as_str().unwrap());
                // Only GET, so that no job is created or changed.
                if method == "get" {
                    api.request(method, &query, |r| r).await;
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
                    api.request(method, &target, |r| r.header("content-type", mime).body(body)).await;
                }
                // With a wrong type, the server may close the connection before the client reads the response.
                let body = vec![b' '; (1 << 20) + 1];
                if mime == "application/json" && !path.ends_with("/predict") && !path.ends_with("/file") {
                    api.request(method, &target, |r| r.header("content-type", mime).body(body)).await;
                }
            }
        }
    }

    // Successes of every operation.
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
        api.expect("get", &filled(path, &job), None, 200).await;
    }
    api.expect("get", "/agents/id-a/metrics", None, 200).await;
    let person = json!({"name": "vera", "role": "viewer", "password": "correct horse"});
    api.expect("post", "/people", Some(person), 201).await;
    api.expect("patch", "/people/vera", Some(json!({"role": "member"})), 200).await;
    for path in ["/tokens", "/audit", "/people"] {
        api.expect("get", path, None, 200).await;
    }
    let token = api.expect("post", "/tokens", Some(json!({"name": "t", "scope": "read"})), 201).await;
    api.expect("delete", &format!("/tokens/{}", token["id"].as_str().unwrap()), None, 204).await;
    api.expect("delete", "/people/vera", None, 204).await;
    api.expect("post", "/login-links", None, 201).await;
    let webhook = api.expect("post", "/webhooks", Some(json!({"url": "http://localhost:1/"})), 201).await;
    let webhook = format!("/webhooks/{}", webhook["id"].as_str().unwrap());
    api.expect("get", "/webhooks", None, 200).await;
    api.expect("patch", &webhook, Some(json!({"enabled": false})), 200).await;
    api.expect("post", &format!("{webhook}/test"), None, 200).await;
    api.expect("get", &format!("{webhook}/deliveries"), None, 200).await;
    api.expect("delete", &webhook, None, 204).await;
    api.expect("get", &format!("/checkpoints/{checkpoint}"), None, 200).await;
    api.expect("post", "/jobs/validate", Some(spec()), 200).await;
    api.expect("post", "/datasets/inspect", Some(json!({"path": "/x"})), 200).await;
    api.expect("post", "/datasets/pictures/inspect", None, 200).await;
    api.expect("post", "/datasets", Some(json!({"name": "more", "path": "/x"})), 201).await;
    let job_path = format!("/jobs/{job}");
    api.expect("patch", &job_path, Some(json!({"notes": "n"})), 200).await;
    api.expect("post", &format!("{job_path}/fork/check"), Some(json!({})), 200).await;
    let fork = api.expect("post", &format!("{job_path}/fork"), Some(json!({})), 201).await;
    let other = api.expect("post", "/jobs", Some(spec()), 201).await;
    let paused = [fork, other].map(|job| format!("/jobs/{}", job["id"].as_str().unwrap()));
    for path in &paused {
        api.expect("post", &format!("{path}/pause"), None, 202).await;
    }
    for body in [json!({"name": "m", "job": job}), json!({"name": "m", "checkpoint": checkpoint})] {
        api.expect("post", "/models", Some(body), 201).await;
    }
    let alias = "/models/m/aliases/champion";
    api.expect("put", alias, Some(json!({"version": 1})), 200).await;
    for path in ["/models", "/models/m", "/models/m/versions/1", alias] {
        api.expect("get", path, None, 200).await;
    }
    // A job with model versions cannot be deleted.
    api.expect("delete", &job_path, None, 409).await;
    for path in [alias, "/models/m/versions/1", "/models/m/versions/2"] {
        api.expect("delete", path, None, 204).await;
    }
    api.expect("post", &format!("{job_path}/retry"), None, 202).await;
    for expected in [201, 200] {
        api.expect("post", "/runs", Some(json!({"id": "a-run", "name": "a run"})), expected).await;
    }
    let records = json!({"first": 1, "records": [{"step": 1, "values": {"a/b": 1}}]});
    api.expect("post", "/runs/a-run/records", Some(records), 200).await;
    api.expect("patch", "/runs/a-run", Some(json!({"state": "succeeded"})), 200).await;
    api.expect("get", "/runs/a-run/files", None, 200).await;
    let archive = crate::dataset_uploads::zip_file(&["cat/1.png", "dog/2.png"]);
    let upload = "/api/v1/datasets/uploads/zipped/archive";
    assert_eq!(api.request("put", upload, |r| r.body(archive)).await.0, 204);
    api.expect("post", "/datasets/uploads/zipped", Some(json!({})), 201).await;
    let file = "/api/v1/runs/a-run/file?path=a/b.txt";
    assert_eq!(api.request("put", file, |r| r.body("0123456789")).await.0, 200);
    for (name, value, expected) in [
        ("accept", "*/*", 200),
        ("range", "bytes=2-4", 206),
        ("range", "bytes=20-", 416),
        ("if-modified-since", "Fri, 01 Jan 2100 00:00:00 GMT", 304),
    ] {
        assert_eq!(api.request("get", file, |r| r.header(name, value)).await.0, expected, "{value}");
    }
    assert_eq!(api.request("delete", file, |r| r).await.0, 204);
    // The requests above may have registered the bundled pictures already.
    let (status, response) = api.request("post", "/api/v1/datasets/bundled", |r| r).await;
    assert!([201, 409].contains(&status), "{response}");
    for (key, expected) in [("k", 201), ("k", 200), ("", 400)] {
        let with_key = |r: RequestBuilder| r.header("idempotency-key", key).json(&spec());
        assert_eq!(api.request("post", "/api/v1/jobs", with_key).await.0, expected, "{key:?}");
    }
    for path in [
        format!("{job_path}/samples?indices=1,2"),
        "/jobs/groups?by=owner,train.lr&metrics=best,loss&count=true".to_owned(),
        format!("/metrics/query?jobs={job}&name=loss"),
    ] {
        api.expect("get", &path, None, 200).await;
    }
    for path in [job_path.as_str(), &format!("{job_path}/checkpoints"), "/datasets", "/datasets/pictures"] {
        let target = format!("/api/v1{path}");
        assert_eq!(api.request("get", &target, |r| r.header("if-none-match", "*")).await.0, 304, "{path}");
    }
    let logs = format!("/api/v1{job_path}/logs");
    api.request("get", &logs, |r| r.header("accept", "text/plain")).await;
    let panels = json!({"panels": [{"title": "t", "metrics": ["loss"]}]});
    let panels_of_job = format!("{job_path}/panels");
    for path in [panels_of_job.as_str(), "/projects/default/panels"] {
        api.expect("put", path, Some(panels.clone()), 200).await;
        api.expect("get", path, None, 200).await;
    }
    api.expect("delete", &panels_of_job, None, 204).await;
    let picture = |r: RequestBuilder| r.header("content-type", "image/png").body("x");
    let predict = format!("/api/v1/checkpoints/{checkpoint}/predict");
    assert_eq!(api.request("post", &predict, picture).await.0, 200);

    // Files: complete, ranges, cached, and invalid ranges.
    let tag = "\"84d89877f0d4041efb6bf91a16f0248f2fd573e6af05c19f96bedb9f882f7882\"";
    let weak_tag = format!("\"x\", W/{tag}");
    let range = ("range", "bytes=2-4");
    let modified = "Fri, 01 Jan 2100 00:00:00 GMT";
    for (file, headers, expected) in [
        ("model.safetensors", &[][..], 200),
        ("model.safetensors", &[range], 206),
        ("model.safetensors", &[("range", "bytes=20-")], 416),
        ("model.safetensors", &[("if-none-match", tag)], 304),
        ("model.safetensors", &[("if-none-match", &*weak_tag), range], 304),
        ("model.safetensors", &[("if-none-match", "\"abc\""), ("if-modified-since", modified)], 200),
        ("model.safetensors", &[range, ("if-range", tag)], 206),
        ("model.safetensors", &[range, ("if-range", "\"other\"")], 200),
        ("model.safetensors", &[range, ("if-range", modified)], 200),
        ("state.json", &[], 200),
        ("state.json", &[range], 206),
    ] {
        let with_headers =
            |r| headers.iter().fold(r, |r: RequestBuilder, (name, value)| r.header(*name, *value));
        let target = format!("/api/v1/checkpoints/{checkpoint}/{file}");
        assert_eq!(api.request("get", &target, with_headers).await.0, expected, "{file} {headers:?}");
    }

    for path in &paused {
        for action in ["resume", "cancel"] {
            api.expect("post", &format!("{path}/{action}"), None, 202).await;
        }
    }
    api.expect("delete", "/datasets/more", None, 204).await;
    api.expect("delete", &paused[0], None, 204).await;
    let mut sweep_spec = spec();
    sweep_spec["sweep"] = json!({"method": "grid", "parameters": {"train.lr": {"values": [0.1]}}});
    let mut sweep = Value::Null;
    for expected in [201, 200] {
        let with_key = |r: RequestBuilder| r.header("idempotency-key", "s").json(&sweep_spec);
        let (status, response) = api.request("post", "/api/v1/sweeps", with_key).await;
        assert_eq!(status, expected, "{response}");
        sweep = response;
    }
    let sweep = format!("/sweeps/{}", sweep["id"].as_str().unwrap());
    for action in ["pause", "resume", "cancel"] {
        api.expect("post", &format!("{sweep}/{action}"), None, 202).await;
    }
    for path in ["/sweeps", &sweep] {
        api.expect("get", path, None, 200).await;
    }
    let sweep = format!("/api/v1{sweep}");
    wait_until("the trial ends, so that its sweep can be deleted", async || {
        api.request("delete", &sweep, |r| r).await.0 == 204
    })
    .await;
    api.expect("post", "/agents/id-a/undrain", None, 204).await;
    Agent::connect(&server, hello("gone", 1, Vec::new())).await.unwrap().disconnect();
    wait_until(
        "the server notices the end of the connection, so that the agent can be deleted",
        async || api.request("delete", "/api/v1/agents/id-gone", |r| r).await.0 == 204,
    )
    .await;
    for path in ["/healthz", "/readyz", "/metrics"] {
        assert_eq!(api.request("get", path, |r| r).await.0, 200);
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
