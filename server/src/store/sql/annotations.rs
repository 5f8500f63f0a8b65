//! Annotations of jobs by users: notes, tags and priorities.

use super::SqlStore;
use crate::store::{
    Annotation, Result, StoreError,
    quarantine::readable,
    values::{from_json, json, plain},
};
use lockstep_protocol::job::JobId;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

impl SqlStore {
    pub(super) async fn read_annotations(&self) -> Result<BTreeMap<JobId, Annotation>> {
        let rows: Vec<(String, String, String)> =
            sqlx::query_as("SELECT job_id, note, tags FROM annotations").fetch_all(&self.reader).await?;
        let read = |(id, note, tags): (String, String, String)| {
            let flawed = |what: &str| StoreError::Corrupt(format!("{what} of the notes of job {id:?}"));
            let tags = from_json(&tags).map_err(|_| flawed("tags"))?;
            Ok((id.parse().map_err(|_| flawed("the id"))?, Annotation { note, tags }))
        };
        Ok(readable(rows.into_iter().map(read)).into_iter().collect())
    }

    pub(super) async fn write_annotation(
        &self,
        job: &JobId,
        note: Option<&str>,
        tags: Option<&[String]>,
    ) -> Result<Annotation> {
        // One statement: a note and tags that come at once are both kept.
        let (note, tags): (String, String) = sqlx::query_as(
            "INSERT INTO annotations (job_id, note, tags) VALUES ($1, COALESCE($2, ''), COALESCE($3, '[]')) \
             ON CONFLICT (job_id) DO UPDATE SET \
             note = COALESCE($2, annotations.note), tags = COALESCE($3, annotations.tags) \
             RETURNING note, tags",
        )
        .bind(job.as_str())
        .bind(note.map(plain))
        .bind(tags.map(|tags| json(&tags)).transpose()?)
        .fetch_one(&self.writer)
        .await?;
        Ok(Annotation { note, tags: from_json(&tags)? })
    }

    pub(super) async fn write_priority(&self, job: &JobId, priority: i32) -> Result<()> {
        let mut db = self.begin().await?;
        let spec: Option<String> =
            sqlx::query_scalar("SELECT spec FROM jobs WHERE id = $1 AND deleted_at IS NULL")
                .bind(job.as_str())
                .fetch_optional(&mut *db)
                .await?;
        let stored = spec.ok_or(StoreError::NotFound("job"))?;
        // Whatever else is in it, perhaps of another version, stays as it is.
        let spec = match from_json::<Map<String, Value>>(&stored) {
            Ok(mut spec) => {
                spec.insert("priority".into(), priority.into());
                json(&spec)?
            }
            Err(_) => stored,
        };
        sqlx::query("UPDATE jobs SET priority = $1, spec = $2 WHERE id = $3")
            .bind(i64::from(priority))
            .bind(spec)
            .bind(job.as_str())
            .execute(&mut *db)
            .await?;
        Ok(db.commit().await?)
    }
}
