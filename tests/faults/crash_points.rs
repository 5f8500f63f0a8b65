//! The server or a rank crashes, or a write fails as on a full disk, at every point of writing a checkpoint and of the database's
//! transactions. `LOCKSTEP_FAULT` injects these faults one after the other.

use crate::{
    judge::{
        CHECKPOINT_STEPS, ReportRow, SLOW_STEPS, STEPS, assert_undisturbed_result, spec, start,
        trained_weights, undisturbed_weights, variables, wait_for_step,
    },
    postgres,
    server::{Server, number, signal, training_permit},
    socket::stored,
    specs,
};
use lockstep_protocol::fault::{CHECKPOINT_POINTS, INGEST_POINTS, JOB_POINTS};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::time::Duration;

/// Faults that each occur once, when their point is passed for the `nth` time. A fault then writes a file with the point's name (its mark)
/// into `folder`. The fault `hold` waits until the test writes to its mark.
fn faults(folder: &std::path::Path, points: &[&str], action: &str, nth: u32) -> Vec<(String, String)> {
    let fault = |point: &&str| format!("{point}:{action}@{nth}:{}", folder.join(point).display());
    vec![("LOCKSTEP_FAULT".into(), points.iter().map(fault).collect::<Vec<_>>().join(","))]
}

/// Also makes every training step take at least 20 ms.
fn with_slow_steps(mut environment: Vec<(String, String)>) -> Vec<(String, String)> {
    environment[0].1 += &format!(",{}", SLOW_STEPS.1);
    environment
}

#[tokio::test]
async fn a_rank_killed_at_any_point_of_a_checkpoint_restarts_cleanly() {
    let _permit = training_permit().await;
    let marks = tempfile::tempdir().expect("a folder");
    let model = undisturbed_weights(STEPS).await;
    // Three crashes per job, as a fourth restart would wait for a long backoff.
    for points in CHECKPOINT_POINTS.chunks(3) {
        // Faults occur at the second checkpoint of an attempt, so that an earlier checkpoint exists.
        let environment = faults(marks.path(), points, "kill", 2);
        let server = start(None, environment).await;
        let id = server.submit(&spec("disturbed", STEPS)).await;
        let row = ReportRow::begin(&format!("kill -9 at {}", points.join(", ")));
        let attempts = assert_undisturbed_result(&server, &id, STEPS, &model, &[]).await;
        assert_eq!(attempts, 1 + points.len() as u64, "one crash at each of {points:?}");
        for point in points {
            assert!(marks.path().join(point).exists(), "{point} was reached");
        }
        let temporary: Vec<_> = std::fs::read_dir(server.job_dir(&id).join("checkpoints"))
            .expect("checkpoints")
            .flatten()
            .map(|e| e.file_name().to_string_lossy().into_owned())
            .filter(|name| name.starts_with(".tmp"))
            .collect();
        assert!(temporary.is_empty(), "temporary files of a dead writer are removed: {temporary:?}");
        row.passed("same weights, no temporary files left");
        server.stop().await;
    }
}

#[tokio::test]
async fn training_continues_if_the_disk_is_full_at_any_point_of_a_checkpoint() {
    let _permit = training_permit().await;
    let marks = tempfile::tempdir().expect("a folder");
    let frequent =
        specs::with(spec("disturbed", STEPS), json!({"checkpoint": {"every_steps": CHECKPOINT_STEPS / 2}}));
    let model = trained_weights(&frequent).await;
    let points = &CHECKPOINT_POINTS[..8];
    // A checkpoint that fails at one point does not reach later points, so each fault hits another checkpoint.
    let environment = faults(marks.path(), points, "error", 2);
    let server = start(None, environment).await;
    let id = server.submit(&frequent).await;
    let row =
        ReportRow::begin(&format!("disk full at each of {} points of writing a checkpoint", points.len()));
    let attempts = assert_undisturbed_result(&server, &id, STEPS, &model, &[]).await;
    assert_eq!(attempts, 1, "training continued");
    let logged = server.cli(&["logs", &id, "--rank", "0"]);
    for point in points {
        assert!(marks.path().join(point).exists(), "{point} was reached");
        let is_logged = logged.ok().lines().any(|line| {
            line.contains("could not be written")
                && line.contains(point)
                && line.contains("the previous checkpoint is kept")
        });
        assert!(is_logged, "{point}: {}", logged.stdout);
    }
    row.passed("training continued, the log says so each time");
    server.stop().await;
}

