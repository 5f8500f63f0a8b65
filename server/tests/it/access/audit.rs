//! The audit log.

use crate::{
    agent::start_job,
    test_server::{TestServer, client, client_without_redirects, wait_until, with_form},
};
use serde_json::{Value, json};

async fn entries(server: &TestServer) -> Vec<Value> {
    let log = server.get_ok("/audit?limit=1000").await;
    log["entries"].as_array().unwrap().clone()
}

#[tokio::test]
async fn all_changing_requests_are_in_the_audit_log() {
    let server = TestServer::new().await;
    let (id, reader) = server.make_token(&json!({"name": "reader", "scope": "read"})).await;
    let reader = client(&reader);
    let request = server.http.post(server.url("/api/v1/jobs?x=1")).header("x-request-id", "mine-1.a_b");
    let response = request.json(&json!({})).send().await.unwrap();
    assert_eq!(response.headers()["x-request-id"], "mine-1.a_b");
    let with_invalid_id =
        server.http.delete(server.url("/api/v1/datasets/none")).header("x-request-id", "a b");
    let response = with_invalid_id.send().await.unwrap();
    let new_id = response.headers()["x-request-id"].to_str().unwrap().to_owned();
    assert_eq!(new_id.len(), 36, "{new_id}");
    assert_eq!(reader.get(server.url("/api/v1/jobs")).send().await.unwrap().status(), 200);
    // Refused requests are not logged, so that strangers cannot displace entries.
    assert_eq!(reader.post(server.url("/api/v1/jobs")).send().await.unwrap().status(), 403);
    assert_eq!(client("").post(server.url("/api/v1/jobs")).send().await.unwrap().status(), 401);
    // These URLs need no right, but do not accept POST.
    for path in ["/static/x", "/login/oidc"] {
        assert_eq!(reader.post(server.url(path)).send().await.unwrap().status(), 405, "{path}");
    }

    let logged = entries(&server).await;
    let seen: Vec<_> = logged
        .iter()
        .map(|e| {
            let text = |key: &str| e[key].as_str().unwrap().to_owned();
            (text("who"), text("action"), text("object"), e["status"].as_u64().unwrap())
        })
        .collect();
    let entry = |action: &str, object: &str, status| {
        ("this machine".to_owned(), action.to_owned(), object.to_owned(), status)
    };
    let expected = [
        entry("DELETE /api/v1/datasets/{name}", "/api/v1/datasets/none", 404),
        entry("POST /api/v1/jobs", "/api/v1/jobs?x=1", 400),
        entry("POST /api/v1/tokens", &format!("/api/v1/tokens: read {id} \"reader\""), 201),
    ];
    assert_eq!(seen, expected, "newest first");
    assert_eq!((&logged[1]["request_id"], &logged[0]["request_id"]), (&json!("mine-1.a_b"), &json!(new_id)));
    assert_eq!((&logged[0]["address"], &logged[0]["token_id"]), (&json!("127.0.0.1"), &json!("local")));

    assert_eq!(server.delete(&format!("/tokens/{id}")).await.0, 204);
    for (query, expected) in [
        ("who=this%20machine", 4),
        ("who=this", 0),
        ("q=/TOKENS", 2),
        ("q=100%25", 0),
        ("who=this%20machine&q=delete", 2),
        ("who=&q=", 4),
    ] {
        let (_, log) = server.get(&format!("/audit?{query}")).await;
        assert_eq!(log["entries"].as_array().unwrap().len(), expected, "{query}");
    }
    let (status, page) = server.get_text("/audit").await;
    assert!(status == 200 && page.contains("DELETE /api/v1/tokens/{id}") && page.contains("this machine"));
    server.stop().await;
}

