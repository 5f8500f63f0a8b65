//! One file a kind of thing; `crate::router` says which address leads where.

pub(crate) mod agent_socket;
pub(crate) mod agents;
pub(crate) mod annotations;
pub(crate) mod assets;
pub(crate) mod attempts;
mod bundle;
pub(crate) mod checkpoints;
mod conditional;
pub(crate) mod datasets;
pub(crate) mod evaluation;
pub(crate) mod extract;
mod fit;
pub(crate) mod fork;
pub(crate) mod health;
pub(crate) mod jobs;
pub(crate) mod logs;
pub(crate) mod looks;
pub(crate) mod metrics;
pub(crate) mod pages;
pub(crate) mod pictures;
pub(crate) mod predict;
pub(crate) mod stream;

/// The close code for what is wrong with a websocket's frames: too large, or not as the protocol has them.
fn close_code_of(error: &axum::Error) -> u16 {
    use axum::extract::ws::close_code;
    // The library keeps its kinds of errors to itself.
    if error.to_string().contains("too long") { close_code::SIZE } else { close_code::PROTOCOL }
}
