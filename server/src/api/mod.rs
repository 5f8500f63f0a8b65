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
pub(crate) mod router;
mod runs;
mod server_url;
mod sweeps;
mod webhooks;

use crate::http::error::{Error, Result};

/// Runs work to completion even if the client disconnects. Without this, the handler of a disconnected client is dropped at any `await`.
async fn to_the_end<T: Send + 'static>(work: impl Future<Output = Result<T>> + Send + 'static) -> Result<T> {
    tokio::spawn(work).await.map_err(|e| Error::Internal(format!("a request's work: {e}")))?
}

/// Returns the close code for an error in a websocket's frames: `SIZE` if a frame is too large, otherwise `PROTOCOL`.
fn close_code_of(error: &axum::Error) -> u16 {
    use axum::extract::ws::close_code;
    // axum does not export the kinds of websocket errors.
    if error.to_string().contains("too long") { close_code::SIZE } else { close_code::PROTOCOL }
}
