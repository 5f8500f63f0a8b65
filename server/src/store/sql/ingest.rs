//! Reports into events: every check against what is stored happens in the transaction that stores.

use super::{Connection, SqlStore, events, jobs, layers};
use crate::{
    lifecycle,
    store::{
        Changed, EventRow, Ingested, JobRow, Place, Report, Result,
        values::{fencing, int, reached, uint},
    },
};
use lockstep_protocol::{
    agent::{Acknowledged, AttemptEvent, AttemptRef, FencingToken, Source},
    job::JobId,
};
use sqlx::AssertSqlSafe;
use std::collections::{BTreeSet, HashMap, hash_map::Entry};

/// A source as it is stored: ranks by their number; the agent of the attempt's first place is -1, that of the second -2.
type SourceNumber = i64;

fn number(source: Source, place: usize) -> SourceNumber {
    match source {
        Source::Rank(rank) => rank.into(),
        Source::Agent => -1 - i64::try_from(place).unwrap_or(i64::MAX - 1),
    }
}

/// The source as the agent of this place calls it; none of another agent's own.
fn source(stored: SourceNumber, place: usize) -> Option<Source> {
    match u32::try_from(stored) {
        Ok(rank) => Some(Source::Rank(rank)),
        Err(_) => (stored == number(Source::Agent, place)).then_some(Source::Agent),
    }
}

/// What the server itself gave out with this attempt, however long ago: its fencing token, and the ids of its agents.
type Given = (FencingToken, Vec<String>);

async fn given(db: &mut Connection, job: &JobId, attempt: u32) -> Result<Option<Given>> {
    let found: Option<(i64, Option<String>, String)> = sqlx::query_as(
        "SELECT fencing_token, fencing_secret, places FROM attempts WHERE job_id = $1 AND attempt = $2",
    )
    .bind(job.as_str())
    .bind(i64::from(attempt))
    .fetch_optional(db)
    .await?;
    Ok(found.map(|(number, secret, places)| {
        let places: Vec<Place> = jobs::read(job.as_str(), "places", &places);
        (fencing(number, secret.as_deref()), places.into_iter().map(|place| place.agent_id).collect())
    }))
}

/// How many records of each source of an attempt are stored.
async fn records(db: &mut Connection, job: &JobId, attempt: u32) -> Result<HashMap<SourceNumber, u64>> {
    let rows: Vec<(i64, i64)> =
        sqlx::query_as("SELECT source, records FROM acknowledged WHERE job_id = $1 AND attempt = $2")
            .bind(job.as_str())
            .bind(i64::from(attempt))
            .fetch_all(db)
            .await?;
    Ok(rows.into_iter().map(|(number, records)| (number, uint(records))).collect())
}

/// A transaction's copy of a job, so that each is read and written once, however many reports there are.
struct Loaded {
    row: JobRow,
    attempts: HashMap<u32, Attempt>,
    /// Events of the transaction, and the first report that announces them.
    events: Vec<EventRow>,
    first_report: Option<usize>,
}

struct Attempt {
    given: Option<Given>,
    records: HashMap<SourceNumber, u64>,
    /// Sources whose number has grown.
    grown: BTreeSet<SourceNumber>,
}

/// Rows of [`acknowledged`](records) of one statement, largest first.
const TOGETHER: [usize; 3] = [64, 8, 1];

async fn acknowledge(db: &mut Connection, numbers: &[(&JobId, u32, SourceNumber, u64)]) -> Result<()> {
    let mut rest = numbers;
    for size in TOGETHER {
        while let Some((now, later)) = rest.split_at_checked(size) {
            rest = later;
            let place = |n| format!("(${}, ${}, ${}, ${})", 4 * n + 1, 4 * n + 2, 4 * n + 3, 4 * n + 4);
            let text = format!(
                "INSERT INTO acknowledged VALUES {} \
                 ON CONFLICT (job_id, attempt, source) DO UPDATE SET records = excluded.records",
                (0..size).map(place).collect::<Vec<_>>().join(", ")
            );
            let mut query = sqlx::query(AssertSqlSafe(text));
            for (job, attempt, source, records) in now {
                query = query.bind(job.as_str()).bind(i64::from(*attempt)).bind(*source).bind(int(*records));
            }
            query.execute(&mut *db).await?;
        }
    }
    Ok(())
}

impl Loaded {
    fn new(row: JobRow) -> Self {
        Self { row, attempts: HashMap::new(), events: Vec::new(), first_report: None }
    }
}

fn acknowledgement(attempt: AttemptRef, source: Source, records: u64) -> Acknowledged {
    Acknowledged { attempt, source, records, watched: false }
}

