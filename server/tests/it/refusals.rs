//! Invalid requests: each error says what to change, and no change is made.

use crate::{
    agent::{dataset_info, server_with_agent, start_job},
    test_server::{TestServer, assert_mistake, assert_refused, column, spec},
};
use lockstep_protocol::dataset::DatasetInfo;
use serde_json::{Value, json};

#[tokio::test]
async fn all_errors_of_a_specification_are_named_with_pointers() {
    let (server, _agent) = server_with_agent(2).await;
    let cases: Vec<(&str, Value, &str)> = vec![
        ("/train", json!({"epoch": 3}), "epochs"),
        ("/train", json!({"lr": "fast"}), ""),
        ("/train", json!({"epochs": 1_000_000_000}), ""),
        ("/train", json!({"epochs": 1, "global_batch_size": 11}), ""),
        ("/train", json!({"epochs": 1, "batch_size": 5000}), "10000 pictures"),
        ("/data", json!({"dataset": "pictures", "image_size": 0}), ""),
        ("/data", json!({"dataset": "picture"}), "did you mean \"pictures\""),
        ("/data", json!({"dataset": "../../etc"}), ""),
        ("/data", json!({"dataset": "pictures", "validation": "val"}), "test"),
        ("/parallel", json!({"ranks": 3}), "2 slots"),
        ("/parallel", json!({"ranks": 1, "device": "cuda"}), "auto"),
        (
            "/parallel",
            json!({"ranks": 4, "mode": "hybrid", "model": 4}),
            "2 classes cannot be divided over 4 ranks: set parallel.model to 2",
        ),
        (
            "/parallel",
            json!({"ranks": 64, "mode": "hybrid", "height": 64}),
            "64 ranks cannot share the 28 rows of a picture: give at most 28",
        ),
        (
            "/parallel",
            json!({
                "ranks": 2, "mode": "hybrid", "model": 2, "sync_batch_norm": true, "shard": [{"match": "conv1", "split": "in"}],
            }),
            "conv1 cannot be split by \"in\" over 2 ranks",
        ),
    ];
    for (pointer, value, hint) in cases {
        let mut document = spec();
        document[pointer.trim_start_matches('/')] = value.clone();
        for path in ["/jobs", "/jobs/validate"] {
            let (status, body) = server.post(path, &document).await;
            assert_eq!(status, 422, "{path} {value}: {body}");
            let errors = body["errors"].as_array().unwrap();
            assert!(errors.iter().any(|e| e["pointer"].as_str().unwrap().starts_with(pointer)), "{body}");
            assert!(errors.iter().any(|e| e["detail"].as_str().unwrap().contains(hint)), "{hint}: {body}");
        }
    }
    let several_mistakes = json!({"nmae": "x", "data": {"dataset": "nothing"}, "train": {"lr": -1.0}});
    let (_, body) = server.post("/jobs", &several_mistakes).await;
    assert!(body["errors"].as_array().unwrap().len() >= 3, "all mistakes are reported at once: {body}");
    for (parallel, pointers) in [
        (json!({"ranks": 8, "mode": "pipeline"}), &["/parallel/mode", "/parallel/ranks"][..]),
        (json!({"ranks": 8, "pipeline": 2}), &["/parallel/pipeline", "/parallel/ranks"]),
        (json!({"ranks": 8, "rank": 2}), &["/parallel/rank", "/parallel/ranks"]),
        // There are no slots to compare with a number of ranks or a device that is not known.
        (json!({"ranks": 0}), &["/parallel/ranks"]),
        (json!({"ranks": 8, "device": "tpu"}), &["/parallel/device"]),
    ] {
        let mut document = spec();
        document["parallel"] = parallel;
        let (_, body) = server.post("/jobs/validate", &document).await;
        assert_eq!(column(&body["errors"], "pointer"), pointers, "{body}");
    }
    let (_, list) = server.get("/jobs").await;
    assert_eq!(list["jobs"], json!([]), "no job is created");
    assert_eq!(std::fs::read_dir(server.dir.path().join("jobs")).unwrap().count(), 0, "no folder is created");

    let (status, plan) = server.post("/jobs/validate", &spec()).await;
    assert_eq!(status, 200, "{plan}");
    assert_eq!(
        (&plan["global_batch_size"], &plan["steps_per_epoch"], &plan["total_steps"]),
        (&json!(20), &json!(50), &json!(100))
    );
    server.stop().await;
}

