//! Registered datasets.

use super::{Connection, DbRow, SqlStore, flag};
use crate::store::{
    Result, StoreError,
    unreadable::read_spec,
    values::{from_json, json, strip_nul, time},
};
use lockstep_protocol::dataset::Dataset;
use sqlx::Row;

fn dataset(row: &DbRow) -> Result<Dataset> {
    let name: String = row.try_get("name")?;
    let corrupt = |error| StoreError::Corrupt(format!("dataset {name:?}: {error}"));
    Ok(Dataset {
        path: row.try_get("path")?,
        info: from_json(row.try_get("info")?).map_err(corrupt)?,
        name: name.clone(),
        added_at: time(row.try_get("added_at")?)?,
        owner: row.try_get("owner")?,
        private: flag(row, "private")?,
    })
}

/// Checks that a dataset is registered. The caller stores a job that needs the dataset in the same transaction.
///
/// # Errors
/// [`StoreError::DatasetRemoved`].
pub(super) async fn require_dataset(db: &mut Connection, name: &str) -> Result<()> {
    let text = "SELECT name FROM datasets WHERE name = $1";
    let found: Option<String> = sqlx::query_scalar(text).bind(strip_nul(name)).fetch_optional(db).await?;
    if found.is_none() { Err(StoreError::DatasetRemoved(name.to_owned())) } else { Ok(()) }
}

impl SqlStore {
    pub async fn datasets(&self) -> Result<Vec<Dataset>> {
        self.list(sqlx::query("SELECT * FROM datasets ORDER BY name"), dataset).await
    }

    pub async fn dataset(&self, name: &str) -> Result<Option<Dataset>> {
        let query = sqlx::query("SELECT * FROM datasets WHERE name = $1").bind(strip_nul(name));
        self.find(query, dataset).await
    }

    pub async fn add_dataset(&self, dataset: &Dataset) -> Result<()> {
        let query = sqlx::query(
            "INSERT INTO datasets (name, path, info, added_at, owner, private) VALUES ($1, $2, $3, $4, $5, $6) \
             ON CONFLICT (name) DO NOTHING",
        )
            .bind(strip_nul(&dataset.name))
            .bind(strip_nul(&dataset.path))
            .bind(json(&dataset.info)?)
            .bind(dataset.added_at.as_millisecond())
            .bind(dataset.owner.as_deref().map(strip_nul))
            .bind(i64::from(dataset.private));
        self.execute_or(query, StoreError::NameTaken(dataset.name.clone())).await
    }

    pub async fn update_dataset(&self, dataset: &Dataset) -> Result<()> {
        let query = sqlx::query("UPDATE datasets SET info = $1, path = $4 WHERE name = $2 AND added_at = $3")
            .bind(json(&dataset.info)?)
            .bind(strip_nul(&dataset.name))
            .bind(dataset.added_at.as_millisecond())
            .bind(strip_nul(&dataset.path));
        self.execute_or(query, StoreError::NotFound("dataset")).await
    }

    pub async fn remove_dataset(&self, name: &str) -> Result<()> {
        // One transaction checks the jobs and deletes the row. A job that is submitted meanwhile is stored before this transaction, so the
        // check finds it, or is refused after it, because the dataset no longer exists.
        let mut db = self.begin().await?;
        let text = "SELECT spec FROM jobs WHERE state NOT IN ('succeeded', 'failed', 'cancelled') AND deleted_at IS NULL";
        let specs: Vec<String> = sqlx::query_scalar(text).fetch_all(&mut *db).await?;
        if specs.iter().any(|spec| read_spec(spec).0.data.dataset == name) {
            return Err(StoreError::DatasetInUse(name.to_owned()));
        }
        let text = "DELETE FROM datasets WHERE name = $1";
        let done = sqlx::query(text).bind(strip_nul(name)).execute(&mut *db).await?;
        db.commit().await?;
        if done.rows_affected() == 0 { Err(StoreError::NotFound("dataset")) } else { Ok(()) }
    }
}
