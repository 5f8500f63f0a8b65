//! Properties of both databases: one server at a time, backups, and temporary failures.

use crate::{
    agent::{Agent, hello, losses, running},
    postgres::{self, Cluster},
    starting::start_error_with_database,
    test_server::{Stream, TestServer, assert_refused},
};
use lockstep_protocol::agent::{AttemptEvent, CheckpointInfo, Ending, Source, ToAgent};
use lockstep_server::{
    ServeError,
    store::{
        Location,
        backup::{BackupError, backup, restore},
    },
};
use serde_json::Value;
use sqlx::{Connection, PgConnection};

#[tokio::test]
async fn a_second_server_on_the_same_database_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = format!("sqlite://{}", folder.path().join("shared.db").display());
    for url in [file, postgres::database()] {
        let server = TestServer::with(|c| c.database = Some(url.clone())).await;
        let error = start_error_with_database(&url).await;
        assert!(matches!(error, ServeError::DatabaseInUse { .. }), "{error}");
        let message = error.to_string();
        assert!(
            message.contains("in use by another lockstep server (") && message.contains("--database"),
            "{message}"
        );
        // The first server continues, and releases the database when it stops.
        assert_eq!(server.get("/jobs").await.0, 200);
        server.stop().await;
        TestServer::with(|c| c.database = Some(url)).await.stop().await;
    }
}

#[tokio::test]
async fn postgres_start_errors_name_the_cause_but_no_password() {
    let url = postgres::database();
    let nowhere = url.replace("lockstep@", "lockstep:secret@").replace("/test", "/missing");
    let message = start_error_with_database(&nowhere).await.to_string();
    assert!(message.contains("does not exist; create it first") && !message.contains("secret"), "{message}");

    TestServer::with(|c| c.database = Some(url.clone())).await.stop().await;
    let mut db = PgConnection::connect(&url).await.unwrap();
    sqlx::query("INSERT INTO _sqlx_migrations SELECT 99999, description, installed_on, success, checksum, execution_time FROM _sqlx_migrations LIMIT 1")
        .execute(&mut db)
        .await
        .unwrap();
    let error = start_error_with_database(&url).await;
    assert!(matches!(error, ServeError::DatabaseTooNew { found: 99999, .. }), "{error}");
}

/// Returns the data of a job, and the datasets, as clients read them.
async fn read_all(server: &TestServer, id: &str) -> Vec<Value> {
    let mut data = server.stored_events(id).await;
    for path in ["", "/metrics?name=loss", "/logs", "/checkpoints"] {
        data.push(server.get(&format!("/jobs/{id}{path}")).await.1);
    }
    data.push(server.get("/datasets").await.1);
    data
}

