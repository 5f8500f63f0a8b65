//! Files of checkpoints, with ranges and checksums. Files are compared with the manifest before they are sent. A separate process converts
//! weights to ONNX files, because the server itself runs no engine.

use crate::api::prelude::*;
use crate::{
    api::checkpoints::{
        Weights, await_fetch, check_regular, damaged_error, ensure_on_disk, find, is_checkpoint_file,
        no_average_error, read_manifest, removed_error,
    },
    checkpoints::{Checkpoints, manifest::ManifestFile, object_store_fetches},
    http::{
        attachment::attachment,
        conditional::{self, CACHING},
    },
    store::CheckpointRow,
};
use axum::{
    body::Body,
    http::{HeaderValue, Request},
};
use lockstep_protocol::checkpoint_files::{self, AVERAGE, MODEL};
use std::{io, process::Stdio};
use tokio::{process::Command, sync::Semaphore};
use tower_http::services::ServeFile;

/// Number of times that a file is compared with the manifest before it counts as damaged. Between two checks, the checkpoint may be
/// replaced or fetched from the object store.
const MAX_CHECKS: u32 = 3;
/// Limits concurrent conversions to ONNX, each of which needs about three times the memory of the weights. Other requests wait.
static CONVERSIONS: Semaphore = Semaphore::const_new(1);

/// Download a file of a checkpoint
///
/// The headers `Range`, `If-Range` and `If-None-Match` are supported. `ETag` and `x-checksum-sha256` have the file's checksum from the
/// manifest. An ONNX file is made for each request, and has no checksum.
#[utoipa::path(get, path = "/checkpoints/{id}/{file}", tag = "checkpoints",
    params(("id" = String, Path), ("file" = String, Path, description = "model.safetensors, ema.safetensors (of jobs with train.ema_decay), optimizer.safetensors, state.json or MANIFEST.json; of a sharded checkpoint also model.safetensors.index.json and the files that it names, such as model-00001-of-00004.safetensors. model.onnx and ema.onnx: the network with these weights as an ONNX file")),
    responses((status = 200, content((Vec<u8> = "application/octet-stream"), (Object = "application/json"))),
        (status = 206, content((Vec<u8> = "application/octet-stream"), (Object = "application/json")), description = "The requested range"),
        (status = 304, description = "The file is unchanged since the response whose `ETag` is in `If-None-Match`"),
        (status = 409, body = Problem, description = "The checkpoint is still being uploaded from another machine"), (status = 416, description = "The range is outside the file"),
        (status = 422, body = Problem, description = "The manifest or the file is damaged, it is not a regular file, or the weights cannot be converted to ONNX")))]
pub(crate) async fn file(
    State(checkpoints): State<Arc<Checkpoints>>,
    Path((id, file)): Path<(String, String)>,
    mut request: Request<Body>,
) -> Result<Response> {
    let name = file.as_str();
    conditional::keep_one_range(request.headers_mut());
    let row = find(&*checkpoints.store, &id).await?;
    let onnx_weights = match name {
        "model.onnx" => Some((Weights::Model, MODEL)),
        "ema.onnx" => Some((Weights::Ema, AVERAGE)),
        _ => None,
    };
    if let Some((weights, source)) = onnx_weights {
        check_file(&checkpoints, &row, source).await?;
        let response = send_onnx(&checkpoints, &row, weights, request).await?;
        return set_download_headers(&checkpoints, &row, name, response).await;
    }
    if !is_checkpoint_file(name) {
        let detail = "a checkpoint has the files that its MANIFEST.json names: state.json, and model.safetensors, optimizer.safetensors \
                      and ema.safetensors or their parts; and model.onnx and ema.onnx";
        return Err(Error::NotFound(detail.into()));
    }
    let checksum = check_file(&checkpoints, &row, name).await?.map(|entry| entry.sha256);
    let tag = checksum.as_ref().map(|checksum| format!("\"{checksum}\""));
    if let Some(tag) = &tag {
        if conditional::client_has(request.headers(), tag) {
            let headers = [(header::ETAG, tag.clone()), (header::CACHE_CONTROL, CACHING.into())];
            return Ok((StatusCode::NOT_MODIFIED, headers).into_response());
        }
        if !conditional::range_applies(request.headers(), tag) {
            request.headers_mut().remove(header::RANGE);
        }
        // An entity tag takes precedence over the time (RFC 9110, section 13.1.3).
        if request.headers().contains_key(header::IF_NONE_MATCH) {
            request.headers_mut().remove(header::IF_MODIFIED_SINCE);
        }
    }
    if checksum.is_none()
        && let Some(kind) = checkpoint_files::kind_of(name)
    {
        let index = checkpoint_files::index_name(kind);
        if check_file(&checkpoints, &row, &index).await?.is_some() {
            return Err(Error::NotFound(format!(
                "this checkpoint is sharded and has no {name}: {index} names the files with its tensors, and `lockstep download` makes one \
                 file of them"
            )));
        }
        if kind == AVERAGE {
            return Err(no_average_error());
        }
        if name != kind {
            let detail =
                format!("this checkpoint is not sharded and has no {name}: its tensors are in {kind}");
            return Err(Error::NotFound(detail));
        }
    }
    let path = checkpoints.folder(&row).join(name);
    let mut response = ServeFile::new(path).try_call(request).await?.map(Body::new).into_response();
    if response.status() == StatusCode::NOT_FOUND {
        return Err(removed_error());
    }
    if let (Some(checksum), Some(tag)) = (checksum, tag) {
        for (key, value) in
            [("x-checksum-sha256", checksum), ("etag", tag), ("cache-control", CACHING.to_owned())]
        {
            let value = HeaderValue::from_str(&value).map_err(|e| Error::Internal(e.to_string()))?;
            response.headers_mut().insert(key, value);
        }
    }
    set_download_headers(&checkpoints, &row, name, response).await
}

