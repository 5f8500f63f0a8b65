//! Jobs: submit, list, show, pause, resume, cancel, retry, delete.

use super::{
    extract::{Document, Path, Query, job_id, search_text},
    fit,
    submission::{self, Weights},
    to_the_end,
};
use crate::{
    app::App,
    dispatch::{self, Wish, device_for, slots_for},
    error::{Error, Problem, Result},
    lifecycle::{self, Fork},
    store::{Created, JobFilter, NewJob},
};
use axum::{
    Json,
    extract::{OriginalUri, State},
    http::{HeaderMap, StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use lockstep_protocol::{
    Job, JobId, JobSpec,
    dataset::Dataset,
    spec::{self, Device, SpecError, Validation, nearest, shortened},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::fmt::Write as _;
use utoipa::{IntoParams, ToSchema};

/// Jobs of one answer, at most; as documented at [`ListQuery`], and by the store.
const MAX_LIMIT: u32 = 1000;
const DEFAULT_LIMIT: u32 = 50;
const MAX_KEY_BYTES: usize = 255;

/// A page of jobs.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct JobList {
    /// Newest first.
    jobs: Vec<Job>,
    /// Give it as `cursor` for the next page; null on the last.
    next: Option<String>,
}

/// Which jobs.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    /// One of the states.
    state: Option<String>,
    /// Part of the name, at most 200 characters.
    name: Option<String>,
    /// At most so many: 1 to 1000; 50 when absent.
    #[param(minimum = 1, maximum = 1000)]
    pub(crate) limit: Option<u32>,
    /// `next` of the page before.
    cursor: Option<String>,
}

impl ListQuery {
    /// # Errors
    /// A state, limit or cursor that is none, or a name too long to search for.
    pub(crate) fn filter(&self) -> Result<JobFilter> {
        let state = self
            .state
            .as_deref()
            .filter(|s| !s.is_empty())
            .map(str::parse)
            .transpose()
            .map_err(Error::BadRequest)?;
        search_text("name", self.name.as_deref())?;
        let cursor = self.cursor.as_deref().map(str::parse).transpose();
        let limit = self.limit.unwrap_or(DEFAULT_LIMIT);
        if !(1..=MAX_LIMIT).contains(&limit) {
            return Err(Error::BadRequest(format!("limit must be 1 to {MAX_LIMIT}, is {limit}")));
        }
        Ok(JobFilter {
            state,
            name: self.name.clone().filter(|n| !n.is_empty()),
            limit,
            cursor: cursor.map_err(Error::BadRequest)?,
        })
    }
}

/// What a specification comes to.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Plan {
    /// Complete, with every default.
    spec: JobSpec,
    /// Training pictures.
    samples: u64,
    global_batch_size: u64,
    steps_per_epoch: u64,
    total_steps: u64,
    /// What is worth a look before the job runs, in words.
    warnings: Vec<String>,
}

/// Submit a job
///
/// Every mistake is answered at once. TOML is taken as well, as `application/toml`. With an `Idempotency-Key`, the same request sent again answers with
/// the job that it made.
#[utoipa::path(post, path = "/jobs", tag = "jobs", request_body(content((JobSpec = "application/json"), (String = "application/toml"))),
    params(("Idempotency-Key" = Option<String>, Header, description = "At most 255 characters of your own")),
    responses((status = 201, body = Job, headers(("Location" = String))), (status = 200, body = Job, description = "The same request made this job before"),
        (status = 409, body = Problem, description = "The key came with another request"), (status = 422, body = Problem)))]
pub(crate) async fn create(
    State(app): State<App>,
    headers: HeaderMap,
    OriginalUri(uri): OriginalUri,
    Document(document, bytes): Document,
) -> Result<Response> {
    let key = idempotency_key(&headers, &uri, &bytes)?;
    let (status, job) = to_the_end(async move { submit(&app, &document, key).await }).await?;
    Ok((status, [(header::LOCATION, format!("/api/v1/jobs/{}", job.id))], Json(job)).into_response())
}

