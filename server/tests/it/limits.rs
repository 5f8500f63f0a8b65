//! Limits of requests, messages and connections: depth, length and count, at the limit and one above it.

mod connections;

use crate::{
    agent::{Agent, best_checkpoint, hello, running, server_with_agent, start_job, unknown_attempt},
    test_server::{Stream, TIMEOUT, TestServer, assert_refused, spec},
};
use futures_util::{SinkExt, StreamExt};
use lockstep_protocol::{
    agent::{FromAgent, Source, ToAgent},
    limits::{JSON_NESTING, KEY_BYTES, KEY_PARTS, MESSAGE_NESTING, PART_BYTES, SEARCH_CHARS, TOML_NESTING},
    wire,
};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, timeout},
};
use tokio_tungstenite::{connect_async, tungstenite::Message};

fn dotted_key(parts: usize) -> String {
    vec!["a"; parts].join(".")
}

fn nested(depth: usize) -> String {
    format!("{}{}", "[".repeat(depth), "]".repeat(depth))
}

/// Creates a job with a checkpoint, and returns both ids.
async fn create_checkpoint(server: &TestServer, agent: &mut Agent) -> (String, String) {
    let (id, attempt) = agent.start_job(server, |_| {}).await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), best_checkpoint(1, 5, 0.5)]).await;
    let folder = server.job_dir(&id).join("checkpoints/1-5");
    std::fs::create_dir_all(folder).unwrap();
    let (_, list) = server.get(&format!("/jobs/{id}/checkpoints")).await;
    (id, list["checkpoints"][0]["id"].as_str().unwrap().to_owned())
}

#[tokio::test]
async fn depth_and_length_of_a_fork_s_keys_are_limited() {
    let (server, mut agent) = server_with_agent(2).await;
    let (id, _) = create_checkpoint(&server, &mut agent).await;
    let fork = async |set: Value| server.post(&format!("/jobs/{id}/fork"), &json!({"set": set})).await;
    let mistakes = |body: &Value| body["errors"].to_string();
    // A key within the limits is refused only because it is unknown.
    for key in [dotted_key(KEY_PARTS), "k".repeat(KEY_BYTES)] {
        let (status, body) = fork(json!({ key: 1 })).await;
        assert!(status == 422 && mistakes(&body).contains("no key is called"), "{body}");
    }
    for key in [dotted_key(KEY_PARTS + 1), dotted_key(20_000), dotted_key(500_000), "k".repeat(KEY_BYTES + 1)]
    {
        let (status, body) = fork(json!({ key: 1 })).await;
        assert!(status == 422 && mistakes(&body).contains("at most 8 parts"), "{body}");
        assert!(body.to_string().len() < 1000, "the error does not repeat the key");
    }
    // Nested tables count like a dotted key.
    let mut tables = json!(1);
    for _ in 0..JSON_NESTING - 3 {
        tables = json!({ "a": tables });
    }
    let (status, body) = fork(json!({ "x": tables })).await;
    assert!(status == 422 && mistakes(&body).contains("at most 8 parts"), "{body}");
    assert_eq!(server.get_text("/healthz").await.0, 200);
    server.stop().await;
}

#[tokio::test]
async fn senders_of_too_large_bodies_receive_the_reason() {
    let server = TestServer::new().await;
    // The body is larger than the buffers of a connection, so the client is still sending when the server refuses it.
    for (path, mime, fragment) in [
        ("/jobs", "application/json", "the body is larger than 1 MiB"),
        ("/jobs", "application/toml", "the body is larger than 1 MiB"),
        ("/datasets", "application/json", "the body is larger than 1 MiB"),
    ] {
        let request = server.http.post(server.url(&format!("/api/v1{path}"))).body(vec![b' '; 64 << 20]);
        let response =
            request.header("content-type", mime).send().await.expect("a response instead of a broken pipe");
        assert_eq!(response.status(), 413, "{path}");
        let problem: Value = serde_json::from_slice(&response.bytes().await.unwrap()).unwrap();
        assert_eq!(problem["detail"], fragment);
    }
    server.stop().await;
}

#[tokio::test]
async fn repeated_keys_and_too_deep_bodies_are_refused() {
    let (server, _agent) = server_with_agent(2).await;
    let send = async |mime: &str, body: String| {
        let url = server.url("/api/v1/jobs/validate");
        server.send(server.http.post(url).header("content-type", mime).body(body)).await
    };
    let json = "application/json";
    // The outer object is one level.
    let (status, body) = send(json, format!("{{\"x\": {}}}", nested(JSON_NESTING - 1))).await;
    assert_eq!(status, 422, "the body is read, but its key is unknown: {body}");
    for depth in [JSON_NESTING, 100_000] {
        assert_refused(send(json, format!("{{\"x\": {}}}", nested(depth))).await, 400, "more than 32 deep");
    }
    let repeated_name = spec().to_string().replacen("{", "{\"name\": \"other\", ", 1);
    assert_refused(send(json, repeated_name).await, 400, "\"name\" appears twice");
    // The key inside is repeated with an escape.
    let repeated_inner_key = spec().to_string().replacen("\"epochs\"", "\"\\u0065pochs\":3,\"epochs\"", 1);
    assert_refused(send(json, repeated_inner_key).await, 400, "\"epochs\" appears twice");
    assert_eq!(send(json, "{} {}".into()).await.0, 400, "a body has only one value");
    // An array is not accepted in place of an object.
    assert_eq!(server.post("/datasets/inspect", &json!(["/x"])).await.0, 400);

    let toml = "application/toml";
    let document = |x: &str| format!("x = {x}\n[data]\ndataset = \"pictures\"\n");
    let (status, body) = send(toml, document(&nested(TOML_NESTING))).await;
    assert!(status == 422 && body["errors"][0]["pointer"] == "/x", "{body}");
    assert_refused(send(toml, document(&nested(TOML_NESTING + 1))).await, 422, "line 1, column 13");
    assert_eq!(send(toml, format!("{} = 1", dotted_key(500_000))).await.0, 422);
    let large = "#".repeat((1 << 20) + 1);
    for mime in [json, toml] {
        assert_eq!(send(mime, large.clone()).await.0, 413, "{mime}");
    }
    for (mime, start) in [(json, "{}"), (toml, "#")] {
        let body = start.to_owned() + &" ".repeat((1 << 20) - start.len());
        assert_eq!(send(mime, body).await.0, 422, "{mime}: the body is read, but names no dataset");
    }
    server.stop().await;
}