#[tokio::test]
async fn a_repeated_request_creates_one_job() {
    let (server, _agent) = server_with_agent(2).await;
    let send = |key_chars: usize, body: Value| {
        let request = server.http.post(server.url("/api/v1/jobs")).json(&body);
        server.send(request.header("idempotency-key", "k".repeat(key_chars)))
    };
    let (first, second) = tokio::join!(send(255, spec()), send(255, spec()));
    let mut statuses = [first.0, second.0];
    statuses.sort_unstable();
    assert_eq!((statuses, &first.1["id"]), ([200, 201], &second.1["id"]));
    assert_eq!(std::fs::read_dir(server.dir.path().join("jobs")).unwrap().count(), 1);
    let mut another = spec();
    another["name"] = json!("another");
    let (status, problem) = send(255, another).await;
    assert_eq!((status, &problem["code"]), (409, &json!("idempotency_key_reused")), "{problem}");
    for chars in [0, 256] {
        let message = "Idempotency-Key must be 1 to 255 visible ASCII characters";
        assert_refused(send(chars, spec()).await, 400, message);
    }
    server.stop().await;
}

#[tokio::test]
async fn malformed_requests_get_problem_responses() {
    let server = TestServer::new().await;
    let jobs = server.url("/api/v1/jobs");
    let json =
        |body: &'static str| server.http.post(&jobs).header("content-type", "application/json").body(body);
    for (body, status) in
        [("{", 400), ("\u{0}", 400), ("", 400), ("[]", 422), ("null", 422), ("3", 422), ("\"resnet20\"", 422)]
    {
        assert_eq!(server.send(json(body)).await.0, status, "{body:?}");
    }
    // A form on another site can send text/plain without a CORS preflight.
    let text = server.http.post(&jobs).header("content-type", "text/plain").body(spec().to_string());
    assert_eq!(server.send(text).await.0, 415);
    assert_eq!(server.send(server.http.put(&jobs)).await.0, 405);
    for path in [
        "/nothing",
        "/jobs/j00000000000000000000000000",
        "/jobs/x",
        "/jobs/..%2f..%2fetc",
        "/jobs/x/metrics",
        "/jobs/x/logs",
        "/jobs/x/checkpoints",
        "/jobs/x/stream",
        "/checkpoints/x",
        "/checkpoints/x/model.safetensors",
        "/datasets/x",
    ] {
        let (status, body) = server.get(path).await;
        assert!(matches!(status, 404 | 426), "{path}: {status} {body}");
    }
    assert_eq!(server.post("/jobs/x/cancel", &Value::Null).await.0, 404);
    assert_eq!(server.delete("/jobs/x").await.0, 404);
    for path in ["/jobs?state=asleep", "/jobs?limit=many", "/jobs?cursor=x", "/jobs?cursor=1-x"] {
        let (status, body) = server.get(path).await;
        assert_eq!(status, 400, "{path} {body}");
    }
    assert_refused(server.get("/jobs?state=asleep").await, 400, "queued, starting");
    assert_eq!(server.get("/stream").await.0, 426);
    server.stop().await;
}

#[tokio::test]
async fn an_agent_inspects_a_dataset_before_registration() {
    let (server, mut agent) = server_with_agent(2).await;
    for (new, pointer) in [
        (json!({"name": "../up", "path": "/x"}), "/name"),
        (json!({"name": "ok", "path": "relative"}), "/path"),
    ] {
        assert_mistake(server.post("/datasets", &new).await, pointer, "");
    }
    let broken = json!({"name": "broken", "path": "/broken"});
    let detail = "/broken/data_batch_1.bin: truncated after 17 of 10000 pictures";
    let add = server.post("/datasets", &broken);
    let ((status, body), ()) = tokio::join!(add, agent.answer_inspection(Err(detail.into())));
    assert_eq!((status, body["errors"][0]["detail"].as_str()), (422, Some(detail)));

    assert_eq!(server.post("/datasets", &json!({"name": "pictures", "path": "/x"})).await.0, 409);
    agent.register_as(&server, "more", dataset_info()).await;
    let id = server.submit(|s| s["data"]["dataset"] = json!("more")).await.id;
    agent.expect_start().await;
    assert_refused(server.delete("/datasets/more").await, 409, id.as_str());
    assert_eq!(server.delete("/datasets/pictures").await.0, 204);
    let (_, list) = server.get("/datasets").await;
    assert_eq!(list["datasets"].as_array().unwrap().len(), 1);
    // The agent disconnects during the request.
    let third = json!({"name": "third", "path": "/third"});
    let add = server.post("/datasets", &third);
    let ((status, _), ()) = tokio::join!(add, async { agent.disconnect() });
    assert_eq!(status, 503);
    server.stop().await;
}

