//! Uploads of zip files of pictures, for people without access to the machines' disks. A file is uploaded in pieces, so that requests are
//! short and a failed request can be repeated.

use super::{
    NewDataset, check_free, created_response, inspect_new,
    inspections::{Inspected, InspectionProgress, NotInspected, WaitQuery},
    name_mistake,
};
use crate::api::prelude::*;
use crate::{
    api::{PieceQuery, read_piece, run_to_completion},
    datasets::{
        Datasets,
        uploads::{self, PIECE_BYTES, Upload, UploadError},
    },
    http::{
        error::{disk_error, run_blocking},
        extract::Body,
    },
};
use axum::extract::Request;
use lockstep_protocol::dataset::Dataset;
use std::{
    path::PathBuf,
    time::{Duration, Instant},
};
use tokio::sync::{Mutex, MutexGuard};

/// Locked while the folder of an upload is emptied, filled, registered or removed.
static FOLDERS_LOCK: Mutex<()> = Mutex::const_new(());
/// Time for which an archive is unpacked before the next archive gets its turn.
const TURN: Duration = Duration::from_secs(5);

/// The dataset to make from an uploaded file.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct UploadedDataset {
    /// Whether only the owner and admins see the dataset.
    #[serde(default)]
    private: bool,
}

/// Upload a piece of a zip file
///
/// The zip file must have pictures in folders of classes (`<class>/*`, or `train/<class>/*` and `val/<class>/*`). Pieces have at most 8
/// MiB, the file at most 8 GiB, and its contents at most 16 GiB and 200,000 files. A piece with offset 0 starts the upload again. An upload
/// that is not continued is removed after a day.
#[utoipa::path(put, path = "/datasets/uploads/{name}/archive", tag = "datasets", params(("name" = String, Path), PieceQuery),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 204), (status = 409, body = Problem, description = "The name is taken, or the piece does not follow the uploaded bytes"),
        (status = 507, body = Problem, description = "The server's disk is full")))]
pub(crate) async fn upload_archive(
    State(datasets): State<Arc<Datasets>>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    Query(piece): Query<PieceQuery>,
    request: Request,
) -> Result<StatusCode> {
    let upload = find_upload(&datasets, &caller, &name)?;
    check_free(&datasets, &caller, &name).await?;
    let body = read_piece(request.into_body(), PIECE_BYTES).await?;
    if piece.offset > 0 {
        run_blocking(move || upload.write(piece.offset, &body)).await?.map_err(refusal)?;
        return Ok(StatusCode::NO_CONTENT);
    }
    let lock = FOLDERS_LOCK.lock().await;
    let registered = dataset_paths(&datasets).await?;
    if registered.iter().any(|path| upload.contains(path)) {
        let detail = "a dataset uses the pictures of an earlier upload of this name; choose another name";
        return Err(Error::Conflict(detail.into()));
    }
    let folder = datasets.roots.uploads.clone();
    let written = run_locked(lock, move || {
        uploads::remove_unused(&folder, &registered);
        upload.write(0, &body)
    });
    written.await?.map_err(refusal)?;
    Ok(StatusCode::NO_CONTENT)
}

/// Register an uploaded zip file as a dataset
///
/// The pictures are unpacked into the server's data directory and registered under this name. Removing the dataset removes the pictures. A
/// response 202 contains the progress; repeat the request until the response is 201.
#[utoipa::path(post, path = "/datasets/uploads/{name}", tag = "datasets", params(("name" = String, Path), WaitQuery), request_body = UploadedDataset,
    responses((status = 201, body = Dataset), (status = 202, body = InspectionProgress, description = "The files are being unpacked or inspected; ask again"),
        (status = 409, body = Problem, description = "The name is taken"), (status = 422, body = Problem, description = "The file is not a zip file of pictures"),
        (status = 507, body = Problem, description = "The server's disk is full")))]
