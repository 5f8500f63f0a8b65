//! Files of runs from elsewhere: programs upload, list, download and delete them. `mlflow/artifacts.rs` has the calls of MLflow's clients.

use crate::api::prelude::*;
use crate::{
    api::{jobs, run_to_completion},
    auth::Auth,
    config::ServeConfig,
    http::{
        attachment::attachment,
        conditional,
        error::{disk_error, run_blocking},
    },
    ingest::{
        run_files::{FileError, RunFiles, check_size},
        runs::Runs,
    },
    util::disk_space::{SPARE_BYTES, check_space},
};
use axum::{
    body::Body,
    http::{HeaderValue, Request},
};
use futures_util::StreamExt;
use lockstep_protocol::{JobId, job::RunFile};
use tokio::io::AsyncWriteExt;
use tower_http::services::ServeFile;

/// Number of received bytes of a file between two checks of the disk's free space.
const CHECK_BYTES: usize = 8 << 20;

/// Selects a file of a run.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct FileQuery {
    /// The file's path within the run, such as `weights/model.safetensors`.
    path: String,
}

/// Parameters of the upload of a file.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct UploadQuery {
    /// The file's path within the run: names separated by `/`, at most 1000 bytes.
    path: String,
    /// Time of the file's last change, in milliseconds since 1970 (default: now).
    modified_ms: Option<u64>,
}

/// The files of a run.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct FilesOfRun {
    /// Ordered by path.
    files: Vec<RunFile>,
}

/// Returns the job id of a run from elsewhere. `id` is the job's id, or the id that the program chose.
///
/// # Errors
/// The job does not exist, or is no run from elsewhere and so has no files.
async fn find_run(auth: &Auth, caller: &Caller, id: &str) -> Result<JobId> {
    let id = auth.run_id(caller, id);
    let job = jobs::find_row(&*auth.store, &id).await?.job;
    match job.external {
        Some(_) => Ok(id),
        None => {
            let detail = "this server's ranks train the job; only runs from elsewhere have files";
            Err(Error::WrongState(detail.into(), job.state))
        }
    }
}

pub(super) fn run_files(config: &ServeConfig, job: &JobId) -> RunFiles {
    RunFiles::of(config.job_dir(job))
}

fn refusal(why: FileError) -> Error {
    match why {
        FileError::Path(detail) => Error::BadRequest(detail),
        FileError::Taken(detail) => Error::Conflict(detail),
        FileError::Full(detail) => Error::Refused(StatusCode::PAYLOAD_TOO_LARGE, detail),
        FileError::Io(error) => disk_error(&error),
    }
}

/// List the files of a run
#[utoipa::path(get, path = "/runs/{id}/files", tag = "runs", params(("id" = String, Path, description = "Id of the job, or the id that the program chose")),
    responses((status = 200, body = FilesOfRun), (status = 409, body = Problem, description = "The server's own ranks train the job")))]
pub(crate) async fn list(
    State(config): State<Arc<ServeConfig>>,
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<FilesOfRun>> {
    let files = run_files(&config, &find_run(&auth, &caller, &id).await?);
    Ok(Json(FilesOfRun { files: list_files(files).await? }))
}

/// Returns all files of a run.
pub(super) async fn list_files(files: RunFiles) -> Result<Vec<RunFile>> {
    Ok(run_blocking(move || files.list()).await??)
}

/// Upload a file of a run
///
/// The body is the file. A file with the same path is replaced.
#[utoipa::path(put, path = "/runs/{id}/file", tag = "runs", params(("id" = String, Path, description = "Id of the job, or the id that the program chose"), UploadQuery),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"), responses((status = 200, body = RunFile),
        (status = 409, body = Problem, description = "The server's own ranks train the job, or a folder has this path"),
        (status = 413, body = Problem, description = "The run has too many files, or they are too large"),
        (status = 507, body = Problem, description = "The server's disk is full")))]
pub(crate) async fn upload(
    State(config): State<Arc<ServeConfig>>,
    State(runs): State<Arc<Runs>>,
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    Query(query): Query<UploadQuery>,
    request: Request<Body>,
) -> Result<Json<RunFile>> {
    let id = find_run(&auth, &caller, &id).await?;
    let body = runs.observe_body(&id, request.into_body());
    Ok(Json(store_file(run_files(&config, &id), query.path, query.modified_ms, body).await?))
}