#[tokio::test]
async fn the_length_of_a_search_is_limited() {
    let (server, _agent, id, _) = start_job(|_| {}).await;
    for (path, key) in [("/jobs".to_owned(), "name"), (format!("/jobs/{id}/logs"), "q")] {
        for letter in ["x", "ß"] {
            let search = async |n: usize| server.get(&format!("{path}?{key}={}", letter.repeat(n))).await;
            assert_eq!(search(SEARCH_CHARS).await.0, 200, "{path}");
            for chars in [SEARCH_CHARS + 1, 10_000] {
                assert_refused(search(chars).await, 422, "at most 200");
            }
        }
    }
    // Numbers at the end of their range are not an error.
    let max = u64::MAX;
    for path in [
        format!("/jobs/{id}/logs?after={max}&before={max}&q=x"),
        format!("/jobs/{id}/metrics?from={max}&to={max}"),
        format!("/jobs/{id}/metrics?ranks={}", vec!["4294967295"; 3000].join(",")),
    ] {
        server.get_ok(&path).await;
    }
    // A request's head may have about 64 KiB.
    let long = server.http.get(server.url(&format!("/healthz?{}", "x".repeat(60_000)))).send().await.unwrap();
    assert_eq!(long.status().as_u16(), 200);
    let longer = server.http.get(server.url(&format!("/healthz?{}", "x".repeat(70_000)))).send().await;
    assert!(longer.is_err() || matches!(longer.unwrap().status().as_u16(), 414 | 431));
    server.stop().await;
}

#[tokio::test]
async fn a_damaged_checkpoint_is_reported_and_pipes_do_not_block() {
    let (server, mut agent) = server_with_agent(2).await;
    let (id, checkpoint) = create_checkpoint(&server, &mut agent).await;
    let folder = server.job_dir(&id).join("checkpoints/1-5");
    let pipe = |name: &str| {
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        let path = folder.join(name);
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        path
    };
    let path_of = |name: &str| format!("/checkpoints/{checkpoint}{name}");
    let manifest = pipe("MANIFEST.json");
    for path in [path_of(""), path_of("/state.json")] {
        assert_refused(server.get(&path).await, 422, "MANIFEST.json is not a regular file");
    }
    std::fs::remove_file(&manifest).unwrap();
    std::fs::write(&manifest, "{\"files\": ").unwrap();
    for path in [path_of(""), path_of("/state.json")] {
        assert_refused(server.get(&path).await, 422, "MANIFEST.json is not JSON");
    }
    std::fs::write(&manifest, "{}").unwrap();
    for name in ["state.json", "model.safetensors"] {
        pipe(name);
        assert_refused(server.get(&path_of(&format!("/{name}"))).await, 422, "is not a regular file");
    }
    let evaluation = server.get(&format!("/jobs/{id}/evaluation")).await;
    assert_refused(evaluation, 422, "model.safetensors is not a regular file");
    let predict = server.http.post(server.url(&format!("/api/v1{}", path_of("/predict")))).body("a picture");
    assert_eq!(server.send(predict).await.0, 422);
    // A fork must read `state.json`, which is a pipe: the fork is refused without waiting for the pipe's writer.
    assert_refused(server.post(&format!("/jobs/{id}/fork"), &json!({})).await, 503, "not a regular file");
    // A fork is also refused if files differ from the manifest, and leaves no files.
    for name in ["state.json", "model.safetensors"] {
        std::fs::remove_file(folder.join(name)).unwrap();
    }
    let sha256_of_world = "486ea46224d1bb4fb680f34f7c9ad96a8f24ec88be73ea8e5a6c65260e9cb8a7";
    let files = json!({ "state.json": { "size_bytes": 5, "sha256": sha256_of_world } });
    std::fs::write(&manifest, json!({ "files": files }).to_string()).unwrap();
    let count_job_folders = || std::fs::read_dir(server.dir.path().join("jobs")).unwrap().count();
    let folders_before = count_job_folders();
    for (content, fragment) in [
        (None, "state.json is missing"),
        (Some("worl"), "has 4 bytes and was written with 5"),
        (Some("worlt"), "are not those"),
    ] {
        if let Some(content) = content {
            std::fs::write(folder.join("state.json"), content).unwrap();
        }
        assert_refused(server.post(&format!("/jobs/{id}/fork"), &json!({})).await, 422, fragment);
    }
    assert_eq!(count_job_folders(), folders_before);
    std::fs::write(folder.join("state.json"), "world").unwrap();
    assert_eq!(server.post(&format!("/jobs/{id}/fork"), &json!({})).await.0, 201);
    server.stop().await;
}
