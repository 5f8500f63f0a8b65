//! Runs from elsewhere: by REST, and by MLflow's protocol.

mod mlflow;

use crate::test_server::{TestServer, assert_refused, column, wait_until};
use lockstep_protocol::job::{Job, JobState, Measured};
use serde_json::{Value, json};
use std::time::Duration;

impl TestServer {
    /// Sends records, which the server must accept. Returns the number of stored records.
    async fn log_records(&self, run: &str, first: u64, records: &Value) -> u64 {
        let body = json!({"first": first, "records": records});
        let (status, response) = self.post(&format!("/runs/{run}/records"), &body).await;
        assert_eq!(status, 200, "{response}");
        response["acknowledged"].as_u64().unwrap()
    }

    /// Starts a run.
    async fn start_run(&self, body: &Value) -> Job {
        serde_json::from_value(self.create("/runs", body).await).unwrap()
    }

    async fn metrics_csv(&self, run: &str, query: &str) -> Vec<String> {
        let (status, text) = self.get_text(&format!("/api/v1/jobs/{run}/metrics.csv{query}")).await;
        assert_eq!(status, 200, "{text}");
        text.lines().skip(1).map(str::to_owned).collect()
    }
}

fn step(step: u64, values: Value) -> Value {
    json!({"step": step, "values": values})
}

#[tokio::test]
async fn runs_are_filtered_and_grouped_by_their_settings() {
    let server = TestServer::new().await;
    for (id, lr) in [
        ("a", json!(0.3)),
        ("b", json!("auto")),
        ("c", json!("0.01")),
        ("d", Value::Null),
        ("e", json!("10 of 20")),
        ("f", json!("-")),
        ("g", json!(true)),
    ] {
        server.start_run(&json!({"id": id, "name": id, "config": {"lr": lr, "dataset": "own"}})).await;
    }
    for (condition, expected) in [
        ("train.lr>0.2", &["a"][..]),
        ("lr<0.2", &["c"]),
        ("lr=0.1", &[]),
        ("data.dataset=own", &["a", "b", "c", "d", "e", "f", "g"]),
    ] {
        let (status, list) = server.get(&format!("/jobs?sort=name&where={condition}")).await;
        assert_eq!(status, 200, "{condition}: {list}");
        assert_eq!(column(&list["jobs"], "name"), expected, "{condition}");
    }
    let (_, groups) = server.get("/jobs/groups?by=train.lr").await;
    assert_eq!(groups["groups"].as_array().unwrap().len(), 3, "0.3, 0.01 and no number: {groups}");
    server.stop().await;
}

