//! The parts of a job's history: changes of state, alerts, forks, requests about the job, and the job's position in the queue.

use super::{
    DbRow, SqlStore, audit,
    jobs::{JOB, job_row},
};
use crate::store::{
    HistoryRows, Result,
    quarantine::readable,
    values::{from_json, time, uint},
};
use lockstep_protocol::{
    job::{Job, Parent},
    stream::Event,
};
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

/// The checkpoint from which a job was forked.
fn parent(row: &DbRow) -> Option<Parent> {
    let text = |name: &str| row.try_get::<Option<String>, _>(name).ok().flatten();
    Some(Parent { job: text("parent_job")?, checkpoint: text("parent_checkpoint")? })
}

impl SqlStore {
    pub(in crate::store) async fn history(&self, job: &Job, with_requests: bool) -> Result<HistoryRows> {
        let mut events = Vec::new();
        for kind in ["state", "alert"] {
            // As in the condition of the index `events_history`.
            let rows = sqlx::query(
                "SELECT seq, at, body FROM events WHERE job_id = $1 AND kind IN ('state', 'alert') AND kind = $2 \
                 ORDER BY seq DESC LIMIT $3",
            )
            .bind(job.id.as_str())
            .bind(kind)
            .bind(MAX_ENTRIES)
            .fetch_all(&self.reader)
            .await?;
            events.extend(readable(rows.iter().map(event)));
        }
        events.sort_by_key(|event| event.seq);
        let own = sqlx::query("SELECT parent_job, parent_checkpoint FROM jobs WHERE id = $1")
            .bind(job.id.as_str())
            .fetch_optional(&self.reader)
            .await?;
        let query =
            format!("{JOB} WHERE parent_job = $1 AND deleted_at IS NULL ORDER BY created_at, id LIMIT $2");
        let forks = sqlx::query(AssertSqlSafe(query))
            .bind(job.id.as_str())
            .bind(MAX_ENTRIES)
            .fetch_all(&self.reader)
            .await?;
        let mut requests = Vec::new();
        if with_requests {
            requests = sqlx::query(
                "SELECT * FROM audit WHERE at >= $1 AND object LIKE $2 AND status < 400 ORDER BY id DESC LIMIT $3",
            )
            .bind(job.created_at.as_millisecond())
            .bind(format!("/api/v1/jobs/{}/%", job.id))
            .bind(MAX_ENTRIES)
            .fetch_all(&self.reader)
            .await?;
        }
        // Counts in the order of `waiting`, which ignores fair share.
        let before_it: i64 = sqlx::query_scalar(
            "SELECT COUNT(*) FROM jobs WHERE state IN ('queued', 'restarting', 'lost') AND deleted_at IS NULL \
             AND (priority > $1 OR (priority = $1 AND (created_at, id) < ($2, $3)))",
        )
        .bind(i64::from(job.spec.priority))
        .bind(job.created_at.as_millisecond())
        .bind(job.id.as_str())
        .fetch_one(&self.reader)
        .await?;
        Ok(HistoryRows {
            events,
            parent: own.as_ref().and_then(parent),
            forks: readable(forks.iter().map(|row| {
                let begun = row.try_get::<Option<String>, _>("parent_checkpoint")?;
                Ok((job_row(row)?.job, begun.unwrap_or_default()))
            })),
            requests: readable(requests.iter().rev().map(audit::entry)),
            before_it: uint(before_it),
        })
    }
}
