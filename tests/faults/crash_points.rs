//! Every crash point inside writing a checkpoint and inside the database's transactions, one after the other, by
//! `LOCKSTEP_FAULT`; and a disk that is full at each of them.

use crate::{
    judge::{EVERY, Row, SLOW_STEPS, STEPS, judge, runs_past, spec, trained, undisturbed, with_pictures},
    postgres,
    server::{Agents, Server, number, signal, turn},
    socket::stored,
    specs,
};
use lockstep_protocol::fault::{CHECKPOINT_POINTS, INGEST_POINTS, JOB_POINTS};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::time::Duration;

const LOCAL: Agents = Agents::Local { cpu_slots: 2 };

/// Steps of a job that a point of the program disturbs, and not the test: the third checkpoint is in its middle.
const FEW_STEPS: u64 = 4 * EVERY;

/// Faults that strike once each, with their marks in `folder`; `nth` says how often a point is passed before.
fn faults(folder: &std::path::Path, points: &[&str], action: &str, nth: u32) -> Vec<(String, String)> {
    let each = |point: &&str| format!("{point}:{action}@{nth}:{}", folder.join(point).display());
    vec![("LOCKSTEP_FAULT".into(), points.iter().map(each).collect::<Vec<_>>().join(","))]
}

/// The same, in ranks whose steps take at least 20 ms.
fn with_slow_steps(mut environment: Vec<(String, String)>) -> Vec<(String, String)> {
    environment[0].1 += &format!(",{}", SLOW_STEPS.1);
    environment
}

#[tokio::test]
async fn a_rank_may_die_at_every_step_of_writing_a_checkpoint() {
    let _turn = turn().await;
    let marks = tempfile::tempdir().expect("a folder");
    let model = undisturbed(FEW_STEPS).await;
    for point in CHECKPOINT_POINTS {
        // Its third time, so that there is a checkpoint to go back to; when one is removed, there are.
        let nth = if point == "checkpoint.remove" { 1 } else { 3 };
        let environment = faults(marks.path(), &[point], "kill", nth);
        let server = with_pictures(Server::start_on(LOCAL, None, environment).await).await;
        let id = server.submit(&spec("disturbed", FEW_STEPS)).await;
        runs_past(&server, &id, EVERY).await;
        let row = Row::begin(&format!("kill -9 at {point}"));
        judge(&server, &id, FEW_STEPS, &model, &[]).await;
        assert_eq!(number(&server.job(&id).await["attempt"]), 2, "it was struck once at {point}");
        assert!(marks.path().join(point).exists(), "{point} was reached");
        let left: Vec<_> = std::fs::read_dir(server.job_dir(&id).join("checkpoints"))
            .expect("checkpoints")
            .flatten()
            .map(|e| e.file_name().to_string_lossy().into_owned())
            .filter(|name| name.starts_with(".tmp"))
            .collect();
        assert!(left.is_empty(), "what a dead writer left is removed: {left:?}");
        row.passed("same weights, nothing half done left");
        server.stop().await;
    }
}

#[tokio::test]
async fn the_disk_may_be_full_at_every_step_of_writing_a_checkpoint() {
    let _turn = turn().await;
    let marks = tempfile::tempdir().expect("a folder");
    let often = specs::with(spec("disturbed", FEW_STEPS), json!({"checkpoint": {"every_steps": EVERY / 4}}));
    let model = trained(&often).await;
    let points = &CHECKPOINT_POINTS[..8];
    // A checkpoint that fails at a point does not get to those after it: so one after the other, each at another one.
    let environment = faults(marks.path(), points, "error", 2);
    let server = with_pictures(Server::start_on(LOCAL, None, environment).await).await;
    let id = server.submit(&often).await;
    let row = Row::begin(&format!("disk full at each of {} points of writing a checkpoint", points.len()));
    judge(&server, &id, FEW_STEPS, &model, &[]).await;
    assert_eq!(number(&server.job(&id).await["attempt"]), 1, "training continued");
    let logged = server.cli(&["logs", &id, "--rank", "0"]);
    for point in points {
        assert!(marks.path().join(point).exists(), "{point} was reached");
        let response = logged.ok().lines().any(|line| {
            line.contains("could not be written")
                && line.contains(point)
                && line.contains("the previous checkpoint is kept")
        });
        assert!(response, "{point}: {}", logged.stdout);
    }
    row.passed("training continued, the log says so each time");
    server.stop().await;
}

