//! Annotations of jobs by users: notes, tags, priorities and projects; and how much disk space deleting a job frees.

use crate::api::prelude::*;
use crate::{
    api::{
        jobs, large,
        list::{Fields, MAX_LIMIT, Pages},
    },
    http::{
        authorize::AuditSubject,
        extract::{Body, check_count},
    },
    scheduler::Scheduler,
    store::{Annotation, Store},
};
use lockstep_protocol::{labels, spec::SpecError};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Notes and tags of all jobs that have notes or tags.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Annotations {
    /// Notes and tags by job id, in the order of ids.
    #[schema(value_type = Object)]
    jobs: BTreeMap<String, Value>,
    /// Value of `cursor` for the next page; null on the last page.
    next_cursor: Option<String>,
    /// Number of jobs on all pages; absent without `count=true`.
    #[serde(skip_serializing_if = "Option::is_none")]
    total: Option<u64>,
}

/// Parameters of `GET /annotations`.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct AnnotationsQuery {
    /// Maximum number of jobs on a page, 1 to 1000 (default 1000). A page also ends after 4 MiB, and then has a `next_cursor`.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
    /// Comma-separated names of the fields to return of each job: `notes`, `tags`.
    fields: Option<String>,
    /// Whether to return the number of jobs on all pages as `total`.
    count: Option<bool>,
}

/// Pages of annotations for cursors. The only order is by id.
const PAGES: Pages = Pages::new("annotations", "id");

/// Changes to a job. Absent fields stay unchanged.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Change {
    /// The job's notes, at most 20 000 bytes.
    notes: Option<String>,
    /// The job's tags: at most 20, each of at most 40 characters.
    tags: Option<Vec<String>>,
    /// The job's priority, -1000 to 1000. It has an effect only while the job waits.
    priority: Option<i32>,
    /// The project to move the job to.
    project: Option<String>,
}

/// List notes and tags
#[utoipa::path(get, path = "/annotations", tag = "jobs", params(AnnotationsQuery), responses((status = 200, body = Annotations)))]
pub(crate) async fn list(
    State(store): State<Arc<dyn Store>>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<AnnotationsQuery>,
) -> Result<Response> {
    let limit = check_count("limit", query.limit, MAX_LIMIT, MAX_LIMIT)?;
    let fields = Fields::parse::<Annotation>(query.fields.as_deref())?;
    let after: Option<String> = PAGES.decode(query.cursor.as_deref())?;
    let seen_by = caller.viewer_name();
    let _permit = large::acquire_permit(limit).await?;
    let page = store.annotations(seen_by.as_deref(), &after.unwrap_or_default(), limit).await?;
    let jobs = page.jobs.into_iter().map(|(id, annotation)| {
        let annotation = match &fields {
            Some(fields) => fields.select(&annotation),
            None => serde_json::to_value(&annotation),
        };
        Ok((id.to_string(), annotation?))
    });
    let jobs = jobs.collect::<Result<_>>()?;
    let total = match query.count {
        Some(true) => Some(store.count_annotations(seen_by.as_deref()).await?),
        _ => None,
    };
    let next_cursor = page.next.map(|id| PAGES.encode(&id)).transpose()?;
    large::json_response(Annotations { jobs, next_cursor, total }).await
}

/// Change a job's notes, tags, priority or project
#[utoipa::path(patch, path = "/jobs/{id}", tag = "jobs", request_body = Change, responses((status = 200, body = Annotation)))]
pub(crate) async fn change(
    State(scheduler): State<Arc<Scheduler>>,
    Path(id): Path<String>,
    Body(change, _): Body<Change>,
) -> Result<(Extension<AuditSubject>, Json<Annotation>)> {
    let job = jobs::find(&scheduler, &id).await?;
    let mut errors = Vec::new();
    let mut mistake =
        |pointer: &str, detail: String| errors.push(SpecError { pointer: pointer.into(), detail });
    if let Some(detail) = change.notes.as_deref().and_then(labels::notes_mistake) {
        mistake("/notes", detail);
    }
    let tags = change.tags.as_deref().map(labels::normalise_tags);
    if let Some(detail) = tags.as_deref().and_then(labels::tags_mistake) {
        mistake("/tags", detail);
    }
    if let Some(detail) = change.project.as_deref().and_then(labels::project_mistake) {
        mistake("/project", detail);
    }
    if change.priority.is_some_and(|p| !(-1000..=1000).contains(&p)) {
        mistake("/priority", "must be from -1000 to 1000".into());
    }
    check_mistakes(errors)?;
    let annotation = if change.notes.is_some() || tags.is_some() {
        scheduler.store.annotate(&job.id, change.notes.as_deref(), tags.as_deref()).await?
    } else {
        Annotation { notes: job.notes.clone().unwrap_or_default(), tags: job.tags.clone() }
    };
    if let Some(priority) = change.priority.filter(|p| *p != job.spec.priority) {
        scheduler.store.set_priority(&job.id, priority).await?;
        scheduler.waiting.note_change(&job);
        scheduler.agents.leases.wake_dispatch();
    }
    if let Some(project) = change.project.as_ref().filter(|project| **project != job.project) {
        scheduler.store.set_project(&job.id, project).await?;
        scheduler.waiting.note_change(&job);
    }
    // Updates open pages.
    scheduler.events.hub.send_labels(jobs::find(&scheduler, &id)).await?;
    let before = json!({
        "notes": job.notes.unwrap_or_default(),
        "tags": job.tags,
        "priority": job.spec.priority,
        "project": job.project,
    });
    let after = json!({
        "notes": annotation.notes,
        "tags": annotation.tags,
        "priority": change.priority.unwrap_or(job.spec.priority),
        "project": change.project.unwrap_or(job.project),
    });
    Ok((Extension(AuditSubject::of_changes(&before, &after)), Json(annotation)))
}

/// Disk space of a job.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Size {
    /// Size of the job's folder, which contains checkpoints, logs and evaluations. The job's rows in the database are not included.
    size_bytes: u64,
}

/// Show the disk space that deleting a job frees
#[utoipa::path(get, path = "/jobs/{id}/size", tag = "jobs", responses((status = 200, body = Size)))]
pub(crate) async fn size(
    State(scheduler): State<Arc<Scheduler>>,
    Path(id): Path<String>,
) -> Result<Json<Size>> {
    let job = jobs::find(&scheduler, &id).await?;
    let folder = scheduler.config.job_dir(&job.id);
    let size = tokio::task::spawn_blocking(move || folder_bytes(&folder)).await;
    Ok(Json(Size { size_bytes: size.ok().flatten().unwrap_or(0) }))
}

/// Total size of the files in a folder, in bytes; `None` if the folder cannot be read.
fn folder_bytes(folder: &std::path::Path) -> Option<u64> {
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
