//! Unreadable rows and records that cannot be stored do not affect other rows and records.

use crate::{
    agent::{checkpoint, line, losses, running, server_with_agent, start_job},
    test_server::{TestServer, assert_refused},
};
use lockstep_protocol::{
    agent::{Ending, Source, ToAgent},
    job::JobState,
};
use serde_json::{Value, json};

async fn set_column(server: &TestServer, table: &str, column: &str, value: &str, condition: &str) {
    let value = value.replace('\'', "''");
    let rows = server.execute(&format!("UPDATE {table} SET {column} = '{value}' WHERE {condition}")).await;
    assert!(rows > 0, "{table}.{column}");
}

#[tokio::test]
async fn jobs_of_other_versions_wait_and_do_not_affect_others() {
    let (server, mut agent) = server_with_agent(2).await;
    // This job uses all slots, so that the other jobs wait.
    let (running_id, attempt) = agent.start_job(&server, |_| {}).await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), losses(0, 1..=3)]).await;
    let newer = server.submit(|s| s["priority"] = json!(9)).await;
    let broken = server.submit(|s| s["priority"] = json!(8)).await;
    let archived = server.submit(|s| s["priority"] = json!(7)).await;
    let readable = server.submit(|_| {}).await.id.to_string();
    let with_id = |id: &dyn std::fmt::Display| format!("id = '{id}'");

    let mut spec = serde_json::to_value(&newer.spec).unwrap();
    spec["train"]["optimizer"] = json!("of another age");
    spec["train"]["lr"] = json!(0.25);
    spec["moon"] = json!({"phase": 3});
    set_column(&server, "jobs", "spec", &spec.to_string(), &with_id(&newer.id)).await;
    set_column(&server, "jobs", "spec", "no JSON at all", &with_id(&broken.id)).await;
    set_column(&server, "jobs", "state", "archived", &with_id(&archived.id)).await;
    // The running job also has a specification of a newer version, and other unreadable columns.
    set_column(&server, "jobs", "spec", &spec.to_string(), &with_id(&running_id)).await;
    for column in ["progress", "agents", "last", "best", "cause"] {
        set_column(&server, "jobs", column, "{\"torn\": ", &with_id(&running_id)).await;
    }

    // The list contains all jobs, with their readable parts.
    let list = server.get_ok("/jobs").await;
    assert_eq!(list["jobs"].as_array().unwrap().len(), 5);
    let (_, response) = server.get(&format!("/jobs/{}", newer.id)).await;
    let flaw = response["unreadable"].as_str().unwrap();
    assert!(flaw.contains("/train/optimizer") && flaw.contains("moon"), "{flaw}");
    assert_eq!(response["spec"]["train"]["lr"], 0.25);
    let (_, response) = server.get(&format!("/jobs/{}", archived.id)).await;
    assert!(response["unreadable"].as_str().unwrap().contains("archived"), "{response}");
    assert_refused(server.post(&format!("/jobs/{}/retry", archived.id), &Value::Null).await, 409, "archived");
    for path in ["/jobs", "/machines", &format!("/jobs/{}", broken.id)] {
        assert_eq!(server.get_text(path).await.0, 200, "{path}");
    }

    // The page of each says what cannot be read and what to do.
    for (id, what) in [
        (newer.id.as_str(), "/train/optimizer"),
        (broken.id.as_str(), "its specification"),
        (archived.id.as_str(), "its state &#34;archived&#34;"),
        (&running_id, "/train/optimizer"),
    ] {
        let (_, page) = server.get_text(&format!("/jobs/{id}")).await;
        let (_, banner) = page.split_once("id=\"banner\"").unwrap();
        let (banner, _) = banner.split_once("</section>").unwrap();
        assert!(!banner.split_once('>').unwrap().0.contains("hidden"), "{banner}");
        for text in ["Not all of this job can be read.", what] {
            assert!(banner.contains(text), "{text:?} in {banner}");
        }
        // The banner of the running job does not say that the job cannot start.
        assert_eq!(banner.contains("use the version that stored it"), id != running_id, "{banner}");
        assert!(!banner.contains("The job failed"), "{banner}");
    }

    // Reports of the running job are stored, and the job ends.
    agent.report(&attempt, Source::Rank(0), 2, vec![losses(0, 4..=5), line(0, 1, "still here")]).await;
    agent.end(&attempt, Ending::Succeeded { step: 100 }).await;
    assert_eq!(server.job(&running_id).await.state, JobState::Succeeded);
    // An attempt with an unknown state is listed.
    set_column(&server, "attempts", "state", "hibernating", &format!("job_id = '{running_id}'")).await;
    let (status, response) = server.get(&format!("/jobs/{running_id}/attempts")).await;
    assert_eq!((status, &response["attempts"][0]["state"]), (200, &json!("unknown")), "{response}");
    assert_eq!(response["attempts"][0]["step"], 100, "{response}");

    // The slots go to the readable job, although unreadable jobs have higher priorities.
    let next_attempt = agent.expect_start().await.attempt;
    assert_eq!(next_attempt.job.to_string(), readable);
    for id in [&newer.id, &broken.id] {
        let mut stream = server.stream(id.as_str(), 0).await;
        stream.until(|f| f["cause"]["code"] == "unreadable_spec").await;
        let job = server.job(id.as_str()).await;
        assert_eq!(job.state, JobState::Queued);
        assert!(job.reason.unwrap().contains("another version of lockstep"));
    }
    // A change of the priority keeps the unreadable parts of the specification.
    assert_eq!(server.patch(&format!("/jobs/{}", newer.id), &json!({"priority": 3})).await.0, 200);
    let query = "SELECT count(*) FROM jobs WHERE spec LIKE '%another age%' AND spec LIKE '%\"priority\":3%'";
    assert_eq!(server.query_number(query).await, 1);
    // Reading a row does not change it.
    assert_eq!(server.query_number("SELECT count(*) FROM jobs WHERE state = 'archived'").await, 1);
    let (status, response) = server.post(&format!("/jobs/{}/fork", newer.id), &json!({})).await;
    assert_eq!(status, 409, "{response}");

    // A restart changes nothing. A version that can read the jobs starts them.
    agent.disconnect();
    let server = TestServer::open(server.stop().await, |_| {}).await;
    assert_eq!(server.get("/jobs").await.1["jobs"].as_array().unwrap().len(), 5);
    let spec = serde_json::to_string(&newer.spec).unwrap();
    set_column(&server, "jobs", "spec", &spec, &with_id(&newer.id)).await;
    assert_eq!(server.get(&format!("/jobs/{}", newer.id)).await.1.get("unreadable"), None);
    assert_eq!(server.post(&format!("/jobs/{}/cancel", broken.id), &Value::Null).await.0, 202);
    for id in [&broken.id, &archived.id] {
        assert_eq!(server.delete(&format!("/jobs/{id}")).await.0, 204);
    }
    server.stop().await;
}