#[tokio::test]
async fn a_run_can_be_started_ended_and_deleted() {
    let server = TestServer::new().await;
    let new = json!({"id": "my-run_1", "name": "mine", "project": "vision", "config": {"lr": 0.1, "net": {"depth": 3}},
        "tags": ["a", "b"], "notes": "why"});
    let run = server.start_run(&new).await;
    assert_eq!((run.state, run.attempt, run.ranks), (JobState::Running, 1, 1));
    assert_eq!(
        (run.project.as_str(), run.tags.as_slice()),
        ("vision", ["a".to_owned(), "b".into()].as_slice())
    );
    let external = run.external.unwrap();
    assert_eq!((external.id.as_deref(), &external.config["net"]["depth"]), (Some("my-run_1"), &json!(3)));
    let id = run.id.to_string();

    // A run is found by its own id and by the id that its program chose.
    let mut stream = server.stream(&id, 0).await;
    assert_eq!(
        server
            .log_records(
                "my-run_1",
                1,
                &json!([step(1, json!({"batch": 8, "epoch": 1, "loss": 2.5, "train/acc 1": 0.1}))])
            )
            .await,
        1
    );
    let records = json!([step(2, json!({"loss": 1.5, "train/acc 1": "NaN"})), step(9, json!({}))]);
    assert_eq!(server.log_records(&id, 2, &records).await, 3);
    stream.until(|frame| frame["name"] == "train/acc 1" && frame["values"] == json!([0.1])).await;
    let update = json!({"config": {"lr": 0.2}, "summary": {"best": 1}});
    let (status, changed) = server.patch("/runs/my-run_1", &update).await;
    assert_eq!(status, 200, "{changed}");
    // Settings are merged by name.
    assert_eq!(changed["external"]["config"], json!({"lr": 0.2, "net": {"depth": 3}}));
    assert_eq!(changed["external"]["summary"], json!({"best": 1}));
    let job = server.job(&id).await;
    assert_eq!((job.last.loss, job.last.others["train/acc 1"]), (Some(1.5), 0.1));
    assert_eq!((job.step, job.epoch), (2, 1), "the newest step and epoch with values");
    assert_eq!(job.sparkline.len(), 2);

    // Actions that need ranks of this server are refused.
    for action in ["pause", "resume", "retry", "fork"] {
        let refusal = server.post(&format!("/jobs/{id}/{action}"), &json!({})).await;
        assert_refused(refusal, 409, "a run from elsewhere");
    }
    let (_, page) = server.get_text(&format!("/jobs/{id}")).await;
    for text in ["data-external", "run from elsewhere", "net.depth"] {
        assert!(page.contains(text), "{text}");
    }
    // The row of numbers has the summary's numbers, then losses and accuracies, then other metrics.
    let results: Vec<_> = page.split("<div class=\"own-result\"><dt>").skip(1).collect();
    let expected =
        ["best</dt><dd>1<", "loss</dt><dd>1.5000<", "train/acc 1</dt><dd>0.1000<", "batch</dt><dd>8<"];
    assert_eq!(results.len(), expected.len(), "{results:?}");
    assert!(results.iter().zip(expected).all(|(shown, text)| shown.starts_with(text)), "{results:?}");
    let (_, page) = server.get_text("/jobs").await;
    assert!(page.contains("run from elsewhere"));

    // The run ends, continues and fails.
    let (_, ended) = server.patch(&format!("/runs/{id}"), &json!({"state": "succeeded"})).await;
    assert_eq!((&ended["state"], ended["finished_at"].is_null()), (&json!("succeeded"), false));
    // Late records are stored.
    assert_eq!(server.log_records(&id, 4, &json!([step(3, json!({"loss": 1.0}))])).await, 4);
    assert_eq!(server.job(&id).await.state, JobState::Succeeded);
    let (status, restarted) =
        server.post("/runs", &json!({"id": "my-run_1", "name": "other", "config": {"x": null}})).await;
    assert_eq!(
        (status, &restarted["id"], &restarted["state"], &restarted["name"]),
        (200, &json!(id), &json!("running"), &json!("mine"))
    );
    assert_eq!(restarted["external"]["config"]["x"], Value::Null);
    assert_eq!(server.delete(&format!("/jobs/{id}")).await.0, 409, "a running run cannot be deleted");
    let (_, failed) =
        server.patch(&format!("/runs/{id}"), &json!({"state": "failed", "reason": "out of luck"})).await;
    assert_eq!((&failed["state"], &failed["reason"]), (&json!("failed"), &json!("out of luck")));

    // The id is free again once the run is deleted.
    assert_eq!(server.delete(&format!("/jobs/{id}")).await.0, 204);
    assert_eq!(server.post("/runs/my-run_1/records", &json!({"first": 5, "records": []})).await.0, 404);
    wait_until("the run is deleted", async || server.post("/runs", &new).await.0 == 201).await;
    // The new run begins with record 1.
    assert_eq!(server.log_records("my-run_1", 1, &json!([step(1, json!({"loss": 1}))])).await, 1);

    // The best validation accuracy ignores values above 1, such as 75.0, and has the step and epoch of its record.
    let measured = server.start_run(&json!({"name": "measured"})).await.id.to_string();
    let records: Vec<_> = [(10, 2.0, 0.5), (20, 3.0, 0.75), (30, 4.5, 0.625), (40, 5.0, 75.0)]
        .map(|(at, epoch, accuracy)| {
            let speed = 10 * at;
            step(
                at,
                json!({"epoch": epoch, "loss": 1.5, "val_accuracy": accuracy, "images_per_second": speed}),
            )
        })
        .into();
    assert_eq!(server.log_records(&measured, 1, &json!(records)).await, 4);
    let job = server.job(&measured).await;
    assert_eq!((job.step, job.epoch, job.last.others["images_per_second"]), (40, 5, 400.0));
    assert_eq!(job.best, Some(Measured { value: 0.75, loss: None, step: 20, epoch: 3 }));
    let (_, list) = server.get("/jobs?where=best%3E0.7").await;
    assert_eq!(list["jobs"][0]["id"], json!(measured), "{list}");
    server.stop().await;
}

