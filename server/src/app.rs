//! The application: what handlers share, and the router that tests and [`crate::serve`] use.

use crate::config::{ServeConfig, ServeError};
use axum::{Router, routing::get};

/// Everything that handlers share.
#[derive(Clone)]
pub struct App {}

impl App {
    /// Opens the database.
    ///
    /// # Errors
    /// A database that cannot be opened or is of a newer version.
    pub async fn open(_config: ServeConfig) -> Result<App, ServeError> {
        Ok(App {})
    }
}

/// Every URL of the server.
pub fn build_router(_app: App) -> Router {
    Router::new().route("/healthz", get(|| async { "ok\n" }))
}