/// Checks a document and stores it as a job.
///
/// # Errors
/// Every mistake in it.
pub(crate) async fn submit(
    app: &App,
    document: &Value,
    key: Option<(String, String)>,
) -> Result<(StatusCode, Job)> {
    if let Some(job) = made_before(app, key.as_ref()).await? {
        return Ok((StatusCode::OK, job));
    }
    let Checked { spec, warnings, .. } = check(app, document, true).await?;
    let (status, mut job) = store(app, JobId::generate(), spec, key, None).await?;
    job.warnings = warnings;
    Ok((status, job))
}

/// The job that this very request made before. Asked first: what has changed since, such as a file that is gone, is no reason
/// to refuse what was accepted.
pub(super) async fn made_before(app: &App, key: Option<&(String, String)>) -> Result<Option<Job>> {
    match key {
        Some(key) => Ok(app.store.job_made_by(key).await?),
        None => Ok(None),
    }
}

/// Stores a specification that was checked as a job, with its folder.
///
/// # Errors
/// The folder or the database cannot be written.
pub(super) async fn store(
    app: &App,
    id: JobId,
    spec: JobSpec,
    key: Option<(String, String)>,
    fork: Option<Fork>,
) -> Result<(StatusCode, Job)> {
    // Before the row: a job that is stored has its folder, and a folder without a job is only a folder.
    let folder = app.job_dir(&id);
    write_folder(&folder, &spec).await.map_err(|error| {
        Error::Unavailable(format!("the job's folder {} cannot be written: {error}", folder.display()))
    })?;
    let new = NewJob { id, spec, at: crate::now(), idempotency: key, fork };
    let created = app.store.create_job(new).await;
    if !matches!(created, Ok(Created::New(_))) {
        let _ = tokio::fs::remove_dir_all(&folder).await;
    }
    match created? {
        Created::Before(job) => Ok((StatusCode::OK, *job)),
        Created::New(changed) => {
            app.announce(&changed);
            Ok((StatusCode::CREATED, changed.job))
        }
    }
}

async fn write_folder(folder: &std::path::Path, spec: &JobSpec) -> std::io::Result<()> {
    tokio::fs::create_dir_all(folder).await?;
    let text = serde_json::to_string_pretty(spec).map_err(std::io::Error::other)?;
    tokio::fs::write(folder.join("spec.json"), text).await
}

/// The client's key and what makes its request that request: where it went, and its body.
pub(super) fn idempotency_key(
    headers: &HeaderMap,
    uri: &Uri,
    body: &Bytes,
) -> Result<Option<(String, String)>> {
    let Some(key) = headers.get("idempotency-key") else { return Ok(None) };
    let key = key.to_str().ok().filter(|k| !k.is_empty() && k.len() <= MAX_KEY_BYTES);
    let key = key.ok_or_else(|| {
        Error::BadRequest(format!("Idempotency-Key must be 1 to {MAX_KEY_BYTES} plain characters"))
    })?;
    // A path has no NUL, so no two requests have the same text.
    let request = Sha256::new().chain_update(uri.path()).chain_update([0]).chain_update(body).finalize();
    let hash = request.iter().fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    });
    Ok(Some((key.to_owned(), hash)))
}

/// Check a specification without submitting it
#[utoipa::path(post, path = "/jobs/validate", tag = "jobs", request_body(content((JobSpec = "application/json"), (String = "application/toml"))),
    responses((status = 200, body = Plan), (status = 422, body = Problem)))]
pub(crate) async fn validate(State(app): State<App>, Document(document, _): Document) -> Result<Json<Plan>> {
    let Checked { spec, dataset, warnings } = check(&app, &document, true).await?;
    let samples = training_samples(&spec, &dataset);
    Ok(Json(Plan {
        samples,
        global_batch_size: spec.global_batch_size(),
        steps_per_epoch: spec.steps_per_epoch(samples),
        total_steps: spec.total_steps(samples),
        warnings,
        spec,
    }))
}

/// A specification without a mistake.
#[derive(Debug)]
pub(super) struct Checked {
    pub(super) spec: JobSpec,
    pub(super) dataset: Dataset,
    /// What is worth a look before the job runs, in words.
    pub(super) warnings: Vec<String>,
}

