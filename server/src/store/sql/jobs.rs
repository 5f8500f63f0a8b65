//! Jobs: reading, creating and changing rows.

use super::{
    Connection, DbRow, SqlStore, checkpoint_copies, datasets, events, fencing_token, flag, multi_row,
};
use crate::{
    lifecycle,
    store::{
        Annotation, ChangedJob, CreateResult, JobRow, NewJob, Result, StoreError,
        unreadable::{self, json_or_default, read_spec},
        values::{fault_point, from_json, int, job_id, json, strip_nul, time, to_u32, uint},
    },
};
use jiff::Timestamp;
use lockstep_protocol::{
    job::{Batch, External, Failure, Job, JobId, JobState, Parent, TrialOf},
    stream::EventBody,
};
use sqlx::Row;
use std::collections::HashMap;

/// Query for jobs with their tags, without notes. Notes may be long, so lists of jobs omit them.
pub(super) const SELECT_JOBS: &str = "SELECT jobs.*, annotations.tags, CAST(NULL AS TEXT) AS notes FROM jobs \
    LEFT JOIN annotations ON annotations.job_id = jobs.id";
/// Query for jobs with their tags and notes.
pub(super) const SELECT_JOBS_WITH_NOTES: &str = "SELECT jobs.*, annotations.tags, COALESCE(annotations.notes, '') AS notes FROM jobs \
    LEFT JOIN annotations ON annotations.job_id = jobs.id";

/// The pattern of `LIKE ... ESCAPE '!'` for texts that contain `text`.
pub(super) fn like_pattern(text: &str) -> String {
    let mut pattern = String::from("%");
    for character in strip_nul(text).chars() {
        if matches!(character, '%' | '_' | '!') {
            pattern.push('!');
        }
        pattern.push(character);
    }
    pattern.push('%');
    pattern
}

/// Reads a job as far as this version of the program can read the row. A value that this version cannot read is logged and replaced, so
/// that lists still contain the job.
pub(super) fn job_row(row: &DbRow) -> Result<JobRow> {
    let id: String = row.try_get("id")?;
    let mut flaws = Vec::new();
    let (mut spec, flaw) = read_spec(row.try_get("spec")?);
    flaws.extend(flaw);
    spec.name = row.try_get("name")?;
    // The column decides who sees the job, even if the specification cannot be read.
    spec.private = flag(row, "private")?;
    spec.parallel.ranks = to_u32(row.try_get("ranks")?);
    spec.project = row.try_get("project")?;
    let stored_state: String = row.try_get("state")?;
    let is_live = row.try_get::<Option<i64>, _>("fencing_token")?.is_some();
    let fencing_token = is_live.then(|| fencing_token(row)).transpose()?;
    // If the stored state is unknown to this version, a job with a live attempt is shown as running, because it holds slots.
    let shown_state = if is_live { JobState::Running } else { JobState::Failed };
    let parsed_state = stored_state.parse::<JobState>();
    let unknown_state = parsed_state.is_err().then_some((stored_state, shown_state));
    if let Some((state, _)) = &unknown_state {
        flaws.push(format!("its state {state:?}"));
    }
    let progress: lifecycle::Progress = json_or_default(&id, "progress", row.try_get("progress")?);
    let optional = |name: &str| row.try_get::<Option<String>, _>(name);
    let time_of = |at: i64| {
        time(at).unwrap_or_else(|error| {
            unreadable::log_once(&format!("a time of job {id}, which is shown as 1970-01-01: {error}"));
            Timestamp::UNIX_EPOCH
        })
    };
    let optional_time = |name: &str| Ok::<_, sqlx::Error>(row.try_get::<Option<i64>, _>(name)?.map(time_of));
    let unsigned = |name: &str| Ok::<_, sqlx::Error>(uint(row.try_get(name)?));
    let tags = optional("tags")?.map(|text| json_or_default(&id, "tags", &text)).unwrap_or_default();
    let (state, reason) = (parsed_state.unwrap_or(shown_state), optional("reason")?);
    let cause = optional("cause")?.and_then(|text| json_or_default(&id, "cause", &text));
    let parent = optional("parent_job")?.zip(optional("parent_checkpoint")?);
    let parent = parent.map(|(job, checkpoint)| Parent { job, checkpoint });
    let trial = optional("sweep")?.zip(row.try_get::<Option<i64>, _>("trial")?);
    let trial = trial.map(|(sweep, number)| TrialOf { sweep, number: to_u32(number) });
    let external: Option<External> =
        optional("external")?.map(|text| json_or_default(&id, "external", &text));
    let (private_parent, parent) = if flag(row, "parent_private")? { (parent, None) } else { (None, parent) };
    let job = Job {
        name: spec.name.clone(),
        failure: Failure::of(state, reason.as_deref(), cause.as_ref()),
        state,
        reason,
        cause,
        project: spec.project.clone(),
        tags,
        queue: None,
        notes: optional("notes")?,
        parent,
        trial,
        owner: optional("owner")?,
        batch: (flaws.is_empty() && external.is_none())
            .then(|| Batch { epoch_samples: progress.speed.epoch_samples(), ..Batch::of(&spec) }),
        unreadable: (!flaws.is_empty()).then(|| flaws.join("; ")),
        warnings: Vec::new(),
        attempt: to_u32(row.try_get("attempt")?),
        ranks: spec.parallel.ranks,
        external,
        spec,
        agents: json_or_default(&id, "agents", row.try_get("agents")?),
        step: unsigned("step")?,
        epoch: to_u32(row.try_get("epoch")?),
        total_steps: unsigned("total_steps")?,
        steps_per_epoch: unsigned("steps_per_epoch")?,
        images_per_second: row.try_get("images_per_second")?,
        eta_secs: row.try_get("eta_secs")?,
        created_at: time_of(row.try_get("created_at")?),
        started_at: optional_time("started_at")?,
        finished_at: optional_time("finished_at")?,
        ran_secs: progress.ran_secs(),
        best: optional("best")?.and_then(|text| json_or_default(&id, "best", &text)),
        diagnosis: None,
        trained_validation: None,
        last: json_or_default(&id, "last", row.try_get("last")?),
        last_seq: unsigned("last_seq")?,
        sparkline: progress.sparkline(),
        id: job_id(&id)?,
    };
    Ok(JobRow {
        announced_state: job.state,
        // If the column is not valid JSON, its text becomes the words of the reason.
        cancel_reason: optional("stop")?
            .map(|text| from_json(&text).unwrap_or_else(|_| text.as_str().into())),
        job,
        private_parent,
        restarts: to_u32(row.try_get("restarts")?),
        waiting_since: optional_time("waiting_since")?,
        fencing_token,
        progress,
        attempt_end: None,
        unknown_state,
    })
}

