//! Copies of checkpoints: on agents' disks, in object stores, and damaged copies on the server's disk.

use super::{Connection, DbRow, SqlStore};
use crate::store::{
    Copies, CopyState, Holder, ObjectStoreMarker, Place, Result, StoredCheckpoint,
    unreadable::json_or_default,
};
use lockstep_protocol::job::JobId;
use sqlx::Row;
use std::collections::{HashMap, HashSet};

/// Prefix of an object store's marker ([`ObjectStoreMarker`]) in a database that was restored from a backup.
pub(super) const RESTORED_PREFIX: &str = "restored ";

/// Prefix of an agent's id in the column `location`.
const AGENT_PREFIX: &str = "agent:";

/// Records that an agent has written a complete checkpoint.
pub(super) async fn add_agent_copy(db: &mut Connection, checkpoint: &str, agent_id: &str) -> Result<()> {
    sqlx::query(
        "INSERT INTO checkpoint_copies (checkpoint_id, location, state) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING",
    )
    .bind(checkpoint)
    .bind(format!("{AGENT_PREFIX}{agent_id}"))
    .bind(CopyState::Complete.as_str())
    .execute(db)
    .await?;
    Ok(())
}

/// Removes the damage mark of the server's copy of a checkpoint. Also removes the agents' copies, unless the checkpoint's row says that
/// `attempt` has written it. `attempt` is `None` if the checkpoint was removed; then all copies of agents are removed.
pub(super) async fn delete_invalid_copies(
    db: &mut Connection,
    checkpoint: &str,
    attempt: Option<u32>,
) -> Result<()> {
    let text = "DELETE FROM checkpoint_copies WHERE checkpoint_id = $1 AND (location = 'server' OR location LIKE 'agent:%' \
        AND NOT EXISTS (SELECT 1 FROM checkpoints WHERE id = $1 AND attempt = $2))";
    sqlx::query(text).bind(checkpoint).bind(attempt.map(i64::from)).execute(db).await?;
    Ok(())
}

impl SqlStore {
    pub async fn copies(&self, job: &JobId, object_store: &str) -> Result<HashMap<String, Copies>> {
        let text = "SELECT checkpoints.id, checkpoints.attempt, location, checkpoint_copies.state FROM checkpoints \
            JOIN checkpoint_copies ON checkpoint_id = checkpoints.id WHERE job_id = $1";
        let rows = sqlx::query(text).bind(job.as_str()).fetch_all(&self.reader).await?;
        let agents = self.read_agents_with_disks(job).await?;
        let mut found: HashMap<String, Copies> = HashMap::new();
        for row in &rows {
            let copies = found.entry(row.try_get("id")?).or_default();
            let location: &str = row.try_get("location")?;
            if location == Copies::SERVER {
                copies.is_damaged_on_server = true;
            } else if location == object_store {
                // A state that another version wrote counts as no copy.
                copies.object_store = row.try_get::<&str, _>("state")?.parse().ok();
            } else if let Some(agent_id) = location.strip_prefix(AGENT_PREFIX) {
                let attempt: i64 = row.try_get("attempt")?;
                copies.holders.extend(agents.get(&(attempt, agent_id.to_owned())).cloned());
            }
        }
        found.values_mut().for_each(|copies| copies.holders.sort_by_key(|holder| holder.place));
        Ok(found)
    }

    /// The agents with their own disks that ran the attempts in which a job's checkpoints were written, by attempt and agent id. Each of
    /// an attempt's agents may have any checkpoint of the attempt.
    async fn read_agents_with_disks(&self, job: &JobId) -> Result<HashMap<(i64, String), Holder>> {
        let text = "SELECT attempt, places, own_disks FROM attempts WHERE job_id = $1 AND own_disks <> '[]' \
            AND attempt IN (SELECT attempt FROM checkpoints WHERE job_id = $1)";
        let rows = sqlx::query(text).bind(job.as_str()).fetch_all(&self.reader).await?;
        let mut agents = HashMap::new();
        for row in &rows {
            let attempt: i64 = row.try_get("attempt")?;
            let own_disks: HashSet<String> =
                json_or_default(job.as_str(), "own_disks", row.try_get("own_disks")?);
            let places: Vec<Place> = json_or_default(job.as_str(), "places", row.try_get("places")?);
            for (place, Place { agent_id, agent, .. }) in places.into_iter().enumerate() {
                if own_disks.contains(&agent_id) {
                    let key = (attempt, agent_id.clone());
                    agents.entry(key).or_insert(Holder { agent_id, agent, place });
                }
            }
        }
        Ok(agents)
    }

    pub async fn stored_checkpoint(&self, object_store: &str, id: &str) -> Result<Option<StoredCheckpoint>> {
        let query = sqlx::query("SELECT * FROM checkpoint_copies WHERE location = $1 AND checkpoint_id = $2");
        let stored = |row: &DbRow| {
            let is_complete = row.try_get::<&str, _>("state")? == CopyState::Complete.as_str();
            let manifest = row.try_get::<Option<String>, _>("manifest")?.filter(|_| is_complete);
            Ok(StoredCheckpoint {
                id: row.try_get("checkpoint_id")?,
                manifest,
                unfinished_upload: row.try_get("parts")?,
            })
        };
        self.find(query.bind(object_store).bind(id), stored).await
    }

