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
use axum::{
    body::Body,
    extract::ws::{CloseFrame, Message, WebSocket, close_code},
    http::StatusCode,
};
use bytes::Bytes;
use futures_util::{SinkExt, stream::SplitSink};
use serde::Deserialize;
use std::time::Duration;
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
    // axum does not export the kinds of websocket errors.
    if error.to_string().contains("too long") { close_code::SIZE } else { close_code::PROTOCOL }
}

/// Sends a close frame. Its reason has at most 123 bytes (RFC 6455, section 5.5); a longer reason is truncated.
async fn close_websocket(sink: &mut SplitSink<WebSocket, Message>, code: u16, reason: &str) {
    let reason = &reason[..reason.floor_char_boundary(123)];
    let frame = CloseFrame { code, reason: reason.into() };
    let _ = tokio::time::timeout(Duration::from_secs(1), sink.send(Message::Close(Some(frame)))).await;
}
