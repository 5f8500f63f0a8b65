//! The store on SQLite.
//!
//! The one writing connection never meets SQLITE_BUSY among our own; others read concurrently (write-ahead log).
//! `synchronous = FULL`: a commit is on disk before it is acknowledged, also when the machine loses power;
//! ingest puts many reports in one transaction, so the price is one sync a batch.

use super::{migration_error, migrations::OF_SQLITE as MIGRATIONS};
use crate::{private, serve_error::ServeError};
use rustix::{fs::FlockOperation, io::Errno};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use std::{
    fs::{File, TryLockError},
    io::{self, Read, Write},
    iter,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

// The same text of the queries for each database: see `sql/mod.rs`.
#[allow(clippy::duplicate_mod)]
#[path = "sql/mod.rs"]
mod sql;

pub use sql::SqlStore as SqliteStore;
pub(super) use sql::copy;

mod dialect {
    pub(super) type Db = sqlx::Sqlite;
    pub(super) type Connection = sqlx::SqliteConnection;
    pub(super) type DbRow = sqlx::sqlite::SqliteRow;
    /// Waits for the write lock now, rather than failing at the first write.
    pub(super) const BEGIN_WRITE: &str = "BEGIN IMMEDIATE";
    /// All reads of the transaction see one moment.
    pub(super) const BEGIN_SNAPSHOT: &str = "BEGIN";
    /// Table, column and type of every column, `jobs` first: others refer to it.
    pub(super) const SCHEMA: &str = "SELECT t.name, c.name, c.type FROM sqlite_master t \
        JOIN pragma_table_info(t.name) c WHERE t.type = 'table' AND t.name NOT LIKE 'sqlite!_%' ESCAPE '!' \
        AND t.name <> '_sqlx_migrations' ORDER BY t.name <> 'jobs', t.name, c.cid";
    /// The planner would rather read all events of a range, points and all.
    pub(super) const BY_LOG: &str = "INDEXED BY events_log";
    pub(super) const BY_METRICS: &str = "INDEXED BY events_metrics";
    /// Whatever the case of ASCII letters.
    pub(super) const LIKE: &str = "LIKE";
    /// Up to `$2` chunks of the job `$1`, by where they lie.
    pub(super) const SOME_METRIC_CHUNKS: &str =
        "rowid IN (SELECT rowid FROM metric_chunks WHERE job_id = $1 LIMIT $2)";
    /// Where the second text begins in the first, from 1; 0 where it is not in it.
    pub(super) const POSITION: &str = "instr";

    /// What `json_text` makes of JSON's truth values.
    pub(super) const TRUE: &str = "'1'";
    pub(super) const FALSE: &str = "'0'";

    /// A number inside a column of JSON, or NULL, also where the column is no JSON.
    pub(super) fn json_number(column: &str, path: &[&str]) -> String {
        format!(
            "CASE WHEN json_valid({column}) THEN CAST(json_extract({column}, '$.{}') AS REAL) END",
            path.join(".")
        )
    }

    /// A text inside a column of JSON, or NULL, also where the column is no JSON.
    pub(super) fn json_text(column: &str, path: &[&str]) -> String {
        format!(
            "CASE WHEN json_valid({column}) THEN CAST(json_extract({column}, '$.{}') AS TEXT) END",
            path.join(".")
        )
    }

    /// AUTOINCREMENT follows the rows by itself.
    pub(super) const AFTER_COPY: &str = "SELECT 1";
}

/// Earlier versions can corrupt a write-ahead log that two connections use (sqlite.org/wal.html#walresetbug).
const OLDEST_SQLITE: (u32, u32, u32) = (3, 51, 3);
/// How many requests may read at once.
const READERS: u32 = 8;

impl SqliteStore {
    /// Opens the file, makes it when missing, and brings its tables up to date. It is this process's until it
    /// ends, however it ends.
    ///
    /// # Errors
    /// A file that cannot be opened, is no database, was written by a newer version, or is another server's.
    pub async fn open(path: &Path) -> Result<Self, ServeError> {
        let name = path.display().to_string();
        let failed = |detail: String| ServeError::Database { path: name.clone(), detail };
        // Made here if need be, so that links can be followed to the file itself: it has one lock, whatever names
        // lead to it.
        private::file(path).map_err(|e| failed(e.to_string()))?;
        let path = &path.canonicalize().map_err(|e| failed(e.to_string()))?;
        let lock: Arc<[File]> = iter::once(lock(path)?).chain(lock_inode(path)?).collect();
        let options = options(path).create_if_missing(true);
        let pool = |n| SqlitePoolOptions::new().max_connections(n).acquire_timeout(Duration::from_secs(15));

        let writer = pool(1).connect_with(options.clone()).await.map_err(|e| failed(e.to_string()))?;
        let version: String = sqlx::query_scalar("SELECT sqlite_version()")
            .fetch_one(&writer)
            .await
            .map_err(|e| failed(e.to_string()))?;
        let mut numbers = version.split('.').map(|n| n.parse().unwrap_or(0));
        let mut number = || numbers.next().unwrap_or(0);
        if (number(), number(), number()) < OLDEST_SQLITE {
            return Err(failed(format!("SQLite {version} is linked; 3.51.3 or later is needed")));
        }
        MIGRATIONS.run(&writer).await.map_err(|error| migration_error(&name, &MIGRATIONS, error))?;
        let reader = pool(READERS)
            .connect_with(options.pragma("query_only", "1"))
            .await
            .map_err(|e| failed(e.to_string()))?;
        Ok(Self { writer, reader, _lock: lock })
    }
}

pub(super) fn options(path: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(path)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
        .foreign_keys(true)
        // Someone else's `sqlite3 lockstep.db` may hold it for a moment.
        .busy_timeout(Duration::from_secs(5))
}

/// The lock of a database file: a file next to it, locked; the system frees it when this process ends. Two data
/// directories may name one database with --database, so their own locks do not say enough.
fn lock(path: &Path) -> Result<File, ServeError> {
    let name = path.display().to_string();
    let mut lock_path = path.as_os_str().to_owned();
    lock_path.push(".lock");
    let lock_path = PathBuf::from(lock_path);
    let failed = |e: io::Error| ServeError::Database {
        path: name.clone(),
        detail: format!("its lock {}: {e}", lock_path.display()),
    };
    let mut file = private::lock_file(&lock_path).map_err(failed)?;
    match file.try_lock() {
        Ok(()) => {
            file.set_len(0).map_err(failed)?;
            write!(file, "process {}", std::process::id()).map_err(failed)?;
            Ok(file)
        }
        Err(TryLockError::WouldBlock) => {
            let mut by = String::new();
            let by = file.read_to_string(&mut by).ok().map(|_| by).filter(|by| !by.is_empty());
            Err(ServeError::DatabaseInUse { path: name, by })
        }
        Err(TryLockError::Error(error)) => Err(failed(error)),
    }
}

/// File systems of the network, which do with an flock what they do with the locks that SQLite takes: it could then not
/// open the file itself. NFS, SMB, CIFS and SMB2 (statfs(2)).
const NETWORK: [u32; 4] = [0x6969, 0x517b, 0xff53_4d42, 0xfe53_4d42];

/// A lock of the file itself, which has other names where a hard link or a bind mount leads to it. On a local file
/// system it does not meet SQLite's own locks. None where the file system knows no such locks.
///
/// It stays open as long as the store: closing any descriptor of a file gives up SQLite's locks on it.
fn lock_inode(path: &Path) -> Result<Option<File>, ServeError> {
    let name = || path.display().to_string();
    let failed = |e: io::Error| ServeError::Database { path: name(), detail: format!("its lock: {e}") };
    let file = File::options().read(true).write(true).open(path).map_err(failed)?;
    let system = rustix::fs::fstatfs(&file).map_err(|e| failed(e.into()))?.f_type as u32;
    if NETWORK.contains(&system) {
        return Ok(None);
    }
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(Errno::WOULDBLOCK) => Err(ServeError::DatabaseInUse { path: name(), by: None }),
        Err(_) => Ok(None),
    }
}
