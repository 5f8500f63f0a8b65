//! Checkpoints: their list, and their files with ranges and checksums.

use super::{
    conditional::{self, CACHING, tagged},
    extract::{Path, Query},
    list::{Elements, List, ListParams, Page},
};
use crate::{
    app::App,
    artifact_fetches,
    artifact_store::{Fetch, NotFetched, StoredState},
    artifacts,
    error::{Code, Error, Problem, Result},
    handlers::jobs,
    regular,
    store::CheckpointRow,
};
use axum::{
    Json,
    body::Body,
    extract::State,
    http::{HeaderMap, HeaderValue, Request, StatusCode, header},
    response::{IntoResponse, Response},
};
use jiff::Timestamp;
use lockstep_protocol::agent::CheckpointInfo;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tower_http::services::ServeFile;
use utoipa::ToSchema;

/// The files of a checkpoint; nothing else in its folder is served.
const FILES: [&str; 5] =
    ["model.safetensors", "ema.safetensors", "optimizer.safetensors", "state.json", "MANIFEST.json"];

/// Which weights of a checkpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Weights {
    /// Those that training continues from.
    #[default]
    Model,
    /// Their running average, of a job with `train.ema_decay`.
    Ema,
}

impl Weights {
    /// The path by which an agent opens these weights of the checkpoint in `folder`.
    ///
    /// # Errors
    /// The checkpoint is gone, is no folder of files, or has no average.
    pub(super) fn path(self, folder: &std::path::Path) -> Result<std::path::PathBuf> {
        if !folder.exists() {
            return Err(removed());
        }
        check_regular(&folder.join(FILES[0]))?;
        if self == Weights::Model {
            return Ok(folder.into());
        }
        let path = folder.join(FILES[1]);
        if !path.exists() {
            return Err(no_average());
        }
        check_regular(&path)?;
        Ok(path)
    }
}

fn no_average() -> Error {
    let detail = "this checkpoint has no averaged weights: its job had no train.ema_decay, or no step whose weights \
                  were averaged; leave weights=ema out";
    Error::NotFound(detail.into())
}

/// A job's checkpoints.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct CheckpointList {
    /// Newest first, unless `sort` says otherwise.
    #[schema(value_type = Vec<Checkpoint>)]
    checkpoints: Elements<Checkpoint>,
    /// Give it as `cursor` for the next page; null on the last.
    next_cursor: Option<String>,
    /// With `count=true`: checkpoints on all pages together.
    #[serde(skip_serializing_if = "Option::is_none")]
    total: Option<u64>,
}

impl From<Page<Checkpoint>> for CheckpointList {
    fn from(page: Page<Checkpoint>) -> Self {
        Self { checkpoints: page.elements, next_cursor: page.next_cursor, total: page.total }
    }
}

const LIST: List<Checkpoint> = List {
    name: "checkpoints",
    fields: &[
        "id",
        "attempt",
        "epoch",
        "step",
        "val_accuracy",
        "val_loss",
        "best",
        "size_bytes",
        "created_at",
        "uploading_from",
        "stored",
    ],
    sorts: &[
        ("step", |checkpoint| Some(checkpoint.info.step as f64).into()),
        ("created", |checkpoint| checkpoint.created_at.into()),
        ("val_accuracy", |checkpoint| checkpoint.info.val_accuracy.into()),
        ("val_loss", |checkpoint| checkpoint.info.val_loss.into()),
        ("size", |checkpoint| Some(checkpoint.info.size_bytes as f64).into()),
    ],
    default_sort: "-step",
    id: |checkpoint| &checkpoint.id,
    created: Some(|checkpoint| checkpoint.created_at),
};

/// A complete checkpoint.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Checkpoint {
    id: String,
    attempt: u32,
    #[serde(flatten)]
    info: CheckpointInfo,
    #[schema(value_type = String)]
    created_at: Timestamp,
    /// The machine that it is still being uploaded from; until that is done its files cannot be had.
    #[serde(skip_serializing_if = "Option::is_none")]
    uploading_from: Option<String>,
    /// Where the server keeps checkpoints in an object store, too (`serve --artifacts`): whether it is there.
    #[serde(skip_serializing_if = "Option::is_none")]
    stored: Option<StoredState>,
}

/// A checkpoint with its files.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct CheckpointDetail {
    #[serde(flatten)]
    checkpoint: Checkpoint,
    job: String,
    /// Size and sha256 of each file, from its `MANIFEST.json`.
    files: Value,
}

impl Checkpoint {
    fn of(app: &App, row: CheckpointRow) -> Self {
        let uploading_from = artifacts::on_its_way(app, &row).into_iter().next().map(|holder| holder.agent);
        let stored = artifacts::stored_state(app, &row);
        let CheckpointRow { id, attempt, info, created_at, .. } = row;
        Self { id, attempt, info, created_at, uploading_from, stored }
    }
}

