//! Conversions between values and columns, for both databases.

use super::error::{Result, StoreError};
use jiff::Timestamp;
use lockstep_protocol::{JobId, agent::FencingToken};
use sqlx::{
    error::{DatabaseError, ErrorKind},
    sqlite::SqliteError,
};
use std::borrow::Cow;

impl From<sqlx::Error> for StoreError {
    fn from(error: sqlx::Error) -> Self {
        match error {
            sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) | sqlx::Error::ColumnNotFound(_) => {
                StoreError::Corrupt(error.to_string())
            }
            sqlx::Error::Encode(_) => StoreError::Rejected(error.to_string()),
            sqlx::Error::Database(ref e) if is_lasting(e.as_ref()) => StoreError::Rejected(error.to_string()),
            sqlx::Error::RowNotFound => StoreError::NotFound("row"),
            sqlx::Error::PoolTimedOut => StoreError::Unavailable("it does not respond".into()),
            _ => StoreError::Unavailable(error.to_string()),
        }
    }
}

/// Whether a statement with the same values would always fail in this way.
fn is_lasting(error: &(dyn DatabaseError + 'static)) -> bool {
    if !matches!(error.kind(), ErrorKind::Other) {
        return true; // The statement violates a constraint.
    }
    let Some(code) = error.code() else { return false };
    match error.try_downcast_ref::<SqliteError>() {
        // The primary code is the lowest byte (sqlite.org/rescode.html): TOOBIG, CONSTRAINT, MISMATCH, RANGE.
        Some(_) => code.parse::<u32>().is_ok_and(|code| matches!(code & 0xff, 18 | 19 | 20 | 25)),
        // Classes of SQLSTATE: data exception, integrity constraint violation, program limit exceeded.
        None => ["22", "23", "54"].iter().any(|class| code.starts_with(class)),
    }
}

/// Serializes a value for a column of JSON.
pub(super) fn json<T: serde::Serialize>(value: &T) -> Result<String> {
    serde_json::to_string(value).map_err(|e| StoreError::Corrupt(e.to_string()))
}

pub(super) fn from_json<T: serde::de::DeserializeOwned>(text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|e| StoreError::Corrupt(e.to_string()))
}

pub(super) fn job_id(text: &str) -> Result<JobId> {
    text.parse().map_err(|_| StoreError::Corrupt(format!("job id {text:?}")))
}

pub(super) fn time(milliseconds: i64) -> Result<Timestamp> {
    Timestamp::from_millisecond(milliseconds).map_err(|e| StoreError::Corrupt(e.to_string()))
}

/// Converts a number for a column. Integers are signed in both databases; sequence numbers, steps and sizes stay far below 2^63.
pub(super) fn int(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// Converts a number from a column. A negative number, which only a damaged row has, becomes 0.
pub(super) fn uint(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

/// A fencing token with a new secret: the 2 x 122 random bits of two UUIDs, folded into 128.
pub(super) fn new_fencing_token(number: u64) -> FencingToken {
    let random = || uuid::Uuid::new_v4().as_u128();
    FencingToken { number, secret: (random() ^ random().rotate_left(64)).max(1) }
}

/// Converts a number from a column. A number outside the range, which only a damaged row has, becomes 0.
pub(super) fn to_u32(value: i64) -> u32 {
    u32::try_from(value).unwrap_or(0)
}

/// Removes NUL characters, which Postgres does not accept in text. With NUL, a request would fail with an error of the database, and a
/// report would be retried forever.
pub(super) fn strip_nul(text: &str) -> Cow<'_, str> {
    if text.contains('\0') { text.replace('\0', "").into() } else { text.into() }
}

/// A point at which tests can inject a fault; see [`lockstep_protocol::fault`].
pub(super) fn fault_point(point: &str) -> Result<()> {
    lockstep_protocol::fault::point(point).map_err(|e| StoreError::Unavailable(e.to_string()))
}
