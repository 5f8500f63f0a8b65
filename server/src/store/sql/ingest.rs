//! Stores reports as events. Reports are checked against stored rows in the same transaction.

use super::{Connection, SqlStore, checkpoint_copies, events, fencing_token, jobs, layers, multi_row};
use crate::{
    lifecycle::{self, external},
    store::{
        AppendResult, ChangedJob, EventRow, IngestResult, JobRow, Place, RecordsChange, Report, Result,
        RunRecords, StoreError, unreadable,
        values::{fault_point, int, job_id, to_u32, uint},
    },
};
use lockstep_protocol::{
    agent::{Acknowledged, AttemptEvent, AttemptRef, FencingToken, Source},
    job::JobId,
    stream::EventBody,
};
use sqlx::Row;
use std::collections::{BTreeSet, HashMap, hash_map::Entry};

/// A source as stored: a rank's number; -1 for the agent of the attempt's first place, -2 for the agent of the second place, and so on.
type SourceNumber = i64;

fn source_number(source: Source, place: usize) -> SourceNumber {
    match source {
        Source::Rank(rank) => rank.into(),
        Source::Agent => -1 - i64::try_from(place).unwrap_or(i64::MAX - 1),
    }
}

/// The source as named by the agent of this place; `None` if the source is another agent.
fn source(stored: SourceNumber, place: usize) -> Option<Source> {
    match u32::try_from(stored) {
        Ok(rank) => Some(Source::Rank(rank)),
        Err(_) => (stored == source_number(Source::Agent, place)).then_some(Source::Agent),
    }
}

/// The attempt of a report: its job and number.
type AttemptKey = (JobId, u32);

/// An attempt as stored.
struct Attempt {
    token: FencingToken,
    /// Ids of the agents, by place.
    agents: Vec<String>,
    /// The number of stored records of each source.
    records: HashMap<SourceNumber, u64>,
    /// Sources with new records in this transaction.
    updated_sources: BTreeSet<SourceNumber>,
}

/// Reads attempts. Attempts that do not exist are left out.
async fn read_attempts(db: &mut Connection, attempts: &[AttemptKey]) -> Result<HashMap<AttemptKey, Attempt>> {
    let text = "SELECT a.job_id, a.attempt, fencing_token, fencing_secret, places, source, records \
        FROM (VALUES {}) AS wanted JOIN attempts a ON a.job_id = column1 AND a.attempt = column2 \
        LEFT JOIN acknowledged k ON k.job_id = a.job_id AND k.attempt = a.attempt";
    let mut found = HashMap::with_capacity(attempts.len());
    let rows = multi_row::fetch_all(db, text, 2, attempts, |query, (job, attempt)| {
        Ok(query.bind(job.as_str()).bind(i64::from(*attempt)))
    });
    for row in rows.await? {
        let id: &str = row.try_get("job_id")?;
        let attempt: &mut Attempt = match found.entry((job_id(id)?, to_u32(row.try_get("attempt")?))) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let places: Vec<Place> = unreadable::json_or_default(id, "places", row.try_get("places")?);
                entry.insert(Attempt {
                    token: fencing_token(&row)?,
                    agents: places.into_iter().map(|place| place.agent_id).collect(),
                    records: HashMap::new(),
                    updated_sources: BTreeSet::new(),
                })
            }
        };
        if let Some(source) = row.try_get("source")? {
            attempt.records.insert(source, uint(row.try_get("records")?));
        }
    }
    Ok(found)
}

/// A transaction's copy of a job, so that each job is read and written once for all reports.
struct LoadedJob {
    row: JobRow,
    attempts: HashMap<u32, Attempt>,
    /// Events of the transaction, and the index of the first report with new records, whose result returns the events.
    events: Vec<EventRow>,
    first_report: Option<usize>,
}

/// Stores the number of records of each source, which are then acknowledged.
async fn acknowledge(db: &mut Connection, numbers: &[(&JobId, u32, SourceNumber, u64)]) -> Result<()> {
    let text = "INSERT INTO acknowledged VALUES {} \
        ON CONFLICT (job_id, attempt, source) DO UPDATE SET records = excluded.records";
    multi_row::execute(db, text, 4, numbers, |query, (job, attempt, source, records)| {
        Ok(query.bind(job.as_str()).bind(i64::from(*attempt)).bind(*source).bind(int(*records)))
    })
    .await
}

fn acknowledgement(attempt: AttemptRef, source: Source, records: u64) -> Acknowledged {
    Acknowledged { attempt, source, records, watched: false }
}

