//! A server that cannot start: its error says what to change, its exit status is 2, and it changes no file.

use crate::test_server::{TIMEOUT, TestServer, config};
use lockstep_server::{ServeConfig, ServeError, serve};
use sqlx::{Connection, SqliteConnection};
use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
};

/// Returns the error of a server that must not start.
pub(crate) async fn start_error(config: ServeConfig) -> ServeError {
    let ready = |_| panic!("the server must not start");
    let error = tokio::time::timeout(TIMEOUT, serve(config, ready, std::future::pending()))
        .await
        .unwrap()
        .unwrap_err();
    assert_eq!(error.exit_code(), 2, "{error}");
    error
}

/// Returns the error of a server with a new data directory and this database, which must not start.
pub(crate) async fn start_error_with_database(url: &str) -> ServeError {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(&dir);
    config.database = Some(url.into());
    start_error(config).await
}

#[tokio::test]
async fn a_data_directory_has_one_server() {
    let server = TestServer::new().await;
    let mut second = config(&server.dir);
    second.listen = server.address;
    let error = start_error(second).await.to_string();
    assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
    let dir = server.stop().await;
    TestServer::open(dir, |_| {}).await.stop().await;
}

#[tokio::test]
async fn an_invalid_database_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(
        dir.path().join("lockstep.db"),
        "not a database, but as long as the header of a database".repeat(30),
    )
    .unwrap();
    let error = start_error(config(&dir)).await.to_string();
    assert!(error.contains("lockstep.db"), "{error}");
    for url in ["mysql://x", "sqlite://", "postgres://localhost:port/lockstep"] {
        assert!(matches!(start_error_with_database(url).await, ServeError::DatabaseUrl(..)), "{url}");
    }
}

#[tokio::test]
async fn a_database_has_one_server_for_all_its_paths() {
    let server = TestServer::with(|c| c.database = None).await;
    let url = |path: &Path| format!("sqlite://{}", path.display());
    let file = server.dir.path().join("lockstep.db");
    let other = tempfile::tempdir().unwrap();
    // A link to the file, a link to a link, a link to its folder, and a path with `..`.
    symlink(&file, other.path().join("link.db")).unwrap();
    symlink("link.db", other.path().join("twice.db")).unwrap();
    symlink(server.dir.path(), other.path().join("folder")).unwrap();
    for name in ["link.db", "twice.db", "folder/lockstep.db", "folder/jobs/../lockstep.db"] {
        let error = start_error_with_database(&url(&other.path().join(name))).await;
        assert!(matches!(error, ServeError::DatabaseInUse { .. }), "{name}: {error}");
    }
    // A hard link to the file has another lock file next to it.
    let hard = server.dir.path().join("hard.db");
    fs::hard_link(&file, &hard).unwrap();
    let error = start_error_with_database(&url(&hard)).await;
    assert!(matches!(error, ServeError::DatabaseInUse { .. }), "{error}");
    server.stop().await;
    // A dangling link: the server creates the database and its lock at the target.
    let target = other.path().join("real.db");
    symlink(&target, other.path().join("dangling.db")).unwrap();
    let dangling = url(&other.path().join("dangling.db"));
    let server = TestServer::with(|c| c.database = Some(dangling)).await;
    assert!(other.path().join("real.db.lock").exists() && !other.path().join("dangling.db.lock").exists());
    let error = start_error_with_database(&url(&target)).await;
    assert!(matches!(error, ServeError::DatabaseInUse { .. }), "{error}");
    server.stop().await;
}

