//! Deletion of a large job: the job disappears at once, and its rows are deleted in steps without delaying other requests.

use crate::{
    agent::{Agent, losses, running, start_job},
    postgres,
    test_server::{TIMEOUT, TestServer, assert_refused, on_two_databases, wait_until},
};
use lockstep_protocol::agent::{Ending, Source};
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use std::time::{Duration, Instant};

/// Events of the large job.
const EVENTS: u32 = 120_000;

async fn test_large_deletion(server: TestServer) {
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    let (large, attempt) = agent.start_job(&server, |_| {}).await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), losses(0, 1..=3)]).await;
    agent.end(&attempt, Ending::Succeeded { step: 100 }).await;
    let body = format!("'{{\"type\":\"rank\",\"filling\":\"{}\"}}'", "x".repeat(500));
    server.execute(&format!(
        "WITH RECURSIVE n (n) AS (SELECT 100 UNION ALL SELECT n + 1 FROM n WHERE n < {EVENTS}) \
         INSERT INTO events (job_id, seq, at, kind, attempt, rank, body) SELECT '{large}', n, 0, 'rank', 1, 0, {body} FROM n"
    ))
    .await;
    server
        .execute(&format!(
            "WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 1000) \
         INSERT INTO metric_chunks (job_id, name, rank, attempt, level, first_step, last_step, data) \
         SELECT '{large}', 'loss', 0, 1, 0, n, n, CAST('' AS {}) FROM n",
            if server.database.starts_with("postgres") { "BYTEA" } else { "BLOB" }
        ))
        .await;
    let (small, attempt) = agent.start_job(&server, |_| {}).await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;

    let start = Instant::now();
    assert_eq!(server.delete(&format!("/jobs/{large}")).await.0, 204);
    let responded_after = start.elapsed();
    // The job cannot be read or deleted any more.
    for path in ["", "/attempts", "/metrics?name=loss", "/logs", "/checkpoints"] {
        assert_eq!(server.get(&format!("/jobs/{large}{path}")).await.0, 404, "{path}");
    }
    assert_eq!(server.delete(&format!("/jobs/{large}")).await.0, 404);
    assert_eq!(server.get("/jobs").await.1["jobs"].as_array().unwrap().len(), 1);

    // Meanwhile another job's reports are stored and acknowledged every few milliseconds.
    let rows = format!(
        "SELECT (SELECT count(*) FROM events WHERE job_id = '{large}') + (SELECT count(*) FROM jobs WHERE id = '{large}')"
    );
    let (mut slowest, mut steps, mut overlapping) = (Duration::ZERO, 0, 0);
    loop {
        let remaining = server.query_number(&rows).await;
        if remaining == 0 {
            break;
        }
        assert!(start.elapsed() < 3 * TIMEOUT, "{remaining} rows are left");
        let sent = Instant::now();
        steps += 1;
        agent.report(&attempt, Source::Rank(0), steps, vec![losses(0, steps..=steps)]).await;
        slowest = slowest.max(sent.elapsed());
        overlapping += u32::from(remaining > 1);
    }
    eprintln!(
        "deleted {EVENTS} events in {:?} (response after {responded_after:?}); the slowest of {steps} reports meanwhile {slowest:?}",
        start.elapsed()
    );
    assert!(overlapping >= 3, "the deletion was a single step: {overlapping} reports were stored during it");
    let chunks = format!("SELECT count(*) FROM metric_chunks WHERE job_id = '{large}'");
    assert_eq!(server.query_number(&chunks).await, 0);
    agent.end(&attempt, Ending::Succeeded { step: 100 }).await;
    assert_eq!(server.job(&small).await.last.loss, Some(f64::from(1.0 / steps as f32)));
    server.stop().await;
}

on_two_databases!(
    a_large_job_is_deleted_in_steps,
    a_large_job_is_deleted_in_steps_from_postgres,
    test_large_deletion
);

