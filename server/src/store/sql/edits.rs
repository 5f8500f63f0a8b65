//! Edits of stored jobs by functions of `crate::lifecycle`, and deletion of jobs.

use super::{
    SqlStore, datasets, events,
    jobs::{load, load_all, record_change, save},
    models, sweeps,
};
use crate::{
    lifecycle,
    store::{Change, ChangedJob, Result, StoreError},
};
use lockstep_protocol::job::JobId;
use sqlx::AssertSqlSafe;
use std::collections::BTreeSet;

impl SqlStore {
    pub async fn change_jobs(&self, changes: &[(JobId, Change)]) -> Result<Vec<Option<ChangedJob>>> {
        let mut db = self.begin().await?;
        let ids: BTreeSet<&JobId> = changes.iter().map(|(id, _)| id).collect();
        let mut rows = load_all(&mut db, &ids.into_iter().cloned().collect::<Vec<_>>()).await?;
        let at = crate::now();
        let (mut changed, mut new_rows) = (Vec::with_capacity(changes.len()), Vec::new());
        for (id, change) in changes {
            let Some(row) = rows.get_mut(id) else {
                changed.push(None);
                continue;
            };
            if row.fencing_token.is_none()
                && let Some((state, _)) = &row.unknown_state
            {
                let detail = format!(
                    "the job is {state:?}, a state that only another version of lockstep knows; start that version"
                );
                return Err(lifecycle::Refusal { state: row.job.state, detail }.into());
            }
            let state = row.job.state;
            let bodies = change(row)?;
            changed.push(Some(record_change(&mut db, row, bodies, at, &mut new_rows).await?));
            // While a job is unfinished, its dataset cannot be removed and its checkpoints cannot be registered, so only jobs that had
            // ended need these checks.
            if state.is_final() && !row.job.state.is_final() && row.job.external.is_none() {
                datasets::require_dataset(&mut db, &row.job.spec.data.dataset).await?;
                models::require_unregistered(&mut db, id, state).await?;
            }
        }
        save(&mut db, &rows.values().collect::<Vec<_>>(), at).await?;
        events::insert(&mut db, &new_rows).await?;
        db.commit().await?;
        Ok(changed)
    }

    pub async fn delete_job(&self, id: &JobId) -> Result<()> {
        let mut db = self.begin().await?;
        let row = load(&mut db, id).await?.ok_or(StoreError::NotFound("job"))?;
        let state = row.job.state;
        if !state.is_final() || row.fencing_token.is_some() {
            let detail = format!("the job is {state}; cancel it before it is deleted");
            return Err(lifecycle::Refusal { state, detail }.into());
        }
        models::require_unregistered(&mut db, id, state).await?;
        if let Some(trial) = &row.job.trial {
            sweeps::require_ended(&mut db, trial, state).await?;
        }
        let text = "UPDATE jobs SET deleted_at = $2 WHERE id = $1";
        sqlx::query(text).bind(id.as_str()).bind(crate::now().as_millisecond()).execute(&mut *db).await?;
        let text = "DELETE FROM checkpoint_copies WHERE (location = 'server' OR location LIKE 'agent:%') \
            AND checkpoint_id IN (SELECT id FROM checkpoints WHERE job_id = $1)";
        sqlx::query(text).bind(id.as_str()).execute(&mut *db).await?;
        // Rows that queries find without their job are deleted at once, because they are few.
        for table in ["checkpoints", "annotations", "idempotency", "webhook_deliveries"] {
            let query = format!("DELETE FROM {table} WHERE job_id = $1");
            sqlx::query(AssertSqlSafe(query)).bind(id.as_str()).execute(&mut *db).await?;
        }
        Ok(db.commit().await?)
    }
}
