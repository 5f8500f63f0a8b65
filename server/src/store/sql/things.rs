//! Datasets, agents, and numbers for monitoring.

use super::{DbRow, SqlStore};
use crate::store::{
    AgentRow, Counts, Result, StoreError,
    values::{from_json, json, plain, time, uint},
};
use lockstep_protocol::dataset::Dataset;
use sqlx::Row;

fn dataset(row: &DbRow) -> Result<Dataset> {
    Ok(Dataset {
        name: row.try_get("name")?,
        path: row.try_get("path")?,
        info: from_json(row.try_get("info")?)?,
        added_at: time(row.try_get("added_at")?)?,
    })
}

impl SqlStore {
    pub(super) async fn list_datasets(&self) -> Result<Vec<Dataset>> {
        let rows = sqlx::query("SELECT * FROM datasets ORDER BY name").fetch_all(&self.reader).await?;
        rows.iter().map(dataset).collect()
    }

    pub(super) async fn read_dataset(&self, name: &str) -> Result<Option<Dataset>> {
        let row = sqlx::query("SELECT * FROM datasets WHERE name = $1")
            .bind(plain(name))
            .fetch_optional(&self.reader)
            .await?;
        row.as_ref().map(dataset).transpose()
    }

    pub(super) async fn insert_dataset(&self, dataset: &Dataset) -> Result<()> {
        let done = sqlx::query("INSERT INTO datasets VALUES ($1, $2, $3, $4) ON CONFLICT (name) DO NOTHING")
            .bind(plain(&dataset.name))
            .bind(plain(&dataset.path))
            .bind(json(&dataset.info)?)
            .bind(dataset.added_at.as_millisecond())
            .execute(&self.writer)
            .await?;
        if done.rows_affected() == 0 { Err(StoreError::NameTaken(dataset.name.clone())) } else { Ok(()) }
    }

    pub(super) async fn delete_dataset(&self, name: &str) -> Result<()> {
        let done = sqlx::query("DELETE FROM datasets WHERE name = $1")
            .bind(plain(name))
            .execute(&self.writer)
            .await?;
        if done.rows_affected() == 0 { Err(StoreError::NotFound("dataset")) } else { Ok(()) }
    }

    pub(super) async fn upsert_agent(&self, agent: &AgentRow) -> Result<()> {
        sqlx::query("INSERT INTO agents VALUES ($1, $2, $3, $4, $5) ON CONFLICT (id) DO UPDATE SET name = excluded.name, \
             machine = excluded.machine, slots = excluded.slots, last_seen_at = excluded.last_seen_at")
            .bind(plain(&agent.id))
            .bind(plain(&agent.name))
            .bind(json(&agent.machine)?)
            .bind(json(&agent.slots)?)
            .bind(agent.last_seen_at.as_millisecond())
            .execute(&self.writer)
            .await?;
        Ok(())
    }

    pub(super) async fn list_agents(&self) -> Result<Vec<AgentRow>> {
        let rows = sqlx::query("SELECT * FROM agents ORDER BY name, id").fetch_all(&self.reader).await?;
        rows.iter()
            .map(|row| {
                Ok(AgentRow {
                    id: row.try_get("id")?,
                    name: row.try_get("name")?,
                    machine: from_json(row.try_get("machine")?)?,
                    slots: from_json(row.try_get("slots")?)?,
                    last_seen_at: time(row.try_get("last_seen_at")?)?,
                })
            })
            .collect()
    }

    pub(super) async fn count(&self) -> Result<Counts> {
        let rows: Vec<(String, i64)> =
            sqlx::query_as("SELECT state, count(*) FROM jobs GROUP BY state").fetch_all(&self.reader).await?;
        let jobs = rows
            .into_iter()
            .map(|(state, n)| Ok((state.parse().map_err(StoreError::Corrupt)?, uint(n))))
            .collect::<Result<_>>()?;
        Ok(Counts { jobs })
    }
}
