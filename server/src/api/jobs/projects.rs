//! Projects: names by which jobs are grouped.

use crate::api::prelude::*;
use crate::{
    api::list::{List, ListParams, list_of},
    store::{Project, Store},
};

list_of! {
    /// A page of projects.
    ProjectList
    /// Ordered by name, unless `sort` is given.
    projects: Project
}

const LIST: List<Project> = List {
    name: "projects",
    sorts: &[
        ("name", |project| project.name.as_str().into()),
        ("jobs", |project| Some(project.jobs as f64).into()),
        ("newest", |project| project.newest_at.into()),
    ],
    default_sort: "name",
    id: |project| &project.name,
    created: None,
};

/// List projects
///
/// Each project has the number of its jobs in each state, without private jobs of other people. `sort`: `name`, `jobs`, `newest`. Projects
/// have no time of creation, so `created_after` and `created_before` are refused.
#[utoipa::path(get, path = "/projects", tag = "jobs", params(ListParams), responses((status = 200, body = ProjectList)))]
pub(crate) async fn list(
    State(store): State<Arc<dyn Store>>,
    Extension(caller): Extension<Caller>,
    Query(params): Query<ListParams>,
) -> Result<Json<ProjectList>> {
    let projects = store.projects(caller.viewer_name().as_deref()).await?;
    Ok(Json(LIST.page(None, projects, &params)?.into()))
}