#[tokio::test]
async fn records_are_stored_once_and_without_a_gap() {
    let server = TestServer::new().await;
    let id = server.start_run(&json!({"name": "numbered"})).await.id.to_string();
    let records =
        |from: u64, to: u64| json!((from..=to).map(|n| step(n, json!({"loss": n}))).collect::<Vec<_>>());
    assert_eq!(server.log_records(&id, 1, &records(1, 3)).await, 3);
    assert_eq!(server.log_records(&id, 1, &records(1, 3)).await, 3, "the same request");
    assert_eq!(server.log_records(&id, 2, &records(2, 5)).await, 5, "only new records are stored");
    assert_eq!(server.log_records(&id, 1, &json!([])).await, 5);
    let gap = json!({"first": 7, "records": records(7, 7)});
    let (status, problem) = server.post(&format!("/runs/{id}/records"), &gap).await;
    assert_eq!((status, &problem["expected"]), (409, &json!(6)), "{problem}");
    let lines: Vec<String> = (1..=5).map(|n| format!("1,0,loss,{n},{n}")).collect();
    assert_eq!(server.metrics_csv(&id, "").await, lines);

    let path = format!("/runs/{id}/records");
    let with_values = |values: Value| json!({"first": 6, "records": [{"step": 1, "values": values}]});
    let values_of_1001_metrics: serde_json::Map<_, _> =
        (0..1001).map(|n| (format!("m{n}"), json!(n))).collect();
    let records_of_11011_values: Vec<_> =
        (0..11).map(|n| step(n, Value::Object(values_of_1001_metrics.clone()))).collect();
    for (body, expected, message) in [
        (with_values(json!({"a": "1"})), 400, "must be a number"),
        (with_values(json!({"a": null})), 400, "must be a number"),
        (with_values(json!({"": 1})), 422, "1 to 250 characters"),
        (with_values(json!({"a\nb": 1})), 422, "control"),
        (with_values(json!({"x".repeat(251): 1})), 422, "1 to 250 characters"),
        (json!({"first": 0, "records": []}), 422, "must be 1"),
        (json!({"first": 6, "records": [{"step": 1u64 << 53, "values": {}}]}), 422, "at most"),
        (json!({"first": 6, "records": records_of_11011_values}), 422, "at most 10000"),
        (with_values(Value::Object(values_of_1001_metrics)), 409, "more than 1000 metrics"),
    ] {
        assert_refused(server.post(&path, &body).await, expected, message);
    }
    for (body, expected) in [
        (json!({"name": ""}), 422),
        (json!({"name": "a", "id": "a b"}), 422),
        (json!({"name": "a", "id": "x".repeat(65)}), 422),
        (json!({"name": "a", "id": "j00000000000000000000000000"}), 404),
        (json!({"name": "a", "config": {"x": "y".repeat(66_000)}}), 422),
        (json!({"name": "a", "project": "a/b"}), 422),
        (json!({"name": "a", "unknown": 1}), 400),
    ] {
        assert_eq!(server.post("/runs", &body).await.0, expected, "{body}");
    }
    let (status, problem) = server.post("/runs", &json!({"name": "a", "tags": ["x", 1]})).await;
    let detail = problem["detail"].as_str().unwrap();
    assert!(
        status == 400 && detail.contains("tags[1]: invalid type: integer `1`, expected a string"),
        "{detail}"
    );
    let long = json!({"summary": {"x": "y".repeat(66_000)}});
    assert_eq!(server.patch(&format!("/runs/{id}"), &long).await.0, 409);
    // No refused record is stored.
    assert_eq!(server.metrics_csv(&id, "").await, lines);
    server.stop().await;
}

