//! Copies whole tables out of a database and into one. The names of tables and columns are read from the database itself, so that a
//! later migration cannot be forgotten here.

use super::{
    super::dialect::{AFTER_COPY, SCHEMA},
    Connection, DbRow,
    checkpoint_copies::RESTORED,
};
use crate::store::{
    backup_file::{BackupError, Writer},
    cells::{Cell, Column, Kind, Table},
};
use futures_util::TryStreamExt;
use sqlx::{AssertSqlSafe, Row};

/// The tables, those that others refer to first.
pub(in crate::store) async fn tables(db: &mut Connection) -> sqlx::Result<Vec<Table>> {
    let columns: Vec<(String, String, String)> = sqlx::query_as(SCHEMA).fetch_all(db).await?;
    let mut tables: Vec<Table> = Vec::new();
    for (table, name, kind) in columns {
        let kind = Kind::of(&kind);
        if tables.last().is_none_or(|t| t.name != table) {
            tables.push(Table { name: table, columns: Vec::new() });
        }
        if let Some(last) = tables.last_mut() {
            last.columns.push(Column { name, kind });
        }
    }
    Ok(tables)
}

/// Writes every row of every table; the caller has begun a transaction that sees one moment.
pub(in crate::store) async fn dump(db: &mut Connection, to: &mut Writer) -> Result<(), BackupError> {
    for table in tables(db).await? {
        to.table(&table)?;
        let query = format!("SELECT {} FROM {}", names(&table), table.name);
        let mut rows = sqlx::query(AssertSqlSafe(query)).fetch(&mut *db);
        while let Some(row) = rows.try_next().await? {
            to.row(&cells(&table, &row)?)?;
        }
    }
    Ok(())
}

fn names(table: &Table) -> String {
    let names: Vec<_> = table.columns.iter().map(|c| format!("\"{}\"", c.name)).collect();
    names.join(", ")
}

fn cells(table: &Table, row: &DbRow) -> sqlx::Result<Vec<Cell>> {
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

/// Adds a row; the table's columns may be fewer than the database's.
pub(in crate::store) async fn insert(db: &mut Connection, table: &Table, row: Vec<Cell>) -> sqlx::Result<()> {
    let places: Vec<_> = (1..=table.columns.len()).map(|n| format!("${n}")).collect();
    let query = format!("INSERT INTO {} ({}) VALUES ({})", table.name, names(table), places.join(", "));
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

/// Whether no table has a row.
pub(in crate::store) async fn is_empty(db: &mut Connection) -> sqlx::Result<bool> {
    for table in tables(db).await? {
        let query = format!("SELECT count(*) FROM (SELECT 1 FROM {} LIMIT 1) AS first", table.name);
        let rows: i64 = sqlx::query_scalar(AssertSqlSafe(query)).fetch_one(&mut *db).await?;
        if rows > 0 {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Marks what object stores are known by as restored: their checkpoints may be another server's yet.
pub(in crate::store) async fn mark_restored(db: &mut Connection) -> sqlx::Result<()> {
    let query = "UPDATE artifact_stores SET marker = $1 || marker WHERE marker NOT LIKE $1 || '%'";
    sqlx::query(query).bind(RESTORED).execute(db).await.map(drop)
}

/// Counters over rows that were numbered elsewhere continue after them.
pub(in crate::store) async fn advance_counters(db: &mut Connection) -> sqlx::Result<()> {
    sqlx::query(AFTER_COPY).execute(db).await.map(drop)
}
