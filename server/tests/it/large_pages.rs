//! Pages of long elements: each page ends after 4 MiB, and every element is on one page.

use crate::{
    agent::{running, start_job},
    test_server::{TestServer, column},
};
use lockstep_protocol::agent::{AttemptEvent, LogLine, Source};
use serde_json::{Value, json};
use std::collections::HashSet;

/// Number of elements. Together they are longer than a page.
const ELEMENTS: usize = 40;

/// Reads all pages of a list. Returns the number of elements of each page, and the names of all elements.
async fn read_pages(
    server: &TestServer,
    path: &str,
    names_of: impl Fn(&Value) -> Vec<String>,
) -> (Vec<usize>, Vec<String>) {
    let (mut sizes, mut names, mut cursor) = (Vec::new(), Vec::new(), String::new());
    loop {
        let (status, text) = server.get_text(&format!("/api/v1{path}{cursor}")).await;
        assert!(status == 200 && text.len() < 5 << 20, "{path}{cursor}: {status}, {} bytes", text.len());
        let page: Value = serde_json::from_str(&text).unwrap();
        let page_names = names_of(&page);
        sizes.push(page_names.len());
        names.extend(page_names);
        match page["next_cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => return (sizes, names),
        }
    }
}

fn texts(page: &Value, list: &str, key: &str) -> Vec<String> {
    column(&page[list], key).iter().map(Value::to_string).collect()
}

#[tokio::test]
async fn a_page_ends_after_4_mib_and_each_element_is_listed_once() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
    for part in 0..ELEMENTS as u64 {
        let line = |n| LogLine {
            number: part * 64 + n,
            at: "2026-01-02T03:04:05Z".parse().unwrap(),
            text: "x".repeat(4000),
        };
        let lines = AttemptEvent::Log { rank: 0, lines: (1..=64).map(line).collect() };
        agent.report(&attempt, Source::Rank(0), 1 + part, vec![lines]).await;
    }
    assert_eq!(server.post("/agents/id-a/drain", &json!({})).await.0, 204);
    for _ in 1..ELEMENTS {
        server.submit(|_| {}).await;
    }
    let notes = "n".repeat(200_000);
    server.execute(&format!("INSERT INTO annotations SELECT id, '{notes}', '[]' FROM jobs")).await;

    let lines = 64 * ELEMENTS;
    let keys = |page: &Value| page["jobs"].as_object().unwrap().keys().cloned().collect();
    for (path, expected, names_of) in [
        (
            "/jobs?limit=1000&fields=id,notes".to_owned(),
            ELEMENTS,
            &(|page: &Value| texts(page, "jobs", "id")) as &dyn Fn(&Value) -> Vec<String>,
        ),
        ("/jobs?limit=1000&fields=id,notes&sort=created".to_owned(), ELEMENTS, &|page| {
            texts(page, "jobs", "id")
        }),
        ("/annotations?limit=1000".to_owned(), ELEMENTS, &keys),
        (format!("/jobs/{id}/events?limit=1000&type=log"), ELEMENTS, &|page| texts(page, "events", "seq")),
        (format!("/jobs/{id}/logs?limit=10000"), lines, &|page| texts(page, "lines", "number")),
        (format!("/jobs/{id}/logs?limit=10000&sort=-seq"), lines, &|page| texts(page, "lines", "number")),
    ] {
        let (sizes, names) = read_pages(&server, &path, names_of).await;
        assert!(sizes.len() > 1 && sizes.iter().all(|size| *size > 0), "{path}: {sizes:?}");
        let distinct: HashSet<_> = names.iter().collect();
        assert_eq!((names.len(), distinct.len()), (expected, expected), "{path}: {sizes:?}");
    }
    // Fields that are not requested do not count towards the limit.
    let (sizes, _) = read_pages(&server, "/jobs?limit=1000", |page| texts(page, "jobs", "id")).await;
    assert_eq!(sizes, [ELEMENTS]);
    server.stop().await;
}
