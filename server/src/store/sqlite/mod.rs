//! The store on SQLite.
//!
//! One connection writes, so writers queue here and never meet SQLITE_BUSY among themselves; a pool of others
//! reads beside it (write-ahead log). `synchronous = FULL`: a commit is on disk before it is acknowledged, also
//! when the machine loses power; ingest puts many reports in one transaction, so the price is one sync a batch.

mod chunks;
mod ingest;
mod jobs;
mod reads;
mod things;

use super::{
    AgentRow, AttemptRow, Change, Changed, CheckpointRow, Claim, Claimed, Counts, Created, EventRow,
    Ingested, JobFilter, JobRow, LogFilter, MetricChunk, MetricFilter, NewJob, Page, Report, Result, Store,
    StoreError,
};
use crate::config::ServeError;
use async_trait::async_trait;
use jiff::Timestamp;
use lockstep_protocol::{
    agent::{Acknowledged, AttemptRef, RankReport},
    dataset::Dataset,
    job::{Job, JobId},
    metric::MetricColumn,
    stream::Event,
};
use sqlx::{
    Sqlite, SqlitePool, Transaction,
    migrate::{MigrateError, Migrator},
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
use std::{path::Path, time::Duration};

static MIGRATIONS: Migrator = sqlx::migrate!("../migrations/sqlite");

/// Earlier versions can corrupt a write-ahead log that two connections use (sqlite.org/wal.html#walresetbug).
const OLDEST_SQLITE: (u32, u32, u32) = (3, 51, 3);
/// How many requests may read at once.
const READERS: u32 = 8;

/// A database file.
#[derive(Debug, Clone)]
pub struct SqliteStore {
    writer: SqlitePool,
    reader: SqlitePool,
}

impl SqliteStore {
    /// Opens the file, makes it when missing, and brings its tables up to date.
    ///
    /// # Errors
    /// A file that cannot be opened, is no database, or was written by a newer version.
    pub async fn open(path: &Path) -> std::result::Result<Self, ServeError> {
        let name = path.display().to_string();
        let failed = |detail: String| ServeError::Database { path: name.clone(), detail };
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(true)
            // Someone else's `sqlite3 lockstep.db` may hold it for a moment.
            .busy_timeout(Duration::from_secs(5));
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
        let known = MIGRATIONS.iter().map(|m| m.version).max().unwrap_or(0);
        MIGRATIONS.run(&writer).await.map_err(|error| match error {
            MigrateError::VersionMissing(found) if found > known => {
                ServeError::DatabaseTooNew { path: name.clone(), found, known }
            }
            other => failed(other.to_string()),
        })?;
        let reader = pool(READERS)
            .connect_with(options.pragma("query_only", "1"))
            .await
            .map_err(|e| failed(e.to_string()))?;
        Ok(Self { writer, reader })
    }

    /// A transaction that has the write lock from its start.
    async fn begin(&self) -> Result<Transaction<'static, Sqlite>> {
        Ok(self.writer.begin_with("BEGIN IMMEDIATE").await?)
    }
}

impl From<sqlx::Error> for StoreError {
    fn from(error: sqlx::Error) -> Self {
        match error {
            sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) | sqlx::Error::ColumnNotFound(_) => {
                StoreError::Corrupt(error.to_string())
            }
            sqlx::Error::RowNotFound => StoreError::NotFound("row"),
            _ => StoreError::Unavailable(error.to_string()),
        }
    }
}

/// A value as it is kept in a column of JSON.
fn json<T: serde::Serialize>(value: &T) -> Result<String> {
    serde_json::to_string(value).map_err(|e| StoreError::Corrupt(e.to_string()))
}

fn from_json<T: serde::de::DeserializeOwned>(text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|e| StoreError::Corrupt(e.to_string()))
}

fn time(milliseconds: i64) -> Result<Timestamp> {
    Timestamp::from_millisecond(milliseconds).map_err(|e| StoreError::Corrupt(e.to_string()))
}