/// Stores a file while it is received.
///
/// # Errors
/// The file does not fit into the run, the body is incomplete, or the disk cannot be written.
pub(super) async fn store_file(
    files: RunFiles,
    path: String,
    modified_ms: Option<u64>,
    body: Body,
) -> Result<RunFile> {
    let (files_of_run, path_of_file) = (files.clone(), path.clone());
    let prepared = run_blocking(move || {
        Ok::<_, FileError>((files_of_run.max_size(&path_of_file)?, files_of_run.create_incoming()?))
    });
    let (max_bytes, incoming) = prepared.await?.map_err(refusal)?;
    let mut file = tokio::fs::File::create(incoming.path()).await.map_err(|e| disk_error(&e))?;
    let (mut parts, mut size_bytes, mut unchecked_bytes) = (body.into_data_stream(), 0, 0);
    while let Some(part) = parts.next().await {
        let part =
            part.map_err(|e| Error::BadRequest(format!("the file was not received completely: {e}")))?;
        size_bytes += part.len() as u64;
        check_size(size_bytes, max_bytes).map_err(refusal)?;
        unchecked_bytes += part.len();
        if unchecked_bytes >= CHECK_BYTES {
            check_space(incoming.path(), 0, SPARE_BYTES).map_err(|e| disk_error(&e))?;
            unchecked_bytes = 0;
        }
        file.write_all(&part).await.map_err(|e| disk_error(&e))?;
    }
    // Reports an error of the last write, which `sync_data` drops.
    file.flush().await.map_err(|e| disk_error(&e))?;
    file.sync_data().await.map_err(|e| disk_error(&e))?;
    run_blocking(move || files.put(&path, incoming, size_bytes, modified_ms)).await?.map_err(refusal)
}

/// Download a file of a run
///
/// The headers `Range` and `If-Modified-Since` are supported.
#[utoipa::path(get, path = "/runs/{id}/file", tag = "runs", params(("id" = String, Path, description = "Id of the job, or the id that the program chose"), FileQuery),
    responses((status = 200, content_type = "application/octet-stream", body = Vec<u8>),
        (status = 206, content_type = "application/octet-stream", body = Vec<u8>, description = "The requested range"),
        (status = 304, description = "The file has not changed"),
        (status = 409, body = Problem, description = "The server's own ranks train the job"), (status = 416, description = "There is no such range")))]
pub(crate) async fn download(
    State(config): State<Arc<ServeConfig>>,
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    Query(query): Query<FileQuery>,
    request: Request<Body>,
) -> Result<Response> {
    send_file(&run_files(&config, &find_run(&auth, &caller, &id).await?), &query.path, request).await
}

/// Returns the response with a file. Browsers save the file and do not show it, because the file could contain scripts.
pub(super) async fn send_file(files: &RunFiles, path: &str, mut request: Request<Body>) -> Result<Response> {
    let disk_path = files.disk_path(path).map_err(refusal)?;
    let missing = || Error::NotFound("the run has no such file; GET /api/v1/runs/ID/files lists them".into());
    // A folder could be opened, too.
    if !tokio::fs::metadata(&disk_path).await.is_ok_and(|metadata| metadata.is_file()) {
        return Err(missing());
    }
    conditional::keep_one_range(request.headers_mut());
    let mut response = ServeFile::new(disk_path).try_call(request).await?.map(Body::new).into_response();
    if response.status() == StatusCode::NOT_FOUND {
        return Err(missing());
    }
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static(conditional::CACHING));
    headers.insert(header::CONTENT_DISPOSITION, attachment(path.rsplit('/').next().unwrap_or(path)));
    Ok(response)
}

/// Delete a file of a run
///
/// If the path is a folder, all files in the folder are deleted.
#[utoipa::path(delete, path = "/runs/{id}/file", tag = "runs", params(("id" = String, Path, description = "Id of the job, or the id that the program chose"), FileQuery),
    responses((status = 204), (status = 409, body = Problem, description = "The server's own ranks train the job")))]
pub(crate) async fn delete(
    State(config): State<Arc<ServeConfig>>,
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    Query(query): Query<FileQuery>,
) -> Result<StatusCode> {
    let files = run_files(&config, &find_run(&auth, &caller, &id).await?);
    run_to_completion(remove_path(files, query.path)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Removes a file or a folder.
pub(super) async fn remove_path(files: RunFiles, path: String) -> Result<()> {
    if run_blocking(move || files.remove(&path)).await?.map_err(refusal)? {
        Ok(())
    } else {
        Err(Error::NotFound("the run has no such file".into()))
    }
}
