//! Chunks of metrics: written by the compaction task, read by charts.

use super::{BEGIN_SNAPSHOT, Connection, DbRow, Query, SqlStore, multi_row, reads::ranks_text};
use crate::store::{
    MetricChunk, MetricFilter, Result, StoreError,
    values::{int, strip_nul, to_u32, uint},
};
use lockstep_protocol::job::JobId;
use sqlx::Row;
use std::collections::BTreeSet;

fn chunk(row: &DbRow) -> Result<MetricChunk> {
    Ok(MetricChunk {
        name: row.try_get("name")?,
        rank: to_u32(row.try_get("rank")?),
        attempt: to_u32(row.try_get("attempt")?),
        level: to_u32(row.try_get("level")?),
        first_step: uint(row.try_get("first_step")?),
        last_step: uint(row.try_get("last_step")?),
        data: row.try_get("data")?,
        replaces_chunk: false,
        replaces_series: false,
    })
}

async fn watermark(db: &mut Connection, job: &JobId) -> Result<u64> {
    let text = "SELECT watermark FROM metric_compaction WHERE job_id = $1";
    let seq: Option<i64> = sqlx::query_scalar(text).bind(job.as_str()).fetch_optional(db).await?;
    Ok(seq.map_or(0, uint))
}

impl SqlStore {
    pub async fn step_range_of_chunks(
        &self,
        job: &JobId,
        filter: &MetricFilter,
    ) -> Result<(u64, Option<(u64, u64)>)> {
        let mut db = self.reader.begin_with(BEGIN_SNAPSHOT).await?;
        let watermark = watermark(&mut db, job).await?;
        // Every level covers all steps. The coarsest level (5) has the fewest rows.
        let ends: (Option<i64>, Option<i64>) = sqlx::query_as(
            "SELECT min(first_step), max(last_step) FROM metric_chunks WHERE job_id = $1 AND level = 5 \
             AND ($2 IS NULL OR name = $2) AND ($3 = '' OR $3 LIKE '%,' || rank || ',%')",
        )
        .bind(job.as_str())
        .bind(filter.name.as_deref().map(strip_nul))
        .bind(ranks_text(filter))
        .fetch_one(&mut *db)
        .await?;
        db.rollback().await?;
        Ok((watermark, ends.0.map(uint).zip(ends.1.map(uint))))
    }

    pub async fn metric_chunks(
        &self,
        job: &JobId,
        level: u32,
        filter: &MetricFilter,
    ) -> Result<(u64, Vec<MetricChunk>)> {
        let query = sqlx::query(
            "SELECT name, rank, attempt, level, first_step, last_step, data FROM metric_chunks \
             WHERE job_id = $1 AND level = $2 AND ($3 IS NULL OR name = $3) \
             AND ($4 = '' OR $4 LIKE '%,' || rank || ',%') \
             AND ($5 IS NULL OR last_step >= $5) AND ($6 IS NULL OR first_step <= $6) \
             ORDER BY name, level, rank, attempt, first_step",
        )
        .bind(job.as_str())
        .bind(i64::from(level))
        .bind(filter.name.as_deref().map(strip_nul))
        .bind(ranks_text(filter))
        .bind(filter.from.map(int))
        .bind(filter.to.map(int));
        self.with_watermark(job, query).await
    }

    pub async fn newest_metric_chunks(&self, job: &JobId) -> Result<(u64, Vec<MetricChunk>)> {
        let text = "SELECT c.name, c.rank, c.attempt, c.level, c.first_step, c.last_step, c.data FROM metric_chunks c \
            JOIN (SELECT name, level, rank, attempt, max(first_step) AS first_step FROM metric_chunks \
            WHERE job_id = $1 GROUP BY name, level, rank, attempt) n \
            ON c.job_id = $1 AND c.name = n.name AND c.level = n.level AND c.rank = n.rank \
            AND c.attempt = n.attempt AND c.first_step = n.first_step";
        let query = sqlx::query(text).bind(job.as_str());
        self.with_watermark(job, query).await
    }

    /// The job's watermark, and the chunks that a query finds, from one snapshot.
    async fn with_watermark(&self, job: &JobId, query: Query<'_>) -> Result<(u64, Vec<MetricChunk>)> {
        let mut db = self.reader.begin_with(BEGIN_SNAPSHOT).await?;
        let watermark = watermark(&mut db, job).await?;
        let rows = query.fetch_all(&mut *db).await?;
        db.rollback().await?;
        Ok((watermark, rows.iter().map(chunk).collect::<Result<_>>()?))
    }

    pub async fn put_metric_chunks(
        &self,
        job: &JobId,
        old_watermark: u64,
        new_watermark: u64,
        chunks: &[MetricChunk],
    ) -> Result<bool> {
        let mut db = self.begin().await?;
        if watermark(&mut db, job).await? != old_watermark {
            return Ok(false);
        }
        let text = "SELECT 1 FROM jobs WHERE id = $1 AND deleted_at IS NULL";
        let exists = sqlx::query(text).bind(job.as_str()).fetch_optional(&mut *db).await?;
        exists.ok_or(StoreError::NotFound("job"))?;
        let replaced = chunks.iter().filter(|chunk| chunk.replaces_series);
        let replaced = replaced.map(|chunk| (&chunk.name, chunk.rank, chunk.attempt));
        for (name, rank, attempt) in replaced.collect::<BTreeSet<_>>() {
            sqlx::query(
                "DELETE FROM metric_chunks WHERE job_id = $1 AND name = $2 AND rank = $3 AND attempt = $4",
            )
            .bind(job.as_str())
            .bind(name)
            .bind(i64::from(rank))
            .bind(i64::from(attempt))
            .execute(&mut *db)
            .await?;
        }
        for chunk in chunks.iter().filter(|chunk| chunk.replaces_chunk) {
            sqlx::query(
                "UPDATE metric_chunks SET last_step = $7, data = $8 WHERE job_id = $1 AND name = $2 AND level = $3 \
                 AND rank = $4 AND attempt = $5 AND first_step = $6",
            )
            .bind(job.as_str())
            .bind(&chunk.name)
            .bind(i64::from(chunk.level))
            .bind(i64::from(chunk.rank))
            .bind(i64::from(chunk.attempt))
            .bind(int(chunk.first_step))
            .bind(int(chunk.last_step))
            .bind(&chunk.data[..])
            .execute(&mut *db)
            .await?;
        }
        let new: Vec<_> = chunks.iter().filter(|chunk| !chunk.replaces_chunk).collect();
        let text = "INSERT INTO metric_chunks (job_id, name, rank, attempt, level, first_step, last_step, data) VALUES {}";
        multi_row::execute(&mut db, text, 8, &new, |query, chunk| {
            Ok(query
                .bind(job.as_str())
                .bind(&chunk.name)
                .bind(i64::from(chunk.rank))
                .bind(i64::from(chunk.attempt))
                .bind(i64::from(chunk.level))
                .bind(int(chunk.first_step))
                .bind(int(chunk.last_step))
                .bind(&chunk.data[..]))
        })
        .await?;
        let text = "INSERT INTO metric_compaction (job_id, watermark) VALUES ($1, $2) \
            ON CONFLICT (job_id) DO UPDATE SET watermark = excluded.watermark";
        sqlx::query(text).bind(job.as_str()).bind(int(new_watermark)).execute(&mut *db).await?;
        db.commit().await?;
        Ok(true)
    }
}
