//! Pages of logs, events and pictures.

use crate::{
    agent::{Agent, line, losses, running, start_job},
    test_server::{TestServer, assert_refused, column},
};
use lockstep_protocol::{
    agent::{AgentReply, AgentRequest, AttemptEvent, Ending, LogLine, Source, ToAgent},
    inspect::{Pick, Sample, Samples},
};
use serde_json::Value;

/// Reads all pages, and returns the texts of the lines and the number of pages.
async fn read_all(server: &TestServer, path: &str) -> (Vec<String>, usize) {
    let pages = server.read_pages(path).await;
    let texts = pages.iter().flat_map(|page| column(&page["lines"], "text"));
    (texts.map(|text| text.to_string()).collect(), pages.len())
}

#[tokio::test]
async fn pages_of_a_log_start_at_either_end() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
    for n in 1..=7 {
        // One report per line, and so one event per line.
        let text = format!("line {n}");
        agent.report(&attempt, Source::Rank(0), n, vec![line(0, n, &text)]).await;
    }
    let expected: Vec<String> = (1..=7).map(|n| format!("\"line {n}\"")).collect();
    let reversed: Vec<String> = expected.iter().rev().cloned().collect();
    let logs = format!("/jobs/{id}/logs");
    for limit in [1, 3, 7, 8] {
        for q in ["", "&q=line"] {
            let (texts, pages) = read_all(&server, &format!("{logs}?limit={limit}&sort=seq{q}")).await;
            assert_eq!(texts, expected, "{limit}{q}");
            assert!(pages >= 7_usize.div_ceil(limit), "{pages} pages of {limit}{q}");
            assert_eq!(
                read_all(&server, &format!("{logs}?limit={limit}{q}")).await.0,
                expected,
                "{limit}{q}"
            );
            let newest = read_all(&server, &format!("{logs}?limit={limit}&sort=-seq{q}")).await;
            assert_eq!(newest.0, reversed, "{limit}{q}");
        }
    }
    // Filters apply to every page.
    let (_, page) = server.get(&logs).await;
    let seq = |n: usize| page["lines"][n]["seq"].as_u64().unwrap();
    let between = format!("after={}&before={}", seq(1), seq(5));
    for (sort, expected) in [("seq", &expected[2..5]), ("-seq", &reversed[2..5])] {
        assert_eq!(read_all(&server, &format!("{logs}?limit=1&sort={sort}&{between}")).await.0, expected);
    }
    for (attempt, lines) in [(1, 7), (2, 0)] {
        let (_, file) = server.get_text(&format!("/api/v1{logs}?format=text&attempt={attempt}")).await;
        assert_eq!(file.lines().count(), lines, "{file}");
    }
    // Invalid queries.
    let (_, first) = server.get(&format!("{logs}?limit=2")).await;
    let cursor = first["next_cursor"].as_str().unwrap();
    for (query, message) in [
        ("sort=sec".to_owned(), "did you mean \"seq\"?"),
        (format!("sort=-seq&cursor={cursor}"), "the cursor is of another query"),
        ("cursor=x".to_owned(), "the cursor is not valid for this list"),
        (format!("format=text&cursor={cursor}"), "leave sort and cursor out"),
    ] {
        assert_refused(server.get(&format!("{logs}?{query}")).await, 400, message);
    }
    server.stop().await;
}

