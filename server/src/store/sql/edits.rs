//! Edits of stored jobs, by rules that the store does not know, and their removal.

use super::{
    Db, SqlStore, datasets,
    jobs::{change, load},
};
use crate::{
    lifecycle,
    store::{Change, Changed, Result, StoreError},
};
use lockstep_protocol::job::JobId;
use sqlx::{AssertSqlSafe, Transaction};

/// Edits a job; none where it is not there.
async fn edit_one(db: &mut Transaction<'static, Db>, id: &JobId, edit: &Change) -> Result<Option<Changed>> {
    let Some(row) = load(db, id).await? else { return Ok(None) };
    if let (Some((state, _)), None) = (&row.unknown_state, row.fencing_token) {
        let detail =
            format!("the job is {state:?}, a state of another version of lockstep; start that version");
        return Err(lifecycle::Refused { state: row.job.state, detail }.into());
    }
    // Nobody removes the dataset of a job that is not over, so that one needs no check.
    let over = row.job.state.is_final();
    let changed = change(db, row, crate::now(), |row| edit(row)).await?;
    if over && !changed.job.state.is_final() {
        datasets::require_dataset(db, &changed.job.spec.data.dataset).await?;
    }
    Ok(Some(changed))
}

impl SqlStore {
    pub(super) async fn edit_job(&self, id: &JobId, edit: Change) -> Result<Changed> {
        let mut db = self.begin().await?;
        let changed = edit_one(&mut db, id, &edit).await?.ok_or(StoreError::NotFound("job"))?;
        db.commit().await?;
        Ok(changed)
    }

    pub(super) async fn edit_jobs(&self, changes: &[(JobId, Change)]) -> Result<Vec<Option<Changed>>> {
        let mut db = self.begin().await?;
        let mut changed = Vec::with_capacity(changes.len());
        for (id, edit) in changes {
            changed.push(edit_one(&mut db, id, edit).await?);
        }
        db.commit().await?;
        Ok(changed)
    }

    pub(super) async fn remove_job(&self, id: &JobId) -> Result<()> {
        let mut db = self.begin().await?;
        let row = load(&mut db, id).await?.ok_or(StoreError::NotFound("job"))?;
        let state = row.job.state;
        if !state.is_final() || row.fencing_token.is_some() {
            let detail = format!("the job is {state}; cancel it before it is deleted");
            return Err(lifecycle::Refused { state, detail }.into());
        }
        sqlx::query("UPDATE jobs SET deleted_at = $2 WHERE id = $1")
            .bind(id.as_str())
            .bind(crate::now().as_millisecond())
            .execute(&mut *db)
            .await?;
        // What is found without its job goes at once; there is little of it.
        for table in ["checkpoints", "annotations", "idempotency"] {
            let query = format!("DELETE FROM {table} WHERE job_id = $1");
            sqlx::query(AssertSqlSafe(query)).bind(id.as_str()).execute(&mut *db).await?;
        }
        Ok(db.commit().await?)
    }
}
