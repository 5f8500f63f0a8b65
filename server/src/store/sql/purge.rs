//! What is left of deleted jobs, removed bit by bit: a run of a week has millions of rows, and one statement that removes
//! them all would hold up every other writer, or run into the database's time limit.

use super::{SOME_METRIC_CHUNKS, SqlStore};
use crate::store::{Result, StoreError};
use lockstep_protocol::JobId;
use sqlx::AssertSqlSafe;

/// Events removed at a time; a few milliseconds' work.
const EVENTS: i64 = 1000;
/// Chunks of metrics removed at a time; each holds some ten kilobytes.
const CHUNKS: i64 = 200;

impl SqlStore {
    pub(super) async fn find_deleted(&self) -> Result<Option<JobId>> {
        let oldest = "SELECT id FROM jobs WHERE deleted_at IS NOT NULL ORDER BY deleted_at LIMIT 1";
        let id: Option<String> = sqlx::query_scalar(oldest).fetch_optional(&self.reader).await?;
        id.map(|id| id.parse().map_err(|_| StoreError::Corrupt(format!("job id {id:?}")))).transpose()
    }

    pub(super) async fn purge_some(&self, id: &JobId) -> Result<()> {
        let id = id.as_str();
        // The events' numbers have no gap.
        let events = "DELETE FROM events WHERE job_id = $1 \
            AND seq < (SELECT min(seq) FROM events WHERE job_id = $1) + $2";
        let chunks = format!("DELETE FROM metric_chunks WHERE {SOME_METRIC_CHUNKS}");
        let mut db = self.begin().await?;
        for (query, rows) in [(events, EVENTS), (chunks.as_str(), CHUNKS)] {
            let done = sqlx::query(AssertSqlSafe(query)).bind(id).bind(rows).execute(&mut *db).await?;
            if done.rows_affected() > 0 {
                db.commit().await?;
                return Ok(());
            }
        }
        // A row a source of an attempt.
        let sources = "DELETE FROM acknowledged WHERE job_id = $1 \
            AND attempt = (SELECT min(attempt) FROM acknowledged WHERE job_id = $1)";
        let done = sqlx::query(sources).bind(id).execute(&mut *db).await?;
        if done.rows_affected() == 0 {
            sqlx::query("DELETE FROM jobs WHERE id = $1").bind(id).execute(&mut *db).await?;
        }
        db.commit().await?;
        Ok(())
    }
}
