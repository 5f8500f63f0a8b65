//! Queries for events, metrics, logs, reports of ranks, checkpoints, unfinished jobs, and counts for monitoring.

use super::{
    BEGIN_SNAPSHOT, DATABASE_BYTES, DbRow, LIKE, SqlStore, USE_LOG_INDEX, USE_METRICS_INDEX, flag,
    jobs::{SELECT_JOBS, job_row, like_pattern},
    multi_row, optional_json,
    pages::bounded,
};
use crate::store::{
    CheckpointRow, Counts, EventRow, LogFilter, LogPage, MetricFilter, MetricPage, RankColumn, Result,
    RowContent, StoreError,
    rows::ROW_COST,
    unreadable::readable,
    values::{from_json, int, job_id, strip_nul, time, to_u32, uint},
};
use futures_util::TryStreamExt;
use lockstep_protocol::{
    agent::{CheckpointInfo, RankReport},
    inspect::TRAINED_VALIDATION,
    job::{Job, JobId},
    stream::{Event, EventBody},
};
use serde::de::DeserializeOwned;
use sqlx::{AssertSqlSafe, Row};
use std::collections::HashMap;

fn event_row(row: &DbRow) -> Result<EventRow> {
    let content = match row.try_get::<Option<Vec<u8>>, _>("points")? {
        Some(data) => RowContent::Points {
            attempt: to_u32(row.try_get("attempt")?),
            rank: to_u32(row.try_get::<Option<i64>, _>("rank")?.unwrap_or(0)),
            data,
        },
        None => RowContent::Body(row.try_get("body")?),
    };
    Ok(EventRow { seq: uint(row.try_get("seq")?), at: time(row.try_get("at")?)?, content })
}

/// Number of a job's first events among which its ranks log how they start.
const MAX_START_EVENTS: u64 = 50_000;

/// Parses an event's body.
fn parse_event<T: DeserializeOwned>(job: &JobId, seq: i64, body: &str) -> Result<T> {
    from_json(body).map_err(|error| StoreError::Corrupt(format!("event {seq} of job {job}: {error}")))
}

/// The filter's ranks as text, each between commas, because the databases have no common type for lists.
pub(super) fn ranks_text(filter: &MetricFilter) -> String {
    filter.ranks.iter().map(|rank| format!(",{rank},")).collect()
}

/// A pattern for bodies that may contain `text` in a string. `None` if `text` has characters that JSON may escape, or letters whose case
/// not every database ignores.
fn body_pattern(text: &str) -> Option<String> {
    let is_plain =
        !text.is_empty() && text.bytes().all(|b| (b' '..=b'~').contains(&b) && b != b'"' && b != b'\\');
    is_plain.then(|| like_pattern(text))
}

fn checkpoint_row(row: &DbRow) -> Result<CheckpointRow> {
    Ok(CheckpointRow {
        id: row.try_get("id")?,
        job: job_id(row.try_get("job_id")?)?,
        attempt: to_u32(row.try_get("attempt")?),
        info: CheckpointInfo {
            epoch: to_u32(row.try_get("epoch")?),
            step: uint(row.try_get("step")?),
            val_accuracy: row.try_get("val_accuracy")?,
            val_loss: row.try_get("val_loss")?,
            validation: optional_json(row, "validation")?,
            best: flag(row, "best")?,
            size_bytes: uint(row.try_get("size_bytes")?),
        },
        created_at: time(row.try_get("created_at")?)?,
    })
}

impl SqlStore {
    pub async fn unfinished_jobs(&self) -> Result<Vec<Job>> {
        let query = format!(
            "{SELECT_JOBS} WHERE state NOT IN ('succeeded', 'failed', 'cancelled') AND deleted_at IS NULL"
        );
        self.list(sqlx::query(AssertSqlSafe(query)), |row| Ok(job_row(row)?.job)).await
    }

