//! Headers, names and cursors of requests.

use super::*;
use crate::{
    agent::checkpoint,
    uploads::{AttemptApi, manifest},
};
use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};

#[tokio::test]
async fn an_idempotency_key_has_at_most_255_characters() {
    let server = TestServer::new().await;
    let _agent = Agent::join_with_dataset(&server, 2).await;
    let submit = async |chars: usize| {
        let request =
            server.http.post(server.url("/api/v1/jobs")).header("idempotency-key", "k".repeat(chars));
        server.send(request.json(&spec())).await
    };
    let (status, job) = submit(255).await;
    assert_eq!(status, 201, "{job}");
    assert_eq!(submit(255).await.1["id"], job["id"], "the same request");
    for chars in [0, 256] {
        let message = "Idempotency-Key must be 1 to 255 visible ASCII characters";
        assert_refused(submit(chars).await, 400, message);
    }
    server.stop().await;
}

#[tokio::test]
async fn names_and_paths_of_datasets_have_maximum_lengths() {
    let server = TestServer::new().await;
    let mut agent = Agent::join(&server, 1).await;
    let new = |name: usize, path: usize| json!({"name": "n".repeat(name), "path": format!("/{}", "p".repeat(path - 1))});
    agent.register_dataset(&server, &new(100, 4096), dataset_info()).await;
    let (status, body) = server.post("/datasets", &new(101, 4097)).await;
    assert_eq!(status, 422, "{body}");
    let details = body["errors"].as_array().unwrap().iter().map(|error| error["detail"].as_str().unwrap());
    let details: Vec<_> = details.collect();
    assert!(details[0].starts_with("has 101 characters: use 1 to 100 "), "{body}");
    assert_eq!(details[1..], ["has 4097 bytes, but must have at most 4096"]);
    let (status, body) = server.post("/datasets/inspect", &json!({"path": "/a\0b"})).await;
    assert!(status == 422 && body.to_string().contains("a zero byte"), "{body}");
    server.stop().await;
}

#[tokio::test]
async fn a_cursor_has_at_most_4096_characters() {
    let server = TestServer::new().await;
    let _agent = Agent::join_with_dataset(&server, 2).await;
    for _ in 0..2 {
        server.submit(|_| {}).await;
    }
    let (_, page) = server.get("/jobs?limit=1").await;
    let cursor = BASE64_URL_SAFE_NO_PAD.decode(page["next_cursor"].as_str().unwrap()).unwrap();
    // Spaces after the JSON are valid. In base64, three bytes are four characters.
    let next = async |bytes: usize| {
        let mut cursor = cursor.clone();
        cursor.resize(bytes, b' ');
        server.get(&format!("/jobs?limit=1&cursor={}", BASE64_URL_SAFE_NO_PAD.encode(cursor))).await
    };
    let (status, page) = next(3072).await;
    assert_eq!((status, page["jobs"].as_array().map(Vec::len)), (200, Some(1)), "{page}");
    let (status, problem) = next(3073).await;
    assert_eq!((status, &problem["code"]), (400, &json!("wrong_cursor")), "{problem}");
    assert!(problem["detail"].as_str().unwrap().contains("leave it out"), "{problem}");
    server.stop().await;
}

#[tokio::test]
async fn a_part_of_a_checkpoint_upload_has_at_most_8_mib() {
    const MAX: usize = 8 << 20;
    let (server, mut agent, _, attempt) = start_job(|_| {}).await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), checkpoint(10)]).await;
    let api = AttemptApi::new(&server, &server.agent_token("a").await, "id-a", &attempt);
    assert_eq!(api.request("POST", "", vec![]).await.0, 204);
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
