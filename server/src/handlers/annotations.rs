//! Annotations of jobs by users: notes, tags, priorities and projects; and how much disk space deleting a job frees.

use super::{
    extract::{Body, Path, job_id},
    jobs, pages,
};
use crate::{
    access::Caller,
    app::App,
    error::{Error, Problem, Result},
    store::Annotation,
};
use axum::{Extension, Json, extract::State};
use lockstep_protocol::{labels, spec::SpecError};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// Notes and tags of all jobs that have any, by job; a job itself has its own, too.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Annotations {
    #[schema(value_type = Object)]
    jobs: BTreeMap<String, Annotation>,
}

/// What is to change; what is absent stays.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Change {
    /// At most 20 000 bytes. `note` is its name of the last version.
    #[serde(alias = "note")]
    notes: Option<String>,
    /// At most 20, of 40 characters each.
    tags: Option<Vec<String>>,
    /// -1000 to 1000; of use while the job waits.
    priority: Option<i32>,
    /// The project that it belongs to from now on.
    project: Option<String>,
}

/// Notes and tags
#[utoipa::path(get, path = "/annotations", tag = "jobs", responses((status = 200, body = Annotations)))]
pub(crate) async fn list(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<Annotations>> {
    let mut all = app.store.annotations().await?;
    for hidden in jobs::hidden_from(&app, &caller).await? {
        all.remove(&hidden);
    }
    Ok(Json(Annotations { jobs: all.into_iter().map(|(id, a)| (id.to_string(), a)).collect() }))
}

/// Change a job's notes, tags, priority or project
#[utoipa::path(patch, path = "/jobs/{id}", tag = "jobs", params(("id" = String, Path)), request_body = Change,
    responses((status = 200, body = Annotation), (status = 404, body = Problem), (status = 422, body = Problem)))]
pub(crate) async fn change(
    State(app): State<App>,
    Path(id): Path<String>,
    Body(change, _): Body<Change>,
) -> Result<Json<Annotation>> {
    let job = jobs::find(&app, &id).await?;
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
        app.store.annotate(&id, change.notes.as_deref(), tags.as_deref()).await?
    } else {
        Annotation { notes: job.notes.clone().unwrap_or_default(), tags: job.tags.clone() }
    };
    if let Some(priority) = change.priority.filter(|p| *p != job.spec.priority) {
        app.store.set_priority(&id, priority).await?;
        app.leases.poke();
    }
    if let Some(project) = change.project.filter(|project| *project != job.project) {
        app.store.set_project(&id, &project).await?;
    }
    // Pages that are open show it, too.
    app.hub.labelled(jobs::find(&app, id.as_str())).await?;
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
pub(crate) async fn size(State(app): State<App>, Path(id): Path<String>) -> Result<Json<Size>> {
    let job = jobs::find(&app, &id).await?;
    let folder = app.job_dir(&job.id);
    let size = tokio::task::spawn_blocking(move || pages::folder_bytes(&folder)).await;
    Ok(Json(Size { size_bytes: size.ok().flatten().unwrap_or(0) }))
}
