//! Backups: everything in a database, in one file that either database can be restored from.
//!
//! The file is lines of JSON: a heading, then for each table its columns and an array a row, last the number of rows
//! and the SHA-256 of all lines before. An own format rather than `pg_dump` and SQLite's: one command does both
//! databases, nothing has to be installed in a matching version, a torn file is known before anything is
//! written, and moving from SQLite to Postgres is a backup and a restore. It is read in one transaction that
//! sees one moment, beside a running server. Checkpoints are not in it: their folders under `jobs/` never change
//! once they are there, so any copying of files backs them up.

use super::{
    Location,
    cells::{Cell, Table, hexadecimal},
    migrations, older, postgres,
    sqlite::{self, SqliteStore},
};
use crate::{config::ServeError, regular};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use sqlx::Connection;
use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader, BufWriter, Write as _},
    path::{Path, PathBuf},
};

const FORMAT: u32 = 1;

/// Why a backup or a restore was not done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackupError {
    /// The file.
    #[error("{}: {source}", path.display())]
    File {
        /// Of the backup.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Not a backup, or not a whole one.
    #[error("{} is not a whole backup: {detail}", path.display())]
    NotWhole {
        /// Of the backup.
        path: PathBuf,
        /// What is wrong with it.
        detail: String,
    },
    /// The database that is to be restored into has rows.
    #[error(
        "the database {0} is not empty; a backup is restored into a new one only, name it with --database or --data-dir"
    )]
    NotEmpty(String),
    /// The database.
    #[error(transparent)]
    Open(#[from] ServeError),
    /// The database, half way; nothing was changed.
    #[error("the database: {0}")]
    Database(#[from] sqlx::Error),
    /// Writing the lines.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// What is in a backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// Rows by table, in the file's order.
    pub tables: Vec<(String, u64)>,
    /// Of the file.
    pub size_bytes: u64,
}

#[derive(Serialize, Deserialize)]
struct Heading {
    lockstep_backup: u32,
    /// The newest migration of the database it was made of.
    migration: i64,
    at: jiff::Timestamp,
}

#[derive(Serialize, Deserialize)]
struct End {
    rows: u64,
    sha256: String,
}

/// The lines of a backup on their way to the disk.
pub(super) struct Writer {
    to: BufWriter<File>,
    hash: Sha256,
    tables: Vec<(String, u64)>,
    size_bytes: u64,
}

impl Writer {
    fn line(&mut self, value: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        self.hash.update(&line);
        self.size_bytes += line.len() as u64;
        self.to.write_all(&line)
    }

    pub(super) fn table(&mut self, table: &Table) -> io::Result<()> {
        self.tables.push((table.name.clone(), 0));
        self.line(table)
    }

    pub(super) fn row(&mut self, cells: &[Cell]) -> io::Result<()> {
        if let Some((_, rows)) = self.tables.last_mut() {
            *rows += 1;
        }
        self.line(&cells.iter().map(Cell::json).collect::<Vec<_>>())
    }
}

/// Writes all that a database holds at this moment to `path`, which appears whole or not at all. A server may
/// be at work on it.
///
/// # Errors
/// The database cannot be read, or the file not be written.
pub async fn backup(location: &Location, path: &Path) -> Result<Summary, BackupError> {
    let failed = |source| BackupError::File { path: path.to_owned(), source };
    let mut partial = path.as_os_str().to_owned();
    partial.push(".part");
    let partial = PathBuf::from(partial);
    let file = File::create(&partial).map_err(failed)?;
    let mut writer =
        Writer { to: BufWriter::new(file), hash: Sha256::new(), tables: Vec::new(), size_bytes: 0 };
    let written = dump(location, &mut writer).await;
    let done = written.and_then(|()| {
        let rows = writer.tables.iter().map(|(_, rows)| rows).sum();
        let sha256 = hexadecimal(&writer.hash.clone().finalize());
        writer.line(&End { rows, sha256 }).map_err(failed)?;
        writer.to.flush().and_then(|()| writer.to.get_ref().sync_all()).map_err(failed)?;
        fs::rename(&partial, path).map_err(failed)?;
        Ok(Summary { tables: writer.tables, size_bytes: writer.size_bytes })
    });
    if done.is_err() {
        // The error says more than what is left of the file.
        let _ = fs::remove_file(&partial);
    }
    done
}

/// The newest migration that this build knows of a kind of database.
fn newest_known(location: &Location) -> i64 {
    let migrations = match location {
        Location::Sqlite(_) => &migrations::OF_SQLITE,
        Location::Postgres(_) => &migrations::OF_POSTGRES,
    };
    migrations.iter().map(|m| m.version).max().unwrap_or(0)
}

async fn dump(location: &Location, writer: &mut Writer) -> Result<(), BackupError> {
    let known = newest_known(location);
    // What a newer version has added, and how to read it, this one cannot know.
    let check = |found: i64| match found > known {
        true => Err(ServeError::DatabaseTooNew { path: location.to_string(), found, known }),
        false => Ok(found),
    };
    let failed =
        |error: sqlx::Error| ServeError::Database { path: location.to_string(), detail: error.to_string() };
    let newest = "SELECT max(version) FROM _sqlx_migrations";
    match location {
        Location::Sqlite(path) => {
            let options = sqlite::options(path).pragma("query_only", "1");
            let mut db = sqlx::SqliteConnection::connect_with(&options).await.map_err(failed)?;
            let mut moment = db.begin().await?;
            let migration = check(sqlx::query_scalar(newest).fetch_one(&mut *moment).await.map_err(failed)?)?;
            writer.line(&Heading { lockstep_backup: FORMAT, migration, at: crate::now() })?;
            sqlite::copy::dump(&mut moment, writer).await?;
            moment.rollback().await?;
            db.close().await?;
        }
        Location::Postgres(url) => {
            let options = postgres::options(url)?;
            let mut db = sqlx::PgConnection::connect_with(&options).await.map_err(failed)?;
            let mut moment = db.begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
            // A large table takes longer than a request may.
            sqlx::query("SET LOCAL statement_timeout = 0").execute(&mut *moment).await?;
            let migration = check(sqlx::query_scalar(newest).fetch_one(&mut *moment).await.map_err(failed)?)?;
            writer.line(&Heading { lockstep_backup: FORMAT, migration, at: crate::now() })?;
            postgres::copy::dump(&mut moment, writer).await?;
            moment.rollback().await?;
            db.close().await?;
        }
    }
    Ok(())
}

/// Brings a backup into an empty database, made when missing. All of it or nothing: the file is checked to
/// its end before the first row is written, and the rows are one transaction.
///
/// # Errors
/// A file that is no whole backup or of a newer version; a database that has rows or is in use.
pub async fn restore(location: &Location, path: &Path) -> Result<Summary, BackupError> {
    let (heading, summary) = verify(path)?;
    let known = newest_known(location);
    if heading.migration > known {
        let path = path.display().to_string();
        return Err(ServeError::DatabaseTooNew { path, found: heading.migration, known }.into());
    }
    match location {
        Location::Sqlite(file) => {
            let store = SqliteStore::open(file).await?;
            let mut db = store.writer.begin_with("BEGIN IMMEDIATE").await?;
            if !sqlite::copy::is_empty(&mut db).await? {
                return Err(BackupError::NotEmpty(location.to_string()));
            }
            let mut rows = Rows::open(path)?;
            while let Some((table, row)) = rows.next()? {
                sqlite::copy::insert(&mut db, &table, row).await?;
            }
            sqlite::copy::settle(&mut db).await?;
            db.commit().await?;
            super::Store::close(&store).await;
        }
        Location::Postgres(url) => {
            let store = postgres::PostgresStore::open(url).await?;
            let mut db = store.writer.begin().await?;
            if !postgres::copy::is_empty(&mut db).await? {
                return Err(BackupError::NotEmpty(location.to_string()));
            }
            let mut rows = Rows::open(path)?;
            while let Some((table, row)) = rows.next()? {
                postgres::copy::insert(&mut db, &table, row).await?;
            }
            postgres::copy::settle(&mut db).await?;
            db.commit().await?;
            super::Store::close(&store).await;
        }
    }
    Ok(summary)
}

/// Reads a backup to its end and checks it.
fn verify(path: &Path) -> Result<(Heading, Summary), BackupError> {
    let failed = |source| BackupError::File { path: path.to_owned(), source };
    let not_whole = |detail: &str| BackupError::NotWhole { path: path.to_owned(), detail: detail.to_owned() };
    let mut from = BufReader::new(regular::open(path).map_err(failed)?);
    let mut hash = Sha256::new();
    let (mut line, mut last) = (Vec::new(), Vec::new());
    let (mut tables, mut size_bytes, mut heading) = (Vec::<(String, u64)>::new(), 0, None);
    while from.read_until(b'\n', &mut line).map_err(failed)? > 0 {
        hash.update(&last);
        size_bytes += line.len() as u64;
        match line.first() {
            Some(b'[') => match tables.last_mut() {
                Some((_, rows)) => *rows += 1,
                None => return Err(not_whole("it has a row of no table")),
            },
            _ if heading.is_none() => {
                let found: Heading =
                    serde_json::from_slice(&line).map_err(|_| not_whole("it does not begin as one"))?;
                if found.lockstep_backup != FORMAT {
                    return Err(not_whole("it is of another version of the format"));
                }
                heading = Some(found);
            }
            _ => {
                if let Ok(table) = serde_json::from_slice::<Table>(&line) {
                    tables.push((table.name, 0));
                }
            }
        }
        last = std::mem::take(&mut line);
    }
    let heading = heading.ok_or_else(|| not_whole("it is empty"))?;
    let end: End = serde_json::from_slice(&last).map_err(|_| not_whole("its end is missing"))?;
    if end.sha256 != hexadecimal(&hash.finalize()) {
        return Err(not_whole("its checksum does not match"));
    }
    Ok((heading, Summary { tables, size_bytes }))
}

/// The rows of a backup that was verified.
struct Rows {
    path: PathBuf,
    from: BufReader<File>,
    table: Option<Table>,
}

impl Rows {
    fn open(path: &Path) -> Result<Self, BackupError> {
        let failed = |source| BackupError::File { path: path.to_owned(), source };
        Ok(Self {
            path: path.to_owned(),
            from: BufReader::new(regular::open(path).map_err(failed)?),
            table: None,
        })
    }

    fn next(&mut self) -> Result<Option<(Table, Vec<Cell>)>, BackupError> {
        let mut line = Vec::new();
        let damaged = |path: &Path| BackupError::NotWhole {
            path: path.to_owned(),
            detail: "a row does not fit its table".into(),
        };
        while self.from.read_until(b'\n', &mut line)? > 0 {
            if line.first() != Some(&b'[') {
                if let Ok(table) = serde_json::from_slice::<Table>(&line) {
                    let plain = |name: &str| {
                        !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
                    };
                    // They become part of a statement.
                    if !plain(&table.name) || !table.columns.iter().all(|c| plain(&c.name)) {
                        return Err(damaged(&self.path));
                    }
                    self.table = Some(table);
                }
                line.clear();
                continue;
            }
            let table = self.table.clone().ok_or_else(|| damaged(&self.path))?;
            let values: Vec<Value> = serde_json::from_slice(&line).map_err(|_| damaged(&self.path))?;
            if values.len() != table.columns.len() {
                return Err(damaged(&self.path));
            }
            let cells = table.columns.iter().zip(values).map(|(c, v)| Cell::read(c.kind, v));
            let cells = cells.collect::<Option<Vec<_>>>().ok_or_else(|| damaged(&self.path))?;
            return Ok(Some(older::as_today(table, cells)));
        }
        Ok(None)
    }
}
