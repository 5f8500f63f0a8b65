//! Projects: names by which jobs are grouped.

use crate::{
    api::list::{List, ListParams, list_of},
    auth::access::Caller,
    http::{
        error::{Problem, Result},
        extract::Query,
    },
    store::Store,
};
use axum::{Extension, Json, extract::State};
use jiff::Timestamp;
use serde::Serialize;
use std::{collections::BTreeMap, sync::Arc};
use utoipa::ToSchema;

list_of! {
    /// A page of projects.
    ProjectList
    /// Ordered by name, unless `sort` is given.
    projects: Project
    /// Number of projects on all pages; absent without `count=true`.
    total
}

/// A project. A project exists while a job has its name.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Project {
    name: String,
    /// Number of jobs in any state.
    jobs: u64,
    /// Number of jobs in each state, without states that no job is in: `{"running": 2, "failed": 1}`.
    states: BTreeMap<&'static str, u64>,
    /// Submission time of the newest job.
    newest_at: Timestamp,
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
/// Each project has the number of its jobs in each state, without private jobs of others. `sort`: `name`, `jobs`, `newest`. Projects have no
/// time of creation, so `created_after` and `created_before` are refused.
#[utoipa::path(get, path = "/projects", tag = "jobs", params(ListParams),
    responses((status = 200, body = ProjectList), (status = 400, body = Problem)))]
pub(crate) async fn list(
    State(store): State<Arc<dyn Store>>,
    Extension(caller): Extension<Caller>,
    Query(params): Query<ListParams>,
) -> Result<Json<ProjectList>> {
    let rows = store.projects(caller.sees_as().as_deref()).await?.into_iter();
    let projects = rows.map(|row| Project {
        jobs: row.states.iter().map(|(_, count)| count).sum(),
        states: row.states.into_iter().map(|(state, count)| (state.as_str(), count)).collect(),
        name: row.name,
        newest_at: row.newest_at,
    });
    Ok(Json(LIST.page(projects.collect(), &params)?.into()))
}