impl SqlStore {
    pub(super) async fn store_reports(&self, reports: &[Report]) -> Result<Vec<Ingested>> {
        let mut db = self.begin().await?;
        reached("ingest.begin")?;
        let mut jobs: HashMap<JobId, Option<Loaded>> = HashMap::new();
        let mut answers = Vec::with_capacity(reports.len());
        let mut new = Vec::new();
        let mut at = crate::now();
        for report in reports {
            at = report.at;
            let id = report.attempt.job.clone();
            if !jobs.contains_key(&id) {
                let row = jobs::load(&mut db, &id).await?;
                jobs.insert(id.clone(), row.map(Loaded::new));
            }
            let before = new.len();
            answers.push(match jobs.get_mut(&id) {
                Some(Some(job)) => {
                    let (answer, is_new) = store_report(&mut db, job, report, &mut new).await?;
                    job.events.extend(new[before..].iter().map(|new| new.row.clone()));
                    if is_new {
                        job.first_report.get_or_insert(answers.len());
                    }
                    answer
                }
                _ => Ingested::Stale,
            });
        }
        events::insert(&mut db, &new).await?;
        for (id, job) in jobs.iter().filter_map(|(id, job)| Some((id, job.as_ref()?))) {
            jobs::save(&mut db, &job.row, at).await?;
            let grown = job.attempts.iter().flat_map(|(attempt, Attempt { records, grown, .. })| {
                grown.iter().map(|source| (id, *attempt, *source, records.get(source).copied().unwrap_or(0)))
            });
            acknowledge(&mut db, &grown.collect::<Vec<_>>()).await?;
        }
        reached("ingest.acknowledged")?;
        reached("ingest.commit")?;
        db.commit().await?;
        reached("ingest.committed")?;
        for Loaded { row, events, first_report, .. } in jobs.into_values().flatten() {
            if let Some(Ingested::Stored { changed, .. }) = first_report.and_then(|n| answers.get_mut(n)) {
                *changed = Some(Box::new(Changed { job: row.job, events }));
            }
        }
        Ok(answers)
    }

    pub(super) async fn read_acknowledged(
        &self,
        attempt: &AttemptRef,
        agent_id: &str,
    ) -> Result<Vec<Acknowledged>> {
        let mut db = self.reader.acquire().await?;
        let given = given(&mut db, &attempt.job, attempt.attempt).await?;
        let Some((_, agents)) = given.filter(|(token, _)| *token == attempt.fencing_token) else {
            return Ok(Vec::new());
        };
        let Some(place) = agents.iter().position(|agent| agent == agent_id) else { return Ok(Vec::new()) };
        let known = records(&mut db, &attempt.job, attempt.attempt).await?;
        let known = known.into_iter().filter_map(|(number, records)| Some((source(number, place)?, records)));
        Ok(known.map(|(source, records)| acknowledgement(attempt.clone(), source, records)).collect())
    }
}

/// What a report does, and whether it said anything new.
async fn store_report(
    db: &mut Connection,
    job: &mut Loaded,
    report: &Report,
    new: &mut Vec<events::New>,
) -> Result<(Ingested, bool)> {
    let Report { agent_id, attempt, source, first, events, at, leaving } = report;
    let (source, first, at) = (*source, *first, *at);
    let Loaded { row, attempts, .. } = job;
    let known = match attempts.entry(attempt.attempt) {
        Entry::Occupied(known) => known.into_mut(),
        Entry::Vacant(unknown) => unknown.insert(Attempt {
            given: given(db, &attempt.job, attempt.attempt).await?,
            records: records(db, &attempt.job, attempt.attempt).await?,
            grown: BTreeSet::new(),
        }),
    };
    let given = known.given.as_ref().filter(|(token, _)| *token == attempt.fencing_token);
    let agents = given.map_or(&[][..], |(_, agents)| agents);
    let Some(place) = agents.iter().position(|agent| agent == agent_id) else {
        return Ok((Ingested::Stale, false));
    };
    let number = number(source, place);
    let have = known.records.get(&number).copied().unwrap_or(0);
    let end = first.saturating_add(events.len() as u64);
    if end <= have {
        // Told twice, perhaps after the attempt's end: its agent only missed the acknowledgement.
        let acknowledged = acknowledgement(attempt.clone(), source, have);
        return Ok((Ingested::Stored { acknowledged, changed: None }, false));
    }
    // Of several agents, one whose lease ran out, or that said already how its ranks ended.
    if row.live().as_ref() != Some(attempt) || lifecycle::has_ended_at(row, agent_id) {
        return Ok((Ingested::Stale, false));
    }
    if first > have {
        return Ok((Ingested::Gap { stored: have }, false));
    }
    let known_already = usize::try_from(have - first).unwrap_or(usize::MAX).min(events.len());
    for event in lifecycle::merge_points(&events[known_already..]) {
        if row.fencing_token.is_none() {
            break; // The attempt has ended; nothing comes after that.
        }
        // Only rank 0 reports layers and how many steps there are.
        let is_its_own = match &event {
            AttemptEvent::Histograms(found) => source == Source::Rank(0) && found.step <= row.job.total_steps,
            AttemptEvent::Network(_) => source == Source::Rank(0),
            _ => true,
        };
        if !is_its_own {
            continue;
        }
        layers::keep(db, &attempt.job, attempt.attempt, &event).await?;
        // Only these move a job, and only a move can be refused half way.
        let moves = matches!(event, AttemptEvent::Ended(_) | AttemptEvent::Running { .. });
        let before = moves.then(|| row.clone());
        let changed = match event {
            AttemptEvent::Ended(ending) if agents.len() > 1 => {
                let end = lifecycle::PlaceEnd::Ended { ending, leaving: leaving.clone() };
                lifecycle::place_ended(row, agents.len(), agent_id, end, at)
            }
            event => lifecycle::report(row, event, leaving.as_ref(), at),
        };
        match changed {
            Ok(bodies) => {
                new.extend(jobs::append(db, row, bodies, at).await?);
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
    known.records.insert(number, end);
    known.grown.insert(number);
    Ok((
        Ingested::Stored { acknowledged: acknowledgement(attempt.clone(), source, end), changed: None },
        true,
    ))
}
