//! Sweeps: submit, list, show, pause, resume, cancel, delete.

pub(crate) mod pages;

use super::{
    jobs::{IdempotencyKey, check::LaunchQuery, check_sweep, idempotency_key},
    list::{List, ListParams, list_of},
    run_to_completion,
};
use crate::api::prelude::*;
use crate::{
    auth::Auth,
    http::extract::JobFile,
    scheduler::{Scheduler, sweeps::describe},
    store::{Ownership, Store, StoreError, SweepRow},
};
use axum::{extract::OriginalUri, http::HeaderMap};
use lockstep_protocol::{
    spec::split_sweep,
    sweep::{Sweep, SweepState},
};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;

list_of! {
    /// A page of sweeps that the caller may see.
    SweepList
    /// Newest first, unless `sort` is given.
    sweeps: Sweep
}

const LIST: List<Sweep> = List {
    name: "sweeps",
    sorts: &[("created", |sweep| sweep.created_at.into()), ("name", |sweep| sweep.name.as_str().into())],
    default_sort: "-created",
    id: |sweep| &sweep.id,
    created: Some(|sweep| sweep.created_at),
};

/// Returns a sweep without its trials.
async fn find(store: &dyn Store, id: &str) -> Result<SweepRow> {
    store.sweep(id).await?.ok_or_else(|| Error::NotFound("no sweep has this id".into()))
}

async fn with_trials(store: &dyn Store, row: &SweepRow) -> Result<Sweep> {
    Ok(describe(row, &store.trials(&row.id).await?))
}

/// Returns the sweeps that a caller may see, newest first.
async fn visible_sweeps(store: &dyn Store, caller: &Caller) -> Result<Vec<SweepRow>> {
    let mut rows = store.sweeps().await?;
    rows.retain(|row| caller.sees_owned(&row.ownership));
    Ok(rows)
}

/// Submit a sweep
///
/// The body is a job file with the section `sweep`. The server makes a job for each trial, and starts these jobs by the rules of the
/// section. With an `Idempotency-Key`, repeating the request returns the sweep that the first request made.
#[utoipa::path(post, path = "/sweeps", tag = "sweeps", request_body(content((Object = "application/json"), (String = "application/toml"))),
    params(LaunchQuery, ("Idempotency-Key" = Option<String>, Header, description = "At most 255 characters, chosen by the client")),
    responses((status = 201, body = Sweep, headers(("Location" = String))), (status = 200, body = Sweep, description = "An earlier identical request has made this sweep"),
        (status = 409, body = Problem, description = "The key was used with another request")))]
pub(crate) async fn create(
    State(scheduler): State<Arc<Scheduler>>,
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    Query(LaunchQuery { launched }): Query<LaunchQuery>,
    headers: HeaderMap,
    OriginalUri(uri): OriginalUri,
    JobFile(document, bytes): JobFile,
) -> Result<impl IntoResponse> {
    let key = idempotency_key(&auth, &caller, &headers, &uri, &bytes)?;
    let (status, sweep) =
        run_to_completion(async move { submit(&scheduler, &caller, document, launched, key).await }).await?;
    Ok((status, [(header::LOCATION, format!("/api/v1/sweeps/{}", sweep.id))], Json(sweep)))
}

/// Returns the response with the sweep that an earlier identical request has made.
///
/// # Errors
/// 409: the idempotency key was used with another request, or the caller may not see the sweep.
async fn respond_with_earlier(
    store: &dyn Store,
    caller: &Caller,
    row: &SweepRow,
    document: &Value,
) -> Result<(StatusCode, Sweep)> {
    if !caller.sees_owned(&row.ownership) || row.spec != *document {
        return Err(StoreError::KeyReused.into());
    }
    Ok((StatusCode::OK, with_trials(store, row).await?))
}

/// Checks a sweep and stores it with its trials.
async fn submit(
    scheduler: &Scheduler,
    caller: &Caller,
    document: Value,
    launched: bool,
    key: Option<IdempotencyKey>,
) -> Result<(StatusCode, Sweep)> {
    let store = &*scheduler.store;
    let (section, job) = split_sweep(&document).ok_or_else(|| {
        let detail =
            "is missing: a sweep is a job file with the section `sweep`; submit a job by POST /api/v1/jobs";
        Error::invalid("/sweep", detail)
    })?;
    // The id is computed from the key, so that a repeated request finds its sweep.
    let has_key = key.is_some();
    let seed = key.map_or_else(|| uuid::Uuid::new_v4().to_string(), |(key, _)| key);
    let id = format!("sweep-{}", &hex::encode(Sha256::digest(seed))[..12]);
    if has_key && let Some(row) = store.sweep(&id).await? {
        return respond_with_earlier(store, caller, &row, &document).await;
    }
    let full_checks = usize::MAX; // check every trial in full
    let checked = check_sweep(scheduler, caller, (&section, &job), &id, full_checks, launched).await?;
    // A set, because trials share most warnings.
    let warnings: BTreeSet<_> = checked.trials.iter().flat_map(|trial| &trial.warnings).cloned().collect();
    let specs: Vec<_> = checked.trials.into_iter().map(|trial| trial.spec).collect();
    let first = specs.first().ok_or_else(|| Error::Internal("a checked sweep has no trials".into()))?;
    let name = job.get("name").and_then(Value::as_str);
    let row = SweepRow {
        id,
        name: name.unwrap_or("untitled").to_owned(),
        project: first.project.clone(),
        state: SweepState::Running,
        reason: None,
        settings: checked.settings,
        rungs: checked.sweep.rungs_of(first),
        ownership: Ownership {
            owner: caller.owner().map(str::to_owned),
            private: specs.iter().any(|spec| spec.private),
        },
        spec: document,
        created_at: crate::now(),
        finished_at: None,
    };
    if !store.add_sweep(&row, &specs).await? {
        // A concurrent identical request has stored the sweep.
        return respond_with_earlier(store, caller, &find(store, &row.id).await?, &row.spec).await;
    }
    scheduler.sweeps_changed.notify_one();
    // Described without jobs, because no trial has a job yet.
    let sweep = Sweep { warnings: warnings.into_iter().collect(), ..describe(&row, &[]) };
    Ok((StatusCode::CREATED, sweep))
}

