//! The store on Postgres.
//!
//! As on SQLite, one connection writes and others read. The writing session holds an advisory lock until it ends. A new session, after a
//! lost connection, takes the lock before it writes. So two servers never write to the same database. `synchronous_commit` is on
//! regardless of the database's default, so a commit is on disk before it is acknowledged.

use super::{Location, migration_error, migrations::OF_POSTGRES as MIGRATIONS};
use crate::config::serve_error::ServeError;
use sqlx::{
    AssertSqlSafe, ConnectOptions, Connection, PgConnection,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use std::time::{Duration, Instant};

// The queries are compiled once for each database: see `sql/mod.rs`.
#[allow(clippy::duplicate_mod)]
#[path = "sql/mod.rs"]
mod sql;

pub use sql::SqlStore as PostgresStore;
pub(super) use sql::copy;

/// The comments in the module of the same name in `sqlite.rs` apply here, too.
mod dialect {
    pub(super) type Db = sqlx::Postgres;
    pub(super) type Connection = sqlx::PgConnection;
    pub(super) type DbRow = sqlx::postgres::PgRow;
    /// Needs no write lock, because only the session with the advisory lock writes.
    pub(super) const BEGIN_WRITE: &str = "BEGIN";
    pub(super) const BEGIN_SNAPSHOT: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";
    pub(super) const LIST_COLUMNS: &str = "SELECT table_name::text, column_name::text, data_type::text \
        FROM information_schema.columns WHERE table_schema = current_schema() \
        AND table_name <> '_sqlx_migrations' ORDER BY table_name <> 'jobs', table_name::text, ordinal_position";
    /// No index is forced, because the planner's statistics show how rare log lines are.
    pub(super) const USE_LOG_INDEX: &str = "";
    pub(super) const USE_METRICS_INDEX: &str = "";
    /// Case-insensitive `LIKE`.
    pub(super) const LIKE: &str = "ILIKE";
    /// Condition that selects at most `$2` chunks of the job `$1`, by their position in the table. The array makes Postgres read only these rows.
    pub(super) const FIRST_METRIC_CHUNKS: &str =
        "ctid = ANY (ARRAY (SELECT ctid FROM metric_chunks WHERE job_id = $1 LIMIT $2))";
    pub(super) const POSITION: &str = "strpos";

    pub(super) const DATABASE_BYTES: &str = "SELECT pg_database_size(current_database())";

    pub(super) const TRUE: &str = "'true'";
    pub(super) const FALSE: &str = "'false'";

    pub(super) fn json_number(column: &str, path: &[&str]) -> String {
        format!("json_number_in({column}, '{}')", path.join("', '"))
    }

    pub(super) fn json_text(column: &str, path: &[&str]) -> String {
        format!("json_text_in({column}, '{}')", path.join("', '"))
    }

    /// Always true, because [`json_number`] checks the condition itself.
    pub(super) fn json_is_number(_column: &str, _path: &[&str]) -> String {
        "TRUE".into()
    }

    /// Makes the next attempt's fencing token greater than all restored tokens.
    pub(super) const ADVANCE_FENCING_TOKENS: &str = "SELECT setval(pg_get_serial_sequence('attempts', 'fencing_token'), \
        greatest((SELECT coalesce(max(fencing_token), 0) FROM attempts), 1))";
}

/// Key of the server's advisory lock: the bytes of "lockstep".
const LOCK: i64 = i64::from_be_bytes(*b"lockstep");
/// Oldest supported release (`server_version_num`). It has identity columns, and no maintained release is older.
const OLDEST_POSTGRES: i32 = 130_000;
/// Maximum number of reading connections.
const MAX_READERS: u32 = 8;
/// Time limit for getting a connection from a pool. A request that exceeds it gets status 503.
const POOL_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limits of a statement. A request that exceeds a limit gets status 503. The URL may set other limits
/// (`?options=-c statement_timeout=...`). The limits do not apply to migrations and backups.
const STATEMENT_TIMEOUTS: [(&str, &str); 2] = [("statement_timeout", "60s"), ("lock_timeout", "30s")];
/// Time limit for getting the advisory lock. The session of a server that was just killed may take a moment to end.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// Describes an error of a connection. sqlx's text of an error of Postgres ends with a line of Postgres' own source.
fn describe(error: &sqlx::Error) -> String {
    match error.as_database_error() {
        Some(error) if error.code().as_deref() == Some("3D000") => {
            format!("{}; create it first (`createdb`), or name another database", error.message())
        }
        Some(error) => error.message().to_owned(),
        None => error.to_string(),
    }
}

impl PostgresStore {
    /// Connects to a database and brings its tables up to date.
    ///
    /// # Errors
    /// The database cannot be reached, is too old, is not encoded in UTF-8, was written by a newer version of this program, or is in use
    /// by another server.
    pub async fn open(url: &str) -> Result<Self, ServeError> {
        let name = Location::Postgres(url.to_owned()).to_string();
        let failed =
            |error: sqlx::Error| ServeError::Database { path: name.clone(), detail: describe(&error) };
        let options = options(url)?;
        // A single connection first, because its errors name the cause, while a pool only reports a timeout.
        let mut first = PgConnection::connect_with(&options).await.map_err(failed)?;
        check_server(&mut first, &name).await?;
        acquire_lock(&mut first, &name).await?;
        first.close().await.map_err(failed)?;

        let pool = |n| PgPoolOptions::new().max_connections(n).acquire_timeout(POOL_TIMEOUT);
        let writer = pool(1)
            // The lock ends with the session, so the connection stays open.
            .idle_timeout(None)
            .max_lifetime(None)
            .after_connect(|connection, _| {
                Box::pin(async move {
                    if try_lock(connection).await? {
                        return Ok(());
                    }
                    Err(sqlx::Error::Configuration("another server uses this database".into()))
                })
            })
            .connect_with(options.clone())
            .await
            .map_err(|error| match error {
                sqlx::Error::PoolTimedOut => ServeError::DatabaseInUse { path: name.clone(), by: None },
                other => failed(other),
            })?;
        // Creating an index on a large table takes longer than these limits. The pool has one connection, so all statements use its
        // session.
        for (limit, _) in STATEMENT_TIMEOUTS {
            sqlx::query(AssertSqlSafe(format!("SET {limit} = 0"))).execute(&writer).await.map_err(failed)?;
        }
        MIGRATIONS.run(&writer).await.map_err(|error| migration_error(&name, &MIGRATIONS, error))?;
        for (limit, _) in STATEMENT_TIMEOUTS {
            sqlx::query(AssertSqlSafe(format!("RESET {limit}"))).execute(&writer).await.map_err(failed)?;
        }
        let reader = pool(MAX_READERS).connect_with(options).await.map_err(failed)?;
        // The advisory lock ends with the writing session.
        Ok(Self { writer, reader, lock: None })
    }
}

pub(super) fn options(url: &str) -> Result<PgConnectOptions, ServeError> {
    let options: PgConnectOptions = url.parse().map_err(|e: sqlx::Error| {
        ServeError::DatabaseUrl(Location::Postgres(url.to_owned()).to_string(), e.to_string())
    })?;
    let given = options.get_options().unwrap_or_default().to_owned();
    let limits = STATEMENT_TIMEOUTS.into_iter().filter(|(name, _)| !given.contains(name));
    let settings = [("synchronous_commit", "on")].into_iter().chain(limits);
    Ok(options.application_name("lockstep").options(settings).disable_statement_logging())
}

async fn check_server(connection: &mut PgConnection, name: &str) -> Result<(), ServeError> {
    let failed = |detail: String| ServeError::Database { path: name.to_owned(), detail };
    let (version, encoding): (i32, String) = sqlx::query_as(
        "SELECT current_setting('server_version_num')::int4, current_setting('server_encoding')",
    )
    .fetch_one(connection)
    .await
    .map_err(|e| failed(e.to_string()))?;
    if version < OLDEST_POSTGRES {
        return Err(failed(format!("it is Postgres {}; 13 or later is needed", version / 10_000)));
    }
    if encoding != "UTF8" {
        return Err(failed(format!(
            "its encoding is {encoding}; create it with ENCODING 'UTF8' TEMPLATE template0"
        )));
    }
    Ok(())
}

async fn try_lock(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar("SELECT pg_try_advisory_lock($1)").bind(LOCK).fetch_one(connection).await
}

async fn acquire_lock(connection: &mut PgConnection, name: &str) -> Result<(), ServeError> {
    let failed =
        |error: sqlx::Error| ServeError::Database { path: name.to_owned(), detail: error.to_string() };
    let since = Instant::now();
    while !try_lock(connection).await.map_err(failed)? {
        if since.elapsed() < LOCK_TIMEOUT {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        }
        let by: Option<String> = sqlx::query_scalar(
            "SELECT 'connected from ' || coalesce(host(client_addr), 'this machine') || ' since ' || \
             to_char(backend_start, 'YYYY-MM-DD HH24:MI') FROM pg_stat_activity JOIN pg_locks USING (pid) \
             WHERE locktype = 'advisory' AND classid::int8 = $1 >> 32 AND objid::int8 = $1 & 4294967295 \
             AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) LIMIT 1",
        )
        .bind(LOCK)
        .fetch_optional(connection)
        .await
        .map_err(failed)?;
        return Err(ServeError::DatabaseInUse { path: name.to_owned(), by });
    }
    Ok(())
}
