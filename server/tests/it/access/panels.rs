//! Panels of jobs and projects: inheritance, rights, limits.

use super::{People, add_people};
use crate::{
    agent::server_with_drained_agent,
    test_server::{TestServer, assert_mistake, spec, wait_until},
};
use lockstep_protocol::limits::{MAX_PANEL_METRICS, MAX_PANELS, PANEL_TITLE_CHARS};
use serde_json::{Value, json};

fn panel(title: &str, metrics: &[&str]) -> Value {
    json!({"title": title, "metrics": metrics})
}

fn panels(titles: &[&str]) -> Value {
    json!({"panels": titles.iter().map(|title| panel(title, &["loss"])).collect::<Vec<_>>()})
}

/// Returns the source of a job's panels, and their titles.
async fn read_panels(server: &TestServer, id: &str) -> (String, Vec<String>) {
    let body = server.get_ok(&format!("/jobs/{id}/panels")).await;
    let titles = body["panels"].as_array().unwrap().iter().map(|p| p["title"].as_str().unwrap().to_owned());
    (body["from"].as_str().unwrap().to_owned(), titles.collect())
}

fn expected(from: &str, titles: &[&str]) -> (String, Vec<String>) {
    (from.into(), titles.iter().map(|title| (*title).to_owned()).collect())
}

