//! Checkpoints: list and show.

pub(crate) mod evaluation;
pub(crate) mod files;
pub(crate) mod fork;
pub(crate) mod predict;

use super::list::{List, ListParams, list_of};
use crate::api::prelude::*;
use crate::{
    api::jobs,
    checkpoints::{
        Checkpoints, object_store_fetches,
        object_store_state::{Fetch, FetchError},
    },
    config::ServeConfig,
    http::{conditional::json_with_etag, error::Code},
    scheduler::Scheduler,
    store::{CheckpointRow, Store},
    util::{if_exists, regular_files},
};
use axum::http::HeaderMap;
use lockstep_protocol::{
    JobId,
    checkpoint::Checkpoint,
    checkpoint_files::{self, AVERAGE, MANIFEST, MODEL, STATE},
};
use serde_json::Value;
use std::{
    fmt::Display,
    io::{self, ErrorKind},
};

/// Whether a checkpoint may have a file of this name. Other files in a checkpoint's folder are not served.
pub(super) fn is_checkpoint_file(name: &str) -> bool {
    [STATE, MANIFEST].contains(&name) || checkpoint_files::kind_of(name).is_some()
}

/// A choice of weights of a checkpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Weights {
    /// The weights from which training continues.
    #[default]
    Model,
    /// The moving average of the weights, for jobs with `train.ema_decay`.
    Ema,
}

impl Weights {
    /// Returns the path from which an agent reads these weights of the checkpoint in `folder`: the folder itself for [`Weights::Model`], the
    /// file of the average for [`Weights::Ema`].
    ///
    /// # Errors
    /// The checkpoint was removed, the weights are not a regular file, or the checkpoint has no average.
    pub(super) fn path(self, folder: &std::path::Path) -> Result<std::path::PathBuf> {
        if !folder.exists() {
            return Err(removed_error());
        }
        check_regular(&folder.join(MODEL))?;
        if self == Weights::Model {
            return Ok(folder.into());
        }
        let path = folder.join(AVERAGE);
        // The agent finds the parts of sharded weights with the index.
        if !path.exists() && !folder.join(checkpoint_files::index_name(AVERAGE)).exists() {
            return Err(no_average_error());
        }
        check_regular(&path)?;
        Ok(path)
    }
}

pub(super) fn no_average_error() -> Error {
    let detail = "this checkpoint has no averaged weights: its job had no train.ema_decay, or had not reached the first averaged step; \
                  leave out weights=ema (on the command line, --weights ema)";
    Error::NotFound(detail.into())
}

list_of! {
    /// A job's checkpoints.
    CheckpointList
    /// Newest first, unless `sort` is given.
    checkpoints: Checkpoint
}

const LIST: List<Checkpoint> = List {
    name: "checkpoints",
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

/// A checkpoint with its files.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct CheckpointDetail {
    #[serde(flatten)]
    checkpoint: Checkpoint,
    job: String,
    /// Size and SHA-256 of each file, from `MANIFEST.json`.
    files: Value,
}

/// List a job's checkpoints
///
/// `sort`: `step`, `created`, `val_accuracy`, `val_loss`, `size` (default `-step`).
#[utoipa::path(get, path = "/jobs/{id}/checkpoints", tag = "checkpoints", params(("id" = String, Path), ListParams),
    responses((status = 200, body = CheckpointList), (status = 304, description = "The list is unchanged since the response whose `ETag` is in `If-None-Match`")))]
pub(crate) async fn list(
    State(scheduler): State<Arc<Scheduler>>,
    Path(id): Path<String>,
    headers: HeaderMap,
    Query(params): Query<ListParams>,
) -> Result<Response> {
    let job = jobs::find(&scheduler, &id).await?;
    let checkpoints = of_job(&scheduler.checkpoints, &job.id).await?;
    json_with_etag(&headers, &CheckpointList::from(LIST.page(Some(&job.id), checkpoints, &params)?))
}

/// Returns a job's checkpoints, newest first.
pub(super) async fn of_job(checkpoints: &Checkpoints, job: &JobId) -> Result<Vec<Checkpoint>> {
    // The rows are read first, so each row's copies are known.
    let rows = checkpoints.store.checkpoints(job).await?;
    let copies = checkpoints.copies(job).await?;
    let describe = |row: CheckpointRow| {
        let copies = copies.of(&row.id);
        checkpoints.describe(row, copies)
    };
    Ok(rows.into_iter().map(describe).collect())
}

/// Show a checkpoint
#[utoipa::path(get, path = "/checkpoints/{id}", tag = "checkpoints", responses((status = 200, body = CheckpointDetail),
        (status = 409, body = Problem, description = "The checkpoint is still being uploaded from another machine"),
        (status = 422, body = Problem, description = "The checkpoint's manifest is damaged")))]
pub(crate) async fn show(
    State(checkpoints): State<Arc<Checkpoints>>,
    Path(id): Path<String>,
) -> Result<Json<CheckpointDetail>> {
    let row = find(&*checkpoints.store, &id).await?;
    let files = read_manifest(&checkpoints, &row).await?.get("files").cloned().unwrap_or_default();
    let copies = checkpoints.copies_of(&row).await?;
    Ok(Json(CheckpointDetail {
        job: row.job.to_string(),
        checkpoint: checkpoints.describe(row, &copies),
        files,
    }))
}

pub(super) async fn find(store: &dyn Store, id: &str) -> Result<CheckpointRow> {
    store.checkpoint(id).await?.ok_or_else(|| Error::NotFound("no checkpoint has this id".into()))
}