#[tokio::test]
async fn a_checkpoint_in_progress_when_another_rank_dies_is_used() {
    let _turn = turn().await;
    let marks = tempfile::tempdir().expect("a folder");
    let model = undisturbed(STEPS).await;
    let environment = faults(marks.path(), &["checkpoint.synced"], "hold", 2);
    let server = with_pictures(Server::start_on(LOCAL, None, environment).await).await;
    let id = server.submit(&spec("disturbed", STEPS)).await;
    let mark = marks.path().join("checkpoint.synced");
    server.until("the second checkpoint is being written", async |_: &Server| mark.exists()).await;
    runs_past(&server, &id, 2 * EVERY + 10).await;
    let (_, rank) = server.ranks(&id).remove(1);
    let mut row = Row::begin("kill -9 of the last rank while rank 0 writes a checkpoint");
    signal(rank.pid, Signal::KILL);
    server
        .until("the rank is gone", async |s: &Server| s.ranks(&id).iter().all(|(rank, _)| *rank != 1))
        .await;
    std::fs::write(&mark, "go on").expect("its mark");
    row.until_mended(&server, &id, 1).await;
    judge(&server, &id, STEPS, &model, &[]).await;
    let events = stored(&server, &id).await;
    let plan = events.iter().rfind(|e| e["type"] == "plan").expect("the second attempt's plan");
    // Training may have got to the next one meanwhile, which is then written, too.
    assert!(number(&plan["start_step"]) >= 2 * EVERY, "{plan}");
    assert_eq!(number(&server.job(&id).await["attempt"]), 2);
    row.passed("it is finished, told of and gone on from");
    server.stop().await;
}

#[tokio::test]
async fn the_last_checkpoint_waits_for_disk_space() {
    let _turn = turn().await;
    let marks = tempfile::tempdir().expect("a folder");
    let environment = faults(marks.path(), &["checkpoint.model"], "error", 1);
    let server = with_pictures(Server::start_on(LOCAL, None, environment).await).await;
    let only_last = json!({"checkpoint": {"every_steps": null, "every_epochs": 0}});
    let id = server.submit(&specs::with(spec("last", 40), only_last)).await;
    let row = Row::begin("disk full at the last checkpoint, then room");
    server.succeeded(&id).await;
    assert_eq!(number(&server.checkpoints(&id).await[0]["step"]), 40);
    row.passed("waited for and written");
    server.stop().await;
}

