//! Invalid requests: responses name the error and the valid values, and nothing is stored.

use crate::{
    pictures,
    server::{Server, number, state_of},
    specs,
};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use std::fs;

const UNKNOWN_JOB: &str = "j00000000000000000000000000";

/// Asserts that no job has a row or a folder.
async fn assert_nothing_stored(server: &Server) {
    let listed = server.get("/jobs").await;
    assert_eq!(listed["jobs"], json!([]));
    let folders = fs::read_dir(server.data_dir().join("jobs")).map_or(0, Iterator::count);
    assert_eq!(folders, 0, "folders under jobs/");
}

#[tokio::test]
async fn all_errors_of_a_specification_are_reported_together() {
    let server = Server::start().await;
    server.register("fashion", &pictures::idx_dataset(server.folder().path(), 64, 16)).await;
    let good = specs::short("good", "fashion", 2, 10);
    let assert_errors = async |changes: Value, expected: &[(&str, &[&str])]| {
        server.post("/jobs", &specs::with(good.clone(), changes)).await.assert_invalid(expected);
    };

    assert_errors(json!({"train": {"learning_rte": 1}}), &[("/train/learning_rte", &["no key"])]).await;
    assert_errors(json!({"train": {"batchsize": 8}}), &[("/train/batchsize", &["batch_size"])]).await;
    assert_errors(json!({"modle": {}}), &[("/modle", &["model"])]).await;
    assert_errors(
        json!({"data": {"image_size": 16}, "model": {"arch": "resnet51"}}),
        &[("/model/arch", &["resnet50", "resnet18"])],
    )
    .await;
    let sgd = ["\"momentum\" is SGD with momentum", "train.momentum = 0"];
    assert_errors(json!({"train": {"optimizer": "sgd"}}), &[("/train/optimizer", &sgd)]).await;
    assert_errors(json!({"train": {"lr": "fast"}}), &[("/train/lr", &["number", "fast"])]).await;
    assert_errors(json!({"parallel": {"ranks": 2.5}}), &[("/parallel/ranks", &["whole number"])]).await;
    assert_errors(json!({"data": 7}), &[("/data", &["table"]), ("/data/dataset", &["missing"])]).await;
    assert_errors(json!({"data": {"image_size": 0}}), &[("/data/image_size", &["8"])]).await;
    let many = json!({"train": {"steps": null, "epochs": 1_000_000_000}});
    assert_errors(many, &[("/train/epochs", &["100,000"])]).await;
    assert_errors(json!({"train": {"epochs": 3}}), &[("/train/steps", &["not both"])]).await;
    let odd = json!({"train": {"batch_size": null, "global_batch_size": 63}});
    assert_errors(odd, &[("/train/global_batch_size", &["63", "2 ranks", "62 or 64"])]).await;
    assert_errors(json!({"data": {"dataset": "fashoin"}}), &[("/data/dataset", &["fashion"])]).await;
    assert_errors(json!({"data": {"dataset": "../../etc"}}), &[("/data/dataset", &[])]).await;
    assert_errors(json!({"parallel": {"ranks": 4}}), &[("/parallel/ranks", &["4 ranks", "2 slots"])]).await;
    assert_errors(json!({"parallel": {"device": "cuda"}}), &[("/parallel/device", &["cuda"])]).await;
    assert_errors(json!({"train": {"precision": "fp16"}}), &[("/train/precision", &["fp32"])]).await;
    assert_errors(json!({"name": "x".repeat(201)}), &[("/name", &["200"])]).await;
    assert_errors(
        json!({
            "train": {"lr": -1, "momentumm": 0.9, "batch_size": 0},
            "model": {"stem": "cfar"},
            "parallel": {"sync_batch_norm": "yes"},
            "checkpoint": {"keep": 0},
        }),
        &[
            ("/train/lr", &["above 0"]),
            ("/train/momentumm", &["momentum"]),
            ("/train/batch_size", &["from 1"]),
            ("/model/stem", &["cifar"]),
            ("/parallel/sync_batch_norm", &["true or false"]),
            ("/checkpoint/keep", &["from 2"]),
        ],
    )
    .await;
    // A global batch larger than the dataset: an epoch would have no step.
    let huge = json!({"train": {"steps": null, "epochs": 1, "batch_size": 500}});
    assert_errors(huge, &[("/train/batch_size", &["1000", "64"])]).await;

    assert_nothing_stored(&server).await;
    server.stop().await;
}