impl SqlStore {
    pub async fn ingest(&self, reports: &[Report]) -> Result<Vec<IngestResult>> {
        let mut db = self.begin().await?;
        fault_point("ingest.begin")?;
        let mut jobs = load(&mut db, reports).await?;
        let mut answers = Vec::with_capacity(reports.len());
        let mut new_rows = Vec::new();
        let mut last_report_at = crate::now();
        for report in reports {
            last_report_at = report.at;
            let start = new_rows.len();
            answers.push(match jobs.get_mut(&report.attempt.job) {
                Some(job) => {
                    let answer = store_report(&mut db, job, report, answers.len(), &mut new_rows).await?;
                    job.events.extend(new_rows[start..].iter().map(|new_row| new_row.row.clone()));
                    answer
                }
                None => IngestResult::Stale,
            });
        }
        events::insert(&mut db, &new_rows).await?;
        let rows: Vec<_> = jobs.values().map(|job| &job.row).collect();
        jobs::save(&mut db, &rows, last_report_at).await?;
        let updated_sources = jobs.iter().flat_map(|(id, job)| {
            job.attempts.iter().flat_map(move |(attempt, Attempt { records, updated_sources, .. })| {
                let records = |source| records.get(source).copied().unwrap_or(0);
                updated_sources.iter().map(move |source| (id, *attempt, *source, records(source)))
            })
        });
        acknowledge(&mut db, &updated_sources.collect::<Vec<_>>()).await?;
        fault_point("ingest.commit")?;
        db.commit().await?;
        fault_point("ingest.committed")?;
        for LoadedJob { row, events, first_report, .. } in jobs.into_values() {
            if let Some(IngestResult::Stored { changed, .. }) = first_report.and_then(|n| answers.get_mut(n))
            {
                *changed = Some(Box::new(ChangedJob { job: row.job, events }));
            }
        }
        Ok(answers)
    }

    pub async fn append_records(&self, records: &RunRecords, change: RecordsChange) -> Result<AppendResult> {
        let RunRecords { job, first, count, at } = records;
        let source = source_number(Source::Rank(external::RANK), 0);
        let mut db = self.begin().await?;
        let row = jobs::load(&mut db, job).await?.ok_or(StoreError::NotFound("job"))?;
        let stored: Option<i64> = sqlx::query_scalar(
            "SELECT records FROM acknowledged WHERE job_id = $1 AND attempt = $2 AND source = $3",
        )
        .bind(job.as_str())
        .bind(i64::from(external::ATTEMPT))
        .bind(source)
        .fetch_optional(&mut *db)
        .await?;
        let expected = stored.map_or(0, uint) + 1;
        let first = first.unwrap_or(expected);
        if first > expected {
            return Ok(AppendResult::Gap { expected });
        }
        let stored_count = (expected - first).min(*count);
        let changed = jobs::change_job(&mut db, row, *at, |row| change(row, stored_count)).await?;
        let records = (expected - 1) + (count - stored_count);
        acknowledge(&mut db, &[(job, external::ATTEMPT, source, records)]).await?;
        db.commit().await?;
        Ok(AppendResult::Stored { records, changed: Box::new(changed) })
    }

    pub async fn acknowledged_records(
        &self,
        attempt: &AttemptRef,
        agent_id: &str,
    ) -> Result<Vec<Acknowledged>> {
        let mut db = self.reader.acquire().await?;
        let key = (attempt.job.clone(), attempt.attempt);
        let stored = read_attempts(&mut db, std::slice::from_ref(&key)).await?.remove(&key);
        let Some(stored) = stored.filter(|stored| stored.token == attempt.fencing_token) else {
            return Ok(Vec::new());
        };
        let place = stored.agents.iter().position(|agent| agent == agent_id);
        let acknowledged = stored.records.into_iter().filter_map(|(number, records)| {
            Some(acknowledgement(attempt.clone(), source(number, place?)?, records))
        });
        Ok(acknowledged.collect())
    }
}