/// As [`job_row`], with the job's id.
pub(super) fn job_with_id(row: &DbRow) -> Result<(JobId, JobRow)> {
    let row = job_row(row)?;
    Ok((row.job.id.clone(), row))
}

/// Loads a job; `None` if it does not exist or was deleted.
pub(super) async fn load(db: &mut Connection, id: &JobId) -> Result<Option<JobRow>> {
    Ok(load_all(db, std::slice::from_ref(id)).await?.remove(id))
}

/// Loads jobs. Deleted jobs are left out.
pub(super) async fn load_all(db: &mut Connection, ids: &[JobId]) -> Result<HashMap<JobId, JobRow>> {
    rows_of(db, SELECT_JOBS_WITH_NOTES, ids).await?.iter().map(job_with_id).collect()
}

/// The rows of `select` ([`SELECT_JOBS`] or [`SELECT_JOBS_WITH_NOTES`]) for jobs, in any order. Deleted jobs are left out.
pub(super) async fn rows_of(db: &mut Connection, select: &str, ids: &[JobId]) -> Result<Vec<DbRow>> {
    let text = format!("{select} WHERE jobs.id IN ({{}}) AND jobs.deleted_at IS NULL");
    multi_row::fetch_all(db, &text, 1, ids, |query, id| Ok(query.bind(id.as_str()))).await
}

