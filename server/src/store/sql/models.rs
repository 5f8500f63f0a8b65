//! Registered models: versions, which name checkpoints, and aliases, which name versions.

use super::{Connection, DbRow, SqlStore, jobs::load, optional_json, people::ownership};
use crate::{
    lifecycle::Refusal,
    store::{
        NewVersion, Result, StoreError, VersionRow,
        unreadable::{read_spec, readable},
        values::{from_json, job_id, json, strip_nul, time, to_u32},
    },
};
use lockstep_protocol::{
    job::{JobId, JobState},
    models::{ModelVersion, SCHEME},
};
use sqlx::{AssertSqlSafe, Row};

/// Maximum number of versions that a refusal names.
const MAX_NAMED: usize = 10;
/// Maximum number of versions of a model. Requests read all versions of a model.
const MAX_VERSIONS_PER_MODEL: i64 = 1000;
/// Maximum number of versions of a job's checkpoints.
const MAX_VERSIONS_PER_JOB: i64 = 100;

const SELECT_VERSIONS: &str = "SELECT v.*, jobs.name AS job_name, jobs.project, jobs.spec, jobs.owner, jobs.private, \
    c.val_accuracy, c.val_loss, c.validation FROM model_versions v JOIN jobs ON jobs.id = v.job_id \
    LEFT JOIN checkpoints c ON c.id = v.checkpoint_id WHERE v.deleted_at IS NULL";

fn version(row: &DbRow) -> Result<VersionRow> {
    let spec = read_spec(row.try_get("spec")?).0;
    let version = ModelVersion {
        model: row.try_get("model")?,
        version: to_u32(row.try_get("version")?),
        aliases: Vec::new(),
        checkpoint: row.try_get("checkpoint_id")?,
        job: job_id(row.try_get("job_id")?)?,
        job_name: row.try_get("job_name")?,
        project: row.try_get("project")?,
        val_accuracy: row.try_get("val_accuracy")?,
        val_loss: row.try_get("val_loss")?,
        validation: optional_json(row, "validation")?,
        sharded: spec.checkpoint.sharded,
        dataset: spec.data.dataset,
        dataset_fingerprint: optional_json(row, "dataset_fingerprint")?,
        programs: from_json(row.try_get("programs")?)?,
        description: row.try_get("description")?,
        registered_by: row.try_get("registered_by")?,
        registered_at: time(row.try_get("registered_at")?)?,
    };
    Ok(VersionRow { version, ownership: ownership(row)? })
}

/// Refuses to run a job again or to delete it if its checkpoints are registered as versions, because this would change the versions.
///
/// # Errors
/// [`StoreError::Refused`]: versions of the job exist, which the error names.
pub(super) async fn require_unregistered(db: &mut Connection, job: &JobId, state: JobState) -> Result<()> {
    let text = "SELECT model, version FROM model_versions WHERE job_id = $1 AND deleted_at IS NULL ORDER BY model, version";
    let found: Vec<(String, i64)> = sqlx::query_as(text).bind(job.as_str()).fetch_all(db).await?;
    let Some((model, version)) = found.first() else { return Ok(()) };
    let removal = format!("lockstep model remove {model} {version}");
    let named = found.iter().take(MAX_NAMED).map(|(model, version)| format!("{SCHEME}{model}/{version}"));
    let ellipsis = if found.len() > MAX_NAMED { ", ..." } else { "" };
    let detail = format!(
        "the job has registered versions ({}{ellipsis}), so it can be neither run again nor deleted; remove the versions first \
         (on the page Models, or with `{removal}`)",
        named.collect::<Vec<_>>().join(", ")
    );
    Err(Refusal { state, detail }.into())
}