/// The document's own mistakes, and those that only this server can know; of a job that `begins` at its first step also
/// whether the weights that it is to begin with fit.
pub(super) async fn check(app: &App, document: &Value, begins: bool) -> Result<Checked> {
    let (mut errors, mut not_looked_at) = (Vec::new(), None);
    let mut spec = match spec::from_json(document) {
        Ok(spec) => Some(spec),
        Err(found) => {
            errors = found;
            None
        }
    };
    let at = |pointer: &str, detail: String| SpecError { pointer: pointer.into(), detail };
    // Also of a document with other mistakes: people mend all at once.
    let name = document.pointer("/data/dataset").and_then(Value::as_str).unwrap_or_default();
    let datasets = app.store.datasets().await?;
    let dataset = datasets.iter().find(|d| d.name == name).cloned();
    if dataset.is_none() && !name.is_empty() {
        errors.push(at("/data/dataset", no_dataset(name, &datasets)));
    }
    if let (Some(spec), Some(dataset)) = (&mut spec, &dataset) {
        let given = document.pointer("/data/validation").is_some_and(|given| !given.is_null());
        submission::choose_validation(spec, dataset, given);
    }
    if let Some(spec) = &spec {
        errors.extend(slots_mistake(app, spec));
    }
    if let (Some(spec), Some(dataset)) = (&spec, &dataset) {
        errors.extend(dataset_mistakes(spec, dataset));
        if begins {
            match submission::pretrained(app, spec, dataset).await? {
                Weights::Fit => {}
                Weights::Mistake(mistake) => errors.push(mistake),
                Weights::NotLookedAt(warning) => not_looked_at = Some(warning),
            }
        }
    }
    match (spec, dataset) {
        (Some(spec), Some(dataset)) if errors.is_empty() => {
            let mut warnings = submission::warnings(&spec, &dataset);
            warnings.extend(not_looked_at);
            Ok(Checked { spec, dataset, warnings })
        }
        _ => Err(Error::Invalid(errors)),
    }
}

/// That none of `datasets` is called `name`, with the one that may be meant.
pub(super) fn no_dataset(name: &str, datasets: &[Dataset]) -> String {
    let names: Vec<_> = datasets.iter().map(|d| d.name.as_str()).collect();
    let known = match (nearest(name, names.iter().copied()), names.is_empty()) {
        (_, true) => "none is registered yet; add one with `lockstep dataset add NAME PATH`".to_owned(),
        (Some(near), _) => format!("did you mean {near:?}?"),
        (None, _) => format!("there are {}", names.join(", ")),
    };
    format!("no dataset is called {:?}; {known}", shortened(name))
}

fn slots_mistake(app: &App, spec: &JobSpec) -> Option<SpecError> {
    let online = app.agents.online();
    if online.is_empty() {
        return None;
    }
    let device = device_for(spec);
    let most = online.iter().map(|a| slots_for(&a.row.slots, device).len()).max().unwrap_or(0);
    if most >= spec.parallel.ranks as usize {
        return None;
    }
    if most == 0 {
        let (pointer, detail) = match (device, spec.parallel.device) {
            (Device::Cuda, Device::Auto) => (
                "/train/precision",
                "no machine online has a GPU, and CPU ranks compute in fp32; use fp32 or auto",
            ),
            (Device::Cuda, _) => (
                "/parallel/device",
                "no machine online has a GPU (a cuda slot); \"auto\" takes what there is",
            ),
            _ => ("/parallel/device", "no machine online has a slot"),
        };
        return Some(SpecError { pointer: pointer.into(), detail: detail.into() });
    }
    let unit = if device == Device::Cuda { "GPU" } else { "slot" };
    let detail = format!(
        "{} ranks, but the largest machine online has {most} {unit}{}; use at most {most}, or join a machine with more",
        spec.parallel.ranks,
        if most == 1 { "" } else { "s" }
    );
    Some(SpecError { pointer: "/parallel/ranks".into(), detail })
}