/// Sets a file's media type, and the name under which browsers save the file.
async fn set_download_headers(
    checkpoints: &Checkpoints,
    row: &CheckpointRow,
    name: &str,
    mut response: Response,
) -> Result<Response> {
    let job = checkpoints.store.job(&row.job).await?;
    let headers = response.headers_mut();
    let kind = if name.ends_with(".json") { "application/json" } else { "application/octet-stream" };
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    let job = job.map_or_else(|| row.job.to_string(), |found| found.job.name);
    let file_name = format!("{job}-{}-{}-{name}", row.info.epoch, row.info.step);
    headers.insert(header::CONTENT_DISPOSITION, attachment(&file_name));
    Ok(response)
}

/// Converts weights to an ONNX file with `lockstep export onnx`, and sends the file.
///
/// # Errors
/// The weights do not exist, or cannot be converted.
async fn send_onnx(
    checkpoints: &Arc<Checkpoints>,
    row: &CheckpointRow,
    weights: Weights,
    request: Request<Body>,
) -> Result<Response> {
    ensure_on_disk(checkpoints, row).await?;
    let weights = weights.path(&checkpoints.folder(row))?;
    let _permit = CONVERSIONS.acquire().await.map_err(|e| Error::Internal(e.to_string()))?;
    let folder = tempfile::tempdir_in(checkpoints.config.job_dir(&row.job))?;
    let path = folder.path().join("network.onnx");
    // The program of this process, also after an update has replaced its file. It gets no variables, because some are credentials.
    let mut command = Command::new("/proc/self/exe");
    command.args(["export", "onnx"]).arg(weights).arg("-o").arg(&path).env_clear();
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output().await?;
    if !output.status.success() {
        let reason = String::from_utf8_lossy(&output.stderr);
        let reason = reason.lines().next_back().unwrap_or("the process ended without a message");
        let reason = reason.strip_prefix("error: ").unwrap_or(reason);
        return Err(Error::unprocessable(format!("the weights cannot be converted to ONNX: {reason}")));
    }
    // The opened file can be read after its folder is removed.
    Ok(ServeFile::new(path).try_call(request).await?.map(Body::new).into_response())
}

/// Checks a file against the manifest and returns the file's entry in the manifest; `None` if the manifest does not name the file. A
/// damaged file is fetched from the object store.
///
/// # Errors
/// The file is damaged, and the object store has no better copy.
async fn check_file(
    checkpoints: &Arc<Checkpoints>,
    row: &CheckpointRow,
    name: &str,
) -> Result<Option<ManifestFile>> {
    let path = checkpoints.folder(row).join(name);
    let mut checks = 0;
    loop {
        let current = read_manifest(checkpoints, row).await?;
        check_regular(&path)?;
        let entry = current.pointer(&format!("/files/{name}")).cloned();
        let Some(entry) = entry.and_then(|entry| serde_json::from_value::<ManifestFile>(entry).ok()) else {
            return Ok(None);
        };
        let how = match checkpoints.verified_files.check(path.clone(), &entry).await {
            Err(error) if error.kind() == io::ErrorKind::InvalidData => error.to_string(),
            // A file that is missing or cannot be read is detected when it is sent.
            _ => return Ok(Some(entry)),
        };
        checks += 1;
        // The file is not damaged if the manifest was replaced during the check.
        if checks < MAX_CHECKS && read_manifest(checkpoints, row).await? != current {
            continue;
        }
        let copies = checkpoints.copies_of(row).await?;
        match object_store_fetches::check(checkpoints, row, &copies, None) {
            Some((fetch, _)) if checks < MAX_CHECKS => await_fetch(&checkpoints.config, row, fetch).await?,
            _ => {
                tracing::warn!(checkpoint = row.id, how, "a damaged checkpoint on the disk is not sent");
                return Err(damaged_error(format_args!("checkpoint {}", row.id), &how));
            }
        }
    }
}
