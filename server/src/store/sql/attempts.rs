//! Attempts: claims, live attempts (which may write), and the list of a job's attempts.

use super::{
    Connection, DbRow, SqlStore, events, fencing_token, flag,
    jobs::{load_all, record_change, save},
    multi_row, optional_time,
};
use crate::{
    lifecycle,
    store::{
        AgentPlace, AttemptRow, Claim, ClaimedAttempt, Occupant, Place, Result, StoreError,
        unreadable::{self, json_or_default},
        values::{fault_point, job_id, json, new_fencing_token, time, to_u32, uint},
    },
};
use lockstep_protocol::{
    agent::{AttemptRef, FencingToken},
    attempt::{Attempt, AttemptState},
    job::{JobId, JobState},
    reason::{Reason, ReasonKind},
};
use sqlx::Row;
use std::collections::HashMap;

impl SqlStore {
    pub async fn attempts(&self, job: &JobId) -> Result<Vec<Attempt>> {
        let text = "SELECT a.*, j.state AS job_state, j.cause AS job_cause, j.fencing_token AS job_fencing_token FROM attempts a \
            JOIN jobs j ON j.id = a.job_id WHERE j.id = $1 AND j.deleted_at IS NULL ORDER BY a.attempt";
        self.list(sqlx::query(text).bind(job.as_str()), |row| attempt(job, row)).await
    }

    pub async fn places(&self, job: &JobId, attempt: u32) -> Result<Vec<Place>> {
        let text = "SELECT places FROM attempts WHERE job_id = $1 AND attempt = $2";
        let query = sqlx::query_scalar(text).bind(job.as_str()).bind(i64::from(attempt));
        let places: Option<String> = query.fetch_optional(&self.reader).await?;
        Ok(places.map(|places| json_or_default(job.as_str(), "places", &places)).unwrap_or_default())
    }

    pub async fn note_own_disk(&self, attempt: &AttemptRef, agent_id: &str) -> Result<()> {
        let mut db = self.begin().await?;
        let (job, number) = (attempt.job.as_str(), i64::from(attempt.attempt));
        let text = "SELECT own_disks FROM attempts WHERE job_id = $1 AND attempt = $2";
        let query = sqlx::query_scalar(text).bind(job).bind(number);
        let own_disks: Option<String> = query.fetch_optional(&mut *db).await?;
        let own_disks = own_disks.map(|own_disks| json_or_default(job, "own_disks", &own_disks));
        let mut own_disks: Vec<String> = own_disks.unwrap_or_default();
        if !own_disks.iter().any(|id| id == agent_id) {
            own_disks.push(agent_id.to_owned());
            let text = "UPDATE attempts SET own_disks = $3 WHERE job_id = $1 AND attempt = $2";
            sqlx::query(text).bind(job).bind(number).bind(json(&own_disks)?).execute(&mut *db).await?;
        }
        Ok(db.commit().await?)
    }

    pub async fn agent_place(&self, attempt: &AttemptRef, agent_id: &str) -> Result<Option<AgentPlace>> {
        let job = attempt.job.as_str();
        let text = "SELECT fencing_token, fencing_secret, places, own_disks FROM attempts WHERE job_id = $1 AND attempt = $2";
        let query = sqlx::query(text).bind(job).bind(i64::from(attempt.attempt));
        let agent_place = |row: &DbRow| {
            let token = fencing_token(row)?;
            let places: Vec<Place> = json_or_default(job, "places", row.try_get("places")?);
            let own_disks: Vec<String> = json_or_default(job, "own_disks", row.try_get("own_disks")?);
            let place = places.into_iter().find(|place| place.agent_id == agent_id);
            Ok(place.filter(|_| token == attempt.fencing_token).map(|place| AgentPlace {
                has_rank_0: place.has_rank_0(),
                has_own_disk: own_disks.iter().any(|id| id == agent_id),
            }))
        };
        Ok(self.find(query, agent_place).await?.flatten())
    }