#[tokio::test]
async fn a_job_without_own_panels_shows_its_project_s_panels() {
    let (server, _agent) = server_with_drained_agent().await;
    let one = server.submit(|_| {}).await.id.to_string();
    let two = server.submit(|_| {}).await.id.to_string();
    assert_eq!(read_panels(&server, &one).await, expected("none", &[]));

    // Missing fields get their defaults, and the response has all fields.
    let all_fields = json!({"title": "both", "metrics": ["loss", "lr"], "lines": "ranks", "columns": 2, "rows": 3, "smoothing": 0.5,
        "robust": true, "log": true, "y_min": 0.001, "y_max": 10.0});
    let (status, stored) = server
        .put(&format!("/jobs/{one}/panels"), &json!({"panels": [all_fields, panel("b", &["accuracy"])]}))
        .await;
    assert_eq!(status, 200, "{stored}");
    let (_, again) = server.get(&format!("/jobs/{one}/panels")).await;
    assert_eq!(again, stored);
    assert_eq!(again["panels"][0], all_fields);
    let with_defaults = json!({"title": "b", "metrics": ["accuracy"], "lines": "mean", "columns": 1, "rows": 1, "smoothing": 0.0, "robust": false, "log": false});
    assert_eq!(again["panels"][1], with_defaults);
    assert_eq!(read_panels(&server, &two).await, expected("none", &[]));

    assert_eq!(server.put("/projects/default/panels", &panels(&["p", "q"])).await.0, 200);
    assert_eq!(read_panels(&server, &two).await, expected("project", &["p", "q"]));
    // The job keeps its own panels.
    assert_eq!(read_panels(&server, &one).await, expected("job", &["both", "b"]));
    let page = server.get_text(&format!("/jobs/{two}")).await.1;
    assert!(page.contains(r#""panels":{"from":"project","panels":[{"title":"p""#), "{page}");
    // An empty list of own panels is not the same as no own panels.
    assert_eq!(server.put(&format!("/jobs/{two}/panels"), &panels(&[])).await.0, 200);
    assert_eq!(read_panels(&server, &two).await, expected("job", &[]));
    assert_eq!(server.delete(&format!("/jobs/{two}/panels")).await.0, 204);
    assert_eq!(read_panels(&server, &two).await, expected("project", &["p", "q"]));
    // A job that is moved to another project shows the other project's panels.
    assert_eq!(server.patch(&format!("/jobs/{two}"), &json!({"project": "other"})).await.0, 200);
    assert_eq!(read_panels(&server, &two).await, expected("none", &[]));
    assert_eq!(server.put("/projects/other/panels", &panels(&["o"])).await.0, 200);
    assert_eq!(read_panels(&server, &two).await, expected("project", &["o"]));
    // The last write wins. An empty list removes all panels.
    assert_eq!(server.put("/projects/default/panels", &panels(&[])).await.0, 200);
    assert_eq!(server.get("/projects/default/panels").await.1, json!({"panels": []}));

    // Panels are deleted with their job, or with the last job of their project.
    for id in [&one, &two] {
        server.order(id, "cancel").await;
        assert_eq!(server.delete(&format!("/jobs/{id}")).await.0, 204);
    }
    let rows = "SELECT (SELECT count(*) FROM job_panels) + (SELECT count(*) FROM project_panels)";
    wait_until("the panels are deleted", async || server.query_number(rows).await == 0).await;
    server.stop().await;
}

#[tokio::test]
async fn the_number_of_panels_is_limited() {
    let (server, _agent) = server_with_drained_agent().await;
    let id = server.submit(|_| {}).await.id.to_string();
    let path = format!("/jobs/{id}/panels");
    let title = "ä".repeat(PANEL_TITLE_CHARS);
    let time_and_bytes =
        ["step_ms", "data_ms", "all_reduce_ms", "gpu_memory_bytes", "memory_used_bytes", "disk_used_bytes"];
    assert_eq!(time_and_bytes.len(), MAX_PANEL_METRICS);
    let max = vec![panel(&title, &time_and_bytes); MAX_PANELS];
    for target in [path.as_str(), "/projects/default/panels"] {
        assert_eq!(server.put(target, &json!({"panels": max})).await.0, 200, "{target}");
        let mut more = max.clone();
        more.push(panel("one more", &["loss"]));
        assert_mistake(server.put(target, &json!({"panels": more})).await, "/panels", "");
    }
    let three_quantities = json!({"panels": [panel("t", &["loss", "lr", "accuracy"])]});
    let refused = server.put(&path, &three_quantities).await;
    assert_mistake(refused, "/panels/0/metrics", "a panel has two axes");
    for unreadable in [json!({}), json!({"panels": [{"title": "t"}]}), json!({"panels": [], "more": 1})] {
        assert_eq!(server.put(&path, &unreadable).await.0, 400, "{unreadable}");
    }
    assert_eq!(read_panels(&server, &id).await.1.len(), MAX_PANELS, "refused requests change nothing");
    server.stop().await;
}

#[tokio::test]
async fn panels_of_a_project_need_a_member_who_sees_the_project() {
    let (server, _agent) = server_with_drained_agent().await;
    let People { vera, mona, otto, .. } = add_people(&server).await;
    for (project, private) in [("hers", false), ("secret", true)] {
        let mut spec = spec();
        (spec["project"], spec["private"]) = (project.into(), private.into());
        assert_eq!(server.send_as(&mona, "POST", "/jobs", Some(spec)).await.0, 201);
    }
    let put = Some(panels(&["a"]));
    let project_panels = "/projects/hers/panels";
    assert_eq!(server.send_as(&vera, "PUT", project_panels, put.clone()).await.0, 403);
    assert_eq!(server.send_as(&otto, "PUT", project_panels, put.clone()).await.0, 200, "a member");
    assert_eq!(server.send_as(&vera, "GET", project_panels, None).await.0, 200);

    // A project with only private jobs does not exist for others.
    let secret_panels = "/projects/secret/panels";
    assert_eq!(server.send_as(&mona, "PUT", secret_panels, put.clone()).await.0, 200);
    for (method, body) in [("PUT", put), ("GET", None)] {
        let (status, problem) = server.send_as(&otto, method, secret_panels, body.clone()).await;
        let (_, missing) = server.send_as(&otto, method, "/projects/nothing/panels", body).await;
        assert_eq!((status, &problem["detail"]), (404, &missing["detail"]));
    }
    assert_eq!(server.get("/projects/no%20name/panels").await.0, 404);
    server.stop().await;
}
