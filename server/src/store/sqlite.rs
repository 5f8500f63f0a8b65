//! The store on SQLite.
//!
//! The one writing connection never meets SQLITE_BUSY among our own; others read concurrently (write-ahead log).
//! `synchronous = FULL`: a commit is on disk before it is acknowledged, also when the machine loses power;
//! ingest puts many reports in one transaction, so the price is one sync a batch.
//!
//! The lock file says, until the database is closed in order, that its write-ahead log must be there. A database without that log has
//! lost writes and is refused. After an unclean end every page is checked.

use super::{migration_error, migrations::OF_SQLITE as MIGRATIONS};
use crate::{config::serve_error::ServeError, util::private};
use rustix::{fs::FlockOperation, io::Errno};
use sqlx::{
    AssertSqlSafe, SqlitePool,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
use std::{
    fs::{File, TryLockError},
    io::{self, Read},
    os::unix::fs::FileExt,
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
    pub(super) use super::Lock;

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

    /// The size of the database with its indexes.
    pub(super) const DATABASE_BYTES: &str =
        "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()";

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
        let mut lock = Lock::take(path)?;
        let options = options(path).create_if_missing(true);
        let pool = |n| {
            let options =
                SqlitePoolOptions::new().max_connections(n).acquire_timeout(Duration::from_secs(15));
            // Connections stay open: SQLite removes the write-ahead log when the last one is closed.
            options.idle_timeout(None).max_lifetime(None)
        };

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
        if lock.is_unclean {
            check(&writer, &name).await?;
            lock.is_unclean = false;
        }
        MIGRATIONS.run(&writer).await.map_err(|error| migration_error(&name, &MIGRATIONS, error))?;
        let reader = pool(READERS)
            .connect_with(options.pragma("query_only", "1"))
            .await
            .map_err(|e| failed(e.to_string()))?;
        // A commit, so that the log has something from now on.
        let times: i32 = sqlx::query_scalar("PRAGMA user_version")
            .fetch_one(&writer)
            .await
            .map_err(|e| failed(e.to_string()))?;
        sqlx::query(AssertSqlSafe(format!("PRAGMA user_version = {}", times.wrapping_add(1))))
            .execute(&writer)
            .await
            .map_err(|e| failed(e.to_string()))?;
        lock.note(NEEDS_WAL).map_err(|e| failed(e.to_string()))?;
        Ok(Self { writer, reader, lock: Arc::new(lock) })
    }
}

/// Reads every page, and says whether they fit together. What was overwritten would be found in the middle of somebody's work.
async fn check(writer: &SqlitePool, name: &str) -> Result<(), ServeError> {
    tracing::info!(database = name, "checking the database, which was not closed in order");
    let found: Result<Vec<String>, _> =
        sqlx::query_scalar(AssertSqlSafe(format!("PRAGMA quick_check({FLAWS})"))).fetch_all(writer).await;
    let detail = match found {
        Ok(found) if found == ["ok"] => return Ok(()),
        Ok(found) => found.join("; "),
        Err(error) => error.to_string(),
    };
    Err(ServeError::DatabaseDamaged { path: name.to_owned(), detail })
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

/// What the lock's file says of a database that has been written to and not been closed in order: its write-ahead log has to be there.
const NEEDS_WAL: &str = ", write-ahead log in use";
/// Flaws that are named, at most.
const FLAWS: u32 = 3;

/// A database file's locks. Of these a file next to it is locked, and the system frees it when this process ends: two data directories may
/// name one database with --database, so their own locks do not say enough. It says who has the database, and nothing once the database
/// was closed in order.
#[derive(Debug)]
pub(super) struct Lock {
    file: File,
    _inode: Option<File>,
    /// Whoever had the database before did not close it, and it was not checked since.
    pub(super) is_unclean: bool,
}

impl Lock {
    /// # Errors
    /// Another process has it, or its write-ahead log is gone.
    pub(super) fn take(path: &Path) -> Result<Self, ServeError> {
        let name = path.display().to_string();
        let lock_path = beside(path, ".lock");
        let failed = |e: io::Error| ServeError::Database {
            path: name.clone(),
            detail: format!("its lock {}: {e}", lock_path.display()),
        };
        let mut file = private::lock_file(&lock_path).map_err(failed)?;
        let locked = file.try_lock();
        let mut by = String::new();
        let read = file.read_to_string(&mut by);
        match locked {
            Ok(()) => {
                read.map_err(failed)?;
            }
            Err(TryLockError::WouldBlock) => {
                let by = by.split(',').next().filter(|by| !by.is_empty()).map(str::to_owned);
                return Err(ServeError::DatabaseInUse { path: name, by });
            }
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        let log = beside(path, "-wal");
        // A database that is put in the place of a lost one (`lockstep restore`) begins as an empty file.
        let is_there = path.metadata().is_ok_and(|file| file.len() > 0);
        if is_there && by.ends_with(NEEDS_WAL) && !is_log(&log) {
            return Err(ServeError::LogMissing { path: name, log, lock: lock_path });
        }
        let lock = Self { file, _inode: lock_inode(path)?, is_unclean: !by.is_empty() };
        // The note of the previous process stays valid until this one has written.
        lock.note(if is_there && by.ends_with(NEEDS_WAL) { NEEDS_WAL } else { "" }).map_err(failed)?;
        Ok(lock)
    }

    fn note(&self, what: &str) -> io::Result<()> {
        let text = format!("process {}{what}", std::process::id());
        // In place, so that it works on a full disk.
        self.file.write_all_at(text.as_bytes(), 0)?;
        self.file.set_len(text.len() as u64)
    }

    /// All connections are about to be closed, the last of which removes the log.
    pub(super) fn closes(&self) {
        let noted = if self.is_unclean { self.note("") } else { self.file.set_len(0) };
        if let Err(error) = noted {
            tracing::warn!(%error, "that the database was closed in order cannot be noted: the next start checks it");
        }
    }
}

impl Drop for Lock {
    /// Its connections end by themselves.
    fn drop(&mut self) {
        self.closes();
    }
}

/// A file next to the database.
fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

/// Whether there is a write-ahead log with something in it, by the beginning of its header (sqlite.org/fileformat.html#walformat).
fn is_log(path: &Path) -> bool {
    let mut magic = [0; 4];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut magic));
    read.is_ok() && matches!(u32::from_be_bytes(magic), 0x377f_0682 | 0x377f_0683)
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