pub(crate) async fn register_upload(
    State(datasets): State<Arc<Datasets>>,
    Extension(caller): Extension<Caller>,
    Query(wait): Query<WaitQuery>,
    Path(name): Path<String>,
    Body(new, _): Body<UploadedDataset>,
) -> Inspected<Response> {
    let upload = find_upload(&datasets, &caller, &name)?;
    let max_wait = wait.max_wait()?;
    // The response to an earlier request may have been lost.
    if let Some(dataset) = datasets.store.dataset(&name).await?
        && upload.contains(&dataset.path)
    {
        return Ok(created_response(dataset));
    }
    check_free(&datasets, &caller, &name).await?;
    let unpacked = {
        let lock = FOLDERS_LOCK.lock().await;
        let (upload, until) = (upload.clone(), Instant::now() + max_wait.min(TURN));
        run_locked(lock, move || upload.unpack(until)).await?.map_err(refusal)?
    };
    if unpacked.files < unpacked.total {
        let detail = format!("unpacking {name}: {} of {} files; ask again", unpacked.files, unpacked.total);
        let progress =
            InspectionProgress { detail, inspected: Some(unpacked.files), total: Some(unpacked.total) };
        return Err(NotInspected::UnderWay(progress));
    }
    let path = unpacked.pictures.to_string_lossy().into_owned();
    let new = NewDataset { name, path: path.clone(), private: new.private };
    let inspected = inspect_new(&datasets, &caller, new, max_wait).await.map_err(|error| match error {
        // The path on the server means nothing to the sender.
        NotInspected::Failed(error @ Error::Invalid(_)) => Error::unprocessable(
            error.detail().replace(&format!("{path}/"), "").replace(&path, "the zip file"),
        )
        .into(),
        other => other,
    });
    Ok(created_response(run_to_completion(add(datasets, upload, unpacked.pictures, inspected?)).await?))
}

/// Stores the dataset of inspected `pictures`, and removes the zip file.
///
/// # Errors
/// The zip file was sent again during the inspection, the dataset cannot be stored, or the zip file cannot be removed.
async fn add(
    datasets: Arc<Datasets>,
    upload: Upload,
    pictures: PathBuf,
    dataset: Dataset,
) -> Result<Dataset> {
    let lock = FOLDERS_LOCK.lock().await;
    if !tokio::fs::try_exists(&pictures).await? {
        let detail = "the zip file was sent again during the inspection of its pictures; ask again";
        return Err(Error::Conflict(detail.into()));
    }
    datasets.store.add_dataset(&dataset).await?;
    run_locked(lock, move || upload.finish()).await?.map_err(|e| disk_error(&e))?;
    Ok(dataset)
}

/// Removes a dataset that was uploaded, and its files.
pub(super) async fn remove(datasets: Arc<Datasets>, name: String, folder: PathBuf) -> Result<()> {
    let lock = FOLDERS_LOCK.lock().await;
    datasets.store.remove_dataset(&name).await?;
    // The folder may also be registered under another name.
    let others = dataset_paths(&datasets).await?;
    if others.iter().any(|path| datasets.roots.upload_folder(path).as_ref() == Some(&folder)) {
        return Ok(());
    }
    run_locked(lock, move || uploads::remove_folder(&folder)).await?.map_err(|e| disk_error(&e))
}

/// Runs work on a blocking thread, which holds `lock` until the work ends, even if the client disconnects.
async fn run_locked<T: Send + 'static>(
    lock: MutexGuard<'static, ()>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    run_blocking(move || {
        let _lock = lock;
        work()
    })
    .await
}

/// The paths of all datasets.
async fn dataset_paths(datasets: &Datasets) -> Result<Vec<String>> {
    Ok(datasets.store.datasets().await?.into_iter().map(|dataset| dataset.path).collect())
}

/// Returns the caller's upload of this name.
fn find_upload(datasets: &Datasets, caller: &Caller, name: &str) -> Result<Upload> {
    check_mistakes(name_mistake(name).into_iter().collect())?;
    Ok(Upload::of(&datasets.roots.uploads, caller.owner().unwrap_or_default(), name))
}

fn refusal(why: UploadError) -> Error {
    match why {
        UploadError::Wrong(detail) => Error::unprocessable(detail),
        UploadError::Offset(stored) => Error::Conflict(format!(
            "the server has {stored} bytes of this file: continue at offset={stored}"
        )),
        UploadError::Io(error) => disk_error(&error),
    }
}
