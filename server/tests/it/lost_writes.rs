//! A database that lacks what it had is named, and does not start as if nothing were missing.

use crate::test_server::{TIMEOUT, TestServer, config};
use lockstep_server::{
    ServeError, serve,
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

async fn refused(dir: &TempDir) -> ServeError {
    let ready = |_| panic!("it must not start");
    let served = serve(config(dir), ready, std::future::pending());
    let error = tokio::time::timeout(TIMEOUT, served).await.unwrap().unwrap_err();
    assert_eq!(error.exit_code(), 2, "{error}");
    error
}

async fn on_sqlite(dir: TempDir) -> TestServer {
    TestServer::open(dir, |config| config.database = None).await
}

/// What a server that was killed has left: its data directory with a dataset in the database.
async fn killed() -> TempDir {
    let server = on_sqlite(tempfile::tempdir().unwrap()).await;
    server.execute("INSERT INTO datasets (name, path, info, added_at) VALUES ('kept', '/x', '{}', 0)").await;
    let left = tempfile::tempdir().unwrap();
    for file in ["lockstep.db", "lockstep.db-wal", "lockstep.db.lock", "token"] {
        fs::copy(server.dir.path().join(file), left.path().join(file)).unwrap();
    }
    server.stop().await;
    left
}

fn wal(dir: &TempDir) -> PathBuf {
    dir.path().join("lockstep.db-wal")
}

async fn starts_with_all(dir: TempDir) -> TempDir {
    let server = on_sqlite(dir).await;
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
    for (how, damage) in damage {
        let dir = killed().await;
        let log = fs::read(wal(&dir)).unwrap();
        damage(&wal(&dir));
        // However often it is tried, and also by a backup, whose connection would write the log into the database.
        let location = Location::Sqlite(dir.path().join("lockstep.db"));
        for _ in 0..2 {
            let error = refused(&dir).await;
            assert!(matches!(error, ServeError::LogMissing { .. }), "{how}: {error}");
            let words = error.to_string();
            assert!(
                words.contains("lockstep.db-wal") && words.contains("lockstep.db.lock"),
                "{how}: {words}"
            );
            let error = backup(&location, &dir.path().join("backup")).await.unwrap_err();
            assert!(error.to_string().contains("lockstep.db-wal"), "{how}: {error}");
        }
        fs::write(wal(&dir), log).unwrap();
        let dir = starts_with_all(dir).await;
        // It was closed in order: there is no log, and none is missed.
        assert!(!wal(&dir).exists());
        starts_with_all(dir).await;
    }
    // With a backup, once the database is out of the way.
    let (dir, saved) = (killed().await, killed().await);
    let at = |dir: &TempDir| Location::Sqlite(dir.path().join("lockstep.db"));
    backup(&at(&saved), &saved.path().join("backup")).await.unwrap();
    fs::remove_file(wal(&dir)).unwrap();
    fs::rename(dir.path().join("lockstep.db"), dir.path().join("damaged.db")).unwrap();
    restore(&at(&dir), &saved.path().join("backup")).await.unwrap();
    let dir = starts_with_all(dir).await;
    starts_with_all(dir).await;
    // With what is left, where somebody says so.
    let dir = killed().await;
    fs::remove_file(wal(&dir)).unwrap();
    fs::remove_file(dir.path().join("lockstep.db.lock")).unwrap();
    on_sqlite(dir).await.stop().await;
}

#[tokio::test]
async fn a_backup_after_a_kill_leaves_a_usable_database() {
    let dir = killed().await;
    let location = Location::Sqlite(dir.path().join("lockstep.db"));
    let done = backup(&location, &dir.path().join("backup")).await.unwrap();
    assert!(done.tables.contains(&("datasets".to_owned(), 1)), "{done:?}");
    starts_with_all(dir).await;
}

#[tokio::test]
async fn an_overwritten_page_is_detected_after_an_unclean_end() {
    let dir = starts_with_all(killed().await).await;
    let file = fs::File::options().write(true).open(dir.path().join("lockstep.db")).unwrap();
    for page in 4..8 {
        file.write_all_at(&[0xff; 4096], page * 4096).unwrap();
    }
    fs::write(dir.path().join("lockstep.db.lock"), "process 1").unwrap();
    for _ in 0..2 {
        let error = refused(&dir).await;
        assert!(matches!(error, ServeError::DatabaseDamaged { .. }), "{error}");
        assert!(error.to_string().contains("lockstep restore"), "{error}");
    }
}

#[tokio::test]
async fn an_empty_database_in_a_used_data_directory_is_refused() {
    let dir = starts_with_all(killed().await).await;
    let job = lockstep_protocol::JobId::generate().to_string();
    fs::create_dir_all(dir.path().join("jobs").join(&job)).unwrap();
    let dir = starts_with_all(dir).await;
    let (database, aside) = (dir.path().join("lockstep.db"), dir.path().join("aside.db"));
    fs::rename(&database, &aside).unwrap();
    for _ in 0..2 {
        let error = refused(&dir).await;
        assert!(matches!(error, ServeError::DatabaseEmpty { .. }), "{error}");
        assert!(
            error.to_string().contains(&job) && error.to_string().contains("lockstep restore"),
            "{error}"
        );
    }
    fs::rename(&aside, &database).unwrap();
    let dir = starts_with_all(dir).await;
    // Where somebody says that it is to begin anew, it does.
    fs::remove_file(&database).unwrap();
    fs::rename(dir.path().join("jobs"), dir.path().join("jobs.old")).unwrap();
    on_sqlite(dir).await.stop().await;
}
