//! One file per resource; `crate::router` maps addresses to handlers.

pub(crate) mod agent_files;
pub(crate) mod agent_socket;
pub(crate) mod agents;
pub(crate) mod annotations;
pub(crate) mod assets;
pub(crate) mod attempts;
pub(crate) mod audit;
mod bundle;
pub(crate) mod bundled;
pub(crate) mod checkpoint_files;
pub(crate) mod checkpoints;
mod conditional;
pub(crate) mod dataset_files;
pub(crate) mod datasets;
pub(crate) mod docs;
pub(crate) mod evaluation;
pub(crate) mod events;
pub(crate) mod extract;
mod fit;
pub(crate) mod fork;
pub(crate) mod health;
pub(crate) mod history;
pub(crate) mod inspections;
pub(crate) mod jobs;
mod join;
mod large;
pub(crate) mod layers;
mod list;
pub(crate) mod login;
pub(crate) mod logs;
pub(crate) mod machine_metrics;
pub(crate) mod metrics;
pub(crate) mod metrics_query;
pub(crate) mod oidc;
pub(crate) mod pages;
pub(crate) mod panels;
pub(crate) mod people;
pub(crate) mod people_pages;
pub(crate) mod pictures;
pub(crate) mod predict;
pub(crate) mod projects;
pub(crate) mod queue;
pub(crate) mod queue_page;
mod requesting_agent;
pub(crate) mod server_url;
pub(crate) mod stream;
mod submission;
pub(crate) mod tokens;

use crate::error::{Error, Result};

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
