//! The pictures that are bundled with the program. A single request unpacks and registers the pictures, so that a new server has a dataset
//! to train on.

use super::inspections::{Inspected, InspectionProgress, MAX_WAIT};
use crate::api::prelude::*;
use crate::{
    api::datasets::{self, NewDataset},
    config::{Bundled, ServeConfig},
    datasets::Datasets,
    http::error::run_blocking,
};
use lockstep_protocol::dataset::Dataset;
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Register the bundled pictures
///
/// Unpacks the subset of Fashion-MNIST that is bundled with the program into the data directory, and registers it as `fashion-mnist`.
#[utoipa::path(post, path = "/datasets/bundled", tag = "datasets",
    responses((status = 201, body = Dataset), (status = 202, body = InspectionProgress, description = "The files are being inspected; ask again"),
        (status = 404, body = Problem, description = "This server has no bundled pictures"), (status = 409, body = Problem, description = "The name is taken"),
        (status = 503, body = Problem, description = "No agent is online to inspect the files")))]
pub(crate) async fn register(
    State(config): State<Arc<ServeConfig>>,
    State(datasets): State<Arc<Datasets>>,
    Extension(caller): Extension<Caller>,
) -> Inspected<Response> {
    let missing = || Error::NotFound("this server has no bundled pictures".into());
    let bundled = config.bundled.ok_or_else(missing)?;
    datasets::check_free(&datasets, &caller, bundled.name).await?;
    let folder = config.data_dir.join("datasets").join(bundled.name);
    let path = run_blocking(move || unpack(&bundled, &folder)).await?;
    let path = path.map_err(|error| Error::Internal(format!("the pictures cannot be unpacked: {error}")))?;
    let path = path.to_string_lossy().into_owned();
    let new = NewDataset { name: bundled.name.into(), path, private: false };
    Ok(datasets::created_response(datasets::register(&datasets, &caller, new, MAX_WAIT).await?))
}

/// Writes the files that are missing or different.
fn unpack(bundled: &Bundled, folder: &Path) -> io::Result<PathBuf> {
    fs::create_dir_all(folder)?;
    for (name, content) in (bundled.files)() {
        let path = folder.join(name);
        if !fs::read(&path).is_ok_and(|existing| existing == *content) {
            fs::write(&path, content)?;
        }
    }
    folder.canonicalize()
}
