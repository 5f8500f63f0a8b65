//! Copies whole tables from and to a database. The names of tables and columns are read from the database, so that new migrations need no
//! change here.

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

/// The database's tables. A table comes before the tables that refer to it.
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

/// Writes all rows of all tables. The caller has begun a snapshot transaction.
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

/// Inserts a row. The backup's table may have fewer columns than the database's.
pub(in crate::store) async fn insert(db: &mut Connection, table: &Table, row: Vec<Cell>) -> sqlx::Result<()> {
    let placeholders: Vec<_> = (1..=table.columns.len()).map(|n| format!("${n}")).collect();
    let query = format!("INSERT INTO {} ({}) VALUES ({})", table.name, names(table), placeholders.join(", "));
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

/// Prefixes object stores' markers with [`RESTORED`], as another server may still use the stores.
pub(in crate::store) async fn mark_restored(db: &mut Connection) -> sqlx::Result<()> {
    let query = "UPDATE artifact_stores SET marker = $1 || marker WHERE marker NOT LIKE $1 || '%'";
    sqlx::query(query).bind(RESTORED).execute(db).await.map(drop)
}

/// Advances counters, so that new rows get greater numbers than the restored rows.
pub(in crate::store) async fn advance_counters(db: &mut Connection) -> sqlx::Result<()> {
    sqlx::query(AFTER_COPY).execute(db).await.map(drop)
}