/// A job's checkpoints
///
/// `sort`: `step`, `created`, `val_accuracy`, `val_loss`, `size`; `-step` when absent.
#[utoipa::path(get, path = "/jobs/{id}/checkpoints", tag = "checkpoints", params(("id" = String, Path), ListParams),
    responses((status = 200, body = CheckpointList), (status = 304, description = "What `If-None-Match` names"), (status = 400, body = Problem), (status = 404, body = Problem)))]
pub(crate) async fn list(
    State(app): State<App>,
    Path(id): Path<String>,
    headers: HeaderMap,
    Query(params): Query<ListParams>,
) -> Result<Response> {
    let job = jobs::find(&app, &id).await?;
    let rows = app.store.checkpoints(&job.id).await?;
    let rows = rows.into_iter().map(|row| Checkpoint::of(&app, row)).collect();
    tagged(&headers, &CheckpointList::from(LIST.page_of_job(&job.id, rows, &params)?))
}

/// One checkpoint
#[utoipa::path(get, path = "/checkpoints/{id}", tag = "checkpoints", params(("id" = String, Path)),
    responses((status = 200, body = CheckpointDetail), (status = 404, body = Problem),
        (status = 409, body = Problem, description = "It is still being uploaded from another machine"),
        (status = 422, body = Problem, description = "Its manifest is damaged")))]
pub(crate) async fn show(State(app): State<App>, Path(id): Path<String>) -> Result<Json<CheckpointDetail>> {
    let row = find(&app, &id).await?;
    let files = manifest(&app, &row).await?.get("files").cloned().unwrap_or_default();
    Ok(Json(CheckpointDetail { job: row.job.to_string(), checkpoint: Checkpoint::of(&app, row), files }))
}

/// A file of a checkpoint
///
/// `Range`, `If-Range` and `If-None-Match` are honoured. `ETag` and `x-checksum-sha256` hold the file's checksum from the
/// manifest.
#[utoipa::path(get, path = "/checkpoints/{id}/{file}", tag = "checkpoints",
    params(("id" = String, Path), ("file" = String, Path, description = "model.safetensors, ema.safetensors (of jobs with train.ema_decay), optimizer.safetensors, state.json or MANIFEST.json")),
    responses((status = 200, content((Vec<u8> = "application/octet-stream"), (Object = "application/json"))),
        (status = 206, content((Vec<u8> = "application/octet-stream"), (Object = "application/json")), description = "The range that was asked for"),
        (status = 304, description = "What `If-None-Match` names"), (status = 404, body = Problem),
        (status = 409, body = Problem, description = "It is still being uploaded from another machine"), (status = 416, description = "There is no such range"),
        (status = 422, body = Problem, description = "Its manifest is damaged, or this is no regular file")))]
pub(crate) async fn file(
    State(app): State<App>,
    Path((id, file)): Path<(String, String)>,
    mut request: Request<Body>,
) -> Result<Response> {
    let Some(name) = FILES.into_iter().find(|name| *name == file) else {
        return Err(Error::NotFound(format!("a checkpoint has the files {}", FILES.join(", "))));
    };
    let row = find(&app, &id).await?;
    let manifest = manifest(&app, &row).await?;
    let checksum =
        manifest.pointer(&format!("/files/{name}/sha256")).and_then(Value::as_str).map(str::to_owned);
    let tag = checksum.as_ref().map(|checksum| format!("\"{checksum}\""));
    if let Some(tag) = &tag {
        if conditional::is_known(request.headers(), tag) {
            let about = [(header::ETAG, tag.clone()), (header::CACHE_CONTROL, CACHING.into())];
            return Ok((StatusCode::NOT_MODIFIED, about).into_response());
        }
        if !conditional::range_counts(request.headers(), tag) {
            request.headers_mut().remove(header::RANGE);
        }
        // A client that sends a tag means that, and not the time.
        if request.headers().contains_key(header::IF_NONE_MATCH) {
            request.headers_mut().remove(header::IF_MODIFIED_SINCE);
        }
    }
    if name == FILES[1] && checksum.is_none() {
        return Err(no_average());
    }
    let path = folder(&app, &row).join(name);
    check_regular(&path)?;
    let mut response = ServeFile::new(path).try_call(request).await?.map(Body::new).into_response();
    if response.status() == StatusCode::NOT_FOUND {
        return Err(removed());
    }
    let headers = response.headers_mut();
    if let (Some(checksum), Some(tag)) = (checksum, tag) {
        for (key, value) in
            [("x-checksum-sha256", checksum), ("etag", tag), ("cache-control", CACHING.to_owned())]
        {
            let value = HeaderValue::from_str(&value).map_err(|e| Error::Internal(e.to_string()))?;
            headers.insert(key, value);
        }
    }
    let kind = if name.ends_with(".json") { "application/json" } else { "application/octet-stream" };
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    if !name.ends_with(".json") {
        let attachment = format!("attachment; filename=\"{}-{}-{name}\"", row.info.epoch, row.info.step);
        headers.insert(
            header::CONTENT_DISPOSITION,
            HeaderValue::from_str(&attachment).map_err(|e| Error::Internal(e.to_string()))?,
        );
    }
    Ok(response)
}

