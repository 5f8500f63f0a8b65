//! The server: REST and websockets, dispatch of jobs to agents, ingest of what ranks report, and the store.

pub mod app;
pub mod config;
mod serve;

pub use config::{ServeConfig, ServeError};
pub use serve::serve;
