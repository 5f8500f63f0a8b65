//! A server that cannot start says what to change, with exit status 2, and touches nothing.

use crate::house::{DEADLINE, House, config};
use lockstep_server::{ServeConfig, ServeError, serve};
use sqlx::{Connection, SqliteConnection};

async fn refused(config: ServeConfig) -> ServeError {
    let ready = |_| panic!("it must not start");
    let error = tokio::time::timeout(DEADLINE, serve(config, ready, std::future::pending()))
        .await
        .unwrap()
        .unwrap_err();
    assert_eq!(error.exit_code(), 2, "{error}");
    error
}

#[tokio::test]
async fn an_address_that_others_can_reach_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for address in ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"] {
        let mut config = config(&dir);
        config.listen = address.parse().unwrap();
        let error = refused(config).await.to_string();
        assert!(error.contains("127.0.0.1") && error.contains("token"), "{error}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn a_port_and_a_directory_belong_to_one_server() {
    let house = House::new().await;
    let dir = tempfile::tempdir().unwrap();
    let mut taken = config(&dir);
    taken.listen = house.address;
    let error = refused(taken).await.to_string();
    assert!(error.contains("is taken by another program") && error.contains("--listen"), "{error}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);

    let error = refused(config(&house.dir)).await.to_string();
    assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
    let dir = house.stop().await;
    House::open(dir, |_| {}).await.stop().await;
}

#[tokio::test]
async fn a_directory_that_cannot_be_used_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let mut config = ServeConfig::new(&file);
    config.listen.set_port(0);
    let error = refused(config).await.to_string();
    assert!(error.contains("file") && error.contains("--data-dir"), "{error}");
}

#[tokio::test]
async fn a_database_of_a_newer_version_is_left_alone() {
    let dir = House::with(|c| c.database = None).await.stop().await;
    let path = dir.path().join("lockstep.db");
    let mut db = SqliteConnection::connect(&format!("sqlite://{}", path.display())).await.unwrap();
    sqlx::query("INSERT INTO _sqlx_migrations SELECT 99999, description, installed_on, success, checksum, execution_time FROM _sqlx_migrations LIMIT 1")
        .execute(&mut db)
        .await
        .unwrap();
    db.close().await.unwrap();
    let before = std::fs::read(&path).unwrap();
    let error = refused(config(&dir)).await;
    assert!(matches!(error, ServeError::DatabaseTooNew { found: 99999, .. }), "{error}");
    assert!(error.to_string().contains("newer version"), "{error}");
    assert!(std::fs::read(&path).unwrap() == before);
}

#[tokio::test]
async fn a_database_that_is_none_is_named() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(
        dir.path().join("lockstep.db"),
        "no database at all, but long enough to be looked at".repeat(30),
    )
    .unwrap();
    let error = refused(config(&dir)).await.to_string();
    assert!(error.contains("lockstep.db"), "{error}");
    for url in ["mysql://x", "sqlite://", "postgres://localhost:port/lockstep"] {
        let mut config = config(&dir);
        config.database = Some(url.into());
        assert!(matches!(refused(config).await, ServeError::DatabaseUrl(..)), "{url}");
    }
}