#[tokio::test]
async fn bodies_without_a_specification_are_refused() {
    let server = Server::start().await;
    server.register("fashion", &pictures::idx_dataset(server.folder().path(), 64, 16)).await;
    let send = async |kind: &str, body: Vec<u8>| {
        let request = server.http.post(server.api("/jobs")).header("content-type", kind).body(body);
        crate::server::Response::read(request.send().await.expect("a response")).await
    };
    let json_kind = "application/json";
    send(json_kind, b"{\"name\": ".to_vec()).await.problem(400);
    send(json_kind, vec![0xff, 0xfe]).await.problem(400);
    send(json_kind, Vec::new()).await.problem(400);
    for body in ["[]", "null", "3", "\"resnet20\""] {
        send(json_kind, body.into()).await.problem(422);
    }
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    send(json_kind, deep.into()).await.problem(400);
    // A form on another site can send text/plain without a CORS preflight.
    let good = specs::short("good", "fashion", 1, 10).to_string();
    let response = send("text/plain", good.clone().into()).await;
    response.problem(415);
    let huge = format!("{{\"name\": \"{}\"}}", "x".repeat(64 << 20));
    let request = server.http.post(server.api("/jobs")).header("content-type", json_kind).body(huge);
    // The server may stop reading; then the client gets a broken pipe instead of a response.
    if let Ok(response) = request.send().await {
        crate::server::Response::read(response).await.problem(413);
    }
    assert_nothing_stored(&server).await;

    server.request(Method::PUT, "/jobs", Some(&json!({}))).await.problem(405);
    for path in [
        "/nothing",
        "/jobs/zzz",
        "/jobs/..%2f..%2fetc",
        &format!("/jobs/{UNKNOWN_JOB}"),
        &format!("/jobs/{UNKNOWN_JOB}/metrics?name=loss"),
        &format!("/jobs/{UNKNOWN_JOB}/logs"),
        &format!("/jobs/{UNKNOWN_JOB}/checkpoints"),
        "/checkpoints/nothing",
        "/checkpoints/nothing/model.safetensors",
    ] {
        let problem = server.request(Method::GET, path, None).await.problem(404);
        assert!(problem["detail"].as_str().is_some_and(|d| !d.is_empty()), "{path}: {problem}");
    }
    for (method, path) in [(Method::POST, "/cancel"), (Method::DELETE, "")] {
        server.request(method, &format!("/jobs/{UNKNOWN_JOB}{path}"), None).await.problem(404);
    }
    server.stop().await;
}

#[tokio::test]
async fn a_job_is_created_once_and_invalid_transitions_are_refused() {
    let server = Server::start_training(640, 16).await;
    let submit = async |key: &str, spec: &Value| {
        let request = server.http.post(server.api("/jobs")).header("idempotency-key", key).json(spec);
        crate::server::Response::read(request.send().await.expect("a response")).await
    };
    let spec = specs::short("once", "fashion", 2, 100_000);
    let first = submit("tuesday-run", &spec).await;
    assert_eq!(first.status, StatusCode::CREATED, "{}", first.text);
    let second = submit("tuesday-run", &spec).await;
    assert!(second.status.is_success(), "{}", second.text);
    let id = first.json()["id"].as_str().expect("an id").to_owned();
    assert_eq!(second.json()["id"], *id);
    submit("tuesday-run", &specs::with(spec.clone(), json!({"train": {"lr": 0.02}}))).await.problem(409);
    assert_eq!(server.get("/jobs").await["jobs"].as_array().map(Vec::len), Some(1));

    // A request that the job's state forbids gets a 409 that names the state.
    let assert_refused = async |method: Method, path: &str, state: &str| {
        let problem = server.request(method, &format!("/jobs/{id}{path}"), None).await.problem(409);
        assert_eq!(problem["state"], state, "{problem}");
        assert!(problem["detail"].as_str().is_some_and(|d| d.contains(state)), "{problem}");
    };
    server
        .wait_for_job(&id, "the job runs", |job| job["state"] == "running" && number(&job["step"]) > 2)
        .await;
    assert_refused(Method::DELETE, "", "running").await;
    assert!(!server.ranks(&id).is_empty(), "a refused request changes nothing");
    let cancelled = server.request(Method::POST, &format!("/jobs/{id}/cancel"), None).await;
    assert_eq!(cancelled.status, StatusCode::ACCEPTED, "{}", cancelled.text);
    let job = server.wait_for_end(&id).await;
    assert_eq!(state_of(&job).as_str(), "cancelled");
    assert_refused(Method::POST, "/cancel", "cancelled").await;
    server.stop().await;
}