    pub async fn mark_damaged(&self, location: &str, id: &str) -> Result<bool> {
        let text = "INSERT INTO checkpoint_copies (checkpoint_id, location, state) SELECT $1, $2, $3 \
            WHERE EXISTS (SELECT 1 FROM checkpoints WHERE id = $1) ON CONFLICT (checkpoint_id, location) \
            DO UPDATE SET state = excluded.state WHERE checkpoint_copies.state <> excluded.state";
        let query = sqlx::query(text).bind(id).bind(location).bind(CopyState::Damaged.as_str());
        Ok(self.execute(query).await? > 0)
    }

    pub async fn clear_damage_marks(&self, object_store: &str) -> Result<()> {
        let text = "UPDATE checkpoint_copies SET state = CASE WHEN manifest IS NULL THEN 'copying' ELSE 'complete' END \
            WHERE location = $1 AND state = 'damaged'";
        let query = sqlx::query(text).bind(object_store);
        self.execute(query).await.map(drop)
    }

    pub async fn uploaded_checkpoints(&self, object_store: &str, limit: u32) -> Result<Vec<String>> {
        let ids = sqlx::query_scalar(
            "SELECT checkpoint_id FROM checkpoint_copies WHERE location = $1 AND manifest IS NOT NULL LIMIT $2",
        );
        Ok(ids.bind(object_store).bind(i64::from(limit)).fetch_all(&self.reader).await?)
    }

    pub async fn abandoned_checkpoints(
        &self,
        object_store: &str,
        after: &str,
        limit: u32,
    ) -> Result<Vec<String>> {
        let ids = sqlx::query_scalar(
            "SELECT checkpoint_id FROM checkpoint_copies WHERE location = $1 AND checkpoint_id > $2 AND NOT EXISTS (SELECT 1 FROM \
             checkpoints WHERE checkpoints.id = checkpoint_copies.checkpoint_id) ORDER BY checkpoint_id LIMIT $3",
        );
        Ok(ids.bind(object_store).bind(after).bind(i64::from(limit)).fetch_all(&self.reader).await?)
    }

    pub async fn put_stored_checkpoint(&self, object_store: &str, stored: &StoredCheckpoint) -> Result<bool> {
        let query = sqlx::query(
            "INSERT INTO checkpoint_copies (checkpoint_id, location, state, manifest, parts) SELECT $1, $2, $3, $4, $5 \
             WHERE EXISTS (SELECT 1 FROM checkpoints WHERE id = $1) ON CONFLICT (checkpoint_id, location) \
             DO UPDATE SET state = excluded.state, manifest = excluded.manifest, parts = excluded.parts",
        )
        .bind(&stored.id)
        .bind(object_store)
        .bind(stored.state().as_str())
        .bind(&stored.manifest)
        .bind(&stored.unfinished_upload);
        Ok(self.execute(query).await? > 0)
    }

    pub async fn object_store_marker(&self, object_store: &str) -> Result<Option<ObjectStoreMarker>> {
        let found =
            sqlx::query_scalar("SELECT marker FROM artifact_stores WHERE store = $1").bind(object_store);
        let found: Option<String> = found.fetch_optional(&self.reader).await?;
        Ok(found.map(|found| match found.strip_prefix(RESTORED_PREFIX) {
            Some(marker) => ObjectStoreMarker { marker: marker.to_owned(), is_restored: true },
            None => ObjectStoreMarker { marker: found, is_restored: false },
        }))
    }

    pub async fn is_marker_restored(&self, marker: &str) -> Result<Option<bool>> {
        let found = sqlx::query_scalar("SELECT marker FROM artifact_stores WHERE marker IN ($1, $2)");
        let found = found.bind(marker).bind(format!("{RESTORED_PREFIX}{marker}"));
        let found: Option<String> = found.fetch_optional(&self.reader).await?;
        Ok(found.map(|found| found != marker))
    }

    pub async fn replace_restored_marker(&self, restored: &str, own: &str) -> Result<()> {
        let query = sqlx::query("UPDATE artifact_stores SET marker = $2 WHERE marker = $1")
            .bind(format!("{RESTORED_PREFIX}{restored}"))
            .bind(own);
        self.execute(query).await.map(drop)
    }

    pub async fn put_object_store_marker(&self, object_store: &str, marker: &str) -> Result<()> {
        let mut db = self.begin().await?;
        // The store with this marker may have been known under another URL. Its copies move to the new URL.
        for query in [
            "UPDATE checkpoint_copies SET location = $1 WHERE location <> $1 AND location IN (SELECT store FROM artifact_stores \
             WHERE marker = $2) AND NOT EXISTS (SELECT 1 FROM checkpoint_copies other WHERE other.location = $1 AND \
             other.checkpoint_id = checkpoint_copies.checkpoint_id)",
            "DELETE FROM artifact_stores WHERE store = $1 OR marker = $2",
            "INSERT INTO artifact_stores (store, marker) VALUES ($1, $2)",
        ] {
            sqlx::query(query).bind(object_store).bind(marker).execute(&mut *db).await?;
        }
        Ok(db.commit().await?)
    }

    pub async fn forget_copy(&self, location: &str, id: &str) -> Result<()> {
        let text = "DELETE FROM checkpoint_copies WHERE checkpoint_id = $1 AND location = $2";
        let query = sqlx::query(text).bind(id).bind(location);
        self.execute(query).await.map(drop)
    }
}
