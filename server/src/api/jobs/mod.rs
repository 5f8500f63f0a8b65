//! Jobs: show, pause, resume, cancel, retry, delete.

pub(crate) mod annotations;
pub(crate) mod attempts;
pub(crate) mod check;
mod conditions;
pub(crate) mod create;
mod diagnosis;
pub(crate) mod events;
pub(crate) mod fit;
mod group_keys;
pub(crate) mod groups;
pub(crate) mod history;
pub(crate) mod layers;
pub(crate) mod list;
pub(crate) mod logs;
pub(crate) mod metrics;
pub(crate) mod metrics_query;
pub(crate) mod pages;
pub(crate) mod panels;
pub(crate) mod pictures;
pub(crate) mod projects;
pub(crate) mod queue;
pub(crate) mod queue_page;
mod sorting;
pub(crate) mod stream;
pub(crate) mod submission;

pub(super) use check::{CheckReport, CheckedSpec, check, check_sweep, no_dataset_message, training_samples};
pub(crate) use create::submit;
pub(super) use create::{IdempotencyKey, find_earlier_job, idempotency_key, store_job};
pub(crate) use list::ListQuery;

use super::run_to_completion;
use crate::api::prelude::*;
use crate::{
    http::{conditional, extract::parse_job_id},
    lifecycle,
    metrics::Metrics,
    scheduler::{
        Scheduler,
        dispatch::{self, StopRequest},
    },
    store::{JobRow, Store, purge::DeletedJobs},
};
use axum::http::HeaderMap;
use lockstep_protocol::{Job, JobId};
use std::{collections::HashSet, time::Duration};

/// Returns the ids of the jobs that a caller may not see.
pub(super) async fn hidden_jobs(store: &dyn Store, caller: &Caller) -> Result<HashSet<JobId>> {
    match caller.viewer_name() {
        None => Ok(HashSet::new()),
        Some(name) => Ok(store.jobs_hidden_from(&name).await?.into_iter().collect()),
    }
}

/// Reads a job with its internal columns.
pub(super) async fn find_row(store: &dyn Store, id: &JobId) -> Result<JobRow> {
    store.job(id).await?.ok_or_else(|| Error::NotFound("no job has this id".into()))
}

/// Reads a job, with its position in the queue.
pub(crate) async fn find(scheduler: &Scheduler, id: &str) -> Result<Job> {
    let mut job = find_row(&*scheduler.store, &parse_job_id(id)?).await?.job;
    scheduler.fill_in(&mut job);
    Ok(job)
}

/// Returns a job as the caller may see it, with its position in the queue. The parent is included only if the caller may see the parent.
pub(super) async fn job_for(scheduler: &Scheduler, caller: &Caller, row: JobRow) -> Result<Job> {
    let mut job = row.job;
    if let Some(parent) = row.private_parent {
        let ownership = match parent.job.parse() {
            Ok(id) => scheduler.store.job_ownership(&id).await?,
            Err(_) => None,
        };
        let is_visible = ownership.is_some_and(|ownership| caller.sees_owned(&ownership));
        job.parent = is_visible.then_some(parent);
    }
    scheduler.fill_in(&mut job);
    Ok(job)
}

/// Same as [`job_for`], with the diagnosis and [`Job::trained_validation`].
async fn diagnose(metrics: &Metrics, scheduler: &Scheduler, caller: &Caller, row: JobRow) -> Result<Job> {
    let mut job = job_for(scheduler, caller, row).await?;
    diagnosis::mark_trained_validation(&*scheduler.store, std::slice::from_mut(&mut job)).await?;
    job.diagnosis = diagnosis::find(metrics, &*scheduler.store, &job).await?;
    Ok(job)
}

/// Reads a job whose id is not in the request's path, so that the middleware has not checked access to the job.
pub(super) async fn find_visible(scheduler: &Scheduler, caller: &Caller, id: &str) -> Result<Job> {
    let job = find(scheduler, id).await?;
    if caller.sees_job(&job) { Ok(job) } else { Err(Error::NotFound("no job has this id".into())) }
}

/// Maximum of `wait`, in seconds. It is less than the time limit of handlers.
const MAX_WAIT_SECS: u64 = 120;