/// Chooses a checkpoint of a job: `best`, `latest`, a checkpoint's id, or its step.
pub(super) fn choose(rows: Vec<CheckpointRow>, requested: &str) -> Result<CheckpointRow> {
    if rows.is_empty() {
        return Err(Error::NotFound("this job has no checkpoint yet".into()));
    }
    find_named(&rows, requested).cloned().ok_or_else(|| {
        Error::NotFound(format!(
            "this job has no checkpoint {requested:?}: give best, latest, an id or a step"
        ))
    })
}

/// Finds a checkpoint in `rows`, which are ordered newest first. For a job without validation, `best` is the newest checkpoint.
fn find_named<'a>(rows: &'a [CheckpointRow], requested: &str) -> Option<&'a CheckpointRow> {
    match requested {
        "latest" => rows.first(),
        "best" => rows.iter().find(|row| row.info.best).or(rows.first()),
        id => rows.iter().find(|row| row.id == id || row.info.step.to_string() == id),
    }
}

/// Makes sure that the files of a checkpoint are on the server's disk. Fetches the checkpoint from the object store if files are missing
/// or truncated.
///
/// # Errors
/// The checkpoint is still being uploaded from another machine, or cannot be fetched.
pub(super) async fn ensure_on_disk(checkpoints: &Arc<Checkpoints>, row: &CheckpointRow) -> Result<()> {
    let copies = checkpoints.copies_of(row).await?;
    if let Some(holder) = checkpoints.holders_unless_on_server(row, &copies).into_iter().next() {
        return Err(Error::Conflict(format!(
            "this checkpoint is still being uploaded from {}; ask again, or use an older checkpoint",
            holder.agent
        )));
    }
    let fetch = match object_store_fetches::fetch(checkpoints, row, &copies) {
        None => object_store_fetches::fetch_if_incomplete(checkpoints, row, &copies).await,
        fetch => fetch,
    };
    match fetch {
        Some(fetch) => await_fetch(&checkpoints.config, row, fetch).await,
        // A missing file is found later.
        None => if_exists(tokio::fs::metadata(checkpoints.folder(row).join(MANIFEST)).await)
            .map(drop)
            .map_err(|error| read_error(&error)),
    }
}

/// Waits until a checkpoint is fetched from the object store.
pub(super) async fn await_fetch(config: &ServeConfig, row: &CheckpointRow, fetch: Fetch) -> Result<()> {
    match object_store_fetches::wait(fetch, config.response_wait).await {
        Some(Ok(())) => Ok(()),
        Some(Err(FetchError::Missing)) => Err(removed_error()),
        Some(Err(FetchError::Damaged(how))) => Err(damaged_error(
            format_args!("checkpoint {}", row.id),
            &format!("{how}, also in the object store"),
        )),
        Some(Err(FetchError::ObjectStoreUnavailable(why))) => Err(Error::Unavailable(format!(
            "checkpoint {} is in the object store, which cannot be reached now ({why}); try again later",
            row.id
        ))),
        Some(Err(FetchError::Disk(why))) => Err(Error::Unavailable(format!(
            "checkpoint {} cannot be fetched from the object store: the server cannot write to its disk ({why})",
            row.id
        ))),
        None => Err(Error::Unavailable(format!(
            "checkpoint {} is being fetched from the object store; ask again in a moment",
            row.id
        ))),
    }
}

/// The error for files of a checkpoint that cannot be opened.
fn read_error(error: &io::Error) -> Error {
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory => removed_error(),
        _ => Error::Unavailable(format!(
            "the server cannot read this checkpoint's files ({error}): check the disk, and that the server's account may read the folder \
             jobs in its data directory"
        )),
    }
}

pub(super) fn removed_error() -> Error {
    Error::NotFound(
        "this checkpoint's files no longer exist: a user removed the checkpoint, only newer ones were kept, or the files were not \
         restored with the database. Choose another checkpoint, or copy the earlier server's folder `jobs` into the data directory"
            .into(),
    )
}

/// Reads the manifest of a checkpoint, which may be fetched from the object store first.
pub(super) async fn read_manifest(checkpoints: &Arc<Checkpoints>, row: &CheckpointRow) -> Result<Value> {
    ensure_on_disk(checkpoints, row).await?;
    let path = checkpoints.folder(row).join(MANIFEST);
    check_regular(&path)?;
    let json = regular_files::read(&path).await.map_err(|error| read_error(&error))?;
    serde_json::from_slice(&json).map_err(|e| {
        damaged_error(format_args!("checkpoint {}", row.id), &format!("its MANIFEST.json is not JSON ({e})"))
    })
}

/// Checks that a file of a checkpoint can be opened without blocking. A missing file is not an error here.
///
/// # Errors
/// The file is a pipe, a socket, a device or a folder.
pub(super) fn check_regular(path: &std::path::Path) -> Result<()> {
    match path.metadata() {
        Ok(metadata) if !metadata.is_file() => {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            Err(damaged_error("this checkpoint", &format!("its {name} is not a regular file")))
        }
        _ => Ok(()),
    }
}

/// Returns the error for a damaged checkpoint. `how` describes the damage, as in `its state.json is missing`.
pub(super) fn damaged_error(which: impl Display, how: &str) -> Error {
    let detail = format!("{which} is damaged: {how}; use another checkpoint");
    Error::WithCode(Code::CheckpointDamaged, detail)
}