    pub async fn events(&self, job: &JobId, after: u64, limit: u32) -> Result<Vec<EventRow>> {
        let rows = sqlx::query(
            "SELECT seq, at, attempt, rank, body, points FROM events WHERE job_id = $1 AND seq > $2 \
             ORDER BY seq LIMIT $3",
        )
        .bind(job.as_str())
        .bind(int(after))
        .bind(i64::from(limit))
        .fetch_all(&self.reader)
        .await?;
        rows.iter().map(event_row).collect()
    }

    pub async fn metrics(&self, job: &JobId, filter: &MetricFilter) -> Result<MetricPage> {
        // One snapshot, so that a stream that begins after `as_of` continues exactly after the columns.
        let mut db = self.reader.begin_with(BEGIN_SNAPSHOT).await?;
        let text = "SELECT last_seq FROM jobs WHERE id = $1 AND deleted_at IS NULL";
        let as_of: Option<i64> = sqlx::query_scalar(text).bind(job.as_str()).fetch_optional(&mut *db).await?;
        let as_of = as_of.ok_or(StoreError::NotFound("job"))?;
        let query = format!(
            "SELECT seq, at, attempt, rank, body, points FROM events {USE_METRICS_INDEX} WHERE job_id = $1 AND kind = 'metrics' \
             AND ($2 = '' OR $2 LIKE '%,' || rank || ',%') AND seq > $3 ORDER BY seq LIMIT $4"
        );
        // A page cannot have more rows, because each row costs at least `ROW_COST`.
        let limit = filter.max_cost.map_or(i64::MAX, |cost| int(cost / ROW_COST + 1));
        let mut page = MetricPage { as_of: uint(as_of), ..MetricPage::default() };
        let mut rows = sqlx::query(AssertSqlSafe(query))
            .bind(job.as_str())
            .bind(ranks_text(filter))
            .bind(int(filter.after))
            .bind(limit)
            .fetch(&mut *db);
        while let Some(row) = rows.try_next().await? {
            let row = event_row(&row)?;
            page.cost += row.cost();
            page.last_seq = row.seq;
            if let Some((attempt, rank, columns)) = row.metrics(filter.name.as_deref()) {
                let columns = columns.into_iter().filter(|c| filter.may_match(c));
                page.columns.extend(columns.map(|column| RankColumn { rank, attempt, column }));
            }
            if filter.max_cost.is_some_and(|max_cost| page.cost >= max_cost) {
                // The page ends at this row. The following pages have the rest.
                (page.as_of, page.is_full) = (page.last_seq, true);
                break;
            }
        }
        drop(rows);
        db.rollback().await?;
        Ok(page)
    }

    pub async fn logs(&self, job: &JobId, filter: &LogFilter) -> Result<LogPage> {
        let order = if filter.selects_newest { "DESC" } else { "ASC" };
        let query = format!(
            "SELECT seq, at, body FROM events {USE_LOG_INDEX} WHERE job_id = $1 AND kind = 'log' \
             AND ($2 IS NULL OR rank = $2) AND ($3 IS NULL OR attempt = $3) AND seq > $4 AND seq < $5 \
             AND ($6 IS NULL OR body {LIKE} $6 ESCAPE '!') ORDER BY seq {order} LIMIT $7"
        );
        let rows = sqlx::query_as::<_, (i64, i64, String)>(AssertSqlSafe(query))
            .bind(job.as_str())
            .bind(filter.rank.map(i64::from))
            .bind(filter.attempt.map(i64::from))
            .bind(int(filter.after))
            .bind(filter.before.map_or(i64::MAX, int))
            .bind(filter.containing.as_deref().and_then(body_pattern))
            .bind(i64::from(filter.limit))
            .fetch(&self.reader);
        let (mut rows, reached_size) = bounded(rows, |(_, _, body)| body.len()).await?;
        let is_full = reached_size || rows.len() == filter.limit as usize;
        if filter.selects_newest {
            rows.reverse();
        }
        let range = rows.first().zip(rows.last()).map(|(first, last)| (uint(first.0), uint(last.0)));
        let events = rows.iter().map(|(seq, at, body)| {
            Ok(Event { seq: uint(*seq), at: time(*at)?, body: parse_event(job, *seq, body)? })
        });
        Ok(LogPage { events: readable(events), range, is_full })
    }