/// Parameters of `GET /jobs/{id}`.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct WaitQuery {
    /// Maximum number of seconds to wait for the job's end, 0 to 120 (default 0).
    #[serde(default)]
    #[param(minimum = 0, maximum = 120)]
    wait: u64,
}

/// Same as [`find_row`], but waits until the job has ended, `limit` has passed, or the server stops.
async fn wait_for_end(scheduler: &Scheduler, id: &JobId, limit: Duration) -> Result<JobRow> {
    let end = async {
        // Subscribed before the job is read, so that no event in between is missed.
        let mut subscription = scheduler.events.hub.subscribe(id);
        let mut found = find_row(&*scheduler.store, id).await?;
        let mut seq = found.job.last_seq;
        while !found.job.state.is_final() {
            let _ = subscription.wait(seq).await;
            match subscription.rows_after(seq) {
                Some(events) if events.iter().all(|event| event.state().is_none()) => {
                    seq = events.last().map_or(seq, |event| event.seq);
                }
                // The job's state changed, the job was deleted, or the hub no longer has the events.
                _ => {
                    found = find_row(&*scheduler.store, id).await?;
                    seq = found.job.last_seq;
                }
            }
        }
        Ok(found)
    };
    tokio::select! {
        found = end => return found,
        () = tokio::time::sleep(limit) => {}
        () = scheduler.tasks.stopping.cancelled() => {}
    }
    find_row(&*scheduler.store, id).await
}

/// Show a job
///
/// With `wait`, the response comes when the job has ended (`succeeded`, `failed`, `cancelled`) or the time has passed.
#[utoipa::path(get, path = "/jobs/{id}", tag = "jobs", params(("id" = String, Path), WaitQuery),
    responses((status = 200, body = Job), (status = 304, description = "The job is unchanged since the response whose `ETag` is in `If-None-Match`")))]
pub(crate) async fn show(
    State(scheduler): State<Arc<Scheduler>>,
    State(metrics): State<Arc<Metrics>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    Path(id): Path<String>,
    Query(WaitQuery { wait }): Query<WaitQuery>,
) -> Result<Response> {
    let id = parse_job_id(&id)?;
    let row = match wait {
        0 => find_row(&*scheduler.store, &id).await?,
        1..=MAX_WAIT_SECS => wait_for_end(&scheduler, &id, Duration::from_secs(wait)).await?,
        _ => return Err(Error::BadRequest(format!("wait is {wait}, but must be 0 to {MAX_WAIT_SECS}"))),
    };
    conditional::json_with_etag(&headers, &diagnose(&metrics, &scheduler, &caller, row).await?)
}

/// Cancel a job
///
/// A queued job is cancelled at once. A running job is cancelled after its ranks have been stopped. A run from elsewhere is cancelled at
/// once, but its program is not stopped: its later points are stored, and its end does not change the state.
#[utoipa::path(post, path = "/jobs/{id}/cancel", tag = "jobs",
    responses((status = 202, body = Job), (status = 409, body = Problem, description = "The job has already ended")))]
pub(crate) async fn cancel(
    State(scheduler): State<Arc<Scheduler>>,
    Path(id): Path<String>,
) -> Result<(StatusCode, Json<Job>)> {
    let job = dispatch::stop(&scheduler, &parse_job_id(&id)?, StopRequest::Cancel).await?;
    Ok((StatusCode::ACCEPTED, Json(job)))
}

/// Pause a job
///
/// The job's ranks finish their step, write a checkpoint and free their slots. A waiting job is paused at once.
#[utoipa::path(post, path = "/jobs/{id}/pause", tag = "jobs",
    responses((status = 202, body = Job), (status = 409, body = Problem, description = "The job neither waits nor runs")))]
pub(crate) async fn pause(
    State(scheduler): State<Arc<Scheduler>>,
    Path(id): Path<String>,
) -> Result<(StatusCode, Json<Job>)> {
    let job = dispatch::stop(&scheduler, &parse_job_id(&id)?, StopRequest::Pause).await?;
    Ok((StatusCode::ACCEPTED, Json(job)))
}

