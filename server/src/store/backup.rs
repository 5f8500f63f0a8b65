//! Backups: the whole content of a database in one file, which can be restored into SQLite or Postgres.
//!
//! The file consists of lines of JSON: a heading, then for each table its columns and one array per row, and at the end the number of rows
//! and the SHA-256 of all preceding lines. The format is Lockstep's own, not that of `pg_dump` or SQLite, so that one command works for
//! both databases, no tool has to be installed in a matching version, a truncated file is detected before anything is written, and a
//! database moves from SQLite to Postgres by a backup and a restore. A backup reads one snapshot, while the server may run. It does not
//! contain checkpoints, because their folders under `jobs/` never change once they exist, so any copy of the files is a backup of them.

pub use super::backup_file::{BackupError, Summary};

use super::{
    Location,
    backup_file::{Writer, verify},
    migrations,
    postgres::{self, PostgresStore},
    sqlite::{self, SqliteStore},
};
use crate::config::serve_error::ServeError;
use sqlx::Connection;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Writes a snapshot of a database to `path`. The file appears complete or not at all. A server may use the database meanwhile.
///
/// # Errors
/// The database cannot be read, or the file cannot be written.
pub async fn backup(location: &Location, path: &Path) -> Result<Summary, BackupError> {
    let failed = |source| BackupError::File { path: path.to_owned(), source };
    let mut partial = path.as_os_str().to_owned();
    partial.push(".part");
    let partial = PathBuf::from(partial);
    let mut writer = Writer::create(&partial).map_err(failed)?;
    let written = dump(location, &mut writer).await.map_err(|error| match error {
        BackupError::Io(source) => failed(source),
        error => error,
    });
    let done = written.and_then(|()| {
        let summary = writer.finish().map_err(failed)?;
        fs::rename(&partial, path).map_err(failed)?;
        Ok(summary)
    });
    if done.is_err() {
        // Ignores an error of the removal, because the first error is more useful.
        let _ = fs::remove_file(&partial);
    }
    done
}

/// The version of the newest migration in this build for this kind of database.
fn newest_known(location: &Location) -> i64 {
    migrations::newest(match location {
        Location::Sqlite(_) => &migrations::OF_SQLITE,
        Location::Postgres(_) => &migrations::OF_POSTGRES,
    })
}

async fn dump(location: &Location, writer: &mut Writer) -> Result<(), BackupError> {
    let known = newest_known(location);
    let failed =
        |error: sqlx::Error| ServeError::Database { path: location.to_string(), detail: error.to_string() };
    match location {
        Location::Sqlite(path) => {
            // If no server runs, closing this connection moves a killed server's write-ahead log into the database and deletes the log.
            // This process holds the lock until then, and notes by `drop` that the log is no longer required.
            let lock = path.canonicalize().ok().map(|path| sqlite::Lock::take(&path));
            let unclean_lock = match lock {
                Some(Err(error @ ServeError::LogMissing { .. })) => return Err(error.into()),
                lock => lock.and_then(Result::ok).filter(|lock| lock.is_unclean),
            };
            let options = sqlite::options(path).pragma("query_only", "1");
            let mut db = sqlx::SqliteConnection::connect_with(&options).await.map_err(failed)?;
            sqlite::copy::dump(&mut db, location, known, writer).await?;
            db.close().await?;
            drop(unclean_lock);
        }
        Location::Postgres(url) => {
            let options = postgres::options(url)?;
            let mut db = sqlx::PgConnection::connect_with(&options).await.map_err(failed)?;
            // Reading a large table takes longer than the limit for requests.
            sqlx::query("SET statement_timeout = 0").execute(&mut db).await?;
            postgres::copy::dump(&mut db, location, known, writer).await?;
            db.close().await?;
        }
    }
    Ok(())
}

/// Restores a backup into an empty database, which is created if missing. The backup is restored completely or not at all: the whole file
/// is checked before the first row is written, and all rows are written in one transaction.
///
/// # Errors
/// The file is not a complete backup, or is of a newer version; the database has rows or is in use.
pub async fn restore(location: &Location, path: &Path) -> Result<Summary, BackupError> {
    let (heading, summary) = verify(path)?;
    let known = newest_known(location);
    if heading.migration > known {
        let path = path.display().to_string();
        return Err(ServeError::DatabaseTooNew { path, found: heading.migration, known }.into());
    }
    match location {
        Location::Sqlite(file) => SqliteStore::open(file).await?.restore(location, path).await?,
        Location::Postgres(url) => PostgresStore::open(url).await?.restore(location, path).await?,
    }
    Ok(summary)
}