/// Loads the jobs of reports and the named attempts. Deleted jobs are left out.
async fn load(db: &mut Connection, reports: &[Report]) -> Result<HashMap<JobId, LoadedJob>> {
    let attempts: BTreeSet<AttemptKey> =
        reports.iter().map(|report| (report.attempt.job.clone(), report.attempt.attempt)).collect();
    let attempts: Vec<_> = attempts.into_iter().collect();
    let mut ids: Vec<_> = attempts.iter().map(|(job, _)| job.clone()).collect();
    ids.dedup();
    let entry = |(id, row): (JobId, JobRow)| {
        (id, LoadedJob { row, attempts: HashMap::new(), events: Vec::new(), first_report: None })
    };
    let mut loaded: HashMap<_, _> = jobs::load_all(db, &ids).await?.into_iter().map(entry).collect();
    for ((job, number), attempt) in read_attempts(db, &attempts).await? {
        if let Some(job) = loaded.get_mut(&job) {
            job.attempts.insert(number, attempt);
        }
    }
    Ok(loaded)
}

/// Applies a report, which is number `index` of the transaction, to a job.
async fn store_report(
    db: &mut Connection,
    job: &mut LoadedJob,
    report: &Report,
    index: usize,
    new_rows: &mut Vec<events::NewRow>,
) -> Result<IngestResult> {
    let Report { agent_id, attempt, source, first, events, at, leaving } = report;
    let (source, first, at) = (*source, *first, *at);
    let LoadedJob { row, attempts, first_report, .. } = job;
    let stored = attempts.get_mut(&attempt.attempt).filter(|stored| stored.token == attempt.fencing_token);
    let Some(Attempt { agents, records, updated_sources, .. }) = stored else {
        return Ok(IngestResult::Stale);
    };
    let Some(place) = agents.iter().position(|agent| agent == agent_id) else {
        return Ok(IngestResult::Stale);
    };
    let number = source_number(source, place);
    let stored_count = records.get(&number).copied().unwrap_or(0);
    let end = first.saturating_add(events.len() as u64);
    if end <= stored_count {
        // The report is a duplicate, perhaps after the attempt's end, because its agent has not received the acknowledgement.
        let acknowledged = acknowledgement(attempt.clone(), source, stored_count);
        return Ok(IngestResult::Stored { acknowledged, changed: None });
    }
    // The attempt has ended, or, with several agents, this agent's lease has expired or its ranks have already ended.
    if row.live_attempt().as_ref() != Some(attempt) || lifecycle::find_end_on_agent(row, agent_id).is_some() {
        return Ok(IngestResult::Stale);
    }
    if first > stored_count {
        return Ok(IngestResult::Gap { stored: stored_count });
    }
    let duplicate_count = usize::try_from(stored_count - first).unwrap_or(usize::MAX).min(events.len());
    for event in lifecycle::merge_points(&events[duplicate_count..]) {
        if row.fencing_token.is_none() {
            break; // The attempt has ended, so later events are ignored.
        }
        // Layers are accepted only from rank 0, and only for steps of the job.
        let is_accepted = match &event {
            AttemptEvent::Histograms(found) => source == Source::Rank(0) && found.step <= row.job.total_steps,
            AttemptEvent::Network(_) => source == Source::Rank(0),
            _ => true,
        };
        if !is_accepted {
            continue;
        }
        layers::put(db, &attempt.job, attempt.attempt, &event).await?;
        // Only these events change the job's state, and only a change of state can fail after it has edited the row.
        let changes_state = matches!(event, AttemptEvent::Ended(_) | AttemptEvent::Running { .. });
        let before = changes_state.then(|| row.clone());
        let changed = match event {
            AttemptEvent::Ended(ending) if agents.len() > 1 => {
                let end = lifecycle::EndOnAgent::Ended { ending, agent_leaving: leaving.clone() };
                lifecycle::record_end_on_agent(row, agents.len(), agent_id, end, at)
            }
            event => lifecycle::report(row, event, leaving.as_ref(), at),
        };
        match changed {
            Ok(bodies) => {
                let checkpoint = bodies.iter().find_map(|body| match body {
                    EventBody::Checkpoint { id, .. } => Some(id.clone()),
                    _ => None,
                });
                new_rows.extend(jobs::prepare_events(db, row, bodies, at).await?);
                if let Some(checkpoint) = checkpoint {
                    checkpoint_copies::add_agent_copy(db, &checkpoint, agent_id).await?;
                }
                fault_point("ingest.event")?;
            }
            Err(refused) => {
                tracing::warn!(job = %row.job.id, %refused, "a report does not fit the job's state");
                if let Some(before) = before {
                    *row = before;
                }
            }
        }
    }
    records.insert(number, end);
    updated_sources.insert(number);
    first_report.get_or_insert(index);
    Ok(IngestResult::Stored { acknowledged: acknowledgement(attempt.clone(), source, end), changed: None })
}
