//! Panels: user-defined charts on the pages of a job or of all jobs of a project. The last write wins.

use crate::api::prelude::*;
use crate::{
    api::jobs,
    http::extract::Body,
    scheduler::Scheduler,
    store::{PanelsOf, Store},
};
use lockstep_protocol::{
    JobId, labels,
    panels::{self, JobPanels, Origin, Panel},
};

/// The panels of a project.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ProjectPanels {
    panels: Vec<Panel>,
}

/// Panels that replace the existing panels.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewPanels {
    /// The new panels, at most 24.
    panels: Vec<Panel>,
}

impl NewPanels {
    /// Checks the panels. With `allows_any_metric`, metrics may have any name, as in runs from elsewhere.
    fn check(self, allows_any_metric: bool) -> Result<Vec<Panel>> {
        check_mistakes(panels::mistakes(&self.panels, allows_any_metric))?;
        Ok(self.panels)
    }
}

/// Returns the panels of a job's page: the job's own panels, or else the project's.
pub(crate) async fn job_panels(store: &dyn Store, job: &JobId, project: &str) -> Result<JobPanels> {
    if let Some(panels) = store.panels(PanelsOf::Job(job)).await? {
        return Ok(JobPanels { from: Origin::Job, panels });
    }
    Ok(match store.panels(PanelsOf::Project(project)).await? {
        Some(panels) => JobPanels { from: Origin::Project, panels },
        None => JobPanels { from: Origin::None, panels: Vec::new() },
    })
}

/// Show a job's panels
///
/// Returns the job's own panels, or else the project's.
#[utoipa::path(get, path = "/jobs/{id}/panels", tag = "jobs", responses((status = 200, body = JobPanels)))]
pub(crate) async fn show(
    State(scheduler): State<Arc<Scheduler>>,
    Path(id): Path<String>,
) -> Result<Json<JobPanels>> {
    let job = jobs::find(&scheduler, &id).await?;
    Ok(Json(job_panels(&*scheduler.store, &job.id, &job.project).await?))
}

/// Set a job's own panels
///
/// Replaces the job's own panels; the last write wins. Everybody who may change the job may set its panels.
#[utoipa::path(put, path = "/jobs/{id}/panels", tag = "jobs", request_body = NewPanels, responses((status = 200, body = JobPanels)))]
pub(crate) async fn put(
    State(scheduler): State<Arc<Scheduler>>,
    Path(id): Path<String>,
    Body(new, _): Body<NewPanels>,
) -> Result<Json<JobPanels>> {
    let job = jobs::find(&scheduler, &id).await?;
    let panels = new.check(job.external.is_some())?;
    scheduler.store.put_panels(PanelsOf::Job(&job.id), Some(&panels)).await?;
    Ok(Json(JobPanels { from: Origin::Job, panels }))
}

/// Remove a job's own panels
///
/// The job then shows the panels of its project.
#[utoipa::path(delete, path = "/jobs/{id}/panels", tag = "jobs", responses((status = 204)))]
pub(crate) async fn delete(
    State(scheduler): State<Arc<Scheduler>>,
    Path(id): Path<String>,
) -> Result<StatusCode> {
    let job = jobs::find(&scheduler, &id).await?;
    scheduler.store.put_panels(PanelsOf::Job(&job.id), None).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Checks that the caller sees a job of a project, and returns the project's name. Other callers do not learn whether the project exists.
async fn check_visible_project(store: &dyn Store, caller: &Caller, name: String) -> Result<String> {
    if let Some(mistake) = labels::project_mistake(&name) {
        return Err(Error::NotFound(format!("no project has this name, which {mistake}")));
    }
    let projects = store.projects(caller.viewer_name().as_deref()).await?;
    if projects.iter().any(|project| project.name == name) {
        Ok(name)
    } else {
        Err(Error::NotFound("no job that you may see is in a project with this name".into()))
    }
}

/// Show a project's panels
///
/// Jobs of the project without their own panels show these panels.
#[utoipa::path(get, path = "/projects/{name}/panels", tag = "jobs", responses((status = 200, body = ProjectPanels)))]
pub(crate) async fn show_project(
    State(store): State<Arc<dyn Store>>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
) -> Result<Json<ProjectPanels>> {
    let project = check_visible_project(&*store, &caller, name).await?;
    let panels = store.panels(PanelsOf::Project(&project)).await?.unwrap_or_default();
    Ok(Json(ProjectPanels { panels }))
}

/// Set a project's panels
///
/// Replaces the project's panels; the last write wins. Members and admins who see a job of the project may set its panels. An empty list
/// removes the panels, and so does the deletion of the project's last job.
#[utoipa::path(put, path = "/projects/{name}/panels", tag = "jobs", request_body = NewPanels,
    responses((status = 200, body = ProjectPanels)))]
pub(crate) async fn put_project(
    State(store): State<Arc<dyn Store>>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    Body(new, _): Body<NewPanels>,
) -> Result<Json<ProjectPanels>> {
    let project = check_visible_project(&*store, &caller, name).await?;
    // Jobs of a project may be runs from elsewhere, whose metrics have any names.
    let allows_any_metric = true;
    let panels = new.check(allows_any_metric)?;
    let stored = Some(&panels[..]).filter(|panels| !panels.is_empty());
    store.put_panels(PanelsOf::Project(&project), stored).await?;
    Ok(Json(ProjectPanels { panels }))
}
