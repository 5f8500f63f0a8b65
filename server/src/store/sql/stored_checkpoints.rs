//! What of checkpoints is in object stores.

use super::{DbRow, SqlStore};
use crate::store::{ArtifactMarker, Result, StoredCheckpoint};
use sqlx::Row;

/// Stands before a marker that came with a backup.
pub(super) const RESTORED: &str = "restored ";

fn stored(row: &DbRow) -> Result<StoredCheckpoint> {
    Ok(StoredCheckpoint {
        id: row.try_get("checkpoint_id")?,
        manifest: row.try_get("manifest")?,
        parts: row.try_get("parts")?,
    })
}

impl SqlStore {
    pub(super) async fn list_stored(
        &self,
        store: &str,
        behind: &str,
        limit: u32,
    ) -> Result<Vec<StoredCheckpoint>> {
        let rows = sqlx::query(
            "SELECT * FROM stored_checkpoints WHERE store = $1 AND checkpoint_id > $2 ORDER BY checkpoint_id LIMIT $3",
        )
        .bind(store)
        .bind(behind)
        .bind(i64::from(limit))
        .fetch_all(&self.reader)
        .await?;
        rows.iter().map(stored).collect()
    }

    pub(super) async fn list_abandoned(
        &self,
        store: &str,
        behind: &str,
        limit: u32,
    ) -> Result<Vec<StoredCheckpoint>> {
        let rows = sqlx::query(
            "SELECT * FROM stored_checkpoints WHERE store = $1 AND checkpoint_id > $2 AND NOT EXISTS (SELECT 1 FROM \
             checkpoints WHERE checkpoints.id = stored_checkpoints.checkpoint_id) ORDER BY checkpoint_id LIMIT $3",
        )
        .bind(store)
        .bind(behind)
        .bind(i64::from(limit))
        .fetch_all(&self.reader)
        .await?;
        rows.iter().map(stored).collect()
    }

    pub(super) async fn upsert_stored(&self, store: &str, stored: &StoredCheckpoint) -> Result<bool> {
        let mut db = self.begin().await?;
        let done = sqlx::query(
            "INSERT INTO stored_checkpoints (checkpoint_id, store, manifest, parts) SELECT $1, $2, $3, $4 \
             WHERE EXISTS (SELECT 1 FROM checkpoints WHERE id = $1) ON CONFLICT (checkpoint_id, store) \
             DO UPDATE SET manifest = excluded.manifest, parts = excluded.parts",
        )
        .bind(&stored.id)
        .bind(store)
        .bind(&stored.manifest)
        .bind(&stored.parts)
        .execute(&mut *db)
        .await?;
        db.commit().await?;
        Ok(done.rows_affected() > 0)
    }

    pub(super) async fn read_artifact_marker(&self, store: &str) -> Result<Option<ArtifactMarker>> {
        let found = sqlx::query_scalar("SELECT marker FROM artifact_stores WHERE store = $1").bind(store);
        let found: Option<String> = found.fetch_optional(&self.reader).await?;
        Ok(found.map(|found| match found.strip_prefix(RESTORED) {
            Some(marker) => ArtifactMarker { marker: marker.to_owned(), is_restored: true },
            None => ArtifactMarker { marker: found, is_restored: false },
        }))
    }

    pub(super) async fn find_marker(&self, marker: &str) -> Result<Option<bool>> {
        let found = sqlx::query_scalar("SELECT marker FROM artifact_stores WHERE marker IN ($1, $2)");
        let found = found.bind(marker).bind(format!("{RESTORED}{marker}"));
        let found: Option<String> = found.fetch_optional(&self.reader).await?;
        Ok(found.map(|found| found != marker))
    }

    pub(super) async fn write_own_marker(&self, restored: &str, own: &str) -> Result<()> {
        let mut db = self.begin().await?;
        sqlx::query("UPDATE artifact_stores SET marker = $2 WHERE marker = $1")
            .bind(format!("{RESTORED}{restored}"))
            .bind(own)
            .execute(&mut *db)
            .await?;
        Ok(db.commit().await?)
    }

    pub(super) async fn upsert_artifact_marker(&self, store: &str, marker: &str) -> Result<()> {
        let mut db = self.begin().await?;
        sqlx::query(
            "UPDATE stored_checkpoints SET store = $1 WHERE store <> $1 AND store IN (SELECT store FROM artifact_stores \
             WHERE marker = $2) AND NOT EXISTS (SELECT 1 FROM stored_checkpoints other WHERE other.store = $1 AND \
             other.checkpoint_id = stored_checkpoints.checkpoint_id)",
        )
        .bind(store)
        .bind(marker)
        .execute(&mut *db)
        .await?;
        sqlx::query("DELETE FROM artifact_stores WHERE marker = $1 OR store = $2")
            .bind(marker)
            .bind(store)
            .execute(&mut *db)
            .await?;
        sqlx::query("INSERT INTO artifact_stores (store, marker) VALUES ($1, $2)")
            .bind(store)
            .bind(marker)
            .execute(&mut *db)
            .await?;
        Ok(db.commit().await?)
    }

    pub(super) async fn delete_stored(&self, store: &str, id: &str) -> Result<()> {
        let mut db = self.begin().await?;
        sqlx::query("DELETE FROM stored_checkpoints WHERE checkpoint_id = $1 AND store = $2")
            .bind(id)
            .bind(store)
            .execute(&mut *db)
            .await?;
        Ok(db.commit().await?)
    }
}
