//! The location of the database: parsed from a URL, displayed without its password, opened as a store.

use super::{Store, postgres::PostgresStore, sqlite::SqliteStore};
use crate::config::{ServeConfig, serve_error::ServeError};
use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

/// The location of a database.
#[derive(Debug, Clone)]
pub enum Location {
    Sqlite(PathBuf),
    /// A connection URL, as for libpq.
    Postgres(String),
}

impl Location {
    /// The database that a configuration names (default: `lockstep.db` in the data directory).
    ///
    /// # Errors
    /// The configured URL is invalid.
    pub fn of(config: &ServeConfig) -> Result<Self, ServeError> {
        match &config.database {
            Some(url) => Self::parse(url),
            None => Ok(Self::Sqlite(config.data_dir.join("lockstep.db"))),
        }
    }

    /// Parses `sqlite://PATH` or `postgres://USER@HOST/NAME`.
    ///
    /// # Errors
    /// The URL has another format.
    pub fn parse(url: &str) -> Result<Self, ServeError> {
        if url.starts_with("postgres://") || url.starts_with("postgresql://") {
            return Ok(Self::Postgres(url.to_owned()));
        }
        match url.strip_prefix("sqlite://").or_else(|| url.strip_prefix("sqlite:")) {
            Some(path) if !path.is_empty() => Ok(Self::Sqlite(path.into())),
            _ => Err(ServeError::DatabaseUrl(
                url.to_owned(),
                "write it as sqlite://PATH or postgres://USER@HOST/NAME".to_owned(),
            )),
        }
    }

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

    /// The folder of the database's file, if it is not the data directory.
    pub(crate) fn other_folder(&self, data_dir: &Path) -> Option<PathBuf> {
        let Self::Sqlite(path) = self else { return None };
        let folder = path.canonicalize().ok()?.parent()?.to_owned();
        (folder != data_dir).then_some(folder)
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sqlite(path) => path.display().fmt(f),
            Self::Postgres(url) => {
                // A password is between the scheme and the last @ before the path, or in the query.
                let (scheme, rest) = url.split_once("://").unwrap_or(("postgres", url));
                let authority = rest.split(['/', '?']).next().unwrap_or_default();
                let host = authority.rsplit('@').next().unwrap_or_default();
                let path = rest[authority.len()..].split('?').next().unwrap_or_default();
                write!(f, "{scheme}://{host}{path}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_not_shown() {
        for (url, shown) in [
            ("postgres://me:secret@db.example:5433/lockstep", "postgres://db.example:5433/lockstep"),
            ("postgresql://db/lockstep?password=secret", "postgresql://db/lockstep"),
            ("postgres:///lockstep?host=/run/postgresql", "postgres:///lockstep"),
        ] {
            assert_eq!(Location::parse(url).unwrap().to_string(), shown);
        }
    }
}
