//! The parts of a job's history: changes of state, alerts, forks, and requests about the job.

use super::{
    DbRow, SqlStore, audit,
    jobs::{SELECT_JOBS, job_row},
};
use crate::store::{
    HistoryRows, Result,
    values::{from_json, time, uint},
};
use lockstep_protocol::{job::Job, stream::Event};
use sqlx::{AssertSqlSafe, Row};

/// Maximum number of changes of state, of alerts (the newest of each), of forks (the oldest) and of requests (the newest) in a history.
const MAX_ENTRIES: i64 = 1000;

fn event(row: &DbRow) -> Result<Event> {
    Ok(Event {
        seq: uint(row.try_get("seq")?),
        at: time(row.try_get("at")?)?,
        body: from_json(row.try_get("body")?)?,
    })
}

impl SqlStore {
    pub async fn history(&self, job: &Job, with_requests: bool) -> Result<HistoryRows> {
        let mut events = Vec::new();
        for kind in ["state", "alert"] {
            // SQLite uses the index `events_history` only if the query has the index's condition, which names both kinds.
            let text = "SELECT seq, at, body FROM events WHERE job_id = $1 AND kind IN ('state', 'alert') AND kind = $2 \
                ORDER BY seq DESC LIMIT $3";
            let query = sqlx::query(text).bind(job.id.as_str()).bind(kind).bind(MAX_ENTRIES);
            events.extend(self.list(query, event).await?);
        }
        events.sort_by_key(|event| event.seq);
        let query = format!(
            "{SELECT_JOBS} WHERE parent_job = $1 AND deleted_at IS NULL ORDER BY created_at, id LIMIT $2"
        );
        let query = sqlx::query(AssertSqlSafe(query)).bind(job.id.as_str()).bind(MAX_ENTRIES);
        let fork = |row: &DbRow| {
            let checkpoint = row.try_get::<Option<String>, _>("parent_checkpoint")?;
            Ok((job_row(row)?.job, checkpoint.unwrap_or_default()))
        };
        let forks = self.list(query, fork).await?;
        let mut requests = Vec::new();
        if with_requests {
            let query = sqlx::query(
                "SELECT * FROM audit WHERE at >= $1 AND object LIKE $2 AND status < 400 ORDER BY id DESC LIMIT $3",
            )
            .bind(job.created_at.as_millisecond())
            .bind(format!("/api/v1/jobs/{}/%", job.id))
            .bind(MAX_ENTRIES);
            requests = self.list(query, audit::entry).await?;
            requests.reverse();
        }
        Ok(HistoryRows { events, forks, requests })
    }
}
