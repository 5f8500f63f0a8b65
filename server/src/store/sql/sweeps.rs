//! Sweeps. The trials of a sweep are jobs; the sweep's progress is computed from them.

use super::{
    Connection, DbRow, SqlStore,
    jobs::{SELECT_JOBS, job_row},
    optional_time,
    people::ownership,
};
use crate::{
    lifecycle::Refusal,
    store::{
        JobRow, Result, StoreError, SweepRow,
        values::{from_json, json, strip_nul, time},
    },
};
use jiff::Timestamp;
use lockstep_protocol::{
    JobSpec,
    job::{JobState, TrialOf},
    sweep::SweepState,
};
use sqlx::{AssertSqlSafe, Row};
use std::collections::HashMap;

/// Query for sweeps without the trials' specifications, which are long.
const SELECT_SWEEPS: &str = "SELECT id, name, project, state, reason, spec, settings, rungs, owner, private, created_at, finished_at \
    FROM sweeps";

fn sweep(row: &DbRow) -> Result<SweepRow> {
    let id: String = row.try_get("id")?;
    let state: String = row.try_get("state")?;
    Ok(SweepRow {
        state: state.parse().map_err(|_| StoreError::Corrupt(format!("sweep {id}: the state {state:?}")))?,
        id,
        name: row.try_get("name")?,
        project: row.try_get("project")?,
        spec: from_json(row.try_get("spec")?)?,
        settings: from_json(row.try_get("settings")?)?,
        rungs: from_json(row.try_get("rungs")?)?,
        reason: row.try_get("reason")?,
        ownership: ownership(row)?,
        created_at: time(row.try_get("created_at")?)?,
        finished_at: optional_time(row, "finished_at")?,
    })
}

/// Refuses to delete a trial of an unfinished sweep, because the sweep would start the trial again.
///
/// # Errors
/// The sweep has not ended.
pub(super) async fn require_ended(db: &mut Connection, trial: &TrialOf, state: JobState) -> Result<()> {
    let query = "SELECT count(*) FROM sweeps WHERE id = $1 AND finished_at IS NULL";
    let unfinished: i64 = sqlx::query_scalar(query).bind(&trial.sweep).fetch_one(db).await?;
    if unfinished == 0 {
        return Ok(());
    }
    let detail = format!(
        "the job is trial {} of {}, which has not ended: delete the job after the sweep's end, or cancel the sweep first",
        trial.number, trial.sweep
    );
    Err(Refusal { state, detail }.into())
}

impl SqlStore {
    pub async fn add_sweep(&self, row: &SweepRow, specs: &[JobSpec]) -> Result<bool> {
        let query = sqlx::query(
            "INSERT INTO sweeps (id, name, project, state, spec, settings, rungs, specs, owner, private, created_at) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) ON CONFLICT DO NOTHING",
        )
        .bind(&row.id)
        .bind(strip_nul(&row.name))
        .bind(&row.project)
        .bind(row.state.as_str())
        .bind(json(&row.spec)?)
        .bind(json(&row.settings)?)
        .bind(json(&row.rungs)?)
        .bind(json(&specs)?)
        .bind(row.ownership.owner.as_deref().map(strip_nul))
        .bind(i64::from(row.ownership.private))
        .bind(row.created_at.as_millisecond());
        Ok(self.execute(query).await? > 0)
    }

    pub async fn sweeps(&self) -> Result<Vec<SweepRow>> {
        let query = format!("{SELECT_SWEEPS} ORDER BY created_at DESC, id");
        self.list(sqlx::query(AssertSqlSafe(query)), sweep).await
    }

    pub async fn unfinished_sweeps(&self) -> Result<Vec<SweepRow>> {
        let query = format!("{SELECT_SWEEPS} WHERE finished_at IS NULL ORDER BY created_at, id");
        self.list(sqlx::query(AssertSqlSafe(query)), sweep).await
    }

    pub async fn paused_sweeps(&self) -> Result<HashMap<String, String>> {
        let query =
            "SELECT id, name FROM sweeps WHERE state IN ('paused', 'cancelled') AND finished_at IS NULL";
        let rows: Vec<(String, String)> = sqlx::query_as(query).fetch_all(&self.reader).await?;
        Ok(rows.into_iter().collect())
    }

    pub async fn sweep(&self, id: &str) -> Result<Option<SweepRow>> {
        let query = sqlx::query(AssertSqlSafe(format!("{SELECT_SWEEPS} WHERE id = $1"))).bind(strip_nul(id));
        self.find(query, sweep).await
    }

    pub async fn sweep_specs(&self, id: &str) -> Result<Vec<JobSpec>> {
        let query = sqlx::query("SELECT specs FROM sweeps WHERE id = $1").bind(strip_nul(id));
        let specs = self.find(query, |row| from_json(row.try_get("specs")?)).await?;
        Ok(specs.unwrap_or_default())
    }

    pub async fn set_sweep_state(
        &self,
        id: &str,
        state: SweepState,
        reason: Option<&str>,
        finished_at: Option<Timestamp>,
    ) -> Result<bool> {
        let query = sqlx::query(
            "UPDATE sweeps SET state = $2, finished_at = $3, reason = $4 WHERE id = $1 AND finished_at IS NULL \
             AND (state <> 'cancelled' OR $2 = 'cancelled')",
        )
        .bind(strip_nul(id))
        .bind(state.as_str())
        .bind(finished_at.map(|at| at.as_millisecond()))
        .bind(reason.map(strip_nul));
        Ok(self.execute(query).await? > 0)
    }

    pub async fn delete_sweep(&self, id: &str) -> Result<bool> {
        let mut db = self.begin().await?;
        let query = "DELETE FROM sweeps WHERE id = $1 AND finished_at IS NOT NULL";
        let deleted = sqlx::query(query).bind(strip_nul(id)).execute(&mut *db).await?.rows_affected() > 0;
        if deleted {
            let query = "UPDATE jobs SET sweep = NULL, trial = NULL WHERE sweep = $1";
            sqlx::query(query).bind(strip_nul(id)).execute(&mut *db).await?;
        }
        db.commit().await?;
        Ok(deleted)
    }

    pub async fn trials(&self, sweep: &str) -> Result<Vec<JobRow>> {
        let query =
            format!("{SELECT_JOBS} WHERE jobs.sweep = $1 AND jobs.deleted_at IS NULL ORDER BY jobs.trial");
        self.list(sqlx::query(AssertSqlSafe(query)).bind(strip_nul(sweep)), job_row).await
    }
}
