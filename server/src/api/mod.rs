//! Handlers, with a folder or file for each resource. `router.rs` maps URLs to handlers.

mod agents;
mod assets;
mod checkpoints;
mod datasets;
mod docs;
mod health;
mod html;
mod jobs;
mod large;
mod list;
mod models;
mod people;
mod prelude;
pub(crate) mod router;
mod runs;
mod server_url;
mod sweeps;
mod webhooks;

use crate::http::error::{Error, Result};
use axum::{body::Body, http::StatusCode};
use bytes::Bytes;
use serde::Deserialize;
use utoipa::IntoParams;

/// Position of a piece in the file that is uploaded.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct PieceQuery {
    /// Number of bytes of the file before this piece.
    #[serde(default)]
    offset: u64,
}

/// Reads a piece of an uploaded file.
///
/// # Errors
/// 413: the piece has more than `max_bytes` bytes.
async fn read_piece(body: Body, max_bytes: usize) -> Result<Bytes> {
    axum::body::to_bytes(body, max_bytes).await.map_err(|error| {
        let detail = format!("a piece of at most {max_bytes} bytes was expected: {error}");
        Error::Refused(StatusCode::PAYLOAD_TOO_LARGE, detail)
    })
}

/// Runs work to completion even if the client disconnects. Without this, the handler of a disconnected client is dropped at any `await`.
async fn run_to_completion<T: Send + 'static>(
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    tokio::spawn(work).await.map_err(|e| Error::Internal(format!("the work of a request failed: {e}")))?
}

/// Returns the close code for an error in a websocket's frames: `SIZE` if a frame is too large, otherwise `PROTOCOL`.
fn close_code_of(error: &axum::Error) -> u16 {
    use axum::extract::ws::close_code;
    // axum does not export the kinds of websocket errors.
    if error.to_string().contains("too long") { close_code::SIZE } else { close_code::PROTOCOL }
}
