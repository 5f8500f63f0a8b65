//! Copies whole tables from and to a database. The names of tables and columns are read from the database, so that new migrations need no
//! change here.

use super::{
    super::dialect::{ADVANCE_FENCING_TOKENS, LIST_COLUMNS},
    BEGIN_SNAPSHOT, BEGIN_WRITE, Connection, DbRow, SqlStore,
    checkpoint_copies::RESTORED_PREFIX,
};
use crate::{
    config::serve_error::ServeError,
    store::{
        Location,
        backup_file::{BackupError, Rows, Writer},
        cells::{Cell, Column, Kind, Table},
    },
};
use futures_util::TryStreamExt;
use sqlx::{AssertSqlSafe, Connection as _, Row};
use std::path::Path;

/// The database's tables. A table comes before the tables that refer to it.
async fn tables(db: &mut Connection) -> sqlx::Result<Vec<Table>> {
    let columns: Vec<(String, String, String)> = sqlx::query_as(LIST_COLUMNS).fetch_all(db).await?;
    let mut tables: Vec<Table> = Vec::new();
    for (table, name, kind) in columns {
        let kind = Kind::of_column_type(&kind);
        if tables.last().is_none_or(|t| t.name != table) {
            tables.push(Table { name: table, columns: Vec::new() });
        }
        if let Some(last) = tables.last_mut() {
            last.columns.push(Column { name, kind });
        }
    }
    Ok(tables)
}

/// Writes the heading and all rows of all tables, as of one snapshot. `known` is the newest migration in this build.
pub(in crate::store) async fn dump(
    db: &mut Connection,
    location: &Location,
    known: i64,
    writer: &mut Writer,
) -> Result<(), BackupError> {
    let mut db = db.begin_with(BEGIN_SNAPSHOT).await?;
    let newest = sqlx::query_scalar::<_, i64>("SELECT max(version) FROM _sqlx_migrations");
    let path = location.to_string();
    let found = match newest.fetch_one(&mut *db).await {
        // This version does not know how to read the tables of a newer version.
        Ok(found) if found > known => return Err(ServeError::DatabaseTooNew { path, found, known }.into()),
        Ok(found) => found,
        Err(error) => return Err(ServeError::Database { path, detail: error.to_string() }.into()),
    };
    writer.write_heading(found)?;
    for table in tables(&mut db).await? {
        writer.write_table(&table)?;
        let query = format!("SELECT {} FROM {}", column_names(&table), table.name);
        let mut rows = sqlx::query(AssertSqlSafe(query)).fetch(&mut *db);
        while let Some(row) = rows.try_next().await? {
            writer.write_row(&read_cells(&table, &row)?)?;
        }
    }
    Ok(db.rollback().await?)
}

fn column_names(table: &Table) -> String {
    let names: Vec<_> = table.columns.iter().map(|c| format!("\"{}\"", c.name)).collect();
    names.join(", ")
}

fn read_cells(table: &Table, row: &DbRow) -> sqlx::Result<Vec<Cell>> {
    let cell = |(index, column): (usize, &Column)| {
        Ok(match column.kind {
            Kind::Integer => Cell::Integer(row.try_get(index)?),
            Kind::Real => Cell::Real(row.try_get(index)?),
            Kind::Text => Cell::Text(row.try_get(index)?),
            Kind::Bytes => Cell::Bytes(row.try_get(index)?),
        })
    };
    table.columns.iter().enumerate().map(cell).collect()
}

/// Inserts a row. The backup's table may have fewer columns than the database's table.
async fn insert_row(db: &mut Connection, table: &Table, row: Vec<Cell>) -> sqlx::Result<()> {
    let placeholders: Vec<_> = (1..=table.columns.len()).map(|n| format!("${n}")).collect();
    let query =
        format!("INSERT INTO {} ({}) VALUES ({})", table.name, column_names(table), placeholders.join(", "));
    let mut query = sqlx::query(AssertSqlSafe(query));
    for cell in row {
        query = match cell {
            Cell::Integer(value) => query.bind(value),
            Cell::Real(value) => query.bind(value),
            Cell::Text(value) => query.bind(value),
            Cell::Bytes(value) => query.bind(value),
        };
    }
    query.execute(db).await.map(drop)
}

/// Whether all tables are empty.
async fn is_empty(db: &mut Connection) -> sqlx::Result<bool> {
    for table in tables(db).await? {
        let query = format!("SELECT count(*) FROM (SELECT 1 FROM {} LIMIT 1) AS first", table.name);
        let rows: i64 = sqlx::query_scalar(AssertSqlSafe(query)).fetch_one(&mut *db).await?;
        if rows > 0 {
            return Ok(false);
        }
    }
    Ok(true)
}

impl SqlStore {
    /// Restores the rows of a verified backup in one transaction, and closes the database.
    ///
    /// # Errors
    /// The database is not empty, a row does not fit its table, or the database refuses a row.
    pub async fn restore(&self, location: &Location, path: &Path) -> Result<(), BackupError> {
        let mut db = self.writer.begin_with(BEGIN_WRITE).await?;
        if !is_empty(&mut db).await? {
            return Err(BackupError::NotEmpty(location.to_string()));
        }
        let mut rows = Rows::open(path)?;
        while let Some((table, row)) = rows.next_row()? {
            insert_row(&mut db, &table, row).await?;
        }
        // Marks the object stores as restored, because the server that wrote the backup may still use them.
        let text = "UPDATE artifact_stores SET marker = $1 || marker WHERE marker NOT LIKE $1 || '%'";
        sqlx::query(text).bind(RESTORED_PREFIX).execute(&mut *db).await?;
        // Makes new fencing tokens greater than the restored tokens.
        sqlx::query(ADVANCE_FENCING_TOKENS).execute(&mut *db).await?;
        db.commit().await?;
        self.close().await;
        Ok(())
    }
}
