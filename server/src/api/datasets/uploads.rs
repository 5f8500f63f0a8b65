//! Uploads of zip files of pictures, for people without access to the machines' disks. A file is uploaded in pieces, so that requests are short
//! and a failed request can be repeated.

use super::{
    NewDataset, Registered, check_free, inspect_and_add,
    inspections::{InspectionProgress, WaitQuery},
    name_mistake,
};
use crate::{
    auth::access::Caller,
    datasets::{
        Datasets,
        uploads::{self, PIECE_BYTES, Refused, Upload},
    },
    http::{
        error::{Error, Problem, Result},
        extract::{Body, Path, Query},
    },
};
use axum::{
    Extension, Json,
    extract::{Request, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use lockstep_protocol::dataset::Dataset;
use serde::Deserialize;
use std::{
    io,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::Semaphore;
use utoipa::{IntoParams, ToSchema};

/// Limits the number of archives that are unpacked at the same time.
static UNPACKING: Semaphore = Semaphore::const_new(1);
/// Time for which an archive is unpacked before the next archive gets its turn.
const TURN: Duration = Duration::from_secs(5);

/// Position of a piece in its file.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ArchiveQuery {
    /// Number of bytes of the file before this piece. 0 starts the upload again.
    #[serde(default)]
    offset: u64,
}

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
/// The zip file must have pictures in folders of classes (`<class>/*`, or `train/<class>/*` and `val/<class>/*`). Pieces have at most 8 MiB, the
/// file at most 8 GiB, and its contents at most 16 GiB and 200,000 files. An upload that is not continued is removed after a day.
#[utoipa::path(put, path = "/datasets/uploads/{name}/archive", tag = "datasets", params(("name" = String, Path), ArchiveQuery),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 204), (status = 409, body = Problem, description = "The name is taken, or the piece does not follow the uploaded bytes"),
        (status = 422, body = Problem), (status = 507, body = Problem, description = "The server's disk is full")))]
pub(crate) async fn upload_archive(
    State(datasets): State<Arc<Datasets>>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    Query(at): Query<ArchiveQuery>,
    request: Request,
) -> Result<StatusCode> {
    let upload = upload(&datasets, &caller, &name).await?;
    let body = axum::body::to_bytes(request.into_body(), PIECE_BYTES).await.map_err(|error| {
        let detail = format!("a piece of at most {PIECE_BYTES} bytes was expected: {error}");
        Error::Refused(StatusCode::PAYLOAD_TOO_LARGE, detail)
    })?;
    let known = if at.offset == 0 { datasets.store.datasets().await? } else { Vec::new() };
    let folder = datasets.roots.uploads.clone();
    blocking(move || {
        if at.offset == 0 {
            uploads::sweep(&folder, &known);
        }
        upload.write(at.offset, &body)
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Make an uploaded zip file a dataset
///
/// The pictures are unpacked into the server's data directory and registered under this name. They are removed with the dataset. 202 has the
/// progress; send the same request again until the response is 201.
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
) -> Result<Response> {
    let upload = upload(&datasets, &caller, &name).await?;
    let patience = wait.patience()?;
    let unpacked = {
        let _turn = UNPACKING.acquire().await.map_err(|e| Error::Internal(e.to_string()))?;
        let (upload, until) = (upload.clone(), Instant::now() + patience.min(TURN));
        blocking(move || upload.unpack(until)).await?
    };
    if unpacked.files < unpacked.total {
        let detail = format!("unpacking {name}: {} of {} files; ask again", unpacked.files, unpacked.total);
        let progress =
            InspectionProgress { detail, inspected: Some(unpacked.files), total: Some(unpacked.total) };
        return Ok((StatusCode::ACCEPTED, Json(progress)).into_response());
    }
    let path = upload.pictures().to_string_lossy().into_owned();
    let new = NewDataset { name, path, private: new.private };
    let dataset = match inspect_and_add(&datasets, &caller, new, patience).await? {
        Registered::Done(dataset) => dataset,
        Registered::UnderWay(under_way) => return Ok((StatusCode::ACCEPTED, Json(under_way)).into_response()),
    };
    blocking(move || Ok(upload.finish()?)).await?;
    Ok((
        StatusCode::CREATED,
        [(header::LOCATION, format!("/api/v1/datasets/{}", dataset.name))],
        Json(dataset),
    )
        .into_response())
}

/// Removes the files of a dataset that was uploaded.
///
/// # Errors
/// The files cannot be removed, or the store cannot be read.
pub(super) async fn remove(datasets: &Datasets, folder: PathBuf) -> Result<()> {
    // The folder may also be registered under another name.
    let others = datasets.store.datasets().await?;
    if others.iter().any(|dataset| datasets.roots.upload(&dataset.path).as_ref() == Some(&folder)) {
        return Ok(());
    }
    blocking(move || Ok(uploads::remove(&folder)?)).await
}

/// Returns the caller's upload of this name.
///
/// # Errors
/// The name is invalid, or a dataset has it already.
async fn upload(datasets: &Datasets, caller: &Caller, name: &str) -> Result<Upload> {
    if let Some(mistake) = name_mistake(name) {
        return Err(Error::Invalid(vec![mistake]));
    }
    check_free(datasets, name).await?;
    Ok(Upload::of(&datasets.roots.uploads, caller.owner().unwrap_or_default(), name))
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> std::result::Result<T, Refused> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| Error::Internal(format!("an upload: {error}")))?.map_err(|refused| match refused {
        Refused::Wrong(detail) => Error::Refused(StatusCode::UNPROCESSABLE_ENTITY, detail),
        Refused::Offset(there) => Error::Conflict(format!("{there} bytes of this file have come"), None),
        Refused::Io(error) => {
            let detail = format!("the server's disk does not take this: {error}");
            match error.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                    Error::Refused(StatusCode::INSUFFICIENT_STORAGE, detail)
                }
                _ => Error::Unavailable(detail),
            }
        }
    })
}