    pub async fn claim_jobs(&self, claims: &[Claim]) -> Result<Vec<Option<ClaimedAttempt>>> {
        let mut db = self.begin().await?;
        fault_point("claim.begin")?;
        let attempts = take_jobs(&mut db, claims).await?;
        let created: Vec<&NewAttempt<'_>> = attempts.iter().flatten().collect();
        let tokens = insert_attempts(&mut db, &created).await?;
        let ids: Vec<_> = created.iter().map(|attempt| attempt.claim.job.clone()).collect();
        let mut rows = load_all(&mut db, &ids).await?;
        let (mut claimed, mut new_rows) = (Vec::with_capacity(claims.len()), Vec::new());
        let mut started = Vec::with_capacity(created.len());
        for attempt in attempts {
            let Some(NewAttempt { claim, number, resume_checkpoint }) = attempt else {
                claimed.push(None);
                continue;
            };
            let mut row = rows.remove(&claim.job).ok_or(StoreError::NotFound("job"))?;
            let fencing_token = *tokens.get(&claim.job).ok_or(StoreError::NotFound("attempt"))?;
            row.fencing_token = Some(fencing_token);
            row.job.agents = agent_names(&claim.places);
            let bodies = lifecycle::start_attempt(&mut row, claim.fewer_ranks_reason.clone(), claim.at)?;
            let changed = record_change(&mut db, &mut row, bodies, claim.at, &mut new_rows).await?;
            let attempt = AttemptRef { job: claim.job.clone(), attempt: number, fencing_token };
            claimed.push(Some(ClaimedAttempt { attempt, resume_checkpoint, changed }));
            started.push(row);
        }
        save(&mut db, &started.iter().collect::<Vec<_>>(), crate::now()).await?;
        events::insert(&mut db, &new_rows).await?;
        fault_point("claim.commit")?;
        db.commit().await?;
        fault_point("claim.committed")?;
        Ok(claimed)
    }

    pub async fn yielding_jobs(&self) -> Result<Vec<Occupant>> {
        // SQLite uses the index `jobs_yielding` only if the index's condition has the same text.
        let query = sqlx::query(
            "SELECT id, priority, preemptible, state, stop, cause FROM jobs WHERE fencing_token IS NOT NULL \
             AND deleted_at IS NULL AND (preemptible <> 0 OR stop IS NOT NULL OR state NOT IN ('starting', 'running')) \
             ORDER BY priority, created_at DESC, id DESC",
        );
        let occupant = |row: &DbRow| {
            let id: String = row.try_get("id")?;
            // A job in a state of another version counts as running and is not preempted.
            let state = row.try_get::<&str, _>("state")?.parse::<JobState>().ok();
            let runs = matches!(state, None | Some(JobState::Starting | JobState::Running));
            let is_pausing = state == Some(JobState::Pausing);
            let cause = row.try_get::<Option<String>, _>("cause")?.filter(|_| is_pausing);
            let cause = cause.and_then(|cause| json_or_default::<Option<Reason>>(&id, "cause", &cause));
            Ok(Occupant {
                priority: i32::try_from(row.try_get::<i64, _>("priority")?).unwrap_or(i32::MAX),
                preemptible: state.is_some() && flag(row, "preemptible")?,
                must_end: !runs || row.try_get::<Option<&str>, _>("stop")?.is_some(),
                is_being_preempted: cause
                    .is_some_and(|cause| matches!(cause.kind(), ReasonKind::Preempting { .. })),
                job: job_id(&id)?,
            })
        };
        self.list(query, occupant).await
    }

    pub async fn live_attempts(&self) -> Result<Vec<AttemptRow>> {
        let query = sqlx::query(
            "SELECT a.fencing_token, a.fencing_secret, a.job_id, a.attempt, a.places FROM attempts a \
             JOIN jobs j ON j.id = a.job_id AND j.fencing_token = a.fencing_token WHERE j.deleted_at IS NULL ORDER BY a.fencing_token",
        );
        let attempt_row = |row: &DbRow| {
            let id: String = row.try_get("job_id")?;
            Ok(AttemptRow {
                // If the places cannot be read, no agent renews the lease, and the attempt is lost when the lease expires.
                places: json_or_default(&id, "places", row.try_get("places")?),
                attempt: AttemptRef {
                    job: job_id(&id)?,
                    attempt: to_u32(row.try_get("attempt")?),
                    fencing_token: fencing_token(row)?,
                },
            })
        };
        self.list(query, attempt_row).await
    }
}

/// The attempt that a claim creates.
struct NewAttempt<'a> {
    claim: &'a Claim,
    number: u32,
    /// The checkpoint from which the attempt continues.
    resume_checkpoint: Option<String>,
}

