//! Incremental removal of deleted jobs' rows, and of points that are in chunks. A run of a week has millions of rows. A single statement
//! that removes all of them would delay all other writers, or exceed the database's time limit.

use super::{Connection, FIRST_METRIC_CHUNKS, SqlStore};
use crate::store::{
    Result,
    values::{job_id, uint},
};
use jiff::Timestamp;
use lockstep_protocol::JobId;
use sqlx::AssertSqlSafe;

/// Maximum number of events that a statement removes. Such a statement takes a few milliseconds.
const MAX_EVENTS: i64 = 1000;
/// Maximum number of chunks of metrics that a statement removes. A chunk has about three kilobytes.
const MAX_CHUNKS: i64 = 500;

impl SqlStore {
    pub async fn first_seq(&self, job: &JobId) -> Result<u64> {
        let removed: Option<i64> =
            sqlx::query_scalar("SELECT removed FROM metric_compaction WHERE job_id = $1")
                .bind(job.as_str())
                .fetch_optional(&self.reader)
                .await?;
        Ok(removed.map_or(0, uint) + 1)
    }

    pub async fn oldest_job_with_points(
        &self,
        ended_before: Timestamp,
        after_job: Option<&JobId>,
    ) -> Result<Option<JobId>> {
        let id: Option<String> = sqlx::query_scalar(
            "SELECT id FROM jobs WHERE state IN ('succeeded', 'failed', 'cancelled') AND deleted_at IS NULL \
             AND finished_at <= $1 AND EXISTS (SELECT 1 FROM events WHERE job_id = jobs.id AND kind = 'metrics') \
             AND ($2 IS NULL OR (created_at, id) > (SELECT created_at, id FROM jobs WHERE id = $2)) \
             ORDER BY created_at, id LIMIT 1",
        )
        .bind(ended_before.as_millisecond())
        .bind(after_job.map(JobId::as_str))
        .fetch_optional(&self.reader)
        .await?;
        id.as_deref().map(job_id).transpose()
    }

    pub async fn remove_points(&self, job: &JobId) -> Result<bool> {
        let id = job.as_str();
        let mut db = self.begin().await?;
        // `removed` is advanced first, so that streams begin after the points that are deleted below.
        let text =
            "UPDATE metric_compaction SET removed = watermark WHERE job_id = $1 AND removed < watermark";
        sqlx::query(text).bind(id).execute(&mut *db).await?;
        let text = "DELETE FROM events WHERE job_id = $1 AND kind = 'metrics' AND seq <= (SELECT max(seq) FROM (SELECT seq \
            FROM events WHERE job_id = $1 AND kind = 'metrics' AND seq <= (SELECT removed FROM metric_compaction \
            WHERE job_id = $1) ORDER BY seq LIMIT $2) AS first)";
        let done = sqlx::query(text).bind(id).bind(MAX_EVENTS).execute(&mut *db).await?;
        db.commit().await?;
        Ok(done.rows_affected() > 0)
    }

    pub async fn oldest_deleted_job(&self) -> Result<Option<JobId>> {
        let oldest = "SELECT id FROM jobs WHERE deleted_at IS NOT NULL ORDER BY deleted_at LIMIT 1";
        let id: Option<String> = sqlx::query_scalar(oldest).fetch_optional(&self.reader).await?;
        id.as_deref().map(job_id).transpose()
    }

    pub async fn purge_some_rows(&self, id: &JobId) -> Result<()> {
        let id = id.as_str();
        let events = "DELETE FROM events WHERE job_id = $1 AND seq <= (SELECT max(seq) FROM \
            (SELECT seq FROM events WHERE job_id = $1 ORDER BY seq LIMIT $2) AS first)";
        let chunks = format!("DELETE FROM metric_chunks WHERE {FIRST_METRIC_CHUNKS}");
        // Removes the histograms of all layers of a step.
        let histograms = "DELETE FROM histograms WHERE job_id = $1 \
            AND step = (SELECT min(step) FROM histograms WHERE job_id = $1)";
        // Removes the numbers of acknowledged records of the oldest attempt, one row for each rank or agent that has reported.
        let acknowledged = "DELETE FROM acknowledged WHERE job_id = $1 \
            AND attempt = (SELECT min(attempt) FROM acknowledged WHERE job_id = $1)";
        let mut db = self.begin().await?;
        for (query, rows) in [
            (events, Some(MAX_EVENTS)),
            (chunks.as_str(), Some(MAX_CHUNKS)),
            (histograms, None),
            (acknowledged, None),
        ] {
            let query = sqlx::query(AssertSqlSafe(query)).bind(id);
            let query = rows.into_iter().fold(query, |query, rows| query.bind(rows));
            if query.execute(&mut *db).await?.rows_affected() > 0 {
                // The caller calls again until the job's row is deleted.
                return Ok(db.commit().await?);
            }
        }
        sqlx::query("DELETE FROM jobs WHERE id = $1").bind(id).execute(&mut *db).await?;
        delete_panels_of_lost_projects(&mut db).await?;
        Ok(db.commit().await?)
    }
}

/// Deletes the panels of projects that no longer exist. A project exists while a job names it.
pub(super) async fn delete_panels_of_lost_projects(db: &mut Connection) -> Result<()> {
    let projects = "DELETE FROM project_panels WHERE NOT EXISTS \
        (SELECT 1 FROM jobs WHERE jobs.project = project_panels.project)";
    sqlx::query(projects).execute(db).await?;
    Ok(())
}
