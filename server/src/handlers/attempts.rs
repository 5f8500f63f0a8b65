//! A job's attempts: every start of its ranks, and why it ended.

use super::{
    extract::{Path, job_id},
    jobs,
};
use crate::{
    app::App,
    error::{Problem, Result},
};
use axum::{Json, extract::State};
use lockstep_protocol::attempt::Attempt;
use serde::Serialize;
use utoipa::ToSchema;

/// Every attempt of a job.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AttemptList {
    /// In order, from the first.
    attempts: Vec<Attempt>,
}

/// A job's attempts
///
/// Each with its state, why it ended (a code, the rank and step it began with, words), and the checkpoint it began from.
/// They are kept as long as the job.
#[utoipa::path(get, path = "/jobs/{id}/attempts", tag = "jobs", params(("id" = String, Path)),
    responses((status = 200, body = AttemptList), (status = 404, body = Problem)))]
pub(crate) async fn list(State(app): State<App>, Path(id): Path<String>) -> Result<Json<AttemptList>> {
    jobs::find(&app, &id).await?;
    Ok(Json(AttemptList { attempts: app.store.attempts(&job_id(&id)?).await? }))
}
