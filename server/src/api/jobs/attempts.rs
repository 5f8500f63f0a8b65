//! A job's attempts: every start of the job's ranks, and why the attempt ended.

use crate::api::prelude::*;
use crate::{
    api::{
        jobs,
        list::{List, ListParams, list_of},
    },
    scheduler::Scheduler,
};
use lockstep_protocol::attempt::Attempt;

list_of! {
    /// A job's attempts.
    AttemptList
    /// Ordered by attempt, unless `sort` is given.
    attempts: Attempt
}

const LIST: List<Attempt> = List {
    name: "attempts",
    sorts: &[("attempt", |attempt| Some(f64::from(attempt.attempt)).into())],
    default_sort: "attempt",
    // Not needed, because no two attempts of a job have the same number.
    id: |_| "",
    created: Some(|attempt| attempt.started_at),
};

/// List a job's attempts
///
/// Each attempt has its state, the reason for its end (a code, the rank and step that caused the end, a text), and the checkpoint from
/// which it began. Attempts are kept as long as the job. `sort`: `attempt`.
#[utoipa::path(get, path = "/jobs/{id}/attempts", tag = "jobs", params(("id" = String, Path), ListParams),
    responses((status = 200, body = AttemptList)))]
pub(crate) async fn list(
    State(scheduler): State<Arc<Scheduler>>,
    Path(id): Path<String>,
    Query(params): Query<ListParams>,
) -> Result<Json<AttemptList>> {
    let job = jobs::find(&scheduler, &id).await?;
    Ok(Json(LIST.page(Some(&job.id), scheduler.store.attempts(&job.id).await?, &params)?.into()))
}