#[tokio::test]
async fn lock_files_must_not_be_links() {
    let elsewhere = tempfile::tempdir().unwrap();
    let victim = elsewhere.path().join("victim");
    fs::write(&victim, "another file").unwrap();
    for name in ["server.lock", "lockstep.db.lock"] {
        let dir = tempfile::tempdir().unwrap();
        symlink(&victim, dir.path().join(name)).unwrap();
        let mut config = config(&dir);
        config.database = None;
        let error = start_error(config).await.to_string();
        assert!(error.contains("symbolic link") && error.contains(name), "{error}");
        assert_eq!(fs::read_to_string(&victim).unwrap(), "another file");
    }
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[tokio::test]
async fn permissions_are_restricted_except_of_folders_with_other_files() {
    let dir = tempfile::tempdir().unwrap();
    let widen_permissions =
        |path: &Path| fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    widen_permissions(dir.path());
    let dir = TestServer::open(dir, |c| c.database = None).await.stop().await;
    let path = |name: &str| dir.path().join(name);
    assert_eq!((mode(dir.path()), mode(&path("jobs"))), (0o700, 0o700));
    assert_eq!((mode(&path("lockstep.db")), mode(&path("server.lock"))), (0o600, 0o600));
    // A directory whose permissions were widened.
    widen_permissions(dir.path());
    fs::set_permissions(path("lockstep.db"), fs::Permissions::from_mode(0o644)).unwrap();
    let dir = TestServer::open(dir, |c| c.database = None).await.stop().await;
    assert_eq!((mode(dir.path()), mode(&dir.path().join("lockstep.db"))), (0o700, 0o600));

    // In a folder with other files, the server restricts only its own files.
    let folder = tempfile::tempdir().unwrap();
    widen_permissions(folder.path());
    fs::write(folder.path().join("other file"), "").unwrap();
    let folder = TestServer::open(folder, |c| c.database = None).await.stop().await;
    // A second start has the same result.
    let folder = TestServer::open(folder, |c| c.database = None).await.stop().await;
    assert_eq!((mode(folder.path()), mode(&folder.path().join("jobs"))), (0o755, 0o700));
    assert_eq!(mode(&folder.path().join("lockstep.db")), 0o600);
}

#[tokio::test]
async fn readiness_requires_a_writable_store() {
    let server = TestServer::with(|c| c.database = None).await;
    assert_eq!(server.get_text("/readyz").await, (200, "ready\n".into()));
    let jobs = server.dir.path().join("jobs");
    assert_eq!(fs::read_dir(&jobs).unwrap().count(), 0, "the probe file is removed");

    // Root ignores permissions, so the test removes the folder instead.
    fs::rename(&jobs, server.dir.path().join("away")).unwrap();
    let (status, body) = server.get_text("/readyz").await;
    assert!(status == 503 && body.contains("jobs"), "{status} {body}");
    fs::rename(server.dir.path().join("away"), &jobs).unwrap();
    assert_eq!(server.get_text("/readyz").await.0, 200);

    // A table that refuses inserts, like a full or read-only database.
    let url = format!("sqlite://{}", server.dir.path().join("lockstep.db").display());
    let mut db = SqliteConnection::connect(&url).await.unwrap();
    let full = "CREATE TRIGGER full BEFORE INSERT ON draining BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END";
    sqlx::query(full).execute(&mut db).await.unwrap();
    let (status, body) = server.get_text("/readyz").await;
    assert!(status == 503 && body.contains("is full"), "{status} {body}");
    assert_eq!(server.get_text("/healthz").await.0, 200, "the process is healthy");
    sqlx::query("DROP TRIGGER full").execute(&mut db).await.unwrap();
    assert_eq!(server.get_text("/readyz").await.0, 200);
    db.close().await.unwrap();
    server.stop().await;
}

#[tokio::test]
async fn partly_migrated_or_foreign_databases_are_refused_with_advice() {
    for (change, fragments) in [
        (
            "UPDATE _sqlx_migrations SET success = FALSE WHERE version = 100",
            ["never finished", "lockstep restore"],
        ),
        ("UPDATE _sqlx_migrations SET checksum = x'00' WHERE version = 100", ["another build", "restore"]),
        ("UPDATE _sqlx_migrations SET version = 25", ["another build", "restore"]),
    ] {
        let dir = TestServer::with(|c| c.database = None).await.stop().await;
        let path = dir.path().join("lockstep.db");
        let mut db = SqliteConnection::connect(&format!("sqlite://{}", path.display())).await.unwrap();
        let changed = sqlx::query(change).execute(&mut db).await.unwrap();
        assert_eq!(changed.rows_affected(), 1);
        db.close().await.unwrap();
        let mut config = config(&dir);
        config.database = None;
        let error = start_error(config).await.to_string();
        assert!(fragments.iter().all(|fragment| error.contains(fragment)), "{error}");
    }
}