#[tokio::test]
async fn created_objects_and_changes_are_in_the_audit_log() {
    let (server, _agent, job, _) = start_job(|s| s["name"] = json!("a job")).await;
    let request = client_without_redirects(&server.token).post(server.url("/jobs/new"));
    let form = with_form(request, "name=x&data.dataset=pictures&model.arch=resnet20");
    let response = form.send().await.unwrap();
    assert_eq!(response.status(), 303, "{}", response.text().await.unwrap());
    let location = response.headers()["location"].to_str().unwrap();
    let objects: Vec<_> = entries(&server).await.into_iter().map(|e| e["object"].clone()).collect();
    let job_of_form = location.strip_prefix("/jobs/").unwrap();
    let expected = [format!("/jobs/new: {job_of_form}"), format!("/api/v1/jobs: {job}")];
    assert_eq!(objects[..2], expected.map(Value::from), "newest first");
    assert!(objects[2..].contains(&json!("/api/v1/datasets: pictures")), "{objects:?}");
    let path = format!("/api/v1/jobs/{job}");
    for (body, changes) in [
        (json!({"priority": 5, "notes": "good"}), ": notes: \"good\" (was \"\"), priority: 5 (was 0)"),
        (json!({"priority": 5}), ""),
    ] {
        assert_eq!(server.send(server.http.patch(server.url(&path)).json(&body)).await.0, 200);
        assert_eq!(entries(&server).await[0]["object"], format!("{path}{changes}"));
    }
    server.stop().await;
}

/// The log has at most 300 characters of a path, and at most 300 characters of the object of a form.
#[tokio::test]
async fn audit_details_are_truncated_after_300_characters() {
    let server = TestServer::new().await;
    let path = |chars: usize| {
        let start = "/api/v1/datasets/none?x=";
        format!("{start}{}", "y".repeat(chars - start.len()))
    };
    for (chars, logged_chars) in [(300, 300), (301, 300), (5000, 300)] {
        let response = server.http.delete(server.url(&path(chars))).send().await.unwrap();
        assert_eq!(response.status(), 404, "{chars}");
        assert_eq!(entries(&server).await[0]["object"], path(logged_chars), "{chars}");
    }
    // A form of the page People is logged with the person's name. The limit counts characters, not bytes.
    let logged = |letters: usize| format!("Add \"{}", "ä".repeat(letters));
    for (letters, expected) in [(294, logged(294) + "\""), (295, logged(295)), (2000, logged(295))] {
        let fields = format!("action=add&name={}&password=correct+horse", "%C3%A4".repeat(letters));
        let form = with_form(server.http.post(server.url("/people")), fields);
        assert_eq!(form.send().await.unwrap().status(), 422, "{letters}");
        assert_eq!(entries(&server).await[0]["object"], format!("/people: {expected}"), "{letters}");
    }
    server.stop().await;
}

#[tokio::test]
async fn the_log_has_pages_and_old_entries_are_removed() {
    let server = TestServer::with(|c| c.max_audit_entries = 20).await;
    for n in 0..10 {
        assert_eq!(server.delete(&format!("/datasets/none-{n}")).await.0, 404);
    }
    let pages = server.read_pages("/audit?limit=3").await;
    let read = pages.iter().flat_map(|page| page["entries"].as_array().unwrap());
    let read: Vec<_> = read.map(|entry| entry["object"].clone()).collect();
    let expected: Vec<_> = (0..10).rev().map(|n| json!(format!("/api/v1/datasets/none-{n}"))).collect();
    assert_eq!(read, expected);
    for (query, status) in
        [("limit=1000", 200), ("limit=1001", 400), ("limit=0", 400), ("cursor=x", 400), ("limit=1", 200)]
    {
        assert_eq!(server.get(&format!("/audit?{query}")).await.0, status, "{query}");
    }

    // A background task removes the oldest entries beyond the limit, once there are half as many new entries as the limit allows.
    for n in 10..60 {
        assert_eq!(server.delete(&format!("/datasets/none-{n}")).await.0, 404);
    }
    wait_until("old entries are removed", async || {
        let remaining = entries(&server).await;
        assert_eq!(remaining[0]["object"], "/api/v1/datasets/none-59", "the newest stays");
        assert!(remaining.len() >= 20, "too many entries are removed");
        remaining.len() <= 31
    })
    .await;
    server.execute("UPDATE audit SET at = 0").await;
    let server = TestServer::open(server.stop().await, |_| {}).await;
    // The first entry after a start removes old entries.
    assert_eq!(server.delete("/datasets/none").await.0, 404);
    wait_until("entries older than a year are removed", async || entries(&server).await.len() == 1).await;
    server.stop().await;
}
