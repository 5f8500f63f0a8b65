//! Unreachable and busy databases, and `kill -9` of the server and of Postgres under load.

use crate::{
    judge::{
        ReportRow, SLOW_STEPS, STEPS, assert_undisturbed_result, log_bytes, spec, start, submit_and_train,
        undisturbed_weights, variables, wait_for_step,
    },
    postgres::Cluster,
    server::{Server, training_permit},
};
use sqlx::{ConnectOptions, sqlite::SqliteConnectOptions};
use std::time::{Duration, Instant};

#[tokio::test]
#[ignore = "slow: 15 s without a database"]
async fn slow_ranks_train_on_while_postgres_is_away_for_15_s() {
    let _permit = training_permit().await;
    let (secs, steps) = (15, 6 * STEPS);
    let mut cluster = Cluster::new(true);
    let url = cluster.database("away");
    let server = start(Some(url), variables([SLOW_STEPS])).await;
    let model = undisturbed_weights(steps).await;
    let id = submit_and_train(&server, steps).await;
    let mut row = ReportRow::begin(&format!("Postgres away for {secs} s"));
    cluster.stop();
    let before = log_bytes(&server, &id);
    let began = Instant::now();
    let meanwhile = spec("meanwhile", 5);
    let (response, refused) =
        tokio::join!(server.request(reqwest::Method::GET, "/jobs", None), server.post("/jobs", &meanwhile));
    let detail = response.problem(503)["detail"].to_string();
    assert!(detail.contains("database"), "{detail}");
    refused.problem(503);
    tokio::time::sleep(Duration::from_secs(secs).saturating_sub(began.elapsed())).await;
    assert!(log_bytes(&server, &id) > before, "the ranks continued to train");
    cluster.start();
    row.recovered_now();
    let attempts = assert_undisturbed_result(&server, &id, steps, &model, &[]).await;
    assert_eq!(attempts, 1);
    row.passed("503 with a reason, ranks trained on, same attempt");
    server.stop().await;
}

/// Another process holds the database's write lock, as a person with `sqlite3` or a backup program may.
#[tokio::test]
async fn ranks_train_on_while_another_process_locks_sqlite() {
    let _permit = training_permit().await;
    let server = start(None, variables([SLOW_STEPS])).await;
    let model = undisturbed_weights(STEPS).await;
    let id = submit_and_train(&server, STEPS).await;
    let file = server.data_dir().join("lockstep.db");
    let mut other = SqliteConnectOptions::new().filename(file).connect().await.expect("the database");
    let mut row = ReportRow::begin("SQLite busy for longer than a request waits");
    sqlx::query("BEGIN IMMEDIATE").execute(&mut other).await.expect("the write lock");
    let before = log_bytes(&server, &id);
    let refused = server.post("/jobs", &spec("meanwhile", 5)).await;
    let detail = refused.problem(503)["detail"].to_string();
    assert!(detail.contains("database"), "{detail}");
    assert_eq!(server.job(&id).await["state"], "running", "stored events can be read");
    assert!(log_bytes(&server, &id) > before, "the ranks continued to train");
    sqlx::query("ROLLBACK").execute(&mut other).await.expect("the write lock is released");
    row.recovered_now();
    let attempts = assert_undisturbed_result(&server, &id, STEPS, &model, &[]).await;
    assert_eq!(attempts, 1);
    assert_eq!(
        server.get("/jobs").await["jobs"].as_array().map(Vec::len),
        Some(1),
        "the refused job is not stored"
    );
    row.passed("503 with a reason, pages are shown, ranks trained on, same attempt");
    server.stop().await;
}

/// Runs jobs one after the other and calls `kill` about every second, 50 times in all.
async fn kill_50_times(name: &str, mut server: Server, mut kill: impl AsyncFnMut(&mut Server)) {
    let steps = 2 * STEPS;
    let model = undisturbed_weights(steps).await;
    let mut row = ReportRow::begin(&format!("{name} under load, 50 times"));
    let mut killed = 0;
    let mut longest_outage = Duration::ZERO;
    let mut jobs = 0;
    while killed < 50 {
        let id = server.submit(&spec("disturbed", steps)).await;
        jobs += 1;
        for step in [20, 60, 110] {
            let job = server.job(&id).await;
            if killed == 50 || crate::server::state_of(&job).is_final() {
                break;
            }
            wait_for_step(&server, &id, step).await;
            let began = Instant::now();
            kill(&mut server).await;
            longest_outage = longest_outage.max(began.elapsed());
            killed += 1;
        }
        let attempts = assert_undisturbed_result(&server, &id, steps, &model, &[]).await;
        assert_eq!(attempts, 1, "no attempt was lost");
    }
    row.recovered_now();
    row.passed(&format!("{killed} kills in {jobs} jobs, back within {:.1} s", longest_outage.as_secs_f64()));
    server.stop().await;
}

#[tokio::test]
#[ignore = "takes minutes"]
async fn kill_50_times_the_server_on_sqlite() {
    let _permit = training_permit().await;
    let server = start(None, Vec::new()).await;
    kill_50_times("kill -9 of the server and its SQLite", server, async |server: &mut Server| {
        server.kill_serve();
        server.start_serve().await;
    })
    .await;
}

#[tokio::test]
#[ignore = "takes minutes"]
async fn kill_50_times_the_server_on_postgres() {
    let _permit = training_permit().await;
    let cluster = Cluster::new(true);
    let url = cluster.database("again");
    let server = start(Some(url), Vec::new()).await;
    kill_50_times("kill -9 of the server on Postgres", server, async |server: &mut Server| {
        server.kill_serve();
        server.start_serve().await;
    })
    .await;
}

#[tokio::test]
#[ignore = "takes minutes"]
async fn kill_50_times_postgres() {
    let _permit = training_permit().await;
    let mut cluster = Cluster::new(true);
    let url = cluster.database("again");
    let server = start(Some(url), Vec::new()).await;
    kill_50_times("kill -9 of Postgres", server, async |server: &mut Server| {
        cluster.kill();
        cluster.start();
        let ready = async |s: &Server| {
            s.http.get(format!("{}/readyz", s.url)).send().await.is_ok_and(|a| a.status().is_success())
        };
        server.until("the server is ready again", ready).await;
    })
    .await;
}
