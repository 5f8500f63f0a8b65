//! A job's attempts: every start of its ranks, and why it ended.

use crate::{
    api::{
        jobs,
        list::{Elements, List, ListParams, Page},
    },
    http::{
        error::{Problem, Result},
        extract::{Path, Query},
    },
    scheduler::Scheduler,
    store::Store,
};
use axum::{Json, extract::State};
use lockstep_protocol::attempt::Attempt;
use serde::Serialize;
use std::sync::Arc;
use utoipa::ToSchema;

/// A job's attempts.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AttemptList {
    /// In order, from the first, unless `sort` says otherwise.
    #[schema(value_type = Vec<Attempt>)]
    attempts: Elements<Attempt>,
    /// Give it as `cursor` for the next page; null on the last.
    next_cursor: Option<String>,
    /// With `count=true`: attempts on all pages together.
    #[serde(skip_serializing_if = "Option::is_none")]
    total: Option<u64>,
}

impl From<Page<Attempt>> for AttemptList {
    fn from(page: Page<Attempt>) -> Self {
        Self { attempts: page.elements, next_cursor: page.next_cursor, total: page.total }
    }
}

const LIST: List<Attempt> = List {
    name: "attempts",
    fields: &["attempt", "state", "reason", "checkpoint", "step", "agents", "started_at", "ended_at"],
    sorts: &[("attempt", |attempt| Some(f64::from(attempt.attempt)).into())],
    default_sort: "attempt",
    // No two have the same number.
    id: |_| "",
    created: Some(|attempt| attempt.started_at),
};

/// A job's attempts
///
/// Each with its state, why it ended (a code, the rank and step it began with, words), and the checkpoint it began from.
/// They are kept as long as the job. `sort`: `attempt`.
#[utoipa::path(get, path = "/jobs/{id}/attempts", tag = "jobs", params(("id" = String, Path), ListParams),
    responses((status = 200, body = AttemptList), (status = 400, body = Problem), (status = 404, body = Problem)))]
pub(crate) async fn list(
    State(scheduler): State<Arc<Scheduler>>,
    State(store): State<Arc<dyn Store>>,
    Path(id): Path<String>,
    Query(params): Query<ListParams>,
) -> Result<Json<AttemptList>> {
    let job = jobs::find(&scheduler, &id).await?;
    Ok(Json(LIST.page_of_job(&job.id, store.attempts(&job.id).await?, &params)?.into()))
}
