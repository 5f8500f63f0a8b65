//! The store on SQLite.
//!
//! One connection writes, so that the server's own connections never cause SQLITE_BUSY. Other connections read concurrently (write-ahead
//! log). `synchronous = FULL`: a commit is on disk before it is acknowledged, even if the machine loses power. Ingest puts many reports
//! into one transaction, which costs one sync for all.
//!
//! Until the database is closed cleanly, the lock file states that the write-ahead log must exist. A database without this log has
//! lost writes and is refused. After an unclean shutdown, every page is checked.

use super::{migration_error, migrations::OF_SQLITE as MIGRATIONS};
use crate::{config::serve_error::ServeError, util::private_files};
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

// The queries are compiled once for each database: see `sql/mod.rs`.
#[allow(clippy::duplicate_mod)]
#[path = "sql/mod.rs"]
mod sql;

pub use sql::SqlStore as SqliteStore;
pub(super) use sql::copy;

mod dialect {
    pub(super) type Db = sqlx::Sqlite;
    pub(super) type Connection = sqlx::SqliteConnection;
    pub(super) type DbRow = sqlx::sqlite::SqliteRow;
    /// Waits for the write lock at the beginning, instead of failing at the first write.
    pub(super) const BEGIN_WRITE: &str = "BEGIN IMMEDIATE";
    /// All reads of the transaction see one snapshot.
    pub(super) const BEGIN_SNAPSHOT: &str = "BEGIN";
    /// Table, name and type of every column. The table `jobs` is first, because other tables refer to it.
    pub(super) const LIST_COLUMNS: &str = "SELECT t.name, c.name, c.type FROM sqlite_master t \
        JOIN pragma_table_info(t.name) c WHERE t.type = 'table' AND t.name NOT LIKE 'sqlite!_%' ESCAPE '!' \
        AND t.name <> '_sqlx_migrations' ORDER BY t.name <> 'jobs', t.name, c.cid";
    /// Forces the index, because the planner would read all events of a range, including points.
    pub(super) const USE_LOG_INDEX: &str = "INDEXED BY events_log";
    pub(super) const USE_METRICS_INDEX: &str = "INDEXED BY events_metrics";
    /// Case-insensitive for ASCII letters.
    pub(super) const LIKE: &str = "LIKE";
    /// Condition that selects at most `$2` chunks of the job `$1`, by their position in the table.
    pub(super) const FIRST_METRIC_CHUNKS: &str =
        "rowid IN (SELECT rowid FROM metric_chunks WHERE job_id = $1 LIMIT $2)";
    /// Function that returns the position of the second text in the first, from 1; 0 if it is not contained.
    pub(super) const POSITION: &str = "instr";

    /// The size of the database with its indexes.
    pub(super) const DATABASE_BYTES: &str =
        "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()";

    /// JSON's `true` and `false` as returned by `json_text`.
    pub(super) const TRUE: &str = "'1'";
    pub(super) const FALSE: &str = "'0'";

    /// Expression for a number in a column of JSON. NULL if the number is missing or the column is not valid JSON.
    pub(super) fn json_number(column: &str, path: &[&str]) -> String {
        format!(
            "CASE WHEN json_valid({column}) THEN CAST(json_extract({column}, '$.{}') AS REAL) END",
            path.join(".")
        )
    }

    /// Expression for a text in a column of JSON. NULL if the text is missing or the column is not valid JSON.
    pub(super) fn json_text(column: &str, path: &[&str]) -> String {
        format!(
            "CASE WHEN json_valid({column}) THEN CAST(json_extract({column}, '$.{}') AS TEXT) END",
            path.join(".")
        )
    }

    /// Condition that a column of JSON has a number at the path, or a text that is wholly a number.
    pub(super) fn json_is_number(column: &str, path: &[&str]) -> String {
        // The comparison with a number converts the text if the whole text is a number.
        let (text, dotted) = (json_text(column, path), path.join("."));
        format!(
            "CASE WHEN json_valid({column}) THEN json_type({column}, '$.{dotted}') END IN ('integer', 'real', 'text') \
             AND CAST({text} AS NUMERIC) = {text}"
        )
    }

    /// No statement is needed, because AUTOINCREMENT considers restored rows.
    pub(super) const ADVANCE_FENCING_TOKENS: &str = "SELECT 1";
}