    pub async fn trained_validation(&self, jobs: &[JobId]) -> Result<HashMap<JobId, String>> {
        let text = format!(
            "SELECT job_id, seq, body FROM events {USE_LOG_INDEX} WHERE job_id IN ({{}}) AND kind = 'log' AND rank = 0 \
             AND seq < {MAX_START_EVENTS} AND body LIKE '%{TRAINED_VALIDATION}%' ORDER BY seq"
        );
        let mut found = HashMap::new();
        let mut db = self.reader.acquire().await?;
        let rows =
            multi_row::fetch_all(&mut db, &text, 1, jobs, |query, id| Ok(query.bind(id.as_str()))).await?;
        for row in rows {
            let job = job_id(row.try_get("job_id")?)?;
            let body = parse_event(&job, row.try_get("seq")?, row.try_get("body")?);
            // An event that cannot be read hides no job.
            let Ok(EventBody::Log { lines, .. }) = body else { continue };
            let line = lines.into_iter().find(|line| line.text.contains(TRAINED_VALIDATION));
            if let Some(line) = line {
                found.entry(job).or_insert(format!("{}.", line.text));
            }
        }
        Ok(found)
    }

    pub async fn rank_reports(&self, job: &JobId, attempt: u32) -> Result<Vec<(u32, RankReport)>> {
        // A run of a week has millions of reports. The newest report of each rank is found by index look-ups only.
        let rows: Vec<(i64, i64, String)> = sqlx::query_as(
            "WITH RECURSIVE ranks (rank) AS ( \
               SELECT (SELECT max(rank) FROM events WHERE job_id = $1 AND kind = 'rank') \
               UNION ALL SELECT rank - 1 FROM ranks WHERE rank > 0) \
             SELECT e.rank, e.seq, e.body FROM ranks JOIN events e ON e.job_id = $1 AND e.seq = (SELECT max(seq) FROM events \
               WHERE job_id = $1 AND kind = 'rank' AND rank = ranks.rank) \
             WHERE e.attempt = $2 ORDER BY e.rank",
        )
        .bind(job.as_str())
        .bind(i64::from(attempt))
        .fetch_all(&self.reader)
        .await?;
        Ok(readable(rows.iter().map(|(rank, seq, body)| Ok((to_u32(*rank), parse_event(job, *seq, body)?)))))
    }

    pub async fn checkpoints(&self, job: &JobId) -> Result<Vec<CheckpointRow>> {
        let query = sqlx::query("SELECT * FROM checkpoints WHERE job_id = $1 ORDER BY step DESC, epoch DESC");
        self.list(query.bind(job.as_str()), checkpoint_row).await
    }

    pub async fn checkpoints_after(&self, id: &str, limit: u32) -> Result<Vec<CheckpointRow>> {
        let query = sqlx::query("SELECT * FROM checkpoints WHERE id > $1 ORDER BY id LIMIT $2");
        self.list(query.bind(id).bind(i64::from(limit)), checkpoint_row).await
    }

    pub async fn checkpoint(&self, id: &str) -> Result<Option<CheckpointRow>> {
        let query = sqlx::query("SELECT * FROM checkpoints WHERE id = $1");
        self.find(query.bind(strip_nul(id)), checkpoint_row).await
    }

    pub async fn counts(&self) -> Result<Counts> {
        let text = "SELECT state, count(*) FROM jobs WHERE deleted_at IS NULL GROUP BY state";
        let rows: Vec<(String, i64)> = sqlx::query_as(text).fetch_all(&self.reader).await?;
        let count = |(state, n): (String, i64)| Ok((state.parse().map_err(StoreError::Corrupt)?, uint(n)));
        let bytes: i64 = sqlx::query_scalar(DATABASE_BYTES).fetch_one(&self.reader).await?;
        Ok(Counts { jobs: readable(rows.into_iter().map(count)), database_bytes: uint(bytes) })
    }
}
