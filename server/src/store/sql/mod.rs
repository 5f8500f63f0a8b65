//! The queries, shared by all databases. `sqlite.rs` and `postgres.rs` each compile this folder and define the differences in their module
//! `dialect` (the driver's types, how transactions begin), so each query is written once. Both databases support `$1`, `ON CONFLICT`,
//! `RETURNING`, `FROM (VALUES ...)` with the columns `column1` and so on, and 64-bit integers for integers and booleans. sqlx's `Any` would
//! hide the types, and generic code over sqlx's traits needs a page of bounds.

mod access;
mod agents;
mod annotations;
mod attempts;
mod audit;
mod checkpoint_copies;
mod chunks;
pub(in crate::store) mod copy;
mod datasets;
mod edits;
mod events;
mod history;
mod ingest;
mod job_list;
mod jobs;
mod layers;
mod machines;
mod models;
mod multi_row;
mod pages;
mod panels;
mod people;
mod purge;
mod queue;
mod reads;
mod sweeps;
mod webhooks;

use super::dialect::{
    BEGIN_SNAPSHOT, BEGIN_WRITE, Connection, DATABASE_BYTES, Db, DbRow, FIRST_METRIC_CHUNKS, LIKE,
    USE_LOG_INDEX, USE_METRICS_INDEX,
};
use crate::store::{
    Result, StoreError,
    sqlite::Lock,
    unreadable::readable,
    values::{from_json, new_fencing_token, time, uint},
};
use jiff::Timestamp;
use lockstep_protocol::agent::FencingToken;
use serde::de::DeserializeOwned;
use sqlx::{Database, Pool, Row, Transaction};
use std::sync::Arc;

/// A statement with its parameters.
type Query<'q> = sqlx::query::Query<'q, Db, <Db as Database>::Arguments>;

/// A database. One connection writes, so writers queue for it and never conflict in the database. A pool of other connections reads
/// concurrently.
#[derive(Debug, Clone)]
pub struct SqlStore {
    pub(in crate::store) writer: Pool<Db>,
    pub(in crate::store) reader: Pool<Db>,
    /// The lock file of an SQLite database, which is locked while the store exists.
    pub(in crate::store) lock: Option<Arc<Lock>>,
}

/// A boolean, which both databases store as an integer.
fn flag(row: &DbRow, column: &str) -> Result<bool> {
    Ok(row.try_get::<i64, _>(column)? != 0)
}

/// The fencing token in the columns `fencing_token` and `fencing_secret`. A damaged secret is replaced by a random secret, so that no agent
/// knows the token.
fn fencing_token(row: &DbRow) -> Result<FencingToken> {
    let number = uint(row.try_get("fencing_token")?);
    let token = FencingToken::of(number, row.try_get("fencing_secret")?);
    Ok(token.unwrap_or_else(|| new_fencing_token(number)))
}

fn optional_json<T: DeserializeOwned>(row: &DbRow, column: &str) -> Result<Option<T>> {
    row.try_get::<Option<&str>, _>(column)?.map(from_json).transpose()
}

fn optional_time(row: &DbRow, column: &str) -> Result<Option<Timestamp>> {
    row.try_get::<Option<i64>, _>(column)?.map(time).transpose()
}

impl SqlStore {
    /// Begins a transaction that has the write lock from the start.
    async fn begin(&self) -> Result<Transaction<'static, Db>> {
        match self.writer.begin_with(BEGIN_WRITE).await {
            // The database itself ended the previous transaction (as SQLite does on a full disk), but the driver still considers the
            // transaction open. A new connection does not have this state.
            Err(sqlx::Error::InvalidSavePointStatement) => {
                self.writer.acquire().await?.close().await?;
                Ok(self.writer.begin_with(BEGIN_WRITE).await?)
            }
            other => Ok(other?),
        }
    }

    /// The rows of a query that can be read. Errors of the other rows are logged.
    async fn list<T>(&self, query: Query<'_>, read: impl Fn(&DbRow) -> Result<T>) -> Result<Vec<T>> {
        let rows = query.fetch_all(&self.reader).await?;
        Ok(readable(rows.iter().map(read)))
    }

    /// The row of a query; `None` if there is no row.
    async fn find<T>(&self, query: Query<'_>, read: impl Fn(&DbRow) -> Result<T>) -> Result<Option<T>> {
        query.fetch_optional(&self.reader).await?.as_ref().map(read).transpose()
    }

    /// Executes a query that writes. Returns the number of rows that it has changed.
    async fn execute(&self, query: Query<'_>) -> Result<u64> {
        Ok(query.execute(&self.writer).await?.rows_affected())
    }

    /// Executes a query that writes. Returns the error `unchanged` if it has changed no row.
    async fn execute_or(&self, query: Query<'_>, unchanged: StoreError) -> Result<()> {
        if self.execute(query).await? == 0 { Err(unchanged) } else { Ok(()) }
    }

    pub async fn wait_for_writer(&self) -> Result<()> {
        Ok(self.begin().await?.rollback().await?)
    }

    pub async fn check_writable(&self) -> Result<()> {
        // Only a committed write proves that the database can be written. This write leaves no row.
        let mut db = self.begin().await?;
        for statement in
            ["INSERT INTO draining (agent_id) VALUES ('')", "DELETE FROM draining WHERE agent_id = ''"]
        {
            sqlx::query(statement).execute(&mut *db).await?;
        }
        Ok(db.commit().await?)
    }

    pub async fn close(&self) {
        if let Some(lock) = &self.lock {
            lock.note_closing();
        }
        self.reader.close().await;
        self.writer.close().await;
    }
}
