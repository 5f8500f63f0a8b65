//! Private objects get the same response as missing objects, also for otherwise invalid requests.

use super::{
    routes::{METHODS, every_path},
    server_with_people,
};
use crate::{agent::dataset_info, document::create_failed_job, test_server::TestServer};
use lockstep_protocol::JobId;
use reqwest::{Client, Method, RequestBuilder};
use serde_json::json;

/// Pairs of a query and a change of the request. All except the first make a request that a handler would refuse as invalid.
const REQUESTS: [(&str, fn(RequestBuilder) -> RequestBuilder); 5] = [
    ("", |request| request),
    ("?limit=none&points=-1&since=x&format=x&cursor=x&augmented=x", |request| request),
    ("", |request| request.body("{").header("content-type", "application/json")),
    ("", |request| request.body("x").header("content-type", "text/plain")),
    ("", |request| request.header("upgrade", "websocket").header("connection", "upgrade")),
];

/// Sends a request, and returns the response without parts that differ between requests.
async fn comparable_response(
    server: &TestServer,
    who: &Client,
    method: &Method,
    path: &str,
    index: usize,
) -> (u16, String) {
    let (query, change) = REQUESTS[index];
    let request = who.request(method.clone(), server.url(&format!("{path}{query}")));
    let response = change(request).send().await.unwrap();
    let status = response.status().as_u16();
    let mut headers: Vec<_> =
        response.headers().iter().map(|(name, value)| format!("{name}: {value:?}\n")).collect();
    // A page contains the time, whose number of digits varies.
    let variable = ["x-request-id", "date", "content-length"];
    headers.retain(|header| !variable.iter().any(|name| header.starts_with(name)));
    headers.sort();
    let body = response.text().await.unwrap();
    let time = body.split("data-now=\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap_or("none");
    (status, headers.concat() + &body.replace(time, ""))
}

#[tokio::test]
async fn private_ids_get_the_same_response_as_unknown_ids() {
    let (mut server, mut agent, people) = server_with_people().await;
    let admin = std::mem::replace(&mut server.http, people.mona.clone());
    let (job, checkpoint) =
        create_failed_job(&server, &mut agent, |spec| spec["private"] = json!(true)).await;
    let new = json!({"name": "secret-pictures", "path": "/secret", "private": true});
    agent.register_dataset(&server, &new, dataset_info()).await;
    server.create("/models", &json!({"name": "secret-model", "job": job})).await;
    server.http = admin;
    let missing = JobId::generate().to_string();
    let missing_checkpoint = format!("{missing}-1-5");

    let mut compared = 0;
    for path in every_path() {
        let (private_id, missing_id) = match path.as_str() {
            path if ["/api/v1/jobs/{id}", "/api/v1/runs/{id}", "/jobs/{id}"]
                .iter()
                .any(|start| path.starts_with(start)) =>
            {
                (&job, &missing)
            }
            path if path.starts_with("/api/v1/checkpoints/{id}") => (&checkpoint, &missing_checkpoint),
            path if path.starts_with("/api/v1/datasets/{name}") => {
                (&"secret-pictures".into(), &"no-pictures".into())
            }
            path if path.starts_with("/api/v1/models/{name}") || path.starts_with("/models/{name}") => {
                (&"secret-model".into(), &"no-model".into())
            }
            _ => continue,
        };
        let with_id = |id: &str| {
            let path = path.replace("{id}", id).replace("{name}", id).replace("{file}", "model.safetensors");
            path.replace("{version}", "1").replace("{alias}", "champion")
        };
        for method in &METHODS {
            for index in 0..REQUESTS.len() {
                let private =
                    comparable_response(&server, &people.otto, method, &with_id(private_id), index).await;
                let missing =
                    comparable_response(&server, &people.otto, method, &with_id(missing_id), index).await;
                assert_eq!(private, missing, "{method} {path} {index}");
                assert_eq!(private.0, 404, "{method} {path} {index}: {}", private.1);
                compared += 1;
            }
        }
    }
    assert!(compared > 800, "{compared}");
    // The owner can read the objects.
    for path in [
        format!("/jobs/{job}"),
        format!("/checkpoints/{checkpoint}"),
        "/datasets/secret-pictures".into(),
        "/models/secret-model/versions/1".into(),
    ] {
        assert_eq!(server.send_as(&people.mona, "GET", &path, None).await.0, 200, "{path}");
    }
    server.stop().await;
}