/// Training pictures after validation has taken its part.
pub(super) fn training_samples(spec: &JobSpec, dataset: &Dataset) -> u64 {
    let train = dataset.info.splits.iter().find(|s| s.name == "train").map_or(0, |s| s.samples);
    match spec.data.validation {
        Validation::Fraction(part) => {
            train - ((train as f64 * part).round() as u64).clamp(1.min(train), train)
        }
        Validation::Split(_) => train,
    }
}

fn dataset_mistakes(spec: &JobSpec, dataset: &Dataset) -> Vec<SpecError> {
    let mut errors = Vec::new();
    let mut mistake =
        |pointer: &str, detail: String| errors.push(SpecError { pointer: pointer.into(), detail });
    let info = &dataset.info;
    if let Validation::Split(name) = &spec.data.validation
        && name != "none"
        && !info.splits.iter().any(|s| s.name == *name)
    {
        let names: Vec<_> = info.splits.iter().map(|s| s.name.as_str()).filter(|n| *n != "train").collect();
        let why = if info.unlabelled.contains(name) { " that has labels" } else { "" };
        let there = if names.is_empty() { "only a training split".into() } else { names.join(", ") };
        mistake(
            "/data/validation",
            format!(
                "{} has no split {name:?}{why}; it has {there}. A fraction such as 0.1 holds pictures out of the training split",
                dataset.name
            ),
        );
    }
    if spec.data.image_size.is_none() && (info.height == 0 || info.height != info.width) {
        mistake(
            "/data/image_size",
            format!("is needed: the pictures of {} are of different sizes, or not square", dataset.name),
        );
    }
    if let (None, Some(validation)) = (&spec.data.image_size, spec.data.validation_size)
        && validation < info.height
    {
        let detail =
            format!("{validation} pixels are less than the pictures' own {0}; give {0} or more", info.height);
        mistake("/data/validation_size", detail);
    }
    for (pointer, values) in [("/data/mean", &spec.data.mean), ("/data/std", &spec.data.std)] {
        if let Some(values) = values
            && values.len() != 1
            && values.len() != info.channels as usize
        {
            mistake(
                pointer,
                format!(
                    "has {} values, but the pictures have {} channel{}",
                    values.len(),
                    info.channels,
                    if info.channels == 1 { "" } else { "s" }
                ),
            );
        }
    }
    let samples = training_samples(spec, dataset);
    if spec.data.drop_remainder && samples < spec.global_batch_size() {
        let pointer = if spec.train.global_batch_size.is_some() {
            "/train/global_batch_size"
        } else {
            "/train/batch_size"
        };
        mistake(
            pointer,
            format!(
                "one step takes {} pictures over all ranks, but {} has {samples} to train on",
                spec.global_batch_size(),
                dataset.name
            ),
        );
    }
    errors
}

/// List jobs
#[utoipa::path(get, path = "/jobs", tag = "jobs", params(ListQuery),
    responses((status = 200, body = JobList), (status = 400, body = Problem), (status = 422, body = Problem)))]
pub(crate) async fn list(State(app): State<App>, Query(query): Query<ListQuery>) -> Result<Json<JobList>> {
    let page = app.store.jobs(&query.filter()?).await?;
    Ok(Json(JobList { jobs: page.jobs, next: page.next.map(|id| id.to_string()) }))
}

/// One job.
///
/// # Errors
/// 404 when there is none.
pub(crate) async fn find(app: &App, id: &str) -> Result<Job> {
    let row = app.store.job(&job_id(id)?).await?;
    row.map(|row| row.job).ok_or_else(|| Error::NotFound("no job has this id".into()))
}

/// Show a job
#[utoipa::path(get, path = "/jobs/{id}", tag = "jobs", params(("id" = String, Path)), responses((status = 200, body = Job), (status = 404, body = Problem)))]
pub(crate) async fn show(State(app): State<App>, Path(id): Path<String>) -> Result<Json<Job>> {
    Ok(Json(find(&app, &id).await?))
}

/// Cancel a job
///
/// A queued one is cancelled at once; ranks that run are ended first.
#[utoipa::path(post, path = "/jobs/{id}/cancel", tag = "jobs", params(("id" = String, Path)),
    responses((status = 202, body = Job), (status = 404, body = Problem), (status = 409, body = Problem, description = "It is over already")))]