impl SqlStore {
    pub async fn add_model_version(&self, new: &NewVersion) -> Result<u32> {
        let mut db = self.begin().await?;
        let row = load(&mut db, &new.job).await?.ok_or(StoreError::NotFound("job"))?;
        let state = row.job.state;
        if !state.is_final() || row.fencing_token.is_some() {
            let detail = format!(
                "the job is {state}, and an unfinished job replaces and removes its checkpoints; register a checkpoint after the job's end"
            );
            return Err(Refusal { state, detail }.into());
        }
        let found: Option<String> =
            sqlx::query_scalar("SELECT id FROM checkpoints WHERE id = $1 AND job_id = $2")
                .bind(strip_nul(&new.checkpoint))
                .bind(new.job.as_str())
                .fetch_optional(&mut *db)
                .await?;
        let checkpoint = found.ok_or(StoreError::NotFound("checkpoint"))?;
        // The newest version includes removed versions, so that numbers are not reused.
        let (model_count, job_count, newest): (i64, i64, Option<i64>) = sqlx::query_as(
            "SELECT (SELECT count(*) FROM model_versions WHERE model = $1 AND deleted_at IS NULL), \
             (SELECT count(*) FROM model_versions WHERE job_id = $2 AND deleted_at IS NULL), \
             (SELECT max(version) FROM model_versions WHERE model = $1)",
        )
        .bind(&new.model)
        .bind(new.job.as_str())
        .fetch_one(&mut *db)
        .await?;
        if model_count >= MAX_VERSIONS_PER_MODEL || job_count >= MAX_VERSIONS_PER_JOB {
            let detail = format!(
                "the model has {model_count} versions and the job {job_count}; the limits are {MAX_VERSIONS_PER_MODEL} per model and \
                 {MAX_VERSIONS_PER_JOB} per job. Remove versions first"
            );
            return Err(Refusal { state, detail }.into());
        }
        let version = newest.unwrap_or(0) + 1;
        sqlx::query(
            "INSERT INTO model_versions (model, version, job_id, checkpoint_id, dataset_fingerprint, programs, \
             description, registered_by, registered_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
        )
        .bind(&new.model)
        .bind(version)
        .bind(new.job.as_str())
        .bind(checkpoint)
        .bind(new.dataset_fingerprint.as_ref().map(json).transpose()?)
        .bind(json(&new.programs)?)
        .bind(strip_nul(&new.description))
        .bind(new.registered_by.as_deref().map(strip_nul))
        .bind(new.at.as_millisecond())
        .execute(&mut *db)
        .await?;
        db.commit().await?;
        Ok(to_u32(version))
    }

    pub async fn model_versions(&self, model: Option<&str>) -> Result<Vec<VersionRow>> {
        let model = model.map(strip_nul);
        let mut db = self.reader.acquire().await?;
        let of_model = "($1 IS NULL OR model = $1)";
        let query = format!("{SELECT_VERSIONS} AND {of_model} ORDER BY v.model, v.version");
        let rows = sqlx::query(AssertSqlSafe(query)).bind(model.as_deref()).fetch_all(&mut *db).await?;
        let mut versions = readable(rows.iter().map(version));
        let query =
            format!("SELECT model, version, alias FROM model_aliases WHERE {of_model} ORDER BY alias");
        let aliases: Vec<(String, i64, String)> =
            sqlx::query_as(AssertSqlSafe(query)).bind(model.as_deref()).fetch_all(&mut *db).await?;
        for (model, number, alias) in aliases {
            let mut candidates = versions.iter_mut().map(|row| &mut row.version);
            if let Some(named) = candidates.find(|v| v.model == model && i64::from(v.version) == number) {
                named.aliases.push(alias);
            }
        }
        Ok(versions)
    }

    pub async fn registered_checkpoints(&self, job: &JobId) -> Result<Vec<String>> {
        let query = "SELECT checkpoint_id FROM model_versions WHERE job_id = $1 AND deleted_at IS NULL";
        Ok(sqlx::query_scalar(query).bind(job.as_str()).fetch_all(&self.reader).await?)
    }

    pub async fn set_model_alias(&self, model: &str, alias: &str, version: Option<u32>) -> Result<()> {
        let Some(version) = version else {
            let text = "DELETE FROM model_aliases WHERE model = $1 AND alias = $2";
            let query = sqlx::query(text).bind(strip_nul(model)).bind(strip_nul(alias));
            return self.execute_or(query, StoreError::NotFound("alias")).await;
        };
        let text = "INSERT INTO model_aliases (model, alias, version) SELECT model, CAST($2 AS TEXT), version \
            FROM model_versions WHERE model = $1 AND version = $3 AND deleted_at IS NULL \
            ON CONFLICT (model, alias) DO UPDATE SET version = excluded.version";
        let query = sqlx::query(text).bind(strip_nul(model)).bind(strip_nul(alias)).bind(i64::from(version));
        self.execute_or(query, StoreError::NotFound("version")).await
    }

    pub async fn remove_model_version(&self, model: &str, version: u32) -> Result<()> {
        let query = sqlx::query(
            "UPDATE model_versions SET deleted_at = $3 WHERE model = $1 AND version = $2 AND deleted_at IS NULL \
             AND NOT EXISTS (SELECT 1 FROM model_aliases a WHERE a.model = $1 AND a.version = $2)",
        )
        .bind(strip_nul(model))
        .bind(i64::from(version))
        .bind(crate::now().as_millisecond());
        self.execute_or(query, StoreError::NotFound("version without an alias")).await
    }
}
