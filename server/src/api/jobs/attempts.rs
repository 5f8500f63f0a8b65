//! A job's attempts: every start of the job's ranks, and why the attempt ended.

use crate::{
    api::{
        jobs,
        list::{Elements, List, ListParams, list_of},
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
    /// Ordered by attempt, unless `sort` is given.
    #[schema(value_type = Vec<Attempt>)]
    attempts: Elements<Attempt>,
    /// Value of `cursor` for the next page; null on the last page.
    next_cursor: Option<String>,
    /// Number of attempts on all pages; absent without `count=true`.
    #[serde(skip_serializing_if = "Option::is_none")]
    total: Option<u64>,
}

list_of!(AttemptList, attempts: Attempt);

const LIST: List<Attempt> = List {
    name: "attempts",
    fields: &["attempt", "state", "reason", "checkpoint", "step", "agents", "started_at", "ended_at"],
    sorts: &[("attempt", |attempt| Some(f64::from(attempt.attempt)).into())],
    default_sort: "attempt",
    // Numbers of attempts are unique.
    id: |_| "",
    created: Some(|attempt| attempt.started_at),
};

/// List a job's attempts
///
/// Each attempt has its state, the reason for its end (a code, the rank and step that caused the end, a text), and the checkpoint from
/// which it began. Attempts are kept as long as the job. `sort`: `attempt`.
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