/// List sweeps
///
/// The list does not contain the trials. `sort`: `created`, `name`.
#[utoipa::path(get, path = "/sweeps", tag = "sweeps", params(ListParams), responses((status = 200, body = SweepList)))]
pub(crate) async fn list(
    State(store): State<Arc<dyn Store>>,
    Extension(caller): Extension<Caller>,
    Query(params): Query<ListParams>,
) -> Result<Json<SweepList>> {
    let rows = visible_sweeps(&*store, &caller).await?;
    // `ended`, `best` and `steps` are computed from the trials, so the trials of this page's sweeps are read, but not listed.
    let mut page = LIST.page(None, rows.iter().map(|row| describe(row, &[])).collect(), &params)?;
    for sweep in &mut page.elements.items {
        if let Some(row) = rows.iter().find(|row| row.id == sweep.id) {
            *sweep = Sweep { trials: Vec::new(), ..with_trials(&*store, row).await? };
        }
    }
    Ok(Json(page.into()))
}

/// Show a sweep
///
/// Returns the sweep with its trials: settings, jobs, and the metric at the newest rung.
#[utoipa::path(get, path = "/sweeps/{id}", tag = "sweeps", responses((status = 200, body = Sweep)))]
pub(crate) async fn show(State(store): State<Arc<dyn Store>>, Path(id): Path<String>) -> Result<Json<Sweep>> {
    Ok(Json(with_trials(&*store, &find(&*store, &id).await?).await?))
}

/// Pause a sweep
///
/// No trial starts or resumes. Running trials continue until their next rung or their end.
#[utoipa::path(post, path = "/sweeps/{id}/pause", tag = "sweeps",
    responses((status = 202, body = Sweep), (status = 409, body = Problem, description = "The sweep is not running")))]
pub(crate) async fn pause(
    State(scheduler): State<Arc<Scheduler>>,
    Path(id): Path<String>,
) -> Result<(StatusCode, Json<Sweep>)> {
    change(&scheduler, &id, &[SweepState::Running], SweepState::Paused).await
}

/// Resume a paused sweep
#[utoipa::path(post, path = "/sweeps/{id}/resume", tag = "sweeps",
    responses((status = 202, body = Sweep), (status = 409, body = Problem, description = "The sweep is not paused")))]
pub(crate) async fn resume(
    State(scheduler): State<Arc<Scheduler>>,
    Path(id): Path<String>,
) -> Result<(StatusCode, Json<Sweep>)> {
    change(&scheduler, &id, &[SweepState::Paused], SweepState::Running).await
}

/// Cancel a sweep
///
/// The sweep's unfinished trials are cancelled, too. The trials keep their checkpoints.
#[utoipa::path(post, path = "/sweeps/{id}/cancel", tag = "sweeps",
    responses((status = 202, body = Sweep), (status = 409, body = Problem, description = "The sweep has already ended")))]
pub(crate) async fn cancel(
    State(scheduler): State<Arc<Scheduler>>,
    Path(id): Path<String>,
) -> Result<(StatusCode, Json<Sweep>)> {
    change(&scheduler, &id, &[SweepState::Running, SweepState::Paused], SweepState::Cancelled).await
}

/// Delete a sweep
///
/// The sweep's jobs remain, as jobs without a sweep. An unfinished sweep is refused; cancel the sweep first.
#[utoipa::path(delete, path = "/sweeps/{id}", tag = "sweeps",
    responses((status = 204), (status = 409, body = Problem, description = "The sweep has not ended")))]
pub(crate) async fn delete(
    State(store): State<Arc<dyn Store>>,
    Path(id): Path<String>,
) -> Result<StatusCode> {
    if store.delete_sweep(&find(&*store, &id).await?.id).await? {
        return Ok(StatusCode::NO_CONTENT);
    }
    Err(Error::Conflict("the sweep has not ended; cancel the sweep before you delete it".into()))
}

/// Changes the state of a sweep from one of the states `from` to the state `to`.
async fn change(
    scheduler: &Scheduler,
    id: &str,
    from: &[SweepState],
    to: SweepState,
) -> Result<(StatusCode, Json<Sweep>)> {
    let store = &*scheduler.store;
    let row = find(store, id).await?;
    if !from.contains(&row.state) || !store.set_sweep_state(id, to, None, None).await? {
        // The sweep may have ended since it was read.
        let state = find(store, id).await?.state;
        return Err(Error::Conflict(format!("the sweep is {}", state.as_str())));
    }
    scheduler.sweeps_changed.notify_one();
    let row = find(store, id).await?;
    Ok((StatusCode::ACCEPTED, Json(with_trials(store, &row).await?)))
}
