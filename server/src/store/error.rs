//! Errors of a store.

use crate::lifecycle::Refusal;

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// No job, dataset, ... has this name or id.
    #[error("there is no such {0}")]
    NotFound(&'static str),
    /// The job's state forbids the change.
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("the name {0:?} is taken")]
    NameTaken(String),
    /// The job's dataset was removed.
    #[error("the dataset {0:?} is no longer registered")]
    DatasetRemoved(String),
    /// Unfinished jobs train on the dataset.
    #[error("jobs train on the dataset {0:?}")]
    DatasetInUse(String),
    /// The idempotency key was used with another request before.
    #[error("this Idempotency-Key was used before with another request; use a new key")]
    KeyReused,
    /// A cursor's value does not fit the list's order.
    #[error("the cursor is not valid for this list; leave it out to begin with the first page")]
    Cursor,
    /// The database is full, busy or unreachable. A later attempt may succeed.
    #[error("the database is not available: {0}")]
    Unavailable(String),
    /// The database never accepts this value.
    #[error("the database refuses a value: {0}")]
    Rejected(String),
    /// This version of Lockstep cannot read a stored value.
    #[error("the database contains an unreadable value: {0}")]
    Corrupt(String),
}

impl StoreError {
    /// Whether a later attempt may succeed.
    pub fn is_temporary(&self) -> bool {
        matches!(self, StoreError::Unavailable(_))
    }
}

/// The result of a store's method.
pub type Result<T> = std::result::Result<T, StoreError>;