#[tokio::test]
async fn a_checkpoint_being_written_survives_the_death_of_another_rank() {
    let _permit = training_permit().await;
    let marks = tempfile::tempdir().expect("a folder");
    let model = undisturbed_weights(STEPS).await;
    let environment = with_slow_steps(faults(marks.path(), &["checkpoint.synced"], "hold", 2));
    let server = start(None, environment).await;
    let id = server.submit(&spec("disturbed", STEPS)).await;
    let mark = marks.path().join("checkpoint.synced");
    server.until("the second checkpoint is being written", async |_: &Server| mark.exists()).await;
    wait_for_step(&server, &id, 2 * CHECKPOINT_STEPS + 10).await;
    let (_, rank) = server.ranks(&id).remove(1);
    let mut row = ReportRow::begin("kill -9 of the last rank while rank 0 writes a checkpoint");
    signal(rank.pid, Signal::KILL);
    server
        .until("the rank has ended", async |s: &Server| s.ranks(&id).iter().all(|(rank, _)| *rank != 1))
        .await;
    // Ends the fault `hold`.
    std::fs::write(&mark, "go on").expect("the mark");
    row.wait_until_recovered(&server, &id, 1).await;
    let attempts = assert_undisturbed_result(&server, &id, STEPS, &model, &[]).await;
    let events = stored(&server, &id).await;
    let plan = events.iter().rfind(|e| e["type"] == "plan").expect("the second attempt's plan");
    // Training may have reached the next checkpoint meanwhile.
    assert!(number(&plan["start_step"]) >= 2 * CHECKPOINT_STEPS, "{plan}");
    assert_eq!(attempts, 2);
    row.passed("the checkpoint is completed and reported, and training continues from it");
    server.stop().await;
}

#[tokio::test]
async fn the_last_checkpoint_waits_for_disk_space() {
    let _permit = training_permit().await;
    let marks = tempfile::tempdir().expect("a folder");
    let environment = faults(marks.path(), &["checkpoint.model"], "error", 1);
    let server = start(None, environment).await;
    let only_last = json!({"checkpoint": {"every_steps": null, "every_epochs": 0}});
    let id = server.submit(&specs::with(spec("last", 40), only_last)).await;
    let row = ReportRow::begin("disk full at the last checkpoint, then space again");
    server.wait_for_success(&id).await;
    assert_eq!(number(&server.checkpoints(&id).await[0]["step"]), 40);
    row.passed("written once there was space");
    server.stop().await;
}

async fn assert_kills_of_the_server_lose_nothing(database: fn() -> Option<String>, kind: &str) {
    let _permit = training_permit().await;
    let marks = tempfile::tempdir().expect("a folder");

    // While reports are stored: the server dies at one point after the other during one job.
    let steps = 2 * STEPS;
    let model = undisturbed_weights(steps).await;
    let dies_at = |point: &str| with_slow_steps(faults(marks.path(), &[point], "kill", 2));
    let mut server = start(database(), dies_at(INGEST_POINTS[0])).await;
    let id = server.submit(&spec("disturbed", steps)).await;
    let mut rows = Vec::new();
    for (index, point) in INGEST_POINTS.iter().enumerate() {
        let mut row = ReportRow::begin(&format!("server killed at {point} ({kind})"));
        assert!(server.serve_ends_within(Duration::from_secs(30)).await, "{point} was not reached");
        let next = INGEST_POINTS.get(index + 1);
        server.environment = next.map_or_else(|| variables([SLOW_STEPS]), |next| dies_at(next));
        server.start_serve().await;
        row.recovered_now();
        rows.push(row);
    }
    let attempts = assert_undisturbed_result(&server, &id, steps, &model, &[]).await;
    assert_eq!(attempts, 1);
    rows.into_iter().for_each(|row| row.passed("same attempt"));
    server.stop().await;

    // While a job is created and claimed. A restarted server first claims the previous point's job, so faults in a claim occur at the
    // second claim.
    let model = undisturbed_weights(CHECKPOINT_STEPS).await;
    let dies_at =
        |point: &str| faults(marks.path(), &[point], "kill", if point.starts_with("claim") { 2 } else { 1 });
    let mut server = start(database(), dies_at(JOB_POINTS[0])).await;
    let mut jobs = 0;
    for (index, point) in JOB_POINTS.iter().enumerate() {
        let key = if point.starts_with("create") { "create" } else { *point };
        let send = async |server: &Server| -> reqwest::Result<Value> {
            let request = server.http.post(server.api("/jobs")).header("idempotency-key", key);
            request.json(&spec("disturbed", CHECKPOINT_STEPS)).send().await?.json().await
        };
        let row = ReportRow::begin(&format!("server killed at {point} ({kind})"));
        let first = send(&server).await;
        assert!(server.serve_ends_within(Duration::from_secs(30)).await, "{point} was not reached");
        let next = JOB_POINTS.get(index + 1);
        server.environment = next.map_or_else(Vec::new, |next| dies_at(next));
        server.start_serve().await;
        // Without a response, the client repeats the request with its key. At a `create` point, the next iteration repeats the request,
        // so that it kills the server at the next point.
        if !next.is_some_and(|next| next.starts_with("create")) {
            let repeated = send(&server).await.expect("a response");
            let id = repeated["id"].as_str().expect("an id");
            if let Ok(first) = first {
                assert_eq!(first["id"], *id, "the acknowledged job is stored");
            }
            assert_undisturbed_result(&server, id, CHECKPOINT_STEPS, &model, &[]).await;
            jobs += 1;
        }
        assert_eq!(server.get("/jobs").await["jobs"].as_array().map(Vec::len), Some(jobs), "jobs at {point}");
        row.passed("one job, nothing lost");
    }
    server.stop().await;
}

