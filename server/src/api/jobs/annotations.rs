//! Annotations of jobs by users: notes, tags, priorities and projects; and how much disk space deleting a job frees.

use crate::{
    api::{
        jobs, large,
        list::{Fields, MAX_LIMIT, Pages},
    },
    auth::access::Caller,
    http::{
        error::{Error, Problem, Result},
        extract::{Body, Path, Query, count, job_id},
    },
    scheduler::Scheduler,
    store::{Annotation, Store},
};
use axum::{Extension, Json, extract::State, response::Response};
use lockstep_protocol::{labels, spec::SpecError};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;
use utoipa::{IntoParams, ToSchema};

/// Notes and tags of jobs that have any, by job; a job itself has its own, too.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Annotations {
    /// In the order of their ids.
    #[schema(value_type = Object)]
    jobs: BTreeMap<String, Value>,
    /// Give it as `cursor` for the next page; null on the last.
    next_cursor: Option<String>,
    /// With `count=true`: jobs on all pages together.
    #[serde(skip_serializing_if = "Option::is_none")]
    total: Option<u64>,
}

/// Which of them.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct AnnotationsQuery {
    /// At most so many jobs: 1 to 1000; 1000 when absent. A page also ends once it has 4 MiB; it then has a `next_cursor`.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
    /// Only these of `notes` and `tags`, with commas between.
    #[param(min_length = 1)]
    fields: Option<String>,
    /// Also how many jobs there are on all pages together, as `total`.
    count: Option<bool>,
}

const FIELDS: &[&str] = &["notes", "tags"];
/// The only order, for cursors.
const PAGES: Pages = Pages::new("annotations", "id");

/// What is to change; what is absent stays.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Change {
    /// At most 20 000 bytes.
    notes: Option<String>,
    /// At most 20, of 40 characters each.
    tags: Option<Vec<String>>,
    /// -1000 to 1000; of use while the job waits.
    priority: Option<i32>,
    /// The project that it belongs to from now on.
    project: Option<String>,
}

/// Notes and tags
#[utoipa::path(get, path = "/annotations", tag = "jobs", params(AnnotationsQuery),
    responses((status = 200, body = Annotations), (status = 400, body = Problem)))]
pub(crate) async fn list(
    State(store): State<Arc<dyn Store>>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<AnnotationsQuery>,
) -> Result<Response> {
    let limit = count("limit", query.limit, MAX_LIMIT, MAX_LIMIT)?;
    let fields = Fields::parse(query.fields.as_deref(), FIELDS)?;
    let behind: Option<String> = PAGES.read(query.cursor.as_deref())?;
    let seen_by = caller.sees_as();
    let _turn = large::turn(limit).await?;
    let page = store.annotations(seen_by.as_deref(), &behind.unwrap_or_default(), limit).await?;
    let jobs = page.jobs.into_iter().map(|(id, annotation)| {
        let annotation = match &fields {
            Some(fields) => fields.of(&annotation),
            None => serde_json::to_value(&annotation),
        };
        Ok((id.to_string(), annotation.map_err(|error| Error::Internal(format!("an annotation: {error}")))?))
    });
    let jobs = jobs.collect::<Result<_>>()?;
    let total = match query.count {
        Some(true) => Some(store.count_annotations(seen_by.as_deref()).await?),
        _ => None,
    };
    let next_cursor = page.next.map(|id| PAGES.cursor(&id)).transpose()?;
    large::json(Annotations { jobs, next_cursor, total }).await
}

/// Change a job's notes, tags, priority or project
#[utoipa::path(patch, path = "/jobs/{id}", tag = "jobs", params(("id" = String, Path)), request_body = Change,
    responses((status = 200, body = Annotation), (status = 404, body = Problem), (status = 422, body = Problem)))]
pub(crate) async fn change(
    State(scheduler): State<Arc<Scheduler>>,
    Path(id): Path<String>,
    Body(change, _): Body<Change>,
) -> Result<Json<Annotation>> {
    let job = jobs::find(&scheduler, &id).await?;
    let mut errors = Vec::new();
    let mut mistake = |pointer: &str, detail: String| {
        errors.push(SpecError { pointer: pointer.into(), detail });
    };
    if let Some(detail) = change.notes.as_deref().and_then(labels::notes_mistake) {
        mistake("/notes", detail);
    }
    let tags = change.tags.as_deref().map(labels::tidy_tags);
    if let Some(detail) = tags.as_deref().and_then(labels::tags_mistake) {
        mistake("/tags", detail);
    }
    if let Some(detail) = change.project.as_deref().and_then(labels::project_mistake) {
        mistake("/project", detail);
    }
    if change.priority.is_some_and(|p| !(-1000..=1000).contains(&p)) {
        mistake("/priority", "must be from -1000 to 1000".into());
    }
    if !errors.is_empty() {
        return Err(Error::Invalid(errors));
    }
    let id = job_id(&id)?;
    let annotation = if change.notes.is_some() || tags.is_some() {
        scheduler.store.annotate(&id, change.notes.as_deref(), tags.as_deref()).await?
    } else {
        Annotation { notes: job.notes.clone().unwrap_or_default(), tags: job.tags.clone() }
    };
    if let Some(priority) = change.priority.filter(|p| *p != job.spec.priority) {
        scheduler.store.set_priority(&id, priority).await?;
        scheduler.waiting.note(&job);
        scheduler.agents.leases.poke();
    }
    if let Some(project) = change.project.filter(|project| *project != job.project) {
        scheduler.store.set_project(&id, &project).await?;
        scheduler.waiting.note(&job);
    }
    // Pages that are open show it, too.
    scheduler.events.hub.labelled(jobs::find(&scheduler, id.as_str())).await?;
    Ok(Json(annotation))
}

/// How much a job takes on disk.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Size {
    /// Its folder: checkpoints, logs, evaluations. What the database holds comes on top.
    size_bytes: u64,
}

/// What deleting a job frees
#[utoipa::path(get, path = "/jobs/{id}/size", tag = "jobs", params(("id" = String, Path)),
    responses((status = 200, body = Size), (status = 404, body = Problem)))]
pub(crate) async fn size(
    State(scheduler): State<Arc<Scheduler>>,
    Path(id): Path<String>,
) -> Result<Json<Size>> {
    let job = jobs::find(&scheduler, &id).await?;
    let folder = scheduler.config.job_dir(&job.id);
    let size = tokio::task::spawn_blocking(move || folder_bytes(&folder)).await;
    Ok(Json(Size { size_bytes: size.ok().flatten().unwrap_or(0) }))
}

/// What deleting a folder frees; `None` when it cannot be read.
pub(crate) fn folder_bytes(folder: &std::path::Path) -> Option<u64> {
    let mut total = 0;
    for entry in std::fs::read_dir(folder).ok()? {
        let entry = entry.ok()?;
        let kind = entry.file_type().ok()?;
        total += if kind.is_dir() {
            folder_bytes(&entry.path()).unwrap_or(0)
        } else {
            entry.metadata().map_or(0, |m| m.len())
        };
    }
    Some(total)
}
