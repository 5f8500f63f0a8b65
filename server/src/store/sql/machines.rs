//! Measurements of machines, one row per minute.

use super::{DbRow, SqlStore};
use crate::store::{MinuteRow, Result, values::strip_nul};
use sqlx::Row;

/// Maximum number of rows that a statement of a purge removes, so that other writers hardly wait.
const PURGE_ROWS: i64 = 2000;

impl SqlStore {
    pub async fn add_machine_minutes(&self, minutes: &[MinuteRow]) -> Result<()> {
        let mut db = self.begin().await?;
        for row in minutes {
            // If the server was restarted in this minute, the means since the restart replace the means before the restart.
            sqlx::query(
                "INSERT INTO machine_minutes (agent_id, minute, data) VALUES ($1, $2, $3) \
                 ON CONFLICT (agent_id, minute) DO UPDATE SET data = excluded.data",
            )
            .bind(strip_nul(&row.agent_id))
            .bind(row.minute)
            .bind(&row.data)
            .execute(&mut *db)
            .await?;
        }
        Ok(db.commit().await?)
    }

    pub async fn machine_minutes(&self, agent: &str, from: i64) -> Result<Vec<MinuteRow>> {
        let text =
            "SELECT minute, data FROM machine_minutes WHERE agent_id = $1 AND minute >= $2 ORDER BY minute";
        let minute = |row: &DbRow| {
            Ok(MinuteRow {
                agent_id: agent.to_owned(),
                minute: row.try_get("minute")?,
                data: row.try_get("data")?,
            })
        };
        self.list(sqlx::query(text).bind(strip_nul(agent)).bind(from), minute).await
    }

    pub async fn purge_machine_minutes(&self, before: i64) -> Result<()> {
        let query = "DELETE FROM machine_minutes WHERE (agent_id, minute) IN \
                     (SELECT agent_id, minute FROM machine_minutes WHERE minute < $1 ORDER BY minute LIMIT $2)";
        while self.execute(sqlx::query(query).bind(before).bind(PURGE_ROWS)).await? > 0 {}
        Ok(())
    }
}