/// Resume a paused job
///
/// The job's next attempt continues from the newest checkpoint. The resulting weights are the same as without the pause.
#[utoipa::path(post, path = "/jobs/{id}/resume", tag = "jobs",
    responses((status = 202, body = Job), (status = 409, body = Problem, description = "The job is not paused, or is a trial that waits at a rung for its sweep"),
        (status = 422, body = Problem, description = "The job's dataset is not registered, or was registered again and does not fit the newest checkpoint")))]
pub(crate) async fn resume(
    State(scheduler): State<Arc<Scheduler>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<(StatusCode, Json<Job>)> {
    let job = find(&scheduler, &id).await?;
    fit::check_can_continue(&scheduler.checkpoints, &caller, &job).await?;
    let at = crate::now();
    let changed =
        scheduler.events.change_job(&job.id, Box::new(move |row| lifecycle::resume(row, at))).await?;
    Ok((StatusCode::ACCEPTED, Json(changed.job)))
}

/// Retry a failed or cancelled job
///
/// The job's next attempt continues from the newest checkpoint. A job with registered versions is refused; fork the job instead.
#[utoipa::path(post, path = "/jobs/{id}/retry", tag = "jobs",
    responses((status = 202, body = Job), (status = 409, body = Problem, description = "The job has not failed or been cancelled, or has registered versions"),
        (status = 422, body = Problem, description = "The job's dataset is not registered, or was registered again and does not fit the newest checkpoint")))]
pub(crate) async fn retry(
    State(scheduler): State<Arc<Scheduler>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<(StatusCode, Json<Job>)> {
    let job = find(&scheduler, &id).await?;
    fit::check_can_continue(&scheduler.checkpoints, &caller, &job).await?;
    let sweep = match &job.trial {
        Some(trial) => scheduler.store.sweep(&trial.sweep).await?,
        None => None,
    };
    let (at, is_in_open_sweep) = (crate::now(), sweep.is_some_and(|sweep| sweep.finished_at.is_none()));
    let retry = move |row: &mut JobRow| {
        if !is_in_open_sweep {
            // No sweep would resume the job after a rung.
            row.progress.pause_after = None;
        }
        lifecycle::retry(row, at)
    };
    let changed = scheduler.events.change_job(&job.id, Box::new(retry)).await?;
    Ok((StatusCode::ACCEPTED, Json(changed.job)))
}

/// Refuses a job that this version of Lockstep cannot read completely, because this version would run a different job.
pub(super) fn check_readable(job: &Job) -> Result<()> {
    match &job.unreadable {
        None => Ok(()),
        Some(flaw) => {
            let detail = format!(
                "the job was stored by another version of lockstep ({flaw}), and this version cannot read all of it; use that version"
            );
            Err(Error::WrongState(detail, job.state))
        }
    }
}

/// Delete a job
///
/// The job's events and checkpoints are deleted, too. An unfinished job is refused; cancel the job first. A job with registered versions is
/// refused; remove the versions first.
#[utoipa::path(delete, path = "/jobs/{id}", tag = "jobs", responses((status = 204), (status = 409, body = Problem)))]
pub(crate) async fn delete(
    State(scheduler): State<Arc<Scheduler>>,
    State(deleted_jobs): State<Arc<DeletedJobs>>,
    Path(id): Path<String>,
) -> Result<StatusCode> {
    let id = parse_job_id(&id)?;
    run_to_completion(async move { remove(&scheduler, &deleted_jobs, &id).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Deletes a job that has ended.
///
/// # Errors
/// The job does not exist, has not ended, has registered versions or is a trial of an unfinished sweep, or the store cannot be written.
pub(super) async fn remove(scheduler: &Scheduler, deleted_jobs: &DeletedJobs, id: &JobId) -> Result<()> {
    let job = find(scheduler, id.as_str()).await?;
    let checkpoints = scheduler.store.checkpoints(id).await?;
    // The purge of the rows also removes the files (`store/purge.rs`).
    scheduler.store.delete_job(id).await?;
    deleted_jobs.wake();
    if let Some(object_store) = &scheduler.checkpoints.object_store {
        checkpoints.iter().for_each(|row| object_store.queue(&row.id));
    }
    scheduler.events.hub.publish_deletion(job);
    Ok(())
}