#[tokio::test]
async fn impossible_inspection_results_are_not_stored() {
    let (server, mut agent) = server_with_agent(2).await;
    for (info, message) in [
        (DatasetInfo { classes: Vec::new(), ..dataset_info() }, "no classes"),
        (DatasetInfo { channels: 4, ..dataset_info() }, "4 channels"),
        (DatasetInfo { mean: vec![f32::NAN], ..dataset_info() }, "mean"),
        (DatasetInfo { std: vec![f32::INFINITY], ..dataset_info() }, "standard deviation"),
        (DatasetInfo { std: vec![0.0], ..dataset_info() }, "standard deviation"),
    ] {
        let new = json!({"name": "odd", "path": "/some/odd"});
        let (refused, ()) = tokio::join!(server.post("/datasets", &new), agent.answer_inspection(Ok(info)));
        assert_mistake(refused, "/path", message);
    }
    assert_eq!(server.get("/datasets/odd").await.0, 404);
    server.stop().await;
}

#[tokio::test]
async fn an_unknown_query_parameter_is_refused_with_the_nearest_name() {
    let (server, _agent, id, _) = start_job(|_| {}).await;
    let of_job = |rest: &str| format!("/jobs/{id}/{rest}");
    for (path, message) in [
        (
            "/jobs?bogus=1".to_owned(),
            "\"bogus\" here; the parameters are state, name, q, where, owner, project, tag, by, group, created_after",
        ),
        ("/jobs?stat=queued".to_owned(), "did you mean \"state\"?"),
        (of_job("logs?Limit=5"), "did you mean \"limit\"?"),
        (of_job("metrics?names=loss"), "did you mean \"name\"?"),
        (of_job("metrics.csv?names=loss"), "did you mean \"name\"?"),
        (of_job("evaluation?checkpont=best"), "did you mean \"checkpoint\"?"),
        (of_job("samples?indices=1&trian=true"), "did you mean \"train\"?"),
        ("/datasets/pictures/samples?ofset=1".to_owned(), "did you mean \"offset\"?"),
        (of_job("metrics.csv?points=0"), "points"),
        (of_job("logs?format=csv"), "format is \"csv\", but must be text or absent"),
    ] {
        assert_refused(server.get(&path).await, 400, message);
    }
    let long = format!("/jobs?{}=1", "k".repeat(10_000));
    let (status, body) = server.get(&long).await;
    assert!(status == 400 && body.to_string().len() < 1000, "the error does not repeat the name: {body}");
    // HTML pages accept unknown parameters, because their scripts store the view in the URL.
    let (status, page) = server.get_text("/jobs?bogus=1").await;
    assert_eq!(status, 200, "{page}");
    server.stop().await;
}

#[tokio::test]
async fn counts_are_accepted_up_to_their_limits() {
    let (server, _agent, id, _) = start_job(|_| {}).await;
    for (path, max) in [
        ("/jobs?limit=".to_owned(), 1000),
        (format!("/jobs/{id}/logs?limit="), 10_000),
        (format!("/jobs/{id}/metrics?points="), 10_000),
    ] {
        for count in [1, max] {
            assert_eq!(server.get(&format!("{path}{count}")).await.0, 200, "{path}{count}");
        }
        for count in [0, max + 1] {
            let (status, body) = server.get(&format!("{path}{count}")).await;
            assert_eq!(status, 400, "{path}{count}: {body}");
            let message = format!("must be 1 to {max}, is {count}");
            assert!(body["detail"].as_str().unwrap().ends_with(&message), "{body}");
        }
    }
    // A position after the end of the log is the end, also in a search.
    let (status, body) = server.get(&format!("/jobs/{id}/logs?q=x&after={}", u64::MAX)).await;
    assert_eq!((status, &body["next_cursor"]), (200, &Value::Null), "{body}");
    let indices = |n: usize| vec!["1"; n].join(",");
    let (status, body) = server.get(&format!("/jobs/{id}/samples?indices={}", indices(201))).await;
    assert_eq!(status, 400, "{body}");
    assert!(
        body["detail"].as_str().unwrap().starts_with("indices names 201 pictures, but may name at most 200"),
        "{body}"
    );
    server.stop().await;
}