/// Oldest accepted version. Earlier versions can corrupt a write-ahead log that two connections use (sqlite.org/wal.html#walresetbug).
const OLDEST_SQLITE: [u32; 3] = [3, 51, 3];
/// Maximum number of reading connections.
const MAX_READERS: u32 = 8;

impl SqliteStore {
    /// Opens the database, creates the file if it is missing, and brings the tables up to date. The database is locked until this process
    /// ends or closes it.
    ///
    /// # Errors
    /// The file cannot be opened, is not a database, was written by a newer version, or is in use by another server.
    pub async fn open(path: &Path) -> Result<Self, ServeError> {
        let name = path.display().to_string();
        let failed = |detail: String| ServeError::Database { path: name.clone(), detail };
        let failed_query = |error: sqlx::Error| failed(error.to_string());
        // Creates the file if it is missing, so that the path's links can be resolved. A database has one lock file, regardless of the path
        // by which it is opened.
        private_files::create_file(path).map_err(|e| failed(e.to_string()))?;
        let path = &path.canonicalize().map_err(|e| failed(e.to_string()))?;
        let mut lock = Lock::take(path)?;
        let options = options(path).create_if_missing(true);
        let pool = |n| {
            let options =
                SqlitePoolOptions::new().max_connections(n).acquire_timeout(Duration::from_secs(15));
            // Connections stay open: SQLite removes the write-ahead log when the last connection is closed.
            options.idle_timeout(None).max_lifetime(None)
        };

        let writer = pool(1).connect_with(options.clone()).await.map_err(failed_query)?;
        let version: sqlx::Result<String> =
            sqlx::query_scalar("SELECT sqlite_version()").fetch_one(&writer).await;
        let version = version.map_err(failed_query)?;
        let numbers: Vec<u32> = version.split('.').map(|number| number.parse().unwrap_or(0)).collect();
        if numbers.as_slice() < OLDEST_SQLITE.as_slice() {
            let [major, minor, patch] = OLDEST_SQLITE;
            let detail = format!("SQLite {version} is linked; {major}.{minor}.{patch} or later is needed");
            return Err(failed(detail));
        }
        if lock.is_unclean {
            check_pages(&writer, &name).await?;
            lock.is_unclean = false;
        }
        MIGRATIONS.run(&writer).await.map_err(|error| migration_error(&name, &MIGRATIONS, error))?;
        let options = options.pragma("query_only", "1");
        let reader = pool(MAX_READERS).connect_with(options).await.map_err(failed_query)?;
        // Commits a change, so that the write-ahead log is not empty from now on.
        let counter: sqlx::Result<i32> = sqlx::query_scalar("PRAGMA user_version").fetch_one(&writer).await;
        let new_counter = counter.map_err(failed_query)?.wrapping_add(1);
        let change = AssertSqlSafe(format!("PRAGMA user_version = {new_counter}"));
        sqlx::query(change).execute(&writer).await.map_err(failed_query)?;
        lock.write_note(NEEDS_WAL).map_err(|e| failed(e.to_string()))?;
        Ok(Self { writer, reader, lock: Some(Arc::new(lock)) })
    }
}

/// Reads all pages and checks that they are consistent. Otherwise damage would be found only later, while jobs run.
async fn check_pages(writer: &SqlitePool, name: &str) -> Result<(), ServeError> {
    tracing::info!(database = name, "checking the database, which was not closed cleanly");
    let found: Result<Vec<String>, _> =
        sqlx::query_scalar(AssertSqlSafe(format!("PRAGMA quick_check({MAX_FLAWS})"))).fetch_all(writer).await;
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
        // Another program, such as `sqlite3 lockstep.db`, may hold the lock for a moment.
        .busy_timeout(Duration::from_secs(5))
}

/// Text in the lock file while the database is open for writing: the write-ahead log must exist.
const NEEDS_WAL: &str = ", write-ahead log in use";
/// Maximum number of flaws in the error of a damaged database.
const MAX_FLAWS: u32 = 3;

/// The locks of a database: a lock file next to it, and the database file's inode. The system releases them when this process ends. The
/// data directory's lock does not suffice, because two servers with different directories may name the same --database. The lock file names
/// the process that has opened the database, and is empty after the database was closed cleanly.
#[derive(Debug)]
pub(super) struct Lock {
    file: File,
    _inode: Option<File>,
    /// Whether the previous process did not close the database cleanly, and the database has not been checked since then.
    pub(super) is_unclean: bool,
}

