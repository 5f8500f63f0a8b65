//! Datasets: removal, repeated inspection, names.

use crate::{
    agent::{Agent, dataset_info, failed, running, server_with_agent, start_job},
    test_server::{TestServer, assert_mistake, assert_refused, spec},
};
use lockstep_protocol::{
    agent::{Ending, Source},
    job::JobState,
};
use serde_json::{Value, json};

#[tokio::test]
async fn an_unused_dataset_is_removed_and_its_jobs_remain() {
    let (server, mut agent) = server_with_agent(2).await;
    let first = server.submit(|s| s["name"] = json!("first")).await.id.to_string();
    let second = server.submit(|s| s["name"] = json!("second")).await.id.to_string();
    let first_attempt = agent.expect_start().await.attempt;
    agent.report(&first_attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;

    let assert_kept = async |unfinished: &[(&str, &str, &str)], finished: &[&str]| {
        let (status, body) = server.delete("/datasets/pictures").await;
        let detail = body["detail"].as_str().unwrap_or_default();
        assert_eq!(status, 409, "{body}");
        for (id, name, state) in unfinished {
            assert!(detail.contains(&format!("{id} ({name:?}, {state})")), "{detail}");
        }
        assert!(!finished.iter().any(|id| detail.contains(id)), "{detail}");
    };
    assert_kept(&[(&first, "first", "running"), (&second, "second", "queued")], &[]).await;
    agent.end(&first_attempt, Ending::Succeeded { step: 100 }).await;
    let second_attempt = agent.expect_start().await.attempt;
    assert_kept(&[(&second, "second", "starting")], &[&first]).await;
    assert_eq!(server.get("/datasets/pictures").await.0, 200, "the dataset still exists");
    // A NUL in a name is refused, because a database may cut the name at the NUL.
    for path in ["/datasets/pictures%00", "/datasets/%00", "/jobs?q=%00"] {
        assert_refused(server.get(path).await, 400, "%00");
    }
    assert_eq!(server.delete("/datasets/pictures%00").await.0, 400);
    assert_eq!(server.get("/datasets/pictures").await.0, 200, "the dataset still exists");
    // `inspect` is a part of a URL (/datasets/inspect), so no dataset may have this name.
    assert_mistake(server.post("/datasets", &json!({ "name": "inspect", "path": "/" })).await, "/name", "");
    agent.end(&second_attempt, failed("by the test", false)).await;
    server.wait_for_state(&second, JobState::Failed).await;

    assert_eq!(server.delete("/datasets/pictures").await.0, 204);
    assert_eq!(server.delete("/datasets/pictures").await.0, 404);
    assert_eq!(server.get("/datasets/pictures").await.0, 404);
    assert_eq!(server.query_number("SELECT count(*) FROM datasets").await, 0);

    // Jobs keep the name of their dataset. A retry is refused with a reason.
    for id in [&first, &second] {
        assert_eq!(server.job(id).await.spec.data.dataset, "pictures");
    }
    let retried = server.post(&format!("/jobs/{second}/retry"), &Value::Null).await;
    assert_mistake(retried, "/data/dataset", "\"pictures\" is no longer registered");
    assert_eq!(server.job(&second).await.state, JobState::Failed, "the job is not queued");
    // The check of the state comes before the check of the dataset.
    assert_eq!(server.post(&format!("/jobs/{first}/retry"), &Value::Null).await.0, 409);
    assert_refused(server.post("/jobs", &spec()).await, 422, "no dataset is registered");
    server.stop().await;
}

#[tokio::test]
async fn a_dataset_can_be_inspected_again_while_a_job_trains_on_it() {
    let (server, mut agent, _, attempt) = start_job(|_| {}).await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
    let (_, before) = server.get("/datasets/pictures").await;
    let mut larger = dataset_info();
    larger.splits[0].samples = 1200;
    let (response, ()) = tokio::join!(
        server.post("/datasets/pictures/inspect", &Value::Null),
        agent.answer_inspection(Ok(larger))
    );
    assert_eq!(
        (response.0, &response.1["info"]["splits"][0]["samples"]),
        (200, &json!(1200)),
        "{}",
        response.1
    );
    let (_, after) = server.get("/datasets/pictures").await;
    assert_eq!(after, response.1);
    assert_eq!((&after["path"], &after["added_at"]), (&before["path"], &before["added_at"]));
    assert_eq!(server.post("/datasets/none/inspect", &Value::Null).await.0, 404);
    server.stop().await;
}

#[tokio::test]
async fn of_a_concurrent_submission_and_removal_exactly_one_succeeds() {
    let (server, mut agent) = server_with_agent(2).await;
    for round in 0..40 {
        let spec = spec();
        let submit = server.post("/jobs", &spec);
        let remove = async {
            // Each round removes the dataset at a later point of the submission.
            for _ in 0..round {
                tokio::task::yield_now().await;
            }
            server.delete("/datasets/pictures").await
        };
        let ((created, job), (deleted, response)) = tokio::join!(submit, remove);
        match (created, deleted) {
            (201, 409) => {
                let id = job["id"].as_str().unwrap();
                assert!(response["detail"].as_str().unwrap().contains(id), "{response}");
                let started = agent.expect_start().await.attempt;
                agent.end(&started, failed("by the test", false)).await;
            }
            (422, 204) => {
                assert_eq!(job["errors"][0]["pointer"], "/data/dataset", "{job}");
                agent.register(&server).await;
            }
            other => panic!("round {round}: {other:?} {job} {response}"),
        }
    }
    server.stop().await;
}

#[tokio::test]
async fn invalid_names_and_paths_are_refused_with_the_rules() {
    let (server, mut agent) = server_with_agent(1).await;
    for (name, problem, example) in [
        (String::new(), "is empty: ", ""),
        ("my pictures".into(), "has a space: ", "; for example `my-pictures`"),
        ("blumen-\u{e4}".into(), "has '\u{e4}': ", "; for example `blumen`"),
        (".hidden".into(), "begins with a dot: ", "; for example `hidden`"),
        ("a".repeat(101), "has 101 characters: ", ""),
    ] {
        let (status, response) =
            server.post("/datasets", &json!({"name": name, "path": "/some/where"})).await;
        let detail = response["errors"][0]["detail"].as_str().unwrap();
        assert_eq!((status, &response["errors"][0]["pointer"]), (422, &json!("/name")), "{response}");
        let rules = "use 1 to 100 letters (a to z, A to Z), digits, '-', '_' and '.', the first not a dot";
        assert_eq!(detail, format!("{problem}{rules}{example}"));
    }
    let new = |name_chars: usize, path_bytes: usize| json!({"name": "n".repeat(name_chars), "path": format!("/{}", "p".repeat(path_bytes - 1))});
    agent.register_dataset(&server, &new(100, 4096), dataset_info()).await;
    let (status, body) = server.post("/datasets", &new(101, 4097)).await;
    let errors = body["errors"].as_array().unwrap();
    let message = "has 4097 bytes, but must have at most 4096";
    assert_eq!((status, errors.len(), &errors[1]["detail"]), (422, 2, &json!(message)), "{body}");
    let (status, body) = server.post("/datasets/inspect", &json!({"path": "/a\0b"})).await;
    assert!(status == 422 && body.to_string().contains("a zero byte"), "{body}");
    server.stop().await;
}

#[tokio::test]
async fn a_refusal_names_ten_jobs_and_counts_the_others() {
    let server = TestServer::new().await;
    Agent::join_with_dataset(&server, 2).await.disconnect();
    let mut ids = Vec::new();
    for (jobs, start) in [(1, "a job trains"), (10, "10 jobs train"), (11, "11 jobs train")] {
        while ids.len() < jobs {
            ids.push(server.submit(|_| {}).await.id.to_string());
        }
        let (status, body) = server.delete("/datasets/pictures").await;
        let detail = body["detail"].as_str().unwrap();
        assert!(status == 409 && detail.starts_with(start), "{body}");
        assert_eq!(ids.iter().filter(|id| detail.contains(*id)).count(), jobs.min(10), "{detail}");
        assert_eq!(detail.contains("and 1 more"), jobs == 11, "{detail}");
    }
    assert_eq!(server.get("/datasets/pictures").await.0, 200);
    server.stop().await;
}