/// Charts, comparisons, panels and the CSV file show metrics of any name. If a step has several values, charts show the last value. The CSV
/// file has all values until points are removed from events, then the last value of each step.
#[tokio::test]
async fn metrics_of_any_name_and_steps_in_any_order_are_shown() {
    let server = TestServer::with(|config| config.keep_points = Duration::from_millis(100)).await;
    let id = server.start_run(&json!({"name": "named"})).await.id.to_string();
    let name = "train/Ünicode loss, \"top 1\"";
    let encoded = "train%2F%C3%9Cnicode%20loss%2C%20%22top%201%22";
    let records = json!([
        step(0, json!({name: 1, "b": "NaN"})),
        step(2, json!({name: 2, "b": "Infinity"})),
        step(1, json!({name: 3.5})),
        step(2, json!({name: 4}))
    ]);
    assert_eq!(server.log_records(&id, 1, &records).await, 4);
    let chart = async |query: &str| {
        let response = server.get_ok(&format!("/jobs/{id}/metrics?name={encoded}{query}")).await;
        let series = &response["series"][0];
        (series["steps"].clone(), series["mean"].clone())
    };
    assert_eq!(chart("").await, (json!([0, 1, 2]), json!([1.0, 3.5, 4.0])));
    assert_eq!(chart("&from=1&to=1").await, (json!([1]), json!([3.5])));
    let (_, compared) = server.get(&format!("/metrics/query?jobs={id}&name={encoded}")).await;
    assert_eq!(compared["jobs"][0]["series"][0]["name"], name);
    let panels = json!({"panels": [{"title": "t", "metrics": [name, "b", "never logged"]}]});
    assert_eq!(server.put(&format!("/jobs/{id}/panels"), &panels).await.0, 200);
    let quoted = "\"train/Ünicode loss, \"\"top 1\"\"\"";
    let line = |step: u64, value: &str| format!("1,0,{quoted},{step},{value}");
    let all_lines = [line(0, "1"), line(2, "2"), line(1, "3.5"), line(2, "4")];
    // All points, in the order of arrival.
    assert_eq!(server.metrics_csv(&id, &format!("?name={encoded}")).await, all_lines);
    let (_, other) = server.get(&format!("/jobs/{id}/metrics?name=b")).await;
    assert_eq!(other["series"][0]["mean"], json!([null, null]), "values that are not finite are null");

    // Sends enough points for compaction. Then compacted steps get new values.
    let count_of_metric_events =
        format!("SELECT count(*) FROM events WHERE kind = 'metrics' AND job_id = '{id}'");
    for n in 0..30u64 {
        let batch: Vec<_> =
            (n * 1000..(n + 1) * 1000).map(|index| step(10 + index, json!({name: index % 7}))).collect();
        server.log_records(&id, 5 + n * 1000, &json!(batch)).await;
    }
    let watermark =
        format!("SELECT COALESCE(max(watermark), 0) FROM metric_compaction WHERE job_id = '{id}'");
    wait_until("points are compacted", async || server.query_number(&watermark).await > 0).await;
    let new_values = json!([step(12, json!({name: 100})), step(5, json!({name: -1}))]);
    assert_eq!(server.log_records(&id, 30_005, &new_values).await, 30_006);
    let expected = (json!([5, 10, 11, 12, 13]), json!([-1.0, 0.0, 1.0, 100.0, 3.0]));
    assert_eq!(chart("&from=3&to=13").await, expected);
    assert_eq!(server.patch(&format!("/runs/{id}"), &json!({"state": "succeeded"})).await.0, 200);
    wait_until("points are removed from events", async || {
        server.query_number(&count_of_metric_events).await == 0
    })
    .await;
    assert_eq!(chart("&from=3&to=13").await, expected);
    assert_eq!(chart("&points=10").await.0.as_array().unwrap().len(), 10);
    let lines = server.metrics_csv(&id, &format!("?name={encoded}&to=12")).await;
    let remaining = [(0, "1"), (1, "3.5"), (2, "4"), (5, "-1"), (10, "0"), (11, "1"), (12, "100")];
    assert_eq!(lines, remaining.map(|(step, value)| line(step, value)));

    // The run continues with an earlier step.
    assert_eq!(server.patch(&format!("/runs/{id}"), &json!({"state": "running"})).await.0, 200);
    server.log_records(&id, 30_007, &json!([step(11, json!({name: 50}))])).await;
    assert_eq!(chart("&from=10&to=12").await, (json!([10, 11, 12]), json!([0.0, 50.0, 100.0])));
    assert_eq!(server.metrics_csv(&id, &format!("?name={encoded}")).await.last(), Some(&line(11, "50")));
    server.stop().await;
}

#[tokio::test]
async fn a_silent_run_fails_and_continues_with_its_next_message() {
    let server = TestServer::with(|config| config.run_silence = Duration::from_secs(3)).await;
    let id = server.start_run(&json!({"name": "quiet"})).await.id.to_string();
    let path = format!("/runs/{id}");
    let wait_for_silence = async || {
        let job = server.wait_for_state(&id, JobState::Failed).await;
        let cause = job.cause.unwrap();
        assert_eq!(cause.code(), "run_silent");
        assert!(cause.words().contains("sent nothing"), "{cause}");
        job.last_seq
    };
    // An empty update and records continue the run.
    let seq = wait_for_silence().await;
    assert_eq!(server.patch(&path, &json!({})).await.1["state"], "running");
    let mut stream = server.stream(&id, seq).await;
    stream.until(|frame| frame["type"] == "state" && frame["state"] == "failed").await;
    assert_eq!(server.log_records(&id, 1, &json!([step(1, json!({"loss": 1}))])).await, 1);
    assert_eq!(server.job(&id).await.state, JobState::Running);
    // A cancelled or ended run keeps its state, in spite of silence and late records.
    server.order(&id, "cancel").await;
    assert_eq!(server.log_records(&id, 2, &json!([step(2, json!({"loss": 1}))])).await, 2);
    for change in [json!({}), json!({"state": "succeeded"})] {
        assert_eq!(server.patch(&path, &change).await.1["state"], "cancelled", "{change}");
    }
    server.stop().await;
}