/// Writes all columns that a change of a job may affect. If a job has no fencing token, also stores the end of its newest attempt.
pub(super) async fn save(db: &mut Connection, rows: &[&JobRow], at: Timestamp) -> Result<()> {
    let text = "UPDATE jobs SET state = column2, reason = column3, attempt = column4, agents = column5, step = column6, epoch = column7, \
        total_steps = column8, steps_per_epoch = column9, images_per_second = column10, eta_secs = column11, started_at = column12, \
        finished_at = column13, best = column14, last = column15, last_seq = column16, progress = column17, stop = column18, \
        restarts = column19, fencing_token = column20, cause = column21, fencing_secret = column22, waiting_since = column23, \
        external = column24 FROM (VALUES {}) AS new WHERE id = column1";
    multi_row::execute(db, text, 24, rows, |query, row| {
        let job = &row.job;
        Ok(query
            .bind(job.id.as_str())
            .bind(match &row.unknown_state {
                Some((state, shown_state)) if *shown_state == job.state => state.as_str(),
                _ => job.state.as_str(),
            })
            .bind(job.reason.as_deref().map(strip_nul))
            .bind(i64::from(job.attempt))
            .bind(json(&job.agents)?)
            .bind(int(job.step))
            .bind(i64::from(job.epoch))
            .bind(int(job.total_steps))
            .bind(int(job.steps_per_epoch))
            .bind(job.images_per_second)
            .bind(job.eta_secs)
            .bind(job.started_at.map(|t| t.as_millisecond()))
            .bind(job.finished_at.map(|t| t.as_millisecond()))
            .bind(job.best.as_ref().map(json).transpose()?)
            .bind(json(&job.last)?)
            .bind(int(job.last_seq))
            .bind(json(&row.progress)?)
            .bind(row.cancel_reason.as_ref().map(json).transpose()?)
            .bind(i64::from(row.restarts))
            .bind(row.fencing_token.map(|token| int(token.number)))
            .bind(job.cause.as_ref().map(json).transpose()?)
            .bind(row.fencing_token.map(|token| token.secret_text()))
            .bind(row.waiting_since.map(|t| t.as_millisecond()))
            .bind(job.external.as_ref().map(json).transpose()?))
    })
    .await?;
    let has_ended = |row: &&&JobRow| row.fencing_token.is_none() && row.job.attempt > 0;
    let ended: Vec<_> = rows.iter().filter(has_ended).collect();
    let text = "UPDATE attempts SET ended_at = column2, state = column3, reason = column4, step = column5 \
        FROM (VALUES {}) AS new WHERE job_id = column1 AND ended_at IS NULL";
    multi_row::execute(db, text, 5, &ended, |query, row| {
        let end = row.attempt_end.as_ref();
        Ok(query
            .bind(row.job.id.as_str())
            .bind(at.as_millisecond())
            .bind(end.map(|end| end.state.as_str()))
            .bind(end.and_then(|end| end.reason.as_ref()).map(json).transpose()?)
            .bind(end.filter(|end| end.has_trained).map(|_| int(row.job.step))))
    })
    .await
}

/// Prepares the rows of new events of a job, which the caller inserts (`events::insert`). Stores written and removed checkpoints.
pub(super) async fn prepare_events(
    db: &mut Connection,
    row: &mut JobRow,
    bodies: Vec<EventBody>,
    at: Timestamp,
) -> Result<Vec<events::NewRow>> {
    for body in &bodies {
        update_checkpoints(db, &row.job.id, body, at).await?;
    }
    events::new_rows(row, bodies, at)
}

/// Same as [`prepare_events`], but adds the rows to `new_rows`, and returns the changed job.
pub(super) async fn record_change(
    db: &mut Connection,
    row: &mut JobRow,
    bodies: Vec<EventBody>,
    at: Timestamp,
    new_rows: &mut Vec<events::NewRow>,
) -> Result<ChangedJob> {
    let appended = prepare_events(db, row, bodies, at).await?;
    let events = appended.iter().map(|new_row| new_row.row.clone()).collect();
    new_rows.extend(appended);
    Ok(ChangedJob { job: row.job.clone(), events })
}

/// Updates the table of checkpoints after an event.
async fn update_checkpoints(db: &mut Connection, job: &JobId, body: &EventBody, at: Timestamp) -> Result<()> {
    match body {
        EventBody::Checkpoint { attempt, id, checkpoint } => {
            checkpoint_copies::delete_invalid_copies(db, id, Some(*attempt)).await?;
            if checkpoint.best {
                let text = "UPDATE checkpoints SET best = 0 WHERE job_id = $1";
                sqlx::query(text).bind(job.as_str()).execute(&mut *db).await?;
            }
            sqlx::query("INSERT INTO checkpoints VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) \
                 ON CONFLICT (id) DO UPDATE SET attempt = excluded.attempt, val_accuracy = excluded.val_accuracy, \
                 val_loss = excluded.val_loss, best = excluded.best, size_bytes = excluded.size_bytes, \
                 created_at = excluded.created_at, validation = excluded.validation")
                .bind(id)
                .bind(job.as_str())
                .bind(i64::from(*attempt))
                .bind(i64::from(checkpoint.epoch))
                .bind(int(checkpoint.step))
                .bind(checkpoint.val_accuracy)
                .bind(checkpoint.val_loss)
                .bind(i64::from(checkpoint.best))
                .bind(int(checkpoint.size_bytes))
                .bind(at.as_millisecond())
                .bind(checkpoint.validation.as_ref().map(json).transpose()?)
                .execute(db)
                .await?;
        }
        EventBody::CheckpointRemoved { id, .. } => {
            checkpoint_copies::delete_invalid_copies(db, id, None).await?;
            sqlx::query("DELETE FROM checkpoints WHERE id = $1").bind(id).execute(db).await?;
        }
        _ => {}
    }
    Ok(())
}