#[tokio::test]
async fn unreadable_records_are_skipped() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    agent
        .report(&attempt, Source::Rank(0), 0, vec![running(100, 0), losses(0, 1..=3), line(0, 1, "one")])
        .await;
    agent.report(&attempt, Source::Rank(0), 3, vec![losses(0, 4..=6), line(0, 2, "two")]).await;
    // Damages a dataset, an agent, notes, and one event of each kind.
    let copy = |table: &str, columns: &str, values: &str| {
        format!("INSERT INTO {table} ({columns}) SELECT {values} FROM {table}")
    };
    server.execute(&copy("datasets", "name, path, info, added_at", "'torn', path, '{', added_at")).await;
    server
        .execute(&copy(
            "agents",
            "id, name, machine, slots, last_seen_at",
            "'x', 'torn', '{', slots, last_seen_at",
        ))
        .await;
    server
        .execute(&format!("INSERT INTO annotations (job_id, notes, tags) VALUES ('{id}', 'n', '{{')"))
        .await;
    let bytes = if server.database.starts_with("postgres") { "BYTEA" } else { "BLOB" };
    for (kind, column, damage) in
        [("metrics", "points", format!("CAST('{{' AS {bytes})")), ("log", "body", "'{'".into())]
    {
        let first = format!("kind = '{kind}' AND seq = (SELECT min(seq) FROM events WHERE kind = '{kind}')");
        assert_eq!(server.execute(&format!("UPDATE events SET {column} = {damage} WHERE {first}")).await, 1);
    }
    for path in ["/datasets", "/agents", "/annotations", "/jobs"] {
        server.get_ok(path).await;
    }
    assert_eq!(server.get("/datasets").await.1["datasets"].as_array().unwrap().len(), 1);
    let (status, response) = server.get(&format!("/jobs/{id}/metrics?name=loss")).await;
    assert_eq!((status, &response["series"][0]["steps"]), (200, &json!([4, 5, 6])), "{response}");
    let (status, response) = server.get(&format!("/jobs/{id}/logs")).await;
    assert_eq!((status, &response["lines"][0]["text"]), (200, &json!("two")), "{response}");
    // Jobs can still be submitted, and end.
    server.submit(|_| {}).await;
    agent.end(&attempt, Ending::Succeeded { step: 100 }).await;
    agent.expect_start().await;
    server.stop().await;
}

#[tokio::test]
async fn a_record_refused_by_the_database_delays_no_others() {
    let (server, mut agent) = server_with_agent(2).await;
    let mut attempts = Vec::new();
    for _ in 0..2 {
        server.submit(|s| s["parallel"] = json!({"ranks": 1})).await;
        attempts.push(agent.expect_start().await.attempt);
    }
    // Two checkpoints of steps that no database can distinguish, because they exceed a signed 64-bit integer.
    let events = vec![
        running(100, 0),
        losses(0, 1..=3),
        checkpoint(u64::MAX),
        checkpoint(u64::MAX - 1),
        losses(0, 4..=6),
    ];
    for (attempt, events) in [(&attempts[0], events), (&attempts[1], vec![running(100, 0), losses(0, 1..=2)])]
    {
        agent.send_report(attempt, Source::Rank(0), 0, events).await;
    }
    let mut acknowledged = Vec::new();
    while acknowledged.len() < 2 {
        match agent.next().await {
            Some(ToAgent::Ack(ack)) => acknowledged.push((ack.attempt.attempt, ack.attempt.job, ack.records)),
            other => panic!("{other:?}"),
        }
    }
    acknowledged.sort_by_key(|a| a.2);
    assert_eq!((acknowledged[0].2, acknowledged[1].2), (2, 5), "all records are acknowledged");
    // Records before and after the refused record are stored, and numbered without a gap.
    let id = attempts[0].job.to_string();
    let (_, response) = server.get(&format!("/jobs/{id}/metrics?name=loss")).await;
    assert_eq!(response["series"][0]["steps"], json!([1, 2, 3, 4, 5, 6]));
    let (_, response) = server.get(&format!("/jobs/{id}/checkpoints")).await;
    assert_eq!(response["checkpoints"].as_array().unwrap().len(), 1);
    let numbers: Vec<_> =
        server.stored_events(&id).await.iter().map(|e| e["seq"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (1..=numbers.len() as u64).collect::<Vec<_>>());
    for attempt in &attempts {
        agent.end(attempt, Ending::Succeeded { step: 100 }).await;
        assert_eq!(server.job(attempt.job.as_str()).await.state, JobState::Succeeded);
    }
    server.stop().await;
}
