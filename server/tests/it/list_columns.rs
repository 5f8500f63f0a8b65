//! Columns and sort keys of the list that are not fields of jobs: metrics, tags, settings with several values, places in the queue.

use crate::{
    agent::{running, server_with_agent},
    lists::read_names,
    queue,
    test_server::{column, wait_until},
};
use lockstep_protocol::{
    JobState,
    agent::{AttemptEvent, Ending, Source},
    metric::MetricColumn,
};
use serde_json::{Value, json};

#[tokio::test]
async fn jobs_are_sorted_by_tags_lists_and_metrics_and_show_requested_metrics() {
    let (server, mut agent) = server_with_agent(2).await;
    // The two ranks of the jobs a and b report different step times. Job c has no step time.
    for (name, tags, milestones, step_ms) in [
        ("a", json!(["x and more"]), json!([3]), Some([4.0, 8.0])),
        ("b", json!(["say \"x\"", "x"]), json!([1, 5]), Some([1.0, 2.0])),
        ("c", json!(["x"]), json!([2, 9]), None),
    ] {
        let id = server
            .submit(|spec| {
                spec["name"] = json!(name);
                spec["tags"] = tags;
                spec["parallel"]["ranks"] = json!(2);
                spec["train"]["epochs"] = json!(10);
                spec["train"]["schedule"] = json!("step");
                spec["train"]["milestones"] = milestones;
            })
            .await
            .id;
        let attempt = agent.expect_start().await.attempt;
        let column = |rank: u32, value: f32| AttemptEvent::Metrics {
            rank,
            columns: vec![MetricColumn { name: "step_ms".into(), steps: vec![1], values: vec![value] }],
        };
        agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
        if let Some([first, second]) = step_ms {
            agent.report(&attempt, Source::Rank(0), 1, vec![column(0, first)]).await;
            agent.report(&attempt, Source::Rank(1), 0, vec![column(1, second)]).await;
        }
        agent.end(&attempt, Ending::Failed { reason: "the end".into(), retriable: false }).await;
        server.wait_for_state(id.as_str(), JobState::Failed).await;
    }
    for limit in [1, 2, 3] {
        for (query, expected) in [
            ("sort=-tag:x", "cba"),
            ("sort=tag:x", "abc"),
            ("sort=tag:y", "abc"),
            ("sort=-tag:x%20and%20more", "acb"),
            ("sort=spec.train.milestones", "bca"),
            ("sort=step_ms", "bac"),
            ("sort=-step_ms", "abc"),
            ("sort=images_per_second&fields=name", "abc"),
        ] {
            assert_eq!(read_names(&server, query, limit).await.concat(), expected, "{query} by {limit}");
        }
    }
    let (_, page) = server.get("/jobs?sort=name&metrics=step_ms,grad_norm").await;
    let reported: Vec<_> = column(&page["jobs"], "last").iter().map(|last| last["step_ms"].clone()).collect();
    assert_eq!(reported, [json!(6.0), json!(1.5), Value::Null], "means over the ranks");
    let (_, page) = server.get("/jobs?sort=name").await;
    assert!(page["jobs"][0]["last"].get("step_ms").is_none() && page["jobs"][0]["last"].get("lr").is_some());
    server.stop().await;
}

#[tokio::test]
async fn a_waiting_job_in_a_list_shows_its_place_and_reason() {
    let (server, mut agent) = server_with_agent(2).await;
    let submit = async |name, ranks| queue::submit(&server, name, ranks, json!({})).await.id;
    submit("one", 1).await;
    let first = agent.expect_start().await.attempt;
    submit("two", 1).await;
    agent.expect_start().await;
    let waiting = submit("both", 2).await;
    let wait_for_reason = async |message: &str| {
        let mut job = Value::Null;
        wait_until(&format!("the reason contains {message}"), async || {
            job = server.get_ok(&format!("/jobs/{waiting}")).await;
            let list = server.get_ok("/jobs?state=queued&fields=reason,queue").await;
            let reason = job["reason"].as_str().unwrap_or_default();
            let is_shown_everywhere =
                list["jobs"][0]["reason"] == reason && job["queue"]["reason"]["words"] == reason;
            reason.contains(message) && job["queue"]["place"] == 1 && is_shown_everywhere
        })
        .await;
        job["last_seq"].take()
    };
    wait_for_reason("0 of 2").await;
    // The reason is shown from memory at once. Its event is stored later.
    let what = "an event of the submission and one of the reason are stored";
    wait_until(what, async || server.stored_events(waiting.as_str()).await.len() == 2).await;
    let seq_before_end = wait_for_reason("0 of 2").await;
    agent.report(&first, Source::Rank(0), 0, vec![running(100, 0)]).await;
    agent.end(&first, Ending::Failed { reason: "the end".into(), retriable: false }).await;
    // No new event is stored, because only the reason's text has changed.
    assert_eq!(wait_for_reason("1 of 2").await, seq_before_end);
    server.stop().await;
}