impl Lock {
    /// Takes the locks of a database.
    ///
    /// # Errors
    /// Another process has opened the database, or the write-ahead log is missing.
    pub(super) fn take(path: &Path) -> Result<Self, ServeError> {
        let name = path.display().to_string();
        let lock_path = with_suffix(path, ".lock");
        let failed = |e: io::Error| ServeError::Database {
            path: name.clone(),
            detail: format!("its lock {}: {e}", lock_path.display()),
        };
        let mut file = private_files::open_lock_file(&lock_path).map_err(failed)?;
        let locked = file.try_lock();
        let mut note = String::new();
        let read = file.read_to_string(&mut note);
        match locked {
            Ok(()) => {
                read.map_err(failed)?;
            }
            Err(TryLockError::WouldBlock) => {
                let process = note.split(',').next().filter(|process| !process.is_empty());
                return Err(ServeError::DatabaseInUse { path: name, by: process.map(str::to_owned) });
            }
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        let log = with_suffix(path, "-wal");
        // A database that replaces a lost database (`lockstep restore`) begins as an empty file.
        let has_content = path.metadata().is_ok_and(|file| file.len() > 0);
        let needs_wal = has_content && note.ends_with(NEEDS_WAL);
        if needs_wal && !is_write_ahead_log(&log) {
            return Err(ServeError::LogMissing { path: name, log, lock: lock_path });
        }
        let lock = Self { file, _inode: lock_inode(path)?, is_unclean: !note.is_empty() };
        // The note of the previous process stays valid until this process writes to the database.
        lock.write_note(if needs_wal { NEEDS_WAL } else { "" }).map_err(failed)?;
        Ok(lock)
    }

    fn write_note(&self, suffix: &str) -> io::Result<()> {
        let text = format!("process {}{suffix}", std::process::id());
        // Overwrites the file in place, which works on a full disk.
        self.file.write_all_at(text.as_bytes(), 0)?;
        self.file.set_len(text.len() as u64)
    }

    /// Notes that the database is being closed cleanly. Closing the last connection removes the write-ahead log. The file stays non-empty
    /// if the database still has to be checked.
    pub(super) fn note_closing(&self) {
        let noted = if self.is_unclean { self.write_note("") } else { self.file.set_len(0) };
        if let Err(error) = noted {
            tracing::warn!(%error, "cannot note in the lock file that the database was closed cleanly; the next start checks the database");
        }
    }
}

impl Drop for Lock {
    /// The connections were closed or dropped before, so the database is closed cleanly.
    fn drop(&mut self) {
        self.note_closing();
    }
}

/// The path of a file next to the database, with this suffix.
fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Whether a file is a non-empty write-ahead log, by the magic number in its header (sqlite.org/fileformat.html#walformat).
fn is_write_ahead_log(path: &Path) -> bool {
    let mut magic = [0; 4];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut magic));
    read.is_ok() && matches!(u32::from_be_bytes(magic), 0x377f_0682 | 0x377f_0683)
}

/// Network file systems, on which an flock conflicts with SQLite's own locks: NFS, SMB, CIFS and SMB2 (statfs(2)).
const NETWORK_FILE_SYSTEMS: [u32; 4] = [0x6969, 0x517b, 0xff53_4d42, 0xfe53_4d42];

/// Locks the database file's inode, which may have several paths (hard links, bind mounts). On a local file system an flock does not
/// conflict with SQLite's own locks. `None` if the file system does not support the lock.
///
/// The file stays open as long as the store, because closing any descriptor of a file releases SQLite's locks on it.
fn lock_inode(path: &Path) -> Result<Option<File>, ServeError> {
    let name = || path.display().to_string();
    let failed = |e: io::Error| ServeError::Database { path: name(), detail: format!("its lock: {e}") };
    let file = File::options().read(true).write(true).open(path).map_err(failed)?;
    let system = rustix::fs::fstatfs(&file).map_err(|e| failed(e.into()))?.f_type as u32;
    if NETWORK_FILE_SYSTEMS.contains(&system) {
        return Ok(None);
    }
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(Errno::WOULDBLOCK) => Err(ServeError::DatabaseInUse { path: name(), by: None }),
        Err(_) => Ok(None),
    }
}
