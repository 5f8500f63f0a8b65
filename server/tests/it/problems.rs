//! Error responses: each has a code for programs.

use crate::{agent::server_with_agent, lists::submit_jobs};
use serde_json::json;

#[tokio::test]
async fn problems_have_codes() {
    let (server, _agent) = server_with_agent(2).await;
    let ids = submit_jobs(&server, &[("a", 0.1, "")]).await;
    let dataset = |name: &str| json!({"name": name, "path": "/x"});
    for ((status, problem), expected) in [
        (server.get("/nothing").await, (404, "not_found")),
        (server.delete("/jobs").await, (405, "method_not_allowed")),
        (server.post("/datasets", &dataset("pictures")).await, (409, "name_taken")),
        (server.post("/datasets", &dataset("Pictures")).await, (409, "name_taken")),
        (server.delete("/datasets/pictures").await, (409, "dataset_in_use")),
        (server.post(&format!("/jobs/{}/resume", ids[0]), &json!({})).await, (409, "wrong_state")),
        (server.post("/jobs", &json!({"nam": 1})).await, (422, "invalid")),
        (server.send(reqwest::Client::new().get(server.url("/api/v1/jobs"))).await, (401, "unauthorized")),
    ] {
        assert_eq!((status, problem["code"].as_str().unwrap()), expected, "{problem}");
        assert_eq!(problem["type"], format!("urn:lockstep:problem:{}", expected.1));
    }
    server.stop().await;
}