#[tokio::test]
async fn a_server_killed_at_any_point_of_writing_to_sqlite_loses_nothing() {
    assert_kills_of_the_server_lose_nothing(|| None, "SQLite").await;
}

#[tokio::test]
#[ignore = "slow: the same test as for SQLite, with Postgres"]
async fn slow_a_server_killed_at_any_point_of_writing_to_postgres_loses_nothing() {
    assert_kills_of_the_server_lose_nothing(|| Some(postgres::database()), "Postgres").await;
}

#[tokio::test]
async fn reports_wait_while_the_database_s_disk_is_full() {
    let _permit = training_permit().await;
    let marks = tempfile::tempdir().expect("a folder");
    let model = undisturbed_weights(STEPS).await;
    let points = ["ingest.begin", "ingest.event", "ingest.commit"];
    let mark = |point: &str, nth: u32| marks.path().join(format!("{point}.{nth}"));
    let fault = |point: &str, nth: u32| format!("{point}:error@{nth}:{}", mark(point, nth).display());
    let passes: Vec<_> = points.iter().flat_map(|point| (2..5).map(move |nth| (*point, nth))).collect();
    let all: Vec<_> = passes.iter().map(|(point, nth)| fault(point, *nth)).collect();
    let environment = with_slow_steps(vec![("LOCKSTEP_FAULT".into(), all.join(","))]);
    let server = start(None, environment).await;
    let id = server.submit(&spec("disturbed", STEPS)).await;
    let row = ReportRow::begin(&format!("the database's disk is full at each of {points:?}"));
    let attempts = assert_undisturbed_result(&server, &id, STEPS, &model, &[]).await;
    assert_eq!(attempts, 1);
    for (point, nth) in passes {
        assert!(mark(point, nth).exists(), "{point} was passed {nth} times");
    }
    row.passed("reports waited, training continued");
    server.stop().await;
}

#[tokio::test]
async fn a_claim_committed_but_reported_as_failed_starts_its_job_once() {
    let _permit = training_permit().await;
    let marks = tempfile::tempdir().expect("a folder");
    let model = undisturbed_weights(CHECKPOINT_STEPS).await;
    let points = ["claim.begin", "claim.commit", "claim.committed"];
    let environment = faults(marks.path(), &points, "error", 1);
    let server = start(None, environment).await;
    let id = server.submit(&spec("disturbed", CHECKPOINT_STEPS)).await;
    let row = ReportRow::begin(&format!("a claim fails at each of {points:?}"));
    let attempts = assert_undisturbed_result(&server, &id, CHECKPOINT_STEPS, &model, &[]).await;
    for point in points {
        assert!(marks.path().join(point).exists(), "{point} was reached");
    }
    // The attempt of the committed claim runs: no lease had to expire first.
    assert_eq!(attempts, 1);
    row.passed("the first attempt, no restart");
    server.stop().await;
}