/// SQLite's integers are signed; sequence numbers, steps and sizes stay far below 2^63.
fn int(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn uint(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

fn small(value: i64) -> u32 {
    u32::try_from(value).unwrap_or(0)
}

#[async_trait]
impl Store for SqliteStore {
    async fn create_job(&self, new: NewJob) -> Result<Created> {
        self.insert_job(new).await
    }
    async fn job(&self, id: &JobId) -> Result<Option<JobRow>> {
        self.read_job(id).await
    }
    async fn jobs(&self, filter: &JobFilter) -> Result<Page> {
        self.list_jobs(filter).await
    }
    async fn waiting(&self) -> Result<Vec<JobRow>> {
        self.list_waiting().await
    }
    async fn unfinished(&self) -> Result<Vec<Job>> {
        self.list_unfinished().await
    }
    async fn change_job(&self, id: &JobId, change: Change) -> Result<Changed> {
        self.edit_job(id, change).await
    }
    async fn delete_job(&self, id: &JobId) -> Result<()> {
        self.remove_job(id).await
    }
    async fn claim(&self, claim: Claim) -> Result<Option<Claimed>> {
        self.make_attempt(claim).await
    }
    async fn live_attempts(&self) -> Result<Vec<AttemptRow>> {
        self.list_live().await
    }
    async fn acknowledged(&self, attempt: &AttemptRef) -> Result<Vec<Acknowledged>> {
        self.read_acknowledged(attempt).await
    }
    async fn ingest(&self, reports: Vec<Report>) -> Result<Vec<Ingested>> {
        self.store_reports(reports).await
    }
    async fn events(&self, job: &JobId, after: u64, limit: u32) -> Result<Vec<EventRow>> {
        self.read_events(job, after, limit).await
    }
    async fn metrics(
        &self,
        job: &JobId,
        filter: &MetricFilter,
    ) -> Result<(u64, Vec<(u32, u32, MetricColumn)>)> {
        self.read_metrics(job, filter).await
    }
    async fn metric_extent(&self, job: &JobId, filter: &MetricFilter) -> Result<(u64, Option<(u64, u64)>)> {
        self.read_metric_extent(job, filter).await
    }
    async fn metric_chunks(
        &self,
        job: &JobId,
        level: u32,
        filter: &MetricFilter,
    ) -> Result<(u64, Vec<MetricChunk>)> {
        self.read_metric_chunks(job, level, filter).await
    }
    async fn newest_metric_chunks(&self, job: &JobId) -> Result<(u64, Vec<MetricChunk>)> {
        self.read_newest_metric_chunks(job).await
    }
    async fn put_metric_chunks(
        &self,
        job: &JobId,
        after: u64,
        until: u64,
        chunks: &[MetricChunk],
    ) -> Result<bool> {
        self.write_metric_chunks(job, after, until, chunks).await
    }
    async fn logs(&self, job: &JobId, filter: &LogFilter) -> Result<Vec<Event>> {
        self.read_logs(job, filter).await
    }
    async fn rank_reports(&self, job: &JobId, attempt: u32) -> Result<Vec<(u32, RankReport)>> {
        self.read_rank_reports(job, attempt).await
    }
    async fn checkpoints(&self, job: &JobId) -> Result<Vec<CheckpointRow>> {
        self.read_checkpoints(job).await
    }
    async fn checkpoint(&self, id: &str) -> Result<Option<CheckpointRow>> {
        self.read_checkpoint(id).await
    }
    async fn datasets(&self) -> Result<Vec<Dataset>> {
        self.list_datasets().await
    }
    async fn dataset(&self, name: &str) -> Result<Option<Dataset>> {
        self.read_dataset(name).await
    }
    async fn add_dataset(&self, dataset: &Dataset) -> Result<()> {
        self.insert_dataset(dataset).await
    }
    async fn remove_dataset(&self, name: &str) -> Result<()> {
        self.delete_dataset(name).await
    }
    async fn put_agent(&self, agent: &AgentRow) -> Result<()> {
        self.upsert_agent(agent).await
    }
    async fn agents(&self) -> Result<Vec<AgentRow>> {
        self.list_agents().await
    }
    async fn counts(&self) -> Result<Counts> {
        self.count().await
    }
    async fn ready(&self) -> Result<()> {
        // Taking the write lock and letting it go proves more than a SELECT would.
        Ok(self.begin().await?.rollback().await?)
    }
    async fn close(&self) {
        self.reader.close().await;
        self.writer.close().await;
    }
}