#[tokio::test]
async fn alerts_with_mistakes_are_refused() {
    let server = TestServer::new().await;
    let id = server.start_run(&json!({"name": "alarmed"})).await.id;
    let path = format!("/runs/{id}");
    for (alert, message) in
        [(json!({"title": "slow", "level": "BAD"}), "`BAD`"), (json!({"text": "slow"}), "`title`")]
    {
        let (status, problem) = server.patch(&path, &json!({"summary": {"alerts": [alert]}})).await;
        assert!(status == 422 && problem.to_string().contains(message), "{problem}");
    }
    server.stop().await;
}

#[tokio::test]
async fn runs_have_owners_and_private_runs_are_hidden() {
    let server = TestServer::new().await;
    for name in ["mona", "otto"] {
        server.add_person(name, "member").await;
    }
    let (mona, _) = server.client_of("mona", "submit").await;
    let (otto, _) = server.client_of("otto", "submit").await;
    let new = |private: bool, id: &str| Some(json!({"id": id, "name": "r", "private": private}));
    let (status, secret) = server.send_as(&mona, "POST", "/runs", new(true, "same")).await;
    assert_eq!(status, 201, "{secret}");
    let (_, open) = server.send_as(&mona, "POST", "/runs", new(false, "open")).await;
    // Two people may choose the same id.
    let (status, ottos_run) = server.send_as(&otto, "POST", "/runs", new(false, "same")).await;
    assert_eq!(status, 201, "{ottos_run}");
    assert_ne!(ottos_run["id"], secret["id"]);
    let records = Some(json!({"first": 1, "records": [step(1, json!({"loss": 1}))]}));
    for (run, expected) in [(&secret, 404), (&open, 403), (&ottos_run, 200)] {
        let id = run["id"].as_str().unwrap();
        let path = format!("/runs/{id}/records");
        assert_eq!(server.send_as(&otto, "POST", &path, records.clone()).await.0, expected);
        let path = format!("/runs/{id}");
        assert_eq!(server.send_as(&otto, "PATCH", &path, Some(json!({}))).await.0, expected);
        let resumed = server.send_as(&otto, "POST", "/runs", new(false, id)).await.0;
        assert_eq!(resumed, expected, "a run can be resumed by the job's id");
        // MLflow's protocol has the same rights.
        let log = otto.post(server.url("/api/2.0/mlflow/runs/log-metric"));
        let log = log.json(&json!({"run_id": id, "key": "a", "value": 1, "timestamp": 0}));
        assert_eq!(log.send().await.unwrap().status().as_u16(), expected);
        for path in
            [format!("/api/v1/runs/{id}/file?path=a"), format!("/api/2.0/mlflow-artifacts/artifacts/{id}/a")]
        {
            let put = otto.put(server.url(&path)).body("x").send().await.unwrap();
            assert_eq!(put.status().as_u16(), expected, "{path}");
        }
    }
    assert_eq!(server.send_as(&mona, "POST", "/runs/same/records", records).await.0, 200);
    server.stop().await;
}

