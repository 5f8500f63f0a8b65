//! Attempts: claims, those that may write, and all there were.

use super::{
    Connection, DbRow, SqlStore, events,
    jobs::{change_row, load, read},
};
use crate::{
    lifecycle,
    store::{
        AttemptRow, Changed, Claim, Claimed, Occupant, Place, Result, StoreError,
        quarantine::{self, readable},
        values::{fencing, json, new_fencing, reached, small, time, uint},
    },
};
use lockstep_protocol::{
    agent::{AttemptRef, FencingToken},
    attempt::{Attempt, AttemptState},
    job::{JobId, JobState},
    reason::{Reason, ReasonCode},
};
use sqlx::{AssertSqlSafe, Row};

/// Jobs whose slots somebody may count on. In these words the index `jobs_yielding` has it, which SQLite compares.
pub(super) const YIELDS: &str =
    "(preemptible <> 0 OR stop IS NOT NULL OR state NOT IN ('starting', 'running'))";

impl SqlStore {
    pub(super) async fn list_attempts(&self, job: &JobId) -> Result<Vec<Attempt>> {
        let rows = sqlx::query(
            "SELECT a.*, j.state AS job_state, j.cause AS job_cause, j.fencing_token AS job_fencing_token FROM attempts a \
             JOIN jobs j ON j.id = a.job_id WHERE j.id = $1 AND j.deleted_at IS NULL ORDER BY a.attempt",
        )
        .bind(job.as_str())
        .fetch_all(&self.reader)
        .await?;
        Ok(readable(rows.iter().map(|row| attempt(job, row))))
    }

    pub(super) async fn places_of(&self, job: &JobId, attempt: u32) -> Result<Vec<Place>> {
        let places: Option<String> =
            sqlx::query_scalar("SELECT places FROM attempts WHERE job_id = $1 AND attempt = $2")
                .bind(job.as_str())
                .bind(i64::from(attempt))
                .fetch_optional(&self.reader)
                .await?;
        Ok(places.map(|places| read(job.as_str(), "places", &places)).unwrap_or_default())
    }

    pub(super) async fn make_attempts(&self, claims: &[Claim]) -> Result<Vec<Option<Claimed>>> {
        let mut db = self.begin().await?;
        reached("claim.begin")?;
        let (mut made, mut new) = (Vec::with_capacity(claims.len()), Vec::new());
        for claim in claims {
            made.push(make_attempt(&mut db, claim, &mut new).await?);
        }
        events::insert(&mut db, &new).await?;
        reached("claim.commit")?;
        db.commit().await?;
        reached("claim.committed")?;
        Ok(made)
    }

    /// Jobs that hold slots, of those that `which` finds.
    pub(super) async fn list_occupants(&self, which: &'static str) -> Result<Vec<Occupant>> {
        let query = format!(
            "SELECT id, priority, preemptible, state, stop, cause FROM jobs WHERE fencing_token IS NOT NULL \
             AND deleted_at IS NULL AND {which} ORDER BY priority, created_at DESC, id DESC"
        );
        let rows = sqlx::query(AssertSqlSafe(query)).fetch_all(&self.reader).await?;
        let occupant = |row: &DbRow| {
            let id: String = row.try_get("id")?;
            // A state of another version is none of these: such a job runs, and is not told to end.
            let state = row.try_get::<&str, _>("state")?.parse::<JobState>().ok();
            let runs = matches!(state, None | Some(JobState::Starting | JobState::Running));
            let pausing = state == Some(JobState::Pausing);
            let cause = row.try_get::<Option<String>, _>("cause")?.filter(|_| pausing);
            let cause = cause.and_then(|cause| read::<Option<Reason>>(&id, "cause", &cause));
            Ok(Occupant {
                priority: i32::try_from(row.try_get::<i64, _>("priority")?).unwrap_or(i32::MAX),
                preemptible: state.is_some() && row.try_get::<i64, _>("preemptible")? != 0,
                ends: !runs || row.try_get::<Option<&str>, _>("stop")?.is_some(),
                preempted: cause.is_some_and(|cause| *cause.code() == ReasonCode::Preempting),
                job: id.parse().map_err(|_| StoreError::Corrupt(format!("job id {id:?}")))?,
            })
        };
        Ok(readable(rows.iter().map(occupant)))
    }

