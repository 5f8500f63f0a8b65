//! Annotations of jobs by users: notes, tags, priorities and projects.

use super::{Connection, Db, SqlStore, job_list::push_visibility, pages::bounded, purge};
use crate::store::{
    Annotation, AnnotationPage, Result, StoreError,
    unreadable::readable,
    values::{from_json, json, strip_nul, uint},
};
use lockstep_protocol::job::JobId;
use serde_json::{Map, Value};
use sqlx::QueryBuilder;

/// Adds `FROM` and `WHERE` for annotations of existing jobs that the person or token `seen_by` sees.
fn push_annotated(query: &mut QueryBuilder<Db>, seen_by: Option<&str>) {
    query.push(" FROM annotations JOIN jobs ON jobs.id = annotations.job_id");
    push_visibility(query, seen_by);
}

impl SqlStore {
    pub async fn annotations(
        &self,
        seen_by: Option<&str>,
        after: &str,
        limit: u32,
    ) -> Result<AnnotationPage> {
        let mut query = QueryBuilder::new("SELECT job_id, notes, tags");
        push_annotated(&mut query, seen_by);
        query.push(" AND job_id > ").push_bind(strip_nul(after).into_owned());
        query.push(" ORDER BY job_id LIMIT ").push_bind(i64::from(limit) + 1);
        let rows = query.build_query_as::<(String, String, String)>().fetch(&self.reader);
        let (mut rows, reached_size) = bounded(rows, |(_, notes, tags)| notes.len() + tags.len()).await?;
        let has_more = reached_size || rows.len() > limit as usize;
        rows.truncate(limit as usize);
        let next = rows.last().filter(|_| has_more).map(|(id, ..)| id.clone());
        let read = |(id, notes, tags): (String, String, String)| {
            let corrupt =
                |what: &str| StoreError::Corrupt(format!("annotation of job {id:?}: {what} cannot be read"));
            let tags = from_json(&tags).map_err(|_| corrupt("its tags"))?;
            Ok((id.parse().map_err(|_| corrupt("its job id"))?, Annotation { notes, tags }))
        };
        Ok(AnnotationPage { jobs: readable(rows.into_iter().map(read)).into_iter().collect(), next })
    }

    pub async fn count_annotations(&self, seen_by: Option<&str>) -> Result<u64> {
        let mut query = QueryBuilder::new("SELECT count(*)");
        push_annotated(&mut query, seen_by);
        Ok(uint(query.build_query_scalar().fetch_one(&self.reader).await?))
    }

    pub async fn annotate(
        &self,
        job: &JobId,
        notes: Option<&str>,
        tags: Option<&[String]>,
    ) -> Result<Annotation> {
        // One statement, so that concurrent changes of notes and of tags are both kept.
        let (notes, tags): (String, String) = sqlx::query_as(
            "INSERT INTO annotations (job_id, notes, tags) VALUES ($1, COALESCE($2, ''), COALESCE($3, '[]')) \
             ON CONFLICT (job_id) DO UPDATE SET \
             notes = COALESCE($2, annotations.notes), tags = COALESCE($3, annotations.tags) \
             RETURNING notes, tags",
        )
        .bind(job.as_str())
        .bind(notes.map(strip_nul))
        .bind(tags.map(|tags| json(&tags)).transpose()?)
        .fetch_one(&self.writer)
        .await?;
        Ok(Annotation { notes, tags: from_json(&tags)? })
    }

    pub async fn set_priority(&self, job: &JobId, priority: i32) -> Result<()> {
        let mut db = self.begin().await?;
        let spec = with_key(&mut db, job, "priority", priority.into()).await?;
        let text = "UPDATE jobs SET priority = $1, spec = $2 WHERE id = $3";
        sqlx::query(text).bind(i64::from(priority)).bind(spec).bind(job.as_str()).execute(&mut *db).await?;
        Ok(db.commit().await?)
    }

    pub async fn set_project(&self, job: &JobId, project: &str) -> Result<()> {
        let mut db = self.begin().await?;
        let spec = with_key(&mut db, job, "project", project.into()).await?;
        let text = "UPDATE jobs SET project = $1, spec = $2 WHERE id = $3";
        sqlx::query(text).bind(project).bind(spec).bind(job.as_str()).execute(&mut *db).await?;
        purge::delete_panels_of_lost_projects(&mut db).await?;
        Ok(db.commit().await?)
    }
}

/// The stored specification of a job with a new value of a key. All other keys, also unknown keys of other versions, are unchanged. An
/// unreadable specification is returned unchanged.
async fn with_key(db: &mut Connection, job: &JobId, key: &str, value: Value) -> Result<String> {
    let text = "SELECT spec FROM jobs WHERE id = $1 AND deleted_at IS NULL";
    let spec: Option<String> = sqlx::query_scalar(text).bind(job.as_str()).fetch_optional(db).await?;
    let stored = spec.ok_or(StoreError::NotFound("job"))?;
    match from_json::<Map<String, Value>>(&stored) {
        Ok(mut spec) => {
            spec.insert(key.into(), value);
            json(&spec)
        }
        Err(_) => Ok(stored),
    }
}