#[tokio::test]
async fn files_of_a_run_are_kept_until_it_is_deleted() {
    let server = TestServer::new().await;
    let id = server.start_run(&json!({"id": "has-files", "name": "files"})).await.id.to_string();
    let put = async |query: &str, body: &'static str| {
        let url = server.url(&format!("/api/v1/runs/has-files/file?{query}"));
        server.send(server.http.put(url).body(body)).await
    };
    let (status, stored) =
        put("path=weights/model.safetensors&modified_ms=1700000000123", "0123456789").await;
    let expected =
        json!({"path": "weights/model.safetensors", "size_bytes": 10, "modified_ms": 1_700_000_000_123u64});
    assert_eq!((status, &stored), (200, &expected));
    assert_eq!(put("path=a%20picture.png", "old").await.0, 200);
    assert_eq!(put("path=a%20picture.png", "newer").await.0, 200, "replaced");
    let list = async || -> Vec<(String, u64)> {
        let response = server.get_ok(&format!("/runs/{id}/files")).await;
        let files = response["files"].as_array().unwrap().iter();
        files.map(|f| (f["path"].as_str().unwrap().into(), f["size_bytes"].as_u64().unwrap())).collect()
    };
    let entry = |path: &str, size: u64| (path.to_owned(), size);
    assert_eq!(list().await, [entry("a picture.png", 5), entry("weights/model.safetensors", 10)]);
    let (_, page) = server.get_text(&format!("/jobs/{id}")).await;
    assert!(page.contains(&format!("/api/v1/runs/{id}/file?path=weights%2Fmodel%2Esafetensors")));
    let url = server.url("/api/v1/runs/has-files/file?path=a%20picture.png");
    let response = server.http.get(url).send().await.unwrap();
    // Uploaded files are never served as HTML.
    assert_eq!(response.headers()["content-type"], "application/octet-stream");
    assert_eq!(
        response.headers()["content-disposition"],
        "attachment; filename=\"a-picture.png\"; filename*=UTF-8''a-picture.png"
    );
    assert_eq!(response.text().await.unwrap(), "newer");
    for (query, expected) in [
        ("path=../a", 400),
        ("path=/a", 400),
        ("path=a%00b", 400),
        ("", 400),
        ("path=weights", 409),
        ("path=weights/model.safetensors/x", 409),
    ] {
        let (status, problem) = put(query, "x").await;
        assert_eq!(status, expected, "{query}: {problem}");
    }

    // The same files as artifacts of MLflow.
    let artifact = |path: &str| server.url(&format!("/api/2.0/mlflow-artifacts/artifacts{path}"));
    let artifact_of_run = |path: &str| artifact(&format!("/{id}/{path}"));
    assert_eq!(
        server.send(server.http.put(artifact_of_run("weights/MLmodel")).body("y")).await,
        (200, json!({}))
    );
    let (_, found) = server.send(server.http.get(artifact(&format!("?path={id}/weights")))).await;
    let expected = json!([{"path": "MLmodel", "is_dir": false, "file_size": 1},
        {"path": "model.safetensors", "is_dir": false, "file_size": 10}]);
    assert_eq!(found["files"], expected);
    let url = server.url(&format!("/api/2.0/mlflow/artifacts/list?run_id={id}"));
    let (_, found) = server.send(server.http.get(url)).await;
    let expected = json!([{"path": "a picture.png", "is_dir": false, "file_size": 5}, {"path": "weights", "is_dir": true}]);
    assert_eq!((&found["root_uri"], &found["files"]), (&json!(format!("mlflow-artifacts:/{id}")), &expected));
    let text =
        server.http.get(artifact_of_run("weights/MLmodel")).send().await.unwrap().text().await.unwrap();
    assert_eq!(text, "y");
    let missing = server.http.get(artifact_of_run("nothing")).send().await.unwrap();
    assert_eq!(missing.json::<Value>().await.unwrap()["error_code"], "RESOURCE_DOES_NOT_EXIST");
    assert_eq!(server.send(server.http.delete(artifact_of_run("weights/MLmodel"))).await.0, 200);

    assert_eq!(server.delete(&format!("/runs/{id}/file?path=weights")).await.0, 204, "a folder");
    assert_eq!(server.delete(&format!("/runs/{id}/file?path=weights")).await.0, 404);
    assert_eq!(list().await, [entry("a picture.png", 5)]);

    // Limits: creates large and many files in the run's folder.
    let folder = server.job_dir(&id).join("files");
    let large = std::fs::File::create(folder.join("large")).unwrap();
    large.set_len((64 << 30) - 5).unwrap();
    assert_refused(put("path=more", "x").await, 413, "0 are left");
    assert_eq!(put("path=large", "x").await.0, 200, "the new file replaces the large file");
    for n in 0..998 {
        std::fs::write(folder.join(n.to_string()), "").unwrap();
    }
    assert_refused(put("path=more", "x").await, 413, "at most 1000 files");

    assert_eq!(server.patch(&format!("/runs/{id}"), &json!({"state": "succeeded"})).await.0, 200);
    assert_eq!(server.delete(&format!("/jobs/{id}")).await.0, 204);
    wait_until("the files are removed with the run", async || !folder.exists()).await;
    server.stop().await;
}