    pub(super) async fn list_live(&self) -> Result<Vec<AttemptRow>> {
        let rows = sqlx::query(
            "SELECT a.fencing_token, a.fencing_secret, a.job_id, a.attempt, a.places, j.stop, j.state FROM attempts a \
             JOIN jobs j ON j.id = a.job_id AND j.fencing_token = a.fencing_token WHERE j.deleted_at IS NULL ORDER BY a.fencing_token",
        )
        .fetch_all(&self.reader)
        .await?;
        let live = |row: &DbRow| {
            let id: String = row.try_get("job_id")?;
            Ok(AttemptRow {
                // Without its places an attempt is lost with its lease, as if nobody had it.
                places: read(&id, "places", row.try_get("places")?),
                attempt: AttemptRef {
                    job: id.parse().map_err(|_| StoreError::Corrupt(format!("job id {id:?}")))?,
                    attempt: small(row.try_get("attempt")?),
                    fencing_token: fencing(row.try_get("fencing_token")?, row.try_get("fencing_secret")?),
                },
                ends: row.try_get::<Option<&str>, _>("stop")?.is_some()
                    || row.try_get::<&str, _>("state")? == JobState::Pausing.as_str(),
            })
        };
        Ok(readable(rows.iter().map(live)))
    }
}

/// Claims a job. Its events come behind `new`, still to be stored.
async fn make_attempt(
    db: &mut Connection,
    claim: &Claim,
    new: &mut Vec<events::New>,
) -> Result<Option<Claimed>> {
    // The one statement that decides: of two claims only one finds the job still waiting.
    let claimed = sqlx::query(
        "UPDATE jobs SET attempt = attempt + 1 WHERE id = $1 AND attempt = $2 \
         AND state IN ('queued', 'restarting') RETURNING attempt",
    )
    .bind(claim.job.as_str())
    .bind(i64::from(claim.after_attempt))
    .fetch_optional(&mut *db)
    .await?;
    let Some(claimed) = claimed else { return Ok(None) };
    let attempt = small(claimed.try_get("attempt")?);
    let resume: Option<(i64, i64)> = sqlx::query_as(
        "SELECT epoch, step FROM checkpoints WHERE job_id = $1 ORDER BY step DESC, epoch DESC LIMIT 1",
    )
    .bind(claim.job.as_str())
    .fetch_optional(&mut *db)
    .await?;
    let resume = resume.map(|(epoch, step)| format!("{epoch}-{step}"));
    // Its number is the database's.
    let unnumbered = new_fencing(0);
    let number: i64 = sqlx::query_scalar(
        "INSERT INTO attempts (job_id, attempt, places, resume, started_at, fencing_secret) \
         VALUES ($1, $2, $3, $4, $5, $6) RETURNING fencing_token",
    )
    .bind(claim.job.as_str())
    .bind(i64::from(attempt))
    .bind(json(&claim.places)?)
    .bind(&resume)
    .bind(claim.at.as_millisecond())
    .bind(unnumbered.secret_text())
    .fetch_one(&mut *db)
    .await?;
    let fencing_token = FencingToken { number: uint(number), ..unnumbered };
    let mut agents: Vec<String> = Vec::new();
    for place in &claim.places {
        if !agents.contains(&place.agent) {
            agents.push(place.agent.clone());
        }
    }
    let row = load(db, &claim.job).await?.ok_or(StoreError::NotFound("job"))?;
    let (job, its) = change_row(db, row, claim.at, |row| {
        row.fencing_token = Some(fencing_token);
        row.job.agents = agents;
        lifecycle::started(row, claim.fewer.clone(), claim.at)
    })
    .await?;
    let changed = Changed { job, events: its.iter().map(|new| new.row.clone()).collect() };
    new.extend(its);
    let attempt = AttemptRef { job: claim.job.clone(), attempt, fencing_token };
    Ok(Some(Claimed { attempt, resume, changed }))
}

/// An attempt as it is shown; the state of the one that may write follows from the job.
fn attempt(job: &JobId, row: &DbRow) -> Result<Attempt> {
    let text = |name: &str| row.try_get::<Option<String>, _>(name);
    let places: Vec<Place> = read(job.as_str(), "places", row.try_get("places")?);
    let mut agents: Vec<String> = Vec::new();
    for place in places {
        if !agents.contains(&place.agent) {
            agents.push(place.agent);
        }
    }
    let live = row.try_get::<Option<i64>, _>("job_fencing_token")? == Some(row.try_get("fencing_token")?);
    let (state, reason) = if live { ("job_state", "job_cause") } else { ("state", "reason") };
    let ended_at: Option<i64> = row.try_get("ended_at")?;
    let state = match text(state)? {
        // Without a word that it ended, an earlier version ended it.
        None => AttemptState::Ended,
        Some(word) => word.parse().unwrap_or_else(|error: String| {
            quarantine::log_once(&format!("the state of an attempt of job {job}: {error}"));
            AttemptState::Unknown
        }),
    };
    Ok(Attempt {
        attempt: small(row.try_get("attempt")?),
        state,
        reason: text(reason)?.and_then(|reason| read(job.as_str(), "reason", &reason)),
        checkpoint: text("resume")?.map(|resume| format!("{job}-{resume}")),
        step: row.try_get::<Option<i64>, _>("step")?.map(uint),
        agents,
        started_at: time(row.try_get("started_at")?)?,
        ended_at: ended_at.map(time).transpose()?,
    })
}
