//! Handlers: a folder a resource. `router.rs` maps addresses to them.

mod agents;
mod assets;
mod bundle;
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

/// Does work that must not be left half done, whether or not its client waits for the end: a request that is hung up on is
/// dropped where it stands.
async fn to_the_end<T: Send + 'static>(work: impl Future<Output = Result<T>> + Send + 'static) -> Result<T> {
    tokio::spawn(work).await.map_err(|e| Error::Internal(format!("a request's work: {e}")))?
}

/// The close code for what is wrong with a websocket's frames: too large, or not as the protocol has them.
fn close_code_of(error: &axum::Error) -> u16 {
    use axum::extract::ws::close_code;
    // The library keeps its kinds of errors to itself.
    if error.to_string().contains("too long") { close_code::SIZE } else { close_code::PROTOCOL }
}