async fn server_dies_at_every_point(database: fn() -> Option<String>, kind: &str) {
    let _turn = turn().await;
    let marks = tempfile::tempdir().expect("a folder");
    let model = undisturbed(FEW_STEPS).await;

    // While reports are stored: one job, struck again and again.
    for point in INGEST_POINTS {
        // Reports come a few times a second: the third is in the middle.
        let environment = with_slow_steps(faults(marks.path(), &[point], "kill", 3));
        let mut server = with_pictures(Server::start_on(LOCAL, database(), environment).await).await;
        let id = server.submit(&spec("disturbed", FEW_STEPS)).await;
        let mut row = Row::begin(&format!("server killed at {point} ({kind})"));
        assert!(server.serve_died(Duration::from_secs(30)).await, "{point} was not reached");
        server.serve_again().await;
        row.mended_now();
        judge(&server, &id, FEW_STEPS, &model, &[]).await;
        assert_eq!(number(&server.job(&id).await["attempt"]), 1);
        row.passed("same attempt");
        server.stop().await;
        std::fs::remove_file(marks.path().join(point)).expect("its mark");
    }

    // While a job is made and given out.
    let model = undisturbed(EVERY).await;
    for point in JOB_POINTS {
        let environment = faults(marks.path(), &[point], "kill", 1);
        let mut server = with_pictures(Server::start_on(LOCAL, database(), environment).await).await;
        let send = |server: &Server| {
            let request = server.http.post(server.api("/jobs")).header("idempotency-key", "mine");
            request.json(&spec("disturbed", EVERY)).send()
        };
        let row = Row::begin(&format!("server killed at {point} ({kind})"));
        let first = send(&server).await;
        assert!(server.serve_died(Duration::from_secs(30)).await, "{point} was not reached");
        server.serve_again().await;
        // The client does what clients do that had no answer: it asks again with its key.
        let again = send(&server).await.expect("an answer").json::<Value>().await.expect("JSON");
        let id = again["id"].as_str().expect("an id").to_owned();
        if let Ok(first) = first
            && let Ok(first) = first.json::<Value>().await
        {
            assert_eq!(first["id"], *id, "what was acknowledged is there");
        }
        judge(&server, &id, EVERY, &model, &[]).await;
        assert_eq!(server.get("/jobs").await["jobs"].as_array().map(Vec::len), Some(1), "one job");
        row.passed("one job, nothing lost");
        server.stop().await;
        std::fs::remove_file(marks.path().join(point)).expect("its mark");
    }
}

#[tokio::test]
async fn the_server_may_die_at_every_point_of_writing_to_sqlite() {
    server_dies_at_every_point(|| None, "SQLite").await;
}

#[tokio::test]
#[ignore = "slow: the same once more"]
async fn slow_the_server_may_die_at_every_point_of_writing_to_postgres() {
    server_dies_at_every_point(|| Some(postgres::database()), "Postgres").await;
}

#[tokio::test]
async fn the_database_s_disk_may_be_full_for_a_while() {
    let _turn = turn().await;
    let marks = tempfile::tempdir().expect("a folder");
    let model = undisturbed(FEW_STEPS).await;
    for point in ["ingest.begin", "ingest.event", "ingest.commit"] {
        let struck = |time: u32| marks.path().join(format!("{point}.{time}"));
        let fault = |time: u32| format!("{point}:error@{time}:{}", struck(time).display());
        let faults = vec![("LOCKSTEP_FAULT".into(), (2..5).map(fault).collect::<Vec<_>>().join(","))];
        // Reports come a few times a second: the job lasts until the fourth.
        let environment = with_slow_steps(faults);
        let server = with_pictures(Server::start_on(LOCAL, None, environment).await).await;
        let id = server.submit(&spec("disturbed", FEW_STEPS)).await;
        let row = Row::begin(&format!("the database's disk is full at {point}"));
        judge(&server, &id, FEW_STEPS, &model, &[]).await;
        assert_eq!(number(&server.job(&id).await["attempt"]), 1);
        assert!((2..5).all(|time| struck(time).exists()), "{point} was reached each time");
        row.passed("reports waited, training continued");
        server.stop().await;
    }
}

#[tokio::test]
async fn a_claim_committed_but_reported_as_failed_starts_its_job_once() {
    let _turn = turn().await;
    let marks = tempfile::tempdir().expect("a folder");
    let model = undisturbed(EVERY).await;
    for point in ["claim.begin", "claim.commit", "claim.committed"] {
        let environment = faults(marks.path(), &[point], "error", 1);
        let server = with_pictures(Server::start_on(LOCAL, None, environment).await).await;
        let id = server.submit(&spec("disturbed", EVERY)).await;
        let row = Row::begin(&format!("a claim fails at {point}"));
        judge(&server, &id, EVERY, &model, &[]).await;
        assert!(marks.path().join(point).exists(), "{point} was reached");
        // Of a claim that was carried out the attempt is the one that runs: no lease had to run out first.
        assert_eq!(number(&server.job(&id).await["attempt"]), 1);
        row.passed("the first attempt, no restart");
        server.stop().await;
    }
}
