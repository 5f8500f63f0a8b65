//! Answers that may have megabytes: a few are made at a time, on threads of their own, so that other requests are answered meanwhile.

use crate::http::error::{Error, Result};
use axum::{
    http::header,
    response::{IntoResponse, Response},
};
use serde::Serialize;
use std::time::Duration;
use tokio::sync::{Semaphore, SemaphorePermit};

/// Pages of more elements than this take turns.
const SMALL: u32 = 100;
static AT_ONCE: Semaphore = Semaphore::const_new(2);
const PATIENCE: Duration = Duration::from_secs(30);

/// Held while a page of so many elements is read and written as JSON; a small one waits for no turn.
///
/// # Errors
/// 503: others take too long.
pub(super) async fn turn(limit: u32) -> Result<Option<SemaphorePermit<'static>>> {
    if limit <= SMALL {
        return Ok(None);
    }
    let turn = tokio::time::timeout(PATIENCE, AT_ONCE.acquire()).await;
    let busy =
        || Error::Unavailable("others are reading large pages; try again, or give a lower limit".into());
    turn.map_err(|_| busy())?.map(Some).map_err(|_| busy())
}

/// The answer with this value.
///
/// # Errors
/// It cannot be written as JSON.
pub(super) async fn json(value: impl Serialize + Send + 'static) -> Result<Response> {
    let written = tokio::task::spawn_blocking(move || serde_json::to_vec(&value)).await;
    let failed = |error: String| Error::Internal(format!("an answer: {error}"));
    let bytes = written.map_err(|e| failed(e.to_string()))?.map_err(|e| failed(e.to_string()))?;
    Ok(([(header::CONTENT_TYPE, "application/json")], bytes).into_response())
}
