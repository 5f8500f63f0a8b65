//! Panels of jobs, and panels of projects for jobs without their own panels.

use super::SqlStore;
use crate::store::{
    PanelsOf, Result,
    values::{from_json, json, strip_nul},
};
use lockstep_protocol::panels::Panel;
use sqlx::AssertSqlSafe;

/// The table of the panels, the table's key column, and the key.
fn table_and_key(of: PanelsOf<'_>) -> (&'static str, &'static str, String) {
    match of {
        PanelsOf::Job(job) => ("job_panels", "job_id", job.to_string()),
        PanelsOf::Project(project) => ("project_panels", "project", strip_nul(project).into_owned()),
    }
}

impl SqlStore {
    pub async fn panels(&self, of: PanelsOf<'_>) -> Result<Option<Vec<Panel>>> {
        let (table, key, name) = table_and_key(of);
        let query = format!("SELECT panels FROM {table} WHERE {key} = $1");
        let found: Option<String> =
            sqlx::query_scalar(AssertSqlSafe(query)).bind(name).fetch_optional(&self.reader).await?;
        // Panels of another version may be unreadable. The page then shows no panels.
        Ok(found.and_then(|text| {
            let panels = from_json(&text);
            panels.inspect_err(|error| tracing::warn!(table, %error, "stored panels cannot be read")).ok()
        }))
    }

    pub async fn put_panels(&self, of: PanelsOf<'_>, panels: Option<&[Panel]>) -> Result<()> {
        let (table, key, name) = table_and_key(of);
        let Some(panels) = panels else {
            let query = format!("DELETE FROM {table} WHERE {key} = $1");
            return self.execute(sqlx::query(AssertSqlSafe(query)).bind(name)).await.map(drop);
        };
        let query = format!(
            "INSERT INTO {table} ({key}, panels) VALUES ($1, $2) \
             ON CONFLICT ({key}) DO UPDATE SET panels = excluded.panels"
        );
        let query = sqlx::query(AssertSqlSafe(query)).bind(name).bind(json(&panels)?);
        self.execute(query).await.map(drop)
    }
}