pub(crate) async fn cancel(
    State(app): State<App>,
    Path(id): Path<String>,
) -> Result<(StatusCode, Json<Job>)> {
    let job = dispatch::stop(&app, &job_id(&id)?, Wish::Cancel).await?;
    Ok((StatusCode::ACCEPTED, Json(job)))
}

/// Pause a job
///
/// Its ranks finish their step, keep a checkpoint of it and free their slots; a waiting one pauses at once.
#[utoipa::path(post, path = "/jobs/{id}/pause", tag = "jobs", params(("id" = String, Path)),
    responses((status = 202, body = Job), (status = 404, body = Problem), (status = 409, body = Problem, description = "It neither waits nor runs")))]
pub(crate) async fn pause(State(app): State<App>, Path(id): Path<String>) -> Result<(StatusCode, Json<Job>)> {
    let job = dispatch::stop(&app, &job_id(&id)?, Wish::Pause).await?;
    Ok((StatusCode::ACCEPTED, Json(job)))
}

/// Resume a paused job
///
/// As its next attempt, from its newest checkpoint: the weights are those of never having paused.
#[utoipa::path(post, path = "/jobs/{id}/resume", tag = "jobs", params(("id" = String, Path)),
    responses((status = 202, body = Job), (status = 404, body = Problem), (status = 409, body = Problem, description = "It is not paused"),
        (status = 422, body = Problem, description = "Its dataset is not registered, or was registered anew and does not fit its newest checkpoint")))]
pub(crate) async fn resume(
    State(app): State<App>,
    Path(id): Path<String>,
) -> Result<(StatusCode, Json<Job>)> {
    fit::check_newest(&app, &find(&app, &id).await?).await?;
    let at = crate::now();
    let changed =
        app.store.change_job(&job_id(&id)?, Box::new(move |row| lifecycle::resume(row, at))).await?;
    app.announce(&changed);
    Ok((StatusCode::ACCEPTED, Json(changed.job)))
}

/// Run a finished job again
///
/// As its next attempt, from its newest checkpoint.
#[utoipa::path(post, path = "/jobs/{id}/retry", tag = "jobs", params(("id" = String, Path)),
    responses((status = 202, body = Job), (status = 404, body = Problem), (status = 409, body = Problem, description = "It is not over"),
        (status = 422, body = Problem, description = "Its dataset is not registered, or was registered anew and does not fit its newest checkpoint")))]
pub(crate) async fn retry(State(app): State<App>, Path(id): Path<String>) -> Result<(StatusCode, Json<Job>)> {
    fit::check_newest(&app, &find(&app, &id).await?).await?;
    let at = crate::now();
    let changed = app.store.change_job(&job_id(&id)?, Box::new(move |row| lifecycle::retry(row, at))).await?;
    app.announce(&changed);
    Ok((StatusCode::ACCEPTED, Json(changed.job)))
}

/// Whether this version understands all of a job: what it would make of one that it does not were another job.
///
/// # Errors
/// What it does not understand.
pub(super) fn check_readable(job: &Job) -> Result<()> {
    match &job.unreadable {
        None => Ok(()),
        Some(flaw) => {
            let detail = format!(
                "the job was stored by another version of lockstep ({flaw}): what this one would take it for is another job"
            );
            Err(Error::Conflict(detail, Some(job.state)))
        }
    }
}

/// Delete a job
///
/// With its events and checkpoints. One that is not over is refused: cancel it first.
#[utoipa::path(delete, path = "/jobs/{id}", tag = "jobs", params(("id" = String, Path)),
    responses((status = 204), (status = 404, body = Problem), (status = 409, body = Problem)))]
pub(crate) async fn delete(State(app): State<App>, Path(id): Path<String>) -> Result<StatusCode> {
    let id = job_id(&id)?;
    // The files go with the rows (`purge.rs`).
    to_the_end(async move {
        app.store.delete_job(&id).await?;
        app.deleted.notify_one();
        app.hub.deleted(&id);
        Ok(StatusCode::NO_CONTENT)
    })
    .await
}