#[tokio::test]
async fn a_backup_of_a_running_server_is_restored_into_either_database() {
    let files = tempfile::tempdir().unwrap();
    let sqlite = |name: &str| format!("sqlite://{}", files.path().join(name).display());
    for (url, restored) in
        [(sqlite("one.db"), "restored-one.db"), (postgres::database(), "restored-postgres.db")]
    {
        let server = TestServer::with(|c| c.database = Some(url.clone())).await;
        let mut agent = Agent::join_with_dataset(&server, 2).await;
        let (id, attempt) = agent.start_job(&server, |spec| spec["name"] = "ä \u{1f600} \"'".into()).await;
        let mut records = vec![running(100, 0), losses(0, 1..=70)];
        // 0.1 + 0.2 needs all digits: the restored number must have the same bits.
        records.push(AttemptEvent::Checkpoint(CheckpointInfo {
            epoch: 1,
            step: 50,
            val_accuracy: Some(0.1 + 0.2),
            best: true,
            size_bytes: 1 << 40,
            ..CheckpointInfo::default()
        }));
        agent.report(&attempt, Source::Rank(0), 0, records).await;
        let before = read_all(&server, &id).await;
        let file = files.path().join("backup");
        let report = backup(&Location::parse(&url).unwrap(), &file).await.unwrap();
        assert!(report.tables.iter().any(|(name, rows)| name == "events" && *rows > 3), "{report:?}");
        assert_eq!(report.size_bytes, std::fs::metadata(&file).unwrap().len());
        server.stop().await;

        for target in [sqlite(restored), postgres::database()] {
            let location = Location::parse(&target).unwrap();
            assert_eq!(restore(&location, &file).await.unwrap().tables, report.tables);
            // A backup is restored only into an empty database.
            let error = loop {
                match restore(&location, &file).await.unwrap_err() {
                    // A child process that another test has just forked may still hold the lock.
                    BackupError::Open(ServeError::DatabaseInUse { .. }) => tokio::task::yield_now().await,
                    other => break other,
                }
            };
            assert!(matches!(error, BackupError::NotEmpty(_)), "{error}");
            let server = TestServer::with(|c| c.database = Some(target.clone())).await;
            assert_eq!(read_all(&server, &id).await, before, "restored into {target}");
            // The running attempt may still write. The fencing token of the next attempt is greater.
            let mut agent = Agent::connect(&server, hello("a", 2, vec![attempt.clone()])).await.unwrap();
            assert!(agent.welcome.1.is_empty() && agent.welcome.0[0].records == 3, "{:?}", agent.welcome);
            agent.report(&attempt, Source::Rank(0), 3, vec![losses(0, 71..=80)]).await;
            server.order(&id, "cancel").await;
            agent.expect_stop().await;
            agent.end(&attempt, Ending::Stopped).await;
            server.order(&id, "retry").await;
            let next = agent.expect_start().await;
            assert!(next.attempt.fencing_token > attempt.fencing_token, "{next:?}");
            assert_eq!(next.resume.as_deref(), Some("1-50"));
            server.stop().await;
            std::fs::remove_file(files.path().join(restored)).ok();
        }

        // Nothing is restored from a truncated or changed file.
        let complete = std::fs::read(&file).unwrap();
        let empty = Location::parse(&sqlite("empty.db")).unwrap();
        let middle = complete.len() / 2;
        let mut changed = complete.clone();
        changed[middle] ^= 1;
        for bytes in [&complete[..middle], &complete[..complete.len() - 2], &changed[..], b"{}\n", b""] {
            std::fs::write(&file, bytes).unwrap();
            let error = restore(&empty, &file).await.unwrap_err();
            assert!(matches!(error, BackupError::Incomplete { .. }), "{error}");
        }
        assert!(!files.path().join("empty.db").exists());
    }
}

#[tokio::test]
async fn requests_fail_while_postgres_is_down_and_nothing_is_lost() {
    let mut cluster = Cluster::new(false);
    let url = cluster.database("away");
    let server = TestServer::with(|c| c.database = Some(url)).await;
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    let (id, attempt) = agent.start_job(&server, |_| {}).await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), losses(0, 1..=10)]).await;
    // How Postgres ends, and the first step and the record number of the report that the agent sends meanwhile.
    for (is_killed, first_step, first) in [(false, 11, 2), (true, 21, 3)] {
        let mut watching: Stream = server.stream(&id, 0).await;
        watching.until(|frame| frame["type"] == "live").await;
        if is_killed {
            cluster.kill()
        } else {
            cluster.stop()
        }
        assert_refused(server.get("/jobs").await, 503, "database");
        assert_eq!(server.get_text("/readyz").await.0, 503);
        assert_eq!(server.get_text("/healthz").await.0, 200, "the process is healthy");
        let last_step = first_step + 9;
        agent.send_report(&attempt, Source::Rank(0), first, vec![losses(0, first_step..=last_step)]).await;
        cluster.start();
        // The server stores the report as soon as the database responds, then publishes and acknowledges it.
        watching
            .until(|frame| frame["steps"].as_array().is_some_and(|steps| steps.contains(&last_step.into())))
            .await;
        let response = agent.next().await;
        assert!(matches!(&response, Some(ToAgent::Ack(ack)) if ack.records == first + 1), "{response:?}");
        assert_eq!(server.get_text("/readyz").await.0, 200);
    }
    let events = server.stored_events(&id).await;
    let numbers: Vec<_> = events.iter().map(|e| e["seq"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (1..=numbers.len() as u64).collect::<Vec<_>>());
    let (_, metrics) = server.get(&format!("/jobs/{id}/metrics?name=loss&ranks=0")).await;
    let steps: Vec<u64> = serde_json::from_value(metrics["series"][0]["steps"].clone()).unwrap();
    assert_eq!(steps, (1..=30).collect::<Vec<_>>());
    server.stop().await;
}