pub(super) async fn find(app: &App, id: &str) -> Result<CheckpointRow> {
    app.store.checkpoint(id).await?.ok_or_else(|| Error::NotFound("no checkpoint has this id".into()))
}

/// The checkpoint of a job that a person names: `best`, `latest`, its id, or its number of steps.
///
/// # Errors
/// There is none, or none like that.
pub(super) fn choose(rows: Vec<CheckpointRow>, wanted: &str) -> Result<CheckpointRow> {
    if rows.is_empty() {
        return Err(Error::NotFound("this job has no checkpoint yet".into()));
    }
    // Newest first; a job without validation has no best one.
    let found = match wanted {
        "latest" => rows.first(),
        "best" => rows.iter().find(|r| r.info.best).or(rows.first()),
        id => rows.iter().find(|r| r.id == id || r.info.step.to_string() == id),
    };
    found.cloned().ok_or_else(|| {
        Error::NotFound(format!("this job has no checkpoint {wanted:?}: give best, latest, an id or a step"))
    })
}

/// Refuses what needs the files of a checkpoint that is still on its way from another machine, and fetches them from the object store
/// where this disk has them no more, or files of it are missing or cut off.
///
/// # Errors
/// It is on its way, or cannot be fetched.
pub(super) async fn check_here(app: &App, row: &CheckpointRow) -> Result<()> {
    if let Some(holder) = artifacts::on_its_way(app, row).into_iter().next() {
        return Err(Error::Conflict(
            format!(
                "this checkpoint is still being uploaded from {}; ask again, or use an older one",
                holder.agent
            ),
            None,
        ));
    }
    let fetch = match artifact_fetches::fetch(app, row) {
        None => artifact_fetches::mend(app, row).await,
        fetch => fetch,
    };
    match fetch {
        Some(fetch) => fetched(app, fetch).await,
        None => Ok(()),
    }
}

/// Waits for a checkpoint that is fetched from the object store.
///
/// # Errors
/// It cannot be fetched, or takes long.
pub(super) async fn fetched(app: &App, fetch: Fetch) -> Result<()> {
    match artifact_fetches::wait(fetch, app.config.evaluation_wait).await {
        Some(Ok(())) => Ok(()),
        Some(Err(NotFetched::Missing)) => Err(removed()),
        Some(Err(NotFetched::Damaged(how))) => Err(damaged(format!("{how}, as the object store has it"))),
        Some(Err(NotFetched::Away(why))) => Err(Error::Unavailable(format!(
            "this checkpoint is in the object store, which cannot be asked now ({why}); try again later"
        ))),
        Some(Err(NotFetched::Disk(why))) => Err(Error::Unavailable(format!(
            "this checkpoint cannot be fetched from the object store: the server's disk does not take it ({why})"
        ))),
        None => Err(Error::Unavailable(
            "this checkpoint is being fetched from the object store; ask again in a moment".into(),
        )),
    }
}

pub(super) fn removed() -> Error {
    Error::NotFound(
        "this checkpoint's files are gone: it was removed to keep the newest ones, or by someone".into(),
    )
}

/// From what the database holds of it, never from a request.
pub(super) fn folder(app: &App, row: &CheckpointRow) -> std::path::PathBuf {
    app.job_dir(&row.job).join("checkpoints").join(format!("{}-{}", row.info.epoch, row.info.step))
}

async fn manifest(app: &App, row: &CheckpointRow) -> Result<Value> {
    check_here(app, row).await?;
    let path = folder(app, row).join("MANIFEST.json");
    check_regular(&path)?;
    let text = regular::read(&path).await.map_err(|_| removed())?;
    serde_json::from_slice(&text).map_err(|e| damaged(format!("its MANIFEST.json is no JSON ({e})")))
}

/// Whether a file of a checkpoint can be opened without waiting for anybody. One that is missing is found out later.
///
/// # Errors
/// It is a pipe, a socket, a device or a folder.
pub(super) fn check_regular(path: &std::path::Path) -> Result<()> {
    match path.metadata() {
        Ok(about) if !about.is_file() => {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            Err(damaged(format!("its {name} is no regular file")))
        }
        _ => Ok(()),
    }
}

/// `how`: what is wrong, as in `its state.json is missing`.
pub(super) fn damaged(how: String) -> Error {
    let detail = format!("this checkpoint is damaged: {how}; use another one");
    Error::Of(Code::CheckpointDamaged, detail)
}