/// Increments the attempt number of each claimed job that still waits and whose newest attempt is the claim's `after_attempt`. Returns the
/// new attempts in the order of the claims; `None` if the job does not wait, or if an earlier claim has taken it.
async fn take_jobs<'a>(db: &mut Connection, claims: &'a [Claim]) -> Result<Vec<Option<NewAttempt<'a>>>> {
    let text = "UPDATE jobs SET attempt = attempt + 1 FROM (VALUES {}) AS claims WHERE id = column1 AND attempt = column2 \
        AND state IN ('queued', 'restarting') RETURNING id, attempt, (SELECT epoch || '-' || step FROM checkpoints \
        WHERE job_id = jobs.id ORDER BY step DESC, epoch DESC LIMIT 1) AS resume";
    let mut incremented = HashMap::with_capacity(claims.len());
    let rows = multi_row::fetch_all(db, text, 2, claims, |query, claim| {
        Ok(query.bind(claim.job.as_str()).bind(i64::from(claim.after_attempt)))
    });
    for row in rows.await? {
        let job = job_id(row.try_get("id")?)?;
        incremented.insert(job, (to_u32(row.try_get("attempt")?), row.try_get("resume")?));
    }
    let new_attempt = |claim: &'a Claim| {
        let (number, resume_checkpoint) = incremented.remove(&claim.job)?;
        Some(NewAttempt { claim, number, resume_checkpoint })
    };
    Ok(claims.iter().map(new_attempt).collect())
}

/// Stores attempts in the order of their fencing tokens. Returns the fencing tokens by job.
async fn insert_attempts(
    db: &mut Connection,
    attempts: &[&NewAttempt<'_>],
) -> Result<HashMap<JobId, FencingToken>> {
    let text = "INSERT INTO attempts (job_id, attempt, places, resume, started_at, fencing_secret) VALUES {} \
        RETURNING job_id, fencing_token, fencing_secret";
    let rows = multi_row::fetch_all(db, text, 6, attempts, |query, attempt| {
        let NewAttempt { claim, number, resume_checkpoint } = attempt;
        Ok(query
            .bind(claim.job.as_str())
            .bind(i64::from(*number))
            .bind(json(&claim.places)?)
            .bind(resume_checkpoint.clone())
            .bind(claim.at.as_millisecond())
            // The database assigns the token's number.
            .bind(new_fencing_token(0).secret_text()))
    });
    let token = |row: &DbRow| Ok((job_id(row.try_get("job_id")?)?, fencing_token(row)?));
    rows.await?.iter().map(token).collect()
}

/// The names of an attempt's agents, without duplicates.
fn agent_names(places: &[Place]) -> Vec<String> {
    let mut agents: Vec<String> = Vec::new();
    for place in places {
        if !agents.contains(&place.agent) {
            agents.push(place.agent.clone());
        }
    }
    agents
}

/// Reads an attempt. An attempt that may write has the state of its job.
fn attempt(job: &JobId, row: &DbRow) -> Result<Attempt> {
    let text = |name: &str| row.try_get::<Option<String>, _>(name);
    let places: Vec<Place> = json_or_default(job.as_str(), "places", row.try_get("places")?);
    let agents = agent_names(&places);
    let is_live = row.try_get::<Option<i64>, _>("job_fencing_token")? == Some(row.try_get("fencing_token")?);
    let (state, reason) = if is_live { ("job_state", "job_cause") } else { ("state", "reason") };
    let state = text(state)?.unwrap_or_default().parse::<AttemptState>().unwrap_or_else(|error| {
        unreadable::log_once(&format!("the state of an attempt of job {job}: {error}"));
        AttemptState::Unknown
    });
    Ok(Attempt {
        attempt: to_u32(row.try_get("attempt")?),
        state,
        reason: text(reason)?.and_then(|reason| json_or_default(job.as_str(), "reason", &reason)),
        checkpoint: text("resume")?.map(|resume| format!("{job}-{resume}")),
        step: row.try_get::<Option<i64>, _>("step")?.map(uint),
        agents,
        ranks: places.iter().map(|place| place.ranks.len() as u32).sum(),
        started_at: time(row.try_get("started_at")?)?,
        ended_at: optional_time(row, "ended_at")?,
    })
}