#[tokio::test]
async fn a_page_of_a_log_has_the_requested_lines_in_complete_reports() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
    // Four reports of three lines.
    for report in 0..4 {
        let number = |n: u64| 3 * report + n;
        let at = "2026-01-02T03:04:05Z".parse().unwrap();
        let line = |n| LogLine { number: number(n), at, text: format!("line {}", number(n)) };
        let lines = AttemptEvent::Log { rank: 0, lines: (1..=3).map(line).collect() };
        agent.report(&attempt, Source::Rank(0), 1 + report, vec![lines]).await;
    }
    let logs = format!("/jobs/{id}/logs");
    let oldest: Vec<String> = (1..=12).map(|n| format!("\"line {n}\"")).collect();
    let newest: Vec<String> = oldest.iter().rev().cloned().collect();
    for (limit, lines) in [(1, 3), (2, 3), (3, 3), (5, 3), (6, 6), (11, 9), (12, 12), (13, 12), (10_000, 12)]
    {
        for q in ["", "&q=LINE"] {
            for (sort, expected) in [("seq", &oldest), ("-seq", &newest)] {
                let path = format!("{logs}?limit={limit}&sort={sort}{q}");
                let (_, page) = server.get(&path).await;
                assert_eq!(page["lines"].as_array().unwrap().len(), lines, "{path}");
                assert_eq!(page["next_cursor"].is_null(), lines == 12, "{path}");
                assert_eq!(&read_all(&server, &path).await.0, expected, "{path}");
            }
        }
    }
    for limit in [0, 10_001] {
        assert_eq!(server.get(&format!("{logs}?limit={limit}")).await.0, 400, "{limit}");
    }
    server.stop().await;
}

#[tokio::test]
async fn pages_of_events_are_filtered_by_type() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), losses(0, 1..=5)]).await;
    agent.end(&attempt, Ending::Failed { reason: "the end".into(), retriable: false }).await;
    let stored = server.stored_events(&id).await;
    for limit in [1, 2, 100] {
        let pages = server.read_pages(&format!("/jobs/{id}/events?limit={limit}")).await;
        let events: Vec<_> =
            pages.iter().flat_map(|page| page["events"].as_array().unwrap().clone()).collect();
        assert_eq!(events, stored, "limit {limit}");
    }
    let (_, page) = server.get(&format!("/jobs/{id}/events?type=state,metrics&fields=type")).await;
    let expected: Vec<_> =
        stored.iter().map(|e| e["type"].clone()).filter(|t| t == "state" || t == "metrics").collect();
    assert_eq!(column(&page["events"], "type"), expected);
    assert_refused(server.get(&format!("/jobs/{id}/events?type=stat")).await, 400, "\"state\"");
    server.stop().await;
}

/// Answers requests for pictures like an agent whose dataset has five pictures.
pub async fn answer_samples(mut agent: Agent) {
    while let Some(message) = agent.next().await {
        let ToAgent::Request { id, request: AgentRequest::Samples { pick, .. } } = message else { continue };
        let places: Vec<u64> = match pick {
            Pick::Stored { offset, limit, .. } => (offset..5.min(offset + u64::from(limit))).collect(),
            Pick::Seen { places, .. } => places,
        };
        let sample = |index| Sample { index, label: 0, epoch: None, file: None, png: String::new() };
        let samples = places.into_iter().map(sample).collect();
        let samples = Samples { total: 5, classes: vec!["cat".into()], samples };
        agent.reply(id, Ok(AgentReply::Samples(samples))).await;
    }
}

#[tokio::test]
async fn pages_of_a_dataset_have_all_its_pictures() {
    let server = TestServer::new().await;
    let agent = tokio::spawn(answer_samples(Agent::join_with_dataset(&server, 2).await));
    let path = "/datasets/pictures/samples?limit=2";
    let pages = server.read_pages(path).await;
    assert!(pages.iter().all(|page| page["total"] == 5), "{pages:?}");
    let indices: Vec<_> = pages.iter().flat_map(|page| column(&page["samples"], "index")).collect();
    assert_eq!((indices, pages.len()), ([0, 1, 2, 3, 4].map(Value::from).to_vec(), 3));
    let cursor = pages[0]["next_cursor"].as_str().unwrap();
    for (parameter, message) in [
        ("&offset=2", "leave one of them out"),
        ("&split=val", "the cursor is of another query"),
        ("&shuffle=1", "the cursor is of another query"),
    ] {
        assert_refused(server.get(&format!("{path}&cursor={cursor}{parameter}")).await, 400, message);
    }
    agent.abort();
    server.stop().await;
}
