//! Reports into events: every check against what is stored happens in the transaction that stores.

use super::{Connection, SqlStore, jobs};
use crate::{
    lifecycle,
    store::{
        Changed, Ingested, JobRow, Report, Result,
        values::{int, reached, small, uint},
    },
};
use lockstep_protocol::{
    agent::{Acknowledged, AttemptEvent, AttemptRef, Source},
    job::JobId,
};
use sqlx::Row;
use std::collections::HashMap;

fn number(source: Source) -> i64 {
    match source {
        Source::Rank(rank) => rank.into(),
        Source::Agent => -1,
    }
}

fn source(number: i64) -> Source {
    u32::try_from(number).map_or(Source::Agent, Source::Rank)
}

async fn stored(db: &mut Connection, attempt: &AttemptRef, source: Source) -> Result<u64> {
    let records: Option<i64> = sqlx::query_scalar(
        "SELECT records FROM acknowledged WHERE job_id = $1 AND attempt = $2 AND source = $3",
    )
    .bind(attempt.job.as_str())
    .bind(i64::from(attempt.attempt))
    .bind(number(source))
    .fetch_optional(db)
    .await?;
    Ok(records.map_or(0, uint))
}

/// Whether the server itself gave out this attempt with this token, however long ago.
async fn is_ours(db: &mut Connection, attempt: &AttemptRef) -> Result<bool> {
    let token: Option<i64> =
        sqlx::query_scalar("SELECT token FROM attempts WHERE job_id = $1 AND attempt = $2")
            .bind(attempt.job.as_str())
            .bind(i64::from(attempt.attempt))
            .fetch_optional(db)
            .await?;
    Ok(token.map(uint) == Some(attempt.token))
}

impl SqlStore {
    pub(super) async fn store_reports(&self, reports: Vec<Report>) -> Result<Vec<Ingested>> {
        let mut db = self.begin().await?;
        reached("ingest.begin")?;
        let mut rows: HashMap<JobId, Option<JobRow>> = HashMap::new();
        let mut answers = Vec::with_capacity(reports.len());
        let mut at = crate::now();
        for report in reports {
            at = report.at;
            let id = report.attempt.job.clone();
            if !rows.contains_key(&id) {
                let row = jobs::load(&mut db, &id).await?;
                rows.insert(id.clone(), row);
            }
            answers.push(match rows.get_mut(&id) {
                Some(Some(row)) => store_report(&mut db, row, report).await?,
                _ => Ingested::Stale,
            });
        }
        for row in rows.values().flatten() {
            jobs::save(&mut db, row, at).await?;
        }
        reached("ingest.commit")?;
        db.commit().await?;
        reached("ingest.committed")?;
        Ok(answers)
    }

    pub(super) async fn read_acknowledged(&self, attempt: &AttemptRef) -> Result<Vec<Acknowledged>> {
        let mut db = self.reader.acquire().await?;
        if !is_ours(&mut db, attempt).await? {
            return Ok(Vec::new());
        }
        let rows = sqlx::query("SELECT source, records FROM acknowledged WHERE job_id = $1 AND attempt = $2")
            .bind(attempt.job.as_str())
            .bind(i64::from(attempt.attempt))
            .fetch_all(&mut *db)
            .await?;
        rows.iter()
            .map(|row| {
                let (source_number, records): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
                let source = source(source_number);
                Ok(Acknowledged { attempt: attempt.clone(), source, records: uint(records) })
            })
            .collect()
    }
}

async fn store_report(db: &mut Connection, row: &mut JobRow, report: Report) -> Result<Ingested> {
    let Report { attempt, source, first, events, at, leaving } = report;
    if !is_ours(db, &attempt).await? {
        return Ok(Ingested::Stale);
    }
    let have = stored(db, &attempt, source).await?;
    let end = first.saturating_add(events.len() as u64);
    if end <= have {
        // Told twice, perhaps after the attempt's end: its agent only missed the acknowledgement.
        let acknowledged = Acknowledged { attempt, source, records: have };
        return Ok(Ingested::Stored { acknowledged, changed: None });
    }
    if row.live().as_ref() != Some(&attempt) {
        return Ok(Ingested::Stale);
    }
    if first > have {
        return Ok(Ingested::Gap { stored: have });
    }
    let mut stored_events = Vec::new();
    for event in events.into_iter().skip(small(int(have - first)) as usize) {
        if row.token.is_none() {
            break; // The attempt has ended; nothing comes after that.
        }
        // Only these move a job, and only a move can be refused half way.
        let moves = matches!(event, AttemptEvent::Ended(_) | AttemptEvent::Running { .. });
        let before = moves.then(|| row.clone());
        match lifecycle::report(row, event, leaving.as_ref(), at) {
            Ok(bodies) => {
                stored_events.extend(jobs::append(db, row, bodies, at).await?);
                reached("ingest.event")?;
            }
            Err(refused) => {
                tracing::warn!(job = %row.job.id, %refused, "a report does not fit the job's state");
                if let Some(before) = before {
                    *row = before;
                }
            }
        }
    }
    sqlx::query(
        "INSERT INTO acknowledged VALUES ($1, $2, $3, $4) \
         ON CONFLICT (job_id, attempt, source) DO UPDATE SET records = excluded.records",
    )
    .bind(attempt.job.as_str())
    .bind(i64::from(attempt.attempt))
    .bind(number(source))
    .bind(int(end))
    .execute(db)
    .await?;
    reached("ingest.acknowledged")?;
    let changed = Changed { job: row.job.clone(), events: stored_events };
    Ok(Ingested::Stored {
        acknowledged: Acknowledged { attempt, source, records: end },
        changed: Some(Box::new(changed)),
    })
}
