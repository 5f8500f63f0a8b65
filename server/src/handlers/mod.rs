//! One file a kind of thing; `crate::router` says which address leads where.

pub(crate) mod agent_socket;
pub(crate) mod agents;
pub(crate) mod annotations;
pub(crate) mod assets;
pub(crate) mod attempts;
mod bundle;
pub(crate) mod checkpoints;
pub(crate) mod datasets;
pub(crate) mod evaluation;
pub(crate) mod extract;
mod fit;
pub(crate) mod fork;
pub(crate) mod health;
pub(crate) mod jobs;
pub(crate) mod logs;
pub(crate) mod metrics;
pub(crate) mod pages;
pub(crate) mod pictures;
pub(crate) mod predict;
pub(crate) mod stream;
