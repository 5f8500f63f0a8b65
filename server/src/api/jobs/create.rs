//! Submitting a job. The server checks the job and stores it with its folder, once for each `Idempotency-Key`.

use super::check::{CheckedSpec, LaunchQuery, Start, check};
use crate::api::prelude::*;
use crate::{
    api::run_to_completion,
    auth::Auth,
    http::extract::JobFile,
    lifecycle::Fork,
    scheduler::{
        Scheduler,
        new_jobs::{NewJobError, add_job, new_job},
    },
    store::{CreateResult, Store, StoreError},
};
use axum::{
    extract::OriginalUri,
    http::{HeaderMap, Uri},
};
use bytes::Bytes;
use lockstep_protocol::{Job, JobId, JobSpec};
use serde_json::Value;
use sha2::{Digest, Sha256};

/// Maximum length of an `Idempotency-Key`, in bytes.
const MAX_KEY_BYTES: usize = 255;

/// A client's `Idempotency-Key`, and a hash of the request's path and body, which identifies the request.
pub(in crate::api) type IdempotencyKey = (String, String);

/// Submit a job
///
/// All mistakes are reported at once. The body may also be TOML (`application/toml`). With an `Idempotency-Key`, repeating the request
/// returns the job that the first request made.
#[utoipa::path(post, path = "/jobs", tag = "jobs", request_body(content((JobSpec = "application/json"), (String = "application/toml"))),
    params(("Idempotency-Key" = Option<String>, Header, description = "At most 255 characters, chosen by the client"), LaunchQuery),
    responses((status = 201, body = Job, headers(("Location" = String))), (status = 200, body = Job, description = "An earlier identical request has made this job"),
        (status = 409, body = Problem, description = "The key was used with another request")))]
pub(crate) async fn create(
    State(scheduler): State<Arc<Scheduler>>,
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    OriginalUri(uri): OriginalUri,
    Query(LaunchQuery { launched }): Query<LaunchQuery>,
    JobFile(document, bytes): JobFile,
) -> Result<Response> {
    let key = idempotency_key(&auth, &caller, &headers, &uri, &bytes)?;
    let (status, job) =
        run_to_completion(async move { submit(&scheduler, &caller, &document, key, launched).await }).await?;
    Ok((status, [(header::LOCATION, format!("/api/v1/jobs/{}", job.id))], Json(job)).into_response())
}

/// Checks a document and stores it as a job. If `launched`, the job's agents are started later, so the slots are not checked.
pub(crate) async fn submit(
    scheduler: &Scheduler,
    caller: &Caller,
    document: &Value,
    key: Option<IdempotencyKey>,
    launched: bool,
) -> Result<(StatusCode, Job)> {
    if let Some(job) = find_earlier_job(&*scheduler.store, caller, key.as_ref()).await? {
        return Ok((StatusCode::OK, job));
    }
    let CheckedSpec { spec, warnings, .. } =
        check(scheduler, caller, document, Start::FirstStep { launched }).await?;
    let (status, mut job) = store_job(scheduler, caller, JobId::generate(), spec, key, None).await?;
    job.warnings = warnings;
    Ok((status, job))
}

/// Returns the job that an earlier request with the same `Idempotency-Key` made. Handlers call this function first, so that a later change,
/// such as a missing file, does not make a repeated request fail.
pub(in crate::api) async fn find_earlier_job(
    store: &dyn Store,
    caller: &Caller,
    key: Option<&IdempotencyKey>,
) -> Result<Option<Job>> {
    let Some(key) = key else { return Ok(None) };
    match store.job_by_idempotency_key(key).await? {
        Some(job) if !caller.sees_job(&job) => Err(StoreError::KeyReused.into()),
        found => Ok(found),
    }
}

/// Stores a checked specification as a job, with its folder.
pub(in crate::api) async fn store_job(
    scheduler: &Scheduler,
    caller: &Caller,
    id: JobId,
    spec: JobSpec,
    key: Option<IdempotencyKey>,
    fork: Option<Fork>,
) -> Result<(StatusCode, Job)> {
    let mut new = new_job(id, spec, caller.owner().map(str::to_owned));
    (new.idempotency, new.fork) = (key, fork);
    let created = add_job(scheduler, new).await.map_err(|error| match error {
        NewJobError::Store(error) => error.into(),
        folder => Error::Unavailable(folder.to_string()),
    });
    Ok(match created? {
        CreateResult::Existing(job) => (StatusCode::OK, *job),
        CreateResult::New(changed) => (StatusCode::CREATED, changed.job),
    })
}

/// Returns the key of a request; `None` if the request has none.
pub(in crate::api) fn idempotency_key(
    auth: &Auth,
    caller: &Caller,
    headers: &HeaderMap,
    uri: &Uri,
    body: &Bytes,
) -> Result<Option<IdempotencyKey>> {
    let Some(key) = headers.get("idempotency-key") else { return Ok(None) };
    let key = key.to_str().ok().filter(|k| !k.is_empty() && k.len() <= MAX_KEY_BYTES);
    let key = key.ok_or_else(|| {
        Error::BadRequest(format!("Idempotency-Key must be 1 to {MAX_KEY_BYTES} visible ASCII characters"))
    })?;
    // A path contains no NUL, so the hashed bytes of different requests differ.
    let request = Sha256::new().chain_update(uri.path()).chain_update([0]).chain_update(body).finalize();
    // If jobs have owners, two people may choose the same key, so the key contains the owner. No name contains the separator U+001F.
    let key = match caller.owner().filter(|_| auth.access.has_people()) {
        Some(owner) => format!("{owner}\u{1f}{key}"),
        None => key.to_owned(),
    };
    Ok(Some((key, hex::encode(request))))
}