/// Applies `change` to a job, and stores the job and the events.
pub(super) async fn change_job(
    db: &mut Connection,
    mut row: JobRow,
    at: Timestamp,
    change: impl FnOnce(&mut JobRow) -> lifecycle::ChangeResult,
) -> Result<ChangedJob> {
    let bodies = change(&mut row)?;
    let new_rows = prepare_events(db, &mut row, bodies, at).await?;
    save(db, &[&row], at).await?;
    events::insert(db, &new_rows).await?;
    Ok(ChangedJob { job: row.job, events: new_rows.into_iter().map(|new_row| new_row.row).collect() })
}

/// The job that the request with this idempotency key created.
///
/// # Errors
/// [`StoreError::KeyReused`]: the key was used with another request.
async fn find_job_by_key(db: &mut Connection, (key, request): &(String, String)) -> Result<Option<Job>> {
    let text = "SELECT request, job_id FROM idempotency WHERE key = $1";
    let found = sqlx::query(text).bind(key).fetch_optional(&mut *db).await?;
    let Some(found) = found else { return Ok(None) };
    if found.try_get::<String, _>("request")? != *request {
        return Err(StoreError::KeyReused);
    }
    let id = job_id(found.try_get("job_id")?)?;
    let row = load(db, &id).await?.ok_or(StoreError::NotFound("job"))?;
    Ok(Some(row.job))
}

impl SqlStore {
    pub async fn job_by_idempotency_key(&self, key: &(String, String)) -> Result<Option<Job>> {
        let mut db = self.reader.acquire().await?;
        find_job_by_key(&mut db, key).await
    }

    pub async fn create_job(&self, new: NewJob) -> Result<CreateResult> {
        let mut db = self.begin().await?;
        fault_point("create.begin")?;
        if let Some(key) = &new.idempotency
            && let Some(existing) = find_job_by_key(&mut db, key).await?
        {
            return Ok(CreateResult::Existing(Box::new(existing)));
        }
        if new.external.is_none() {
            datasets::require_dataset(&mut db, &new.spec.data.dataset).await?;
        }
        sqlx::query(
            "INSERT INTO jobs (id, name, state, priority, spec, ranks, created_at, parent_job, parent_checkpoint, \
             parent_private, project, owner, private, preemptible, external, sweep, trial) \
             VALUES ($1, $2, 'queued', $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)",
        )
        .bind(new.id.as_str())
        .bind(strip_nul(&new.spec.name))
        .bind(i64::from(new.spec.priority))
        .bind(json(&new.spec)?)
        .bind(i64::from(new.spec.parallel.ranks))
        .bind(new.at.as_millisecond())
        .bind(new.fork.as_ref().map(|fork| &fork.parent.job))
        .bind(new.fork.as_ref().map(|fork| &fork.parent.checkpoint))
        .bind(i64::from(new.fork.as_ref().is_some_and(|fork| fork.hides_parent)))
        .bind(&new.spec.project)
        .bind(new.owner.as_deref().map(strip_nul))
        .bind(i64::from(new.spec.private))
        .bind(i64::from(new.spec.preemptible))
        .bind(new.external.as_ref().map(json).transpose()?)
        .bind(new.trial.as_ref().map(|trial| &trial.id.sweep))
        .bind(new.trial.as_ref().map(|trial| i64::from(trial.id.number)))
        .execute(&mut *db)
        .await?;
        if new.annotation != Annotation::default() {
            sqlx::query("INSERT INTO annotations (job_id, notes, tags) VALUES ($1, $2, $3)")
                .bind(new.id.as_str())
                .bind(strip_nul(&new.annotation.notes))
                .bind(json(&new.annotation.tags)?)
                .execute(&mut *db)
                .await?;
        }
        if let Some((key, request)) = &new.idempotency {
            sqlx::query("INSERT INTO idempotency VALUES ($1, $2, $3, $4)")
                .bind(key)
                .bind(request)
                .bind(new.id.as_str())
                .bind(new.at.as_millisecond())
                .execute(&mut *db)
                .await?;
        }
        let row = load(&mut db, &new.id).await?.ok_or(StoreError::NotFound("job"))?;
        let fork = new.fork.as_ref();
        let changed = change_job(&mut db, row, new.at, |row| match row.job.external {
            Some(_) => lifecycle::external::begin(row, new.at),
            None => {
                row.progress.pause_after = new.trial.as_ref().and_then(|trial| trial.pause_after);
                Ok(lifecycle::first_events(row, fork))
            }
        });
        let changed = changed.await?;
        fault_point("create.commit")?;
        db.commit().await?;
        fault_point("create.committed")?;
        Ok(CreateResult::New(Box::new(changed)))
    }

    pub async fn job(&self, id: &JobId) -> Result<Option<JobRow>> {
        load(&mut *self.reader.acquire().await?, id).await
    }
}
