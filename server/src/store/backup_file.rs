//! The file of a backup: writing, verification and reading. `backup.rs` describes the format.

use super::cells::{Cell, Table};
use crate::{config::serve_error::ServeError, util::regular_files};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::{
    fs::File,
    io::{self, BufRead, BufReader, BufWriter, Write as _},
    path::{Path, PathBuf},
};

const FORMAT: u32 = 1;

/// An error of a backup or a restore.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackupError {
    /// The file cannot be read or written.
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("{} is not a complete backup: {detail}", path.display())]
    Incomplete { path: PathBuf, detail: String },
    /// The target database of a restore has rows.
    #[error(
        "the database {0} is not empty; a backup can only be restored into a new database: name a new one with --database or --data-dir"
    )]
    NotEmpty(String),
    #[error(transparent)]
    Open(#[from] ServeError),
    /// A query failed; nothing was changed.
    #[error("the database: {0}")]
    Database(#[from] sqlx::Error),
    /// A line cannot be read or written.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The content of a backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// Rows by table, in the file's order.
    pub tables: Vec<(String, u64)>,
    /// Size of the file in bytes.
    pub size_bytes: u64,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Heading {
    lockstep_backup: u32,
    /// The newest migration of the database that was backed up.
    pub(super) migration: i64,
    at: jiff::Timestamp,
}

#[derive(Serialize, Deserialize)]
struct End {
    rows: u64,
    sha256: String,
}

/// Writes the lines of a backup.
pub(super) struct Writer {
    file: BufWriter<File>,
    hash: Sha256,
    tables: Vec<(String, u64)>,
}

impl Writer {
    /// Creates a file, which the caller finishes or removes.
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        let file = BufWriter::new(File::create(path)?);
        Ok(Self { file, hash: Sha256::new(), tables: Vec::new() })
    }

    /// Writes the first line, for a database whose newest migration is `migration`.
    pub(super) fn write_heading(&mut self, migration: i64) -> io::Result<()> {
        self.write_line(&Heading { lockstep_backup: FORMAT, migration, at: crate::now() })
    }

    fn write_line(&mut self, value: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        self.hash.update(&line);
        self.file.write_all(&line)
    }

    pub(super) fn write_table(&mut self, table: &Table) -> io::Result<()> {
        self.tables.push((table.name.clone(), 0));
        self.write_line(table)
    }

    pub(super) fn write_row(&mut self, cells: &[Cell]) -> io::Result<()> {
        if let Some((_, rows)) = self.tables.last_mut() {
            *rows += 1;
        }
        self.write_line(&cells.iter().map(Cell::json).collect::<Vec<_>>())
    }

    /// Writes the last line and syncs the file to disk.
    pub(super) fn finish(mut self) -> io::Result<Summary> {
        let rows = self.tables.iter().map(|(_, rows)| rows).sum();
        let sha256 = hex::encode(self.hash.clone().finalize());
        self.write_line(&End { rows, sha256 })?;
        self.file.flush().and_then(|()| self.file.get_ref().sync_all())?;
        Ok(Summary { tables: self.tables, size_bytes: self.file.get_ref().metadata()?.len() })
    }
}

/// Reads and checks a whole backup.
pub(super) fn verify(path: &Path) -> Result<(Heading, Summary), BackupError> {
    let failed = |source| BackupError::File { path: path.to_owned(), source };
    let incomplete =
        |detail: &str| BackupError::Incomplete { path: path.to_owned(), detail: detail.to_owned() };
    let mut file = BufReader::new(regular_files::open(path).map_err(failed)?);
    let mut hash = Sha256::new();
    let (mut line, mut last) = (Vec::new(), Vec::new());
    let (mut tables, mut heading) = (Vec::<(String, u64)>::new(), None);
    while file.read_until(b'\n', &mut line).map_err(failed)? > 0 {
        // The checksum does not include the last line of the file.
        hash.update(&last);
        match line.first() {
            Some(b'[') => match tables.last_mut() {
                Some((_, rows)) => *rows += 1,
                None => return Err(incomplete("it has a row without a table")),
            },
            _ if heading.is_none() => {
                let found: Heading =
                    serde_json::from_slice(&line).map_err(|_| incomplete("it has no heading"))?;
                if found.lockstep_backup != FORMAT {
                    return Err(incomplete("it has another version of the format"));
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
    let heading = heading.ok_or_else(|| incomplete("it is empty"))?;
    let end: End = serde_json::from_slice(&last).map_err(|_| incomplete("its end is missing"))?;
    if end.sha256 != hex::encode(hash.finalize()) {
        return Err(incomplete("its checksum does not match"));
    }
    let size_bytes = file.get_ref().metadata().map_err(failed)?.len();
    Ok((heading, Summary { tables, size_bytes }))
}

/// Reads the rows of a verified backup.
pub(super) struct Rows {
    path: PathBuf,
    file: BufReader<File>,
    /// The table of the next row.
    table: Option<Table>,
}

impl Rows {
    pub(super) fn open(path: &Path) -> Result<Self, BackupError> {
        let failed = |source| BackupError::File { path: path.to_owned(), source };
        Ok(Self {
            path: path.to_owned(),
            file: BufReader::new(regular_files::open(path).map_err(failed)?),
            table: None,
        })
    }

    /// The next row and its table; `None` at the end of the file.
    pub(super) fn next_row(&mut self) -> Result<Option<(Table, Vec<Cell>)>, BackupError> {
        let mut line = Vec::new();
        let path = &self.path;
        let damaged =
            || BackupError::Incomplete { path: path.clone(), detail: "a row does not fit its table".into() };
        while self.file.read_until(b'\n', &mut line)? > 0 {
            if line.first() != Some(&b'[') {
                if let Ok(table) = serde_json::from_slice::<Table>(&line) {
                    let is_plain = |name: &str| {
                        !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
                    };
                    // The names become part of an SQL statement.
                    if !is_plain(&table.name) || !table.columns.iter().all(|c| is_plain(&c.name)) {
                        return Err(damaged());
                    }
                    self.table = Some(table);
                }
                line.clear();
                continue;
            }
            let table = self.table.clone().ok_or_else(damaged)?;
            let values: Vec<Value> = serde_json::from_slice(&line).map_err(|_| damaged())?;
            if values.len() != table.columns.len() {
                return Err(damaged());
            }
            let cells = table.columns.iter().zip(values).map(|(c, v)| Cell::read(c.kind, v));
            let cells = cells.collect::<Option<Vec<_>>>().ok_or_else(damaged)?;
            return Ok(Some((table, cells)));
        }
        Ok(None)
    }
}
