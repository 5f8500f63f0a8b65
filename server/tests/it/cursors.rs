//! A cursor is valid only for its list, its job or dataset, and its order.

use crate::{
    agent::{Agent, checkpoint, dataset_info, line, losses, running, server_with_agent},
    log_pages::answer_samples,
    test_server::TestServer,
};
use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use lockstep_protocol::agent::{Ending, Source};
use serde_json::json;

/// Returns the cursor of the first page of a list.
async fn first_cursor(server: &TestServer, path: &str) -> String {
    let separator = if path.contains('?') { '&' } else { '?' };
    let page = server.get_ok(&format!("{path}{separator}limit=1")).await;
    page["next_cursor"].as_str().unwrap_or_else(|| panic!("{path}: {page}")).to_owned()
}

/// Asserts that the server refuses this cursor with this message.
async fn assert_refused(server: &TestServer, path: &str, cursor: &str, message: &str) {
    let separator = if path.contains('?') { '&' } else { '?' };
    let (status, problem) = server.get(&format!("{path}{separator}cursor={cursor}")).await;
    assert_eq!((status, &problem["code"]), (400, &json!("wrong_cursor")), "{path}: {problem}");
    assert_eq!(problem["type"], "urn:lockstep:problem:wrong_cursor");
    let detail = problem["detail"].as_str().unwrap();
    assert!(detail.contains(message) && detail.contains("leave it out"), "{path}: {problem}");
}

/// A job of two attempts, with log lines, events and two checkpoints.
async fn create_job(server: &TestServer, agent: &mut Agent) -> String {
    let (id, attempt) = agent.start_job(server, |_| {}).await;
    let events = vec![running(100, 0), losses(0, 1..=5), checkpoint(3), checkpoint(5)];
    let mut records = agent.report(&attempt, Source::Rank(0), 0, events).await;
    for n in 1..=3 {
        // One report per line, and so one event per line.
        records = agent.report(&attempt, Source::Rank(0), records, vec![line(0, n, "a line")]).await;
    }
    agent.end(&attempt, Ending::Failed { reason: "by the test".into(), retriable: true }).await;
    let attempt = agent.expect_start().await.attempt;
    agent.end(&attempt, Ending::Failed { reason: "the end".into(), retriable: false }).await;
    id
}

#[tokio::test]
async fn a_cursor_of_another_job_list_or_order_is_refused() {
    let (server, mut agent) = server_with_agent(2).await;
    let (mine, other) = (create_job(&server, &mut agent).await, create_job(&server, &mut agent).await);
    let lists = ["logs", "events", "history", "attempts", "checkpoints"];
    for list in lists {
        let path = |job: &str| format!("/jobs/{job}/{list}");
        let cursor = first_cursor(&server, &path(&mine)).await;
        server.get_ok(&format!("{}?cursor={cursor}", path(&mine))).await;
        assert_refused(&server, &path(&other), &cursor, &format!("of the {list} of another job")).await;
        for another in lists.iter().filter(|another| **another != list) {
            assert_refused(&server, &format!("/jobs/{mine}/{another}"), &cursor, "of another list").await;
        }
        for invalid in ["x", "e30", &"A".repeat(5000), &cursor[..cursor.len() - 4]] {
            assert_refused(&server, &path(&mine), invalid, "not valid for this list").await;
        }
    }
    for (list, sort) in [("logs", "-seq"), ("attempts", "-attempt"), ("checkpoints", "created")] {
        let path = format!("/jobs/{mine}/{list}");
        let cursor = first_cursor(&server, &path).await;
        assert_refused(&server, &format!("{path}?sort={sort}"), &cursor, "of another query").await;
    }
    server.stop().await;
}

#[tokio::test]
async fn cursors_are_valid_only_for_their_own_list() {
    let (server, mut agent) = server_with_agent(2).await;
    for name in ["a", "b"] {
        let id = server.submit(|spec| spec["name"] = json!(name)).await.id;
        assert_eq!(server.patch(&format!("/jobs/{id}"), &json!({"notes": "x"})).await.0, 200);
        server.make_token(&json!({"name": name, "scope": "read"})).await;
    }
    agent.expect_start().await;
    let groups = "/jobs/groups?by=name";
    let lists = ["/jobs", groups, "/annotations", "/tokens", "/audit"];
    for list in lists {
        let cursor = first_cursor(&server, list).await;
        for another in lists.iter().chain(&["/queue", "/datasets", "/projects"]).filter(|one| **one != list) {
            assert_refused(&server, another, &cursor, "of another list").await;
        }
    }
    let cursor = first_cursor(&server, "/jobs").await;
    assert_refused(&server, "/jobs?sort=name", &cursor, "of another query").await;
    let cursor = first_cursor(&server, groups).await;
    assert_refused(&server, "/jobs/groups?by=state", &cursor, "of the groups of another grouping").await;
    // A cursor has at most 4096 characters. Spaces after its JSON are valid. In base64, three bytes are four characters.
    let decoded = BASE64_URL_SAFE_NO_PAD.decode(first_cursor(&server, "/jobs").await).unwrap();
    let padded = |bytes: usize| {
        let mut cursor = decoded.clone();
        cursor.resize(bytes, b' ');
        BASE64_URL_SAFE_NO_PAD.encode(cursor)
    };
    let (status, page) = server.get(&format!("/jobs?limit=1&cursor={}", padded(3072))).await;
    assert_eq!((status, page["jobs"].as_array().map(Vec::len)), (200, Some(1)), "{page}");
    assert_refused(&server, "/jobs?limit=1", &padded(3073), "not valid for this list").await;
    server.stop().await;
}

#[tokio::test]
async fn a_cursor_of_another_dataset_s_pictures_is_refused() {
    let (server, mut agent) = server_with_agent(2).await;
    agent.register_as(&server, "others", dataset_info()).await;
    let answering = tokio::spawn(answer_samples(agent));
    let cursor = first_cursor(&server, "/datasets/pictures/samples").await;
    let (_, page) = server.get(&format!("/datasets/pictures/samples?cursor={cursor}")).await;
    assert_eq!(page["samples"][0]["index"], json!(1), "{page}");
    assert_refused(&server, "/datasets/others/samples", &cursor, "of the samples of another dataset").await;
    // A new dataset with the same name.
    answering.abort();
    let _ = answering.await;
    assert_eq!(server.delete("/datasets/pictures").await.0, 204);
    let mut agent = Agent::join(&server, 2).await;
    agent.register(&server).await;
    let answering = tokio::spawn(answer_samples(agent));
    assert_refused(&server, "/datasets/pictures/samples", &cursor, "of the samples of another dataset").await;
    assert_eq!(server.get("/datasets/pictures/samples").await.0, 200);
    answering.abort();
    server.stop().await;
}
