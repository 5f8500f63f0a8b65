//! A store at a location: the one place that knows both databases.

use super::{Location, Store, postgres::PostgresStore, sqlite::SqliteStore};
use crate::config::serve_error::ServeError;
use std::sync::Arc;

impl Location {
    /// Opens it for this process alone, with its tables up to date.
    ///
    /// # Errors
    /// It cannot be opened, was written by a newer version, or is another server's.
    pub async fn open(&self) -> Result<Arc<dyn Store>, ServeError> {
        Ok(match self {
            Self::Sqlite(path) => Arc::new(SqliteStore::open(path).await?),
            Self::Postgres(url) => Arc::new(PostgresStore::open(url).await?),
        })
    }
}
