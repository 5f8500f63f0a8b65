//! A dataset's files, for agents on machines without the dataset's folder: the list of files, and their bytes. An agent gets only the files
//! of the dataset of an attempt that it runs.

use super::requesting_agent::RequestingAgent;
use crate::api::prelude::*;
use crate::{
    datasets::{
        Datasets,
        files::{FileList, MAX_FILES, Parts, Tree},
    },
    http::error::run_blocking,
};
use axum::{
    body::{Body, Bytes},
    extract::rejection::BytesRejection,
};
use futures_util::stream;
use lockstep_protocol::{
    agent::{ANEW_BYTES, DATASET_PART_BYTES, DATASET_PARTS, DATASET_PARTS_BYTES, DatasetParts},
    dataset::Dataset,
    spec::shortened,
};
use std::io;

/// List a dataset's files
///
/// The requesting agent runs an attempt on a machine without the dataset. Each line of the response is a JSON entry; the last entry is
/// `end` or `failed`.
#[utoipa::path(get, path = "/agent/attempts/{job}/{attempt}/dataset/files", tag = "agents",
    params(("job" = String, Path), ("attempt" = u32, Path)), responses((status = 200, content_type = "application/x-ndjson", body = String),
        (status = 404, body = Problem, description = "The server has no such files"),
        (status = 422, body = Problem, description = "The files cannot be copied")))]
pub(crate) async fn list(
    State(datasets): State<Arc<Datasets>>,
    requester: RequestingAgent,
) -> Result<Response> {
    requester.check_attempt(&datasets.agents)?;
    let (dataset, tree) = open_tree(&datasets, &requester).await?;
    let list = run_blocking(move || FileList::open(tree, MAX_FILES)).await?.map_err(Error::unprocessable)?;
    let body = read_while_sent(list.ok_or_else(|| no_files(&dataset))?, FileList::chunk);
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response())
}

/// Read parts of a dataset's files
///
/// Each file must be unchanged since the files were listed. A request may name several small files, or parts of a large file from any byte
/// on.
#[utoipa::path(post, path = "/agent/attempts/{job}/{attempt}/dataset/files", tag = "agents",
    params(("job" = String, Path), ("attempt" = u32, Path)), request_body = DatasetParts,
    responses((status = 200, content_type = "application/octet-stream"),
        (status = 404, body = Problem, description = "The server has no such files"),
        (status = 422, body = Problem, description = "The request is invalid, or the files cannot be copied")))]
pub(crate) async fn parts(
    State(datasets): State<Arc<Datasets>>,
    requester: RequestingAgent,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response> {
    requester.check_attempt(&datasets.agents)?;
    let body = body?;
    let request: DatasetParts = serde_json::from_slice(&body)
        .map_err(|e| Error::BadRequest(format!("a request for parts of a dataset must be JSON: {e}")))?;
    check_parts(&request)?;
    let (dataset, tree) = open_tree(&datasets, &requester).await?;
    log_progress(&datasets, &requester, &dataset, &request).await;
    let body = read_while_sent(Parts::of(tree, request.parts), Parts::chunk);
    Ok(([(header::CONTENT_TYPE, "application/octet-stream")], body).into_response())
}

fn check_parts(request: &DatasetParts) -> Result<()> {
    let invalid = |detail: String| Err(Error::unprocessable(detail));
    let bytes = request.parts.iter().fold(0, |sum: u64, part| sum.saturating_add(part.length));
    if request.parts.is_empty() || request.parts.len() > DATASET_PARTS {
        return invalid(format!("a request must name 1 to {DATASET_PARTS} parts"));
    }
    if request.parts.iter().any(|part| part.length > DATASET_PART_BYTES) {
        return invalid(format!("a part must have at most {DATASET_PART_BYTES} bytes"));
    }
    if request.copied_bytes > request.total_bytes {
        let (copied, total) = (request.copied_bytes, request.total_bytes);
        return invalid(format!("copied_bytes ({copied}) must be at most total_bytes ({total})"));
    }
    if let Some(part) = request.parts.iter().find(|part| part.size_bytes > request.total_bytes) {
        return invalid(format!("total_bytes must be at least the size of {:?}", shortened(&part.path)));
    }
    if request.anew.as_ref().is_some_and(|why| why.len() > ANEW_BYTES) {
        return invalid(format!("anew must have at most {ANEW_BYTES} bytes"));
    }
    if bytes > DATASET_PARTS_BYTES {
        return invalid(format!(
            "the parts of a request must have at most {DATASET_PARTS_BYTES} bytes in all"
        ));
    }
    Ok(())
}

fn no_files(dataset: &Dataset) -> Error {
    Error::NotFound(format!("the server's machine has no files at {}", dataset.path))
}

/// Opens the tree of files of an attempt's dataset. Returns the dataset and the tree.
async fn open_tree(datasets: &Datasets, requester: &RequestingAgent) -> Result<(Dataset, Tree)> {
    let not_registered = |what: &str| Error::NotFound(format!("{what} is no longer registered"));
    let row = datasets.store.job(&requester.attempt.job).await?.ok_or_else(|| not_registered("the job"))?;
    let name = row.job.spec.data.dataset;
    let dataset = datasets.store.dataset(&name).await?.ok_or_else(|| not_registered("the dataset"))?;
    let path = dataset.path.clone();
    let found = run_blocking(move || Tree::open(std::path::Path::new(&path))).await?;
    let tree = found.map_err(Error::unprocessable)?.ok_or_else(|| no_files(&dataset))?;
    // The server's roots may have changed since the dataset was registered. The tree refuses links that lead out of the dataset's folder.
    datasets.roots.check_found(&dataset.path).map_err(Error::unprocessable)?;
    Ok((dataset, tree))
}

/// Writes the progress of the copy into the job's log, at each tenth of the dataset and when the copy starts again.
async fn log_progress(
    datasets: &Datasets,
    requester: &RequestingAgent,
    dataset: &Dataset,
    request: &DatasetParts,
) {
    let (job, attempt) = (&requester.attempt.job, requester.attempt.attempt);
    let (copied, total) = (request.copied_bytes, request.total_bytes);
    let who = (job, attempt, requester.agent_id.as_str());
    let Some(tenths) = datasets.copies.note_progress(who, (copied, total), request.anew.is_some()) else {
        return;
    };
    let agent = requester.agent_name(&datasets.agents);
    let name = &dataset.name;
    let megabytes = |bytes: u64| bytes as f64 / 1e6;
    let text = match (&request.anew, tenths) {
        (Some(change), _) => format!(
            "the dataset {name} changed while {agent} copied it ({change}): it is copied again, {:.1} MB of which {:.1} MB are already copied",
            megabytes(total),
            megabytes(copied)
        ),
        (None, 0) => {
            format!("{agent} copies the dataset {name} ({:.1} MB) from the server", megabytes(total))
        }
        (None, _) => format!(
            "{agent} has copied {} % of the dataset {name}: {:.1} of {:.1} MB",
            tenths * 10,
            megabytes(copied),
            megabytes(total)
        ),
    };
    datasets.events.log(job, text).await;
}

/// Returns a body that is read while it is sent, on threads for blocking work.
fn read_while_sent<T: Send + 'static>(source: T, next: fn(&mut T) -> io::Result<Option<Vec<u8>>>) -> Body {
    Body::from_stream(stream::try_unfold(source, move |mut source| async move {
        let read =
            tokio::task::spawn_blocking(move || next(&mut source).map(|chunk| chunk.map(|c| (c, source))));
        read.await.map_err(io::Error::other)?
    }))
}
