//! Opens the store at a location.

use super::{Location, Store, postgres::PostgresStore, sqlite::SqliteStore};
use crate::config::serve_error::ServeError;
use std::sync::Arc;

impl Location {
    /// Opens the database exclusively for this process and brings its tables up to date.
    ///
    /// # Errors
    /// The database cannot be opened, was written by a newer version, or is in use by another server.
    pub async fn open(&self) -> Result<Arc<dyn Store>, ServeError> {
        Ok(match self {
            Self::Sqlite(path) => Arc::new(SqliteStore::open(path).await?),
            Self::Postgres(url) => Arc::new(PostgresStore::open(url).await?),
        })
    }
}
