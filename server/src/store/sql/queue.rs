//! The queue: jobs that wait for slots, and the slots in use by each owner or project.

use super::{
    SqlStore,
    jobs::{SELECT_JOBS, job_with_id, rows_of},
};
use crate::{
    config::FairShare,
    store::{
        JobRow, Result, ShareUse, WaitingFingerprint,
        unreadable::readable,
        values::{job_id, uint},
    },
};
use lockstep_protocol::job::JobId;
use sqlx::AssertSqlSafe;
use std::collections::HashMap;

impl SqlStore {
    pub async fn jobs_by_id(&self, ids: &[JobId]) -> Result<HashMap<JobId, JobRow>> {
        let rows = rows_of(&mut *self.reader.acquire().await?, SELECT_JOBS, ids).await?;
        Ok(readable(rows.iter().map(job_with_id)).into_iter().collect())
    }

    pub async fn waiting_fingerprints(&self) -> Result<HashMap<JobId, WaitingFingerprint>> {
        let text = "SELECT id, last_seq, priority, project FROM jobs \
            WHERE state IN ('queued', 'restarting', 'lost') AND deleted_at IS NULL";
        let rows: Vec<(String, i64, i64, String)> = sqlx::query_as(text).fetch_all(&self.reader).await?;
        let fingerprint = |(id, last_seq, priority, project): (String, i64, i64, String)| {
            let priority = i32::try_from(priority).unwrap_or(i32::MAX);
            Ok((job_id(&id)?, WaitingFingerprint { last_seq: uint(last_seq), priority, project }))
        };
        Ok(readable(rows.into_iter().map(fingerprint)).into_iter().collect())
    }

    pub async fn slots_of_shares(&self, fair_share: FairShare) -> Result<HashMap<String, ShareUse>> {
        let share = match fair_share {
            FairShare::Off => return Ok(HashMap::new()),
            FairShare::Owner => "COALESCE(owner, '')",
            FairShare::Project => "project",
        };
        let query = format!(
            "SELECT share, CAST(SUM(ranks) AS BIGINT), MAX(token) FROM ( \
             SELECT {share} AS share, ranks, fencing_token AS token FROM jobs \
             WHERE fencing_token IS NOT NULL AND deleted_at IS NULL \
             UNION ALL SELECT {share}, 0, newest.fencing_token FROM jobs JOIN \
             (SELECT job_id, fencing_token FROM attempts ORDER BY fencing_token DESC LIMIT 100) AS newest \
             ON jobs.id = newest.job_id) AS parts GROUP BY 1"
        );
        let rows: Vec<(String, i64, i64)> =
            sqlx::query_as(AssertSqlSafe(query)).fetch_all(&self.reader).await?;
        let share_use =
            |slots, newest_start| ShareUse { slots: uint(slots), newest_start: uint(newest_start) };
        Ok(rows.into_iter().map(|(share, slots, newest)| (share, share_use(slots, newest))).collect())
    }
}
