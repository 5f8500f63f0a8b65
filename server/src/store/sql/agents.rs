//! Agents, and which of them are drained.

use super::{DbRow, SqlStore};
use crate::store::{
    AgentRow, Result, StoreError,
    values::{from_json, json, strip_nul, time},
};
use sqlx::Row;

fn agent(row: &DbRow) -> Result<AgentRow> {
    let id: String = row.try_get("id")?;
    let corrupt = |error: StoreError| StoreError::Corrupt(format!("agent {id:?}: {error}"));
    Ok(AgentRow {
        name: row.try_get("name")?,
        machine: from_json(row.try_get("machine")?).map_err(corrupt)?,
        slots: from_json(row.try_get("slots")?).map_err(corrupt)?,
        last_seen_at: time(row.try_get("last_seen_at")?)?,
        id: id.clone(),
    })
}

impl SqlStore {
    pub async fn put_agents(&self, agents: &[AgentRow]) -> Result<()> {
        let mut db = self.begin().await?;
        for agent in agents {
            sqlx::query("INSERT INTO agents VALUES ($1, $2, $3, $4, $5) ON CONFLICT (id) DO UPDATE SET name = excluded.name, \
             machine = excluded.machine, slots = excluded.slots, last_seen_at = excluded.last_seen_at")
            .bind(strip_nul(&agent.id))
            .bind(strip_nul(&agent.name))
            .bind(json(&agent.machine)?)
            .bind(json(&agent.slots)?)
            .bind(agent.last_seen_at.as_millisecond())
            .execute(&mut *db)
            .await?;
        }
        Ok(db.commit().await?)
    }

    pub async fn remove_agent(&self, id: &str) -> Result<()> {
        let mut db = self.begin().await?;
        for query in [
            "DELETE FROM agents WHERE id = $1",
            "DELETE FROM draining WHERE agent_id = $1",
            "DELETE FROM machine_minutes WHERE agent_id = $1",
        ] {
            sqlx::query(query).bind(strip_nul(id)).execute(&mut *db).await?;
        }
        Ok(db.commit().await?)
    }

    pub async fn agents_by_name_or_id(&self, name: &str, id: &str) -> Result<Vec<AgentRow>> {
        let query = sqlx::query("SELECT * FROM agents WHERE name = $1 OR id = $2 ORDER BY name, id");
        self.list(query.bind(strip_nul(name)).bind(strip_nul(id)), agent).await
    }

    pub async fn agents(&self) -> Result<Vec<AgentRow>> {
        self.list(sqlx::query("SELECT * FROM agents ORDER BY name, id"), agent).await
    }

    pub async fn draining_agents(&self) -> Result<Vec<String>> {
        Ok(sqlx::query_scalar("SELECT agent_id FROM draining ORDER BY agent_id")
            .fetch_all(&self.reader)
            .await?)
    }

    pub async fn set_draining(&self, agent: &str, draining: bool) -> Result<()> {
        let query = if draining {
            "INSERT INTO draining (agent_id) VALUES ($1) ON CONFLICT (agent_id) DO NOTHING"
        } else {
            "DELETE FROM draining WHERE agent_id = $1"
        };
        self.execute(sqlx::query(query).bind(strip_nul(agent))).await.map(drop)
    }
}
