//! The server does not start with a database that has lost data.

use crate::{
    starting::start_error,
    test_server::{TestServer, config},
};
use lockstep_server::{
    ServeError,
    store::{
        Location,
        backup::{backup, restore},
    },
};
use std::{
    fs,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};
use tempfile::TempDir;

async fn open_sqlite(dir: TempDir) -> TestServer {
    TestServer::open(dir, |config| config.database = None).await
}

/// Returns a copy of a running server's data directory with one dataset, as after a crash.
async fn crashed_dir() -> TempDir {
    let server = open_sqlite(tempfile::tempdir().unwrap()).await;
    server.execute("INSERT INTO datasets (name, path, info, added_at) VALUES ('kept', '/x', '{}', 0)").await;
    let copy = tempfile::tempdir().unwrap();
    for file in ["lockstep.db", "lockstep.db-wal", "lockstep.db.lock", "token"] {
        fs::copy(server.dir.path().join(file), copy.path().join(file)).unwrap();
    }
    server.stop().await;
    copy
}

fn wal(dir: &TempDir) -> PathBuf {
    dir.path().join("lockstep.db-wal")
}

/// Starts a server, and checks that the dataset exists.
async fn open_complete(dir: TempDir) -> TempDir {
    let server = open_sqlite(dir).await;
    assert_eq!(server.query_number("SELECT count(*) FROM datasets").await, 1);
    server.stop().await
}

#[tokio::test]
async fn a_missing_write_ahead_log_after_an_unclean_end_is_detected() {
    let damage: [(&str, fn(&Path)); 3] = [
        ("removed", |wal| fs::remove_file(wal).unwrap()),
        ("emptied", |wal| fs::write(wal, "").unwrap()),
        ("overwritten", |wal| fs::write(wal, [0; 64]).unwrap()),
    ];
    for (kind, damage) in damage {
        let dir = crashed_dir().await;
        let log = fs::read(wal(&dir)).unwrap();
        damage(&wal(&dir));
        // Every start fails, and so does a backup, whose connection would write the log into the database.
        let location = Location::Sqlite(dir.path().join("lockstep.db"));
        for _ in 0..2 {
            let error = start_error(config(&dir)).await;
            assert!(matches!(error, ServeError::LogMissing { .. }), "{kind}: {error}");
            let message = error.to_string();
            assert!(
                message.contains("lockstep.db-wal") && message.contains("lockstep.db.lock"),
                "{kind}: {message}"
            );
            let error = backup(&location, &dir.path().join("backup")).await.unwrap_err();
            assert!(error.to_string().contains("lockstep.db-wal"), "{kind}: {error}");
        }
        fs::write(wal(&dir), log).unwrap();
        let dir = open_complete(dir).await;
        // After an orderly end there is no log, and the next start expects no log.
        assert!(!wal(&dir).exists());
        open_complete(dir).await;
    }
    // First remedy: move the database away and restore a backup.
    let (dir, undamaged) = (crashed_dir().await, crashed_dir().await);
    let location_in = |dir: &TempDir| Location::Sqlite(dir.path().join("lockstep.db"));
    backup(&location_in(&undamaged), &undamaged.path().join("backup")).await.unwrap();
    fs::remove_file(wal(&dir)).unwrap();
    fs::rename(dir.path().join("lockstep.db"), dir.path().join("damaged.db")).unwrap();
    restore(&location_in(&dir), &undamaged.path().join("backup")).await.unwrap();
    let dir = open_complete(dir).await;
    open_complete(dir).await;
    // Second remedy: remove the lock file and continue with the remaining data.
    let dir = crashed_dir().await;
    fs::remove_file(wal(&dir)).unwrap();
    fs::remove_file(dir.path().join("lockstep.db.lock")).unwrap();
    open_sqlite(dir).await.stop().await;
}

#[tokio::test]
async fn a_backup_after_a_kill_leaves_a_usable_database() {
    let dir = crashed_dir().await;
    let location = Location::Sqlite(dir.path().join("lockstep.db"));
    let report = backup(&location, &dir.path().join("backup")).await.unwrap();
    assert!(report.tables.contains(&("datasets".to_owned(), 1)), "{report:?}");
    open_complete(dir).await;
}

#[tokio::test]
async fn an_overwritten_page_is_detected_after_an_unclean_end() {
    let dir = open_complete(crashed_dir().await).await;
    let file = fs::File::options().write(true).open(dir.path().join("lockstep.db")).unwrap();
    for page in 4..8 {
        file.write_all_at(&[0xff; 4096], page * 4096).unwrap();
    }
    fs::write(dir.path().join("lockstep.db.lock"), "process 1").unwrap();
    for _ in 0..2 {
        let error = start_error(config(&dir)).await;
        assert!(matches!(error, ServeError::DatabaseDamaged { .. }), "{error}");
        assert!(error.to_string().contains("lockstep restore"), "{error}");
    }
}

#[tokio::test]
async fn an_empty_database_in_a_used_data_directory_is_refused() {
    let dir = open_complete(crashed_dir().await).await;
    let job = lockstep_protocol::JobId::generate().to_string();
    fs::create_dir_all(dir.path().join("jobs").join(&job)).unwrap();
    let dir = open_complete(dir).await;
    let (database, aside) = (dir.path().join("lockstep.db"), dir.path().join("aside.db"));
    fs::rename(&database, &aside).unwrap();
    for _ in 0..2 {
        let error = start_error(config(&dir)).await;
        assert!(matches!(error, ServeError::DatabaseEmpty { .. }), "{error}");
        assert!(
            error.to_string().contains(&job) && error.to_string().contains("lockstep restore"),
            "{error}"
        );
    }
    fs::rename(&aside, &database).unwrap();
    let dir = open_complete(dir).await;
    // The server starts with an empty database after the folder of jobs is moved away.
    fs::remove_file(&database).unwrap();
    fs::rename(dir.path().join("jobs"), dir.path().join("jobs.old")).unwrap();
    open_sqlite(dir).await.stop().await;
}