/// Deletion and migration take longer than the database's limit for statements, which applies to other statements.
#[tokio::test]
async fn long_deletions_and_migrations_in_postgres_do_not_time_out() {
    let url = postgres::database();
    let mut db = PgConnection::connect(&url).await.unwrap();
    // One index takes three seconds, as on a large table.
    sqlx::raw_sql(
        "CREATE FUNCTION slow() RETURNS event_trigger LANGUAGE plpgsql AS $$BEGIN \
         IF EXISTS (SELECT FROM pg_event_trigger_ddl_commands() WHERE object_identity LIKE '%jobs_deleted') THEN PERFORM pg_sleep(3); END IF; END$$; \
         CREATE EVENT TRIGGER slow ON ddl_command_end WHEN TAG IN ('CREATE INDEX') EXECUTE FUNCTION slow()",
    )
    .execute(&mut db)
    .await
    .unwrap();
    let url_with_limit = format!("{url}?options=-c%20statement_timeout=2s");
    let server = TestServer::with(|c| c.database = Some(url_with_limit)).await;
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    // The limit applies to a request that waits for a locked table.
    let mut lock = db.begin().await.unwrap();
    sqlx::query("LOCK TABLE datasets IN ACCESS EXCLUSIVE MODE").execute(&mut *lock).await.unwrap();
    assert_refused(server.get("/datasets").await, 503, "statement timeout");
    lock.rollback().await.unwrap();
    let (id, attempt) = agent.start_job(&server, |_| {}).await;
    agent.end(&attempt, Ending::Succeeded { step: 100 }).await;
    // Every tenth row takes a millisecond: all rows take four seconds, and one step takes a fraction of a second.
    sqlx::raw_sql(AssertSqlSafe(format!(
        "INSERT INTO events (job_id, seq, at, kind, attempt, body) \
         SELECT '{id}', n, 0, 'rank', 1, '{{}}' FROM generate_series(100, 40000) n; \
         CREATE FUNCTION slow_row() RETURNS trigger LANGUAGE plpgsql AS \
         $$BEGIN IF OLD.seq % 10 = 0 THEN PERFORM pg_sleep(0.001); END IF; RETURN OLD; END$$; \
         CREATE TRIGGER slow BEFORE DELETE ON events FOR EACH ROW EXECUTE FUNCTION slow_row()"
    )))
    .execute(&mut db)
    .await
    .unwrap();
    let start = Instant::now();
    assert_eq!(server.delete(&format!("/jobs/{id}")).await.0, 204);
    let rows = format!("SELECT count(*) FROM jobs WHERE id = '{id}'");
    while server.query_number(&rows).await > 0 {
        assert!(start.elapsed() < 3 * TIMEOUT, "the deletion does not end");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(start.elapsed() > Duration::from_secs(3), "the deletion was too fast to test the limit");
    assert_eq!(server.query_number("SELECT count(*) FROM events").await, 0);
    server.stop().await;
}

#[tokio::test]
async fn the_next_server_completes_deletions() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), losses(0, 1..=3)]).await;
    agent.end(&attempt, Ending::Succeeded { step: 100 }).await;
    // The state after a server that was stopped during the deletion.
    server.execute(&format!("UPDATE jobs SET deleted_at = 1 WHERE id = '{id}'")).await;
    assert_eq!(server.get(&format!("/jobs/{id}")).await.0, 404);
    let server = TestServer::open(server.stop().await, |_| {}).await;
    let jobs = async || server.query_number("SELECT count(*) FROM jobs").await;
    wait_until("the job is deleted", async || jobs().await == 0).await;
    assert_eq!(server.query_number("SELECT count(*) FROM events").await, 0);
    server.stop().await;
}

#[tokio::test]
async fn a_cursor_remains_valid_after_its_job_was_deleted() {
    let server = TestServer::new().await;
    Agent::join_with_dataset(&server, 2).await.disconnect();
    let mut ids = Vec::new();
    for _ in 0..5 {
        ids.push(server.submit(|_| {}).await.id.to_string());
    }
    ids.reverse();
    let (_, page) = server.get("/jobs?limit=2").await;
    let cursor = page["next_cursor"].as_str().unwrap().to_owned();
    // Deletes both jobs of the page, including the job at the cursor.
    for id in &ids[..2] {
        server.order(id, "cancel").await;
        assert_eq!(server.delete(&format!("/jobs/{id}")).await.0, 204);
    }
    let page = server.get_ok(&format!("/jobs?limit=2&cursor={cursor}")).await;
    let listed: Vec<_> = page["jobs"].as_array().unwrap().iter().map(|j| j["id"].clone()).collect();
    assert_eq!(listed, [json!(ids[2]), json!(ids[3])]);
    // The cursor is also valid for the HTML page.
    let (_, page) = server.get_text(&format!("/jobs?cursor={cursor}")).await;
    assert!(ids[2..].iter().all(|id| page.contains(id)), "{page}");
    server.stop().await;
}
