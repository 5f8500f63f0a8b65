//! MLflow's protocol: calls with the bodies that MLflow's client sends, and the responses that the client expects.

use crate::test_server::{TestServer, client, column};
use lockstep_protocol::job::JobState;
use reqwest::Client;
use serde_json::{Value, json};

/// Sends a call like MLflow's client. Fields of a GET are in the query.
async fn call(
    server: &TestServer,
    client: &Client,
    method: &str,
    name: &str,
    fields: &Value,
) -> (u16, Value) {
    let url = server.url(&format!("/api/2.0/mlflow/{name}"));
    let request = match method {
        "GET" => {
            let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let query: Vec<_> =
                fields.as_object().unwrap().iter().map(|(key, value)| (key, text(value))).collect();
            client.get(url).query(&query)
        }
        _ => client.post(url).json(fields),
    };
    let response = request.send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

#[tokio::test]
async fn responses_to_mlflow_s_calls_match_mlflow() {
    let server = TestServer::new().await;
    let post = async |name: &str, fields: Value| {
        let (status, response) = call(&server, &server.http, "POST", name, &fields).await;
        assert_eq!(status, 200, "{name}: {response}");
        response
    };
    let get = async |name: &str, fields: Value| {
        let (status, response) = call(&server, &server.http, "GET", name, &fields).await;
        assert_eq!(status, 200, "{name}: {response}");
        response
    };
    // An experiment is a project. The default experiment always exists.
    let default = json!({"experiment_id": "0", "name": "Default", "lifecycle_stage": "active",
        "artifact_location": "mlflow-artifacts:/"});
    assert_eq!(get("experiments/get", json!({"experiment_id": "0"})).await["experiment"], default);
    assert_eq!(
        get("experiments/get-by-name", json!({"experiment_name": "Default"})).await["experiment"],
        default
    );
    let created = post("experiments/create", json!({"name": "shoes"})).await;
    assert_eq!(created["experiment_id"], "shoes");
    assert_eq!(
        get("experiments/get", json!({"experiment_id": "shoes"})).await["experiment"]["name"],
        "shoes"
    );

    let run = post(
        "runs/create",
        json!({"experiment_id": "shoes", "user_id": "me", "start_time": 1_700_000_000_000u64,
        "tags": [{"key": "mlflow.user", "value": "me"}], "run_name": "sole"}),
    )
    .await;
    let info = &run["run"]["info"];
    let id = info["run_id"].as_str().unwrap();
    assert_eq!(
        (&info["status"], &info["run_name"], &info["experiment_id"]),
        (&json!("RUNNING"), &json!("sole"), &json!("shoes"))
    );
    assert_eq!((&info["start_time"], &info["user_id"]), (&json!(1_700_000_000_000u64), &json!("me")));
    assert_eq!(info["artifact_uri"], format!("mlflow-artifacts:/{id}"));
    let with_run = |mut fields: Value| {
        fields["run_id"] = json!(id);
        fields
    };
    post("runs/log-parameter", with_run(json!({"key": "lr", "value": "0.1"}))).await;
    // The same value again is allowed.
    post("runs/log-parameter", with_run(json!({"key": "lr", "value": "0.1"}))).await;
    for (value, step) in [(json!(0.5), 0), (json!(0.25), 1), (json!("NaN"), 2)] {
        post(
            "runs/log-metric",
            with_run(
                json!({"key": "val/loss", "value": value, "timestamp": 1_700_000_000_000u64, "step": step}),
            ),
        )
        .await;
    }
    post("runs/log-batch", with_run(json!({
        "metrics": [{"key": "acc", "value": 0.1, "timestamp": "1700000000000", "step": "1"}, {"key": "acc", "value": 0.7, "timestamp": 1, "step": 2}],
        "params": [{"key": "depth", "value": "3"}], "tags": [{"key": "colour", "value": "blue"}, {"key": "gone", "value": "x"}],
    }))).await;
    post("runs/set-tag", with_run(json!({"key": "colour", "value": "red"}))).await;
    post("runs/delete-tag", with_run(json!({"key": "gone"}))).await;
    post("runs/log-inputs", with_run(json!({"datasets": []}))).await;
    // A model is a folder of its run.
    let new_model = json!({"experiment_id": "shoes", "name": "net", "source_run_id": id, "tags": [{"key": "a", "value": "b"}]});
    let created = post("logged-models", new_model).await;
    let model = &created["model"]["info"];
    assert_eq!(
        (model["artifact_uri"].as_str(), model["status"].as_str()),
        (Some(format!("mlflow-artifacts:/{id}/net").as_str()), Some("LOGGED_MODEL_READY"))
    );
    post("runs/outputs", with_run(json!({"models": [{"model_id": model["model_id"], "step": 0}]}))).await;
    let model_path = format!("logged-models/{}", model["model_id"].as_str().unwrap());
    post(&format!("{model_path}/params"), json!({"params": [{"key": "lr", "value": "0.1"}]})).await;
    assert_eq!(get(&model_path, json!({})).await, created);
    let run = get("runs/get", with_run(json!({}))).await;
    let data = &run["run"]["data"];
    let pairs = |key: &str| -> Vec<(String, Value)> {
        let list = data[key].as_array().unwrap().iter();
        list.map(|entry| (entry["key"].as_str().unwrap().to_owned(), entry["value"].clone())).collect()
    };
    let pair = |key: &str, value: Value| (key.to_owned(), value);
    assert_eq!(pairs("params"), [pair("depth", json!("3")), pair("lr", json!("0.1"))]);
    // These are the newest finite values.
    assert_eq!(pairs("metrics"), [pair("acc", json!(0.7)), pair("val/loss", json!(0.25))]);
    let tags = [("colour", "red"), ("mlflow.runName", "sole"), ("mlflow.user", "me")];
    assert_eq!(pairs("tags"), tags.map(|(key, value)| pair(key, json!(value))));
    let history = async |page: Value| get("metrics/get-history", with_run(page)).await;
    let complete = history(json!({"metric_key": "val/loss"})).await;
    let values: Vec<_> =
        complete["metrics"].as_array().unwrap().iter().map(|m| (&m["step"], &m["value"])).collect();
    assert_eq!(values, [(&json!(0), &json!(0.5)), (&json!(1), &json!(0.25)), (&json!(2), &json!("NaN"))]);
    let first = history(json!({"metric_key": "val/loss", "max_results": 2})).await;
    let token = first["next_page_token"].clone();
    let rest = history(json!({"metric_key": "val/loss", "page_token": token})).await;
    assert_eq!((rest["metrics"].as_array().unwrap().len(), rest["next_page_token"].is_null()), (1, true));

    let search = json!({"experiment_ids": ["shoes"], "filter": "", "run_view_type": "ACTIVE_ONLY", "max_results": 1, "order_by": []});
    let runs = post("runs/search", search).await;
    assert_eq!((runs["runs"].as_array().unwrap().len(), &runs["runs"][0]["info"]["run_id"]), (1, &json!(id)));
    let experiments =
        post("experiments/search", json!({"max_results": 10, "view_type": "ACTIVE_ONLY"})).await;
    assert_eq!(column(&experiments["experiments"], "name"), ["shoes", "Default"]);

    let ended = post(
        "runs/update",
        with_run(json!({"status": "FINISHED", "end_time": 1_700_000_000_001u64, "run_name": "heel"})),
    )
    .await;
    assert_eq!(
        (&ended["run_info"]["status"], &ended["run_info"]["run_name"]),
        (&json!("FINISHED"), &json!("heel"))
    );
    assert_eq!(ended["run_info"]["end_time"], 1_700_000_000_001u64);
    let job = server.job(id).await;
    assert_eq!(
        (job.state, job.project.as_str(), job.external.unwrap().config["lr"].as_str()),
        (JobState::Succeeded, "shoes", Some("0.1"))
    );

    // Errors.
    let long = |length: usize| "x".repeat(length);
    let metrics: Vec<_> =
        (0..1001).map(|n| json!({"key": "m", "value": n, "timestamp": 0, "step": n})).collect();
    let assert_error =
        async |method: &str, name: &str, fields: &Value, expected: (u16, &str), fragment: &str| {
            let (status, problem) = call(&server, &server.http, method, name, fields).await;
            assert_eq!((status, problem["error_code"].as_str().unwrap()), expected, "{name}: {problem}");
            assert!(problem["message"].as_str().unwrap().contains(fragment), "{name}: {problem}");
        };
    for (name, fields, fragment) in [
        (
            "runs/log-parameter",
            with_run(json!({"key": "lr", "value": "0.2"})),
            "Changing param values is not allowed",
        ),
        ("runs/log-parameter", with_run(json!({"key": "p", "value": long(6001)})), "length limit of 6000"),
        ("runs/log-metric", with_run(json!({"key": "m", "value": "x"})), "valid double"),
        ("runs/log-metric", with_run(json!({"key": long(251), "value": 1})), "1 to 250 characters"),
        ("runs/log-batch", with_run(json!({"metrics": metrics})), "at most 1000 metrics"),
        ("runs/log-metric", json!({"key": "m", "value": 1}), "'run_id'"),
        ("runs/search", json!({"experiment_ids": ["shoes"], "filter": "metrics.acc > 1"}), "no filter"),
        ("logged-models", json!({"experiment_id": "shoes", "name": "net"}), "mlflow.start_run"),
    ] {
        assert_error("POST", name, &fields, (400, "INVALID_PARAMETER_VALUE"), fragment).await;
    }
    let taken = (400, "RESOURCE_ALREADY_EXISTS");
    assert_error("POST", "experiments/create", &json!({"name": "shoes"}), taken, "already exists").await;
    let no_models = (404, "ENDPOINT_NOT_FOUND");
    assert_error(
        "POST",
        "registered-models/create",
        &json!({"name": "m"}),
        no_models,
        "no registered models",
    )
    .await;
    for (name, fields, fragment) in [
        ("runs/get", json!({"run_id": "nothing"}), "Run with id=nothing not found"),
        (
            "experiments/get-by-name",
            json!({"experiment_name": "boots"}),
            "Could not find experiment with name 'boots'",
        ),
        ("logged-models/m-nothing", json!({}), "Logged model with ID 'm-nothing' not found."),
    ] {
        assert_error("GET", name, &fields, (404, "RESOURCE_DOES_NOT_EXIST"), fragment).await;
    }
    let traces =
        server.http.post(server.url("/api/3.0/mlflow/traces")).json(&json!({})).send().await.unwrap();
    assert_eq!(traces.json::<Value>().await.unwrap()["error_code"], "ENDPOINT_NOT_FOUND");

    // MLflow's clients send a token as a password. A token of the scope read cannot change anything.
    let (_, read_token) = server.make_token(&json!({"name": "reads", "scope": "read"})).await;
    let anonymous = client("");
    let (status, problem) = call(&server, &anonymous, "GET", "runs/get", &with_run(json!({}))).await;
    assert_eq!((status, &problem["error_code"]), (401, &json!("UNAUTHENTICATED")), "{problem}");
    assert!(problem["message"].as_str().unwrap().contains("access token"), "{problem}");
    let as_password = |name: &str| {
        anonymous.post(server.url(&format!("/api/2.0/mlflow/{name}"))).basic_auth("me", Some(&read_token))
    };
    let search = as_password("runs/search").json(&json!({"experiment_ids": ["shoes"]})).send().await.unwrap();
    assert_eq!(search.status(), 200);
    let traces = anonymous.get(server.url("/api/3.0/mlflow/traces")).basic_auth("me", Some(&read_token));
    let traces = traces.send().await.unwrap();
    assert_eq!(traces.json::<Value>().await.unwrap()["error_code"], "ENDPOINT_NOT_FOUND");
    let refused = as_password("runs/create").json(&json!({})).send().await.unwrap();
    assert_eq!(refused.status(), 403);
    assert_eq!(refused.json::<Value>().await.unwrap()["error_code"], "PERMISSION_DENIED");
    let other_route = anonymous.get(server.url("/api/v1/jobs")).basic_auth("me", Some(&read_token));
    // Other routes do not accept a token as a password.
    assert_eq!(other_route.send().await.unwrap().status(), 401);

    post("runs/delete", with_run(json!({}))).await;
    assert_eq!(call(&server, &server.http, "GET", "runs/get", &with_run(json!({}))).await.0, 404);
    server.stop().await;
}

/// Assertions of `tests/tracking/test_rest_tracking.py` in MLflow's repository, for the supported calls.
#[tokio::test]
async fn calls_agree_with_mlflow_s_own_tests() {
    let server = TestServer::new().await;
    let ask = async |method: &str, name: &str, fields: Value| {
        call(&server, &server.http, method, name, &fields).await
    };
    // Some characters of experiments' names are not allowed in names of projects: the server replaces them.
    let (_, experiment) = ask("POST", "experiments/create", json!({"name": "Oh My"})).await;
    assert_eq!(experiment, json!({"experiment_id": "Oh-My"}));
    let (_, created) =
        ask("POST", "runs/create", json!({"experiment_id": experiment["experiment_id"]})).await;
    let id = created["run"]["info"]["run_id"].clone();
    assert_eq!(created["run"]["info"]["user_id"], "this machine");
    let with_run_id = |mut fields: Value| {
        fields["run_id"] = id.clone();
        fields
    };
    // Empty values are valid.
    for (name, fields) in [
        ("runs/log-parameter", json!({"key": "empty", "value": ""})),
        ("runs/set-tag", json!({"key": "empty", "value": ""})),
        (
            "runs/log-batch",
            json!({"params": [{"key": "p", "value": ""}], "tags": [{"key": "t", "value": ""}]}),
        ),
        ("runs/log-batch", json!({"metrics": [{"key": "mae", "value": 2.5, "timestamp": 123_456_789}]})),
    ] {
        assert_eq!(ask("POST", name, with_run_id(fields.clone())).await.0, 200, "{name} {fields}");
    }
    let (_, run) = ask("GET", "runs/get", with_run_id(json!({}))).await;
    assert_eq!(run["run"]["data"]["params"][0], json!({"key": "empty", "value": ""}));
    assert_eq!(run["run"]["data"]["tags"][0], json!({"key": "empty", "value": ""}));
    // Early clients name the run in another field.
    let (status, _) = ask("POST", "runs/set-tag", json!({"run_uuid": id, "key": "k", "value": "v"})).await;
    assert_eq!(status, 200);
    let invalid = |value: &str, key: &str| format!("Invalid value {value} for parameter '{key}' supplied");
    let missing = |key: &str| format!("Missing value for required parameter '{key}'");
    let metric = |change: Value| {
        let mut metric = with_run_id(json!({"key": "foo", "value": 31, "timestamp": 59, "step": 41}));
        let change = change.as_object().unwrap().clone();
        metric.as_object_mut().unwrap().extend(change);
        metric
    };
    for (name, fields, fragment) in [
        ("experiments/create", json!({"name": 123}), invalid("123", "name")),
        ("experiments/create", json!({}), missing("name")),
        (
            "experiments/create",
            json!({"name": "x", "artifact_location": 9.0}),
            invalid("9.0", "artifact_location"),
        ),
        ("experiments/create", json!({"name": "x", "tags": "5"}), invalid("\"5\"", "tags")),
        ("runs/log-metric", metric(json!({"run_id": 31})), invalid("31", "run_id")),
        ("runs/log-metric", metric(json!({"key": 31})), invalid("31", "key")),
        ("runs/log-metric", metric(json!({"step": "foo"})), invalid("\"foo\"", "step")),
        ("runs/log-metric", metric(json!({"timestamp": "foo"})), invalid("\"foo\"", "timestamp")),
        ("runs/log-metric", metric(json!({"run_id": null})), missing("run_id")),
        ("runs/log-metric", metric(json!({"key": null})), missing("key")),
        ("runs/log-parameter", json!({"run_id": 31, "key": "p", "value": 41}), invalid("31", "run_id")),
        ("runs/log-parameter", with_run_id(json!({"key": 31, "value": 41})), invalid("31", "key")),
        ("runs/set-tag", json!({"run_id": 31, "key": "p", "value": 41}), invalid("31", "run_id")),
        ("runs/set-tag", with_run_id(json!({"key": "p", "value": 41})), invalid("41", "value")),
        ("runs/set-tag", with_run_id(json!({"value": "v"})), missing("key")),
        ("runs/delete-tag", with_run_id(json!({"key": "fakeTag"})), "No tag with name: fakeTag".into()),
        ("runs/log-batch", with_run_id(json!({"metrics": "foo"})), invalid("\"foo\"", "metrics")),
        ("runs/log-batch", with_run_id(json!({"params": "foo"})), invalid("\"foo\"", "params")),
        ("runs/log-batch", with_run_id(json!({"tags": "foo"})), invalid("\"foo\"", "tags")),
        (
            "runs/log-batch",
            with_run_id(json!({"metrics": [{"key": "mae", "value": 2.5}]})),
            missing("metrics[0].timestamp"),
        ),
        (
            "runs/search",
            json!({"experiment_ids": ["Oh-My"], "max_results": 123_456_789}),
            invalid("123456789", "max_results"),
        ),
    ] {
        let (status, problem) = ask("POST", name, fields.clone()).await;
        let expected = if name == "runs/delete-tag" { 404 } else { 400 };
        assert_eq!(status, expected, "{name} {fields}: {problem}");
        assert!(problem["message"].as_str().unwrap().contains(&fragment), "{name} {fields}: {problem}");
    }
    let invalid_path = json!({"error_code": "INVALID_PARAMETER_VALUE", "message": "Invalid path"});
    let listed = ask("GET", "artifacts/list", with_run_id(json!({"path": "../path"}))).await;
    assert_eq!(listed, (400, invalid_path));

    // Pages of experiments, and of a metric whose steps are far apart.
    let search = async |token: Value| {
        let (_, page) =
            ask("POST", "experiments/search", json!({"max_results": 1, "page_token": token})).await;
        (page["experiments"][0]["name"].clone(), page["next_page_token"].clone())
    };
    let (first, token) = search(Value::Null).await;
    let (second, end) = search(token).await;
    assert_eq!((first, second, end), (json!("Oh-My"), json!("Default"), Value::Null));
    let steps = [0u64, 1, 2, 1_000_000, 5_000_000_000];
    let metrics = steps.map(|step| json!({"key": "far", "value": 1, "timestamp": 1, "step": step}));
    assert_eq!(ask("POST", "runs/log-batch", with_run_id(json!({"metrics": metrics}))).await.0, 200);
    let (mut steps_of_pages, mut token, mut pages) = (Vec::new(), Value::Null, 0);
    while pages == 0 || !token.is_null() {
        let mut fields = with_run_id(json!({"metric_key": "far", "max_results": 2}));
        if let Some(token) = token.as_str() {
            fields["page_token"] = token.into();
        }
        let (_, page) = ask("GET", "metrics/get-history", fields).await;
        steps_of_pages.extend(column(&page["metrics"], "step"));
        (token, pages) = (page["next_page_token"].clone(), pages + 1);
    }
    assert_eq!((steps_of_pages, pages), (steps.map(Value::from).to_vec(), 3));
    server.stop().await;
}
