//! Errors of a store.

use crate::lifecycle::Refused;

/// What goes wrong in a store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// No such job, dataset ...
    #[error("there is no such {0}")]
    NotFound(&'static str),
    /// The job's state forbids it.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The name is taken.
    #[error("the name {0:?} is taken")]
    NameTaken(String),
    /// No dataset of this name is registered, at the very moment that something was to need it.
    #[error("the dataset {0:?} is no longer registered")]
    NoDataset(String),
    /// Jobs that are not over train on the dataset.
    #[error("jobs train on the dataset {0:?}")]
    DatasetInUse(String),
    /// An idempotency key came with another request before.
    #[error("this Idempotency-Key was used before, with another request")]
    KeyReused,
    /// A cursor has a value that its order does not have.
    #[error("the cursor is none of this list: leave it out to begin with the first page")]
    Cursor,
    /// The database did not do its work: full, busy, away. Trying again later may help.
    #[error("the database is not available: {0}")]
    Unavailable(String),
    /// The database takes this value never, now or later.
    #[error("the database refuses a value: {0}")]
    Rejected(String),
    /// A row does not hold what this version writes.
    #[error("the database holds something unreadable: {0}")]
    Corrupt(String),
}

impl StoreError {
    /// Whether the same work may be done when it is tried again later.
    pub fn may_pass(&self) -> bool {
        matches!(self, StoreError::Unavailable(_))
    }
}

/// The result of a store's work.
pub type Result<T> = std::result::Result<T, StoreError>;
