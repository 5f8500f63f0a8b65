//! Answers that may have megabytes: a few are made at a time, on threads of their own, and they are sent in pieces. Other requests are
//! answered meanwhile.

use crate::error::{Error, Result};
use axum::{
    body::Body,
    http::header,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures_util::stream;
use serde::Serialize;
use std::{convert::Infallible, time::Duration};
use tokio::sync::{Semaphore, SemaphorePermit};

/// Pages of more elements than this take turns.
const SMALL: u32 = 100;
static AT_ONCE: Semaphore = Semaphore::const_new(2);
const PATIENCE: Duration = Duration::from_secs(30);
/// The connection's thread compresses a piece in well under a millisecond.
const PIECE_BYTES: usize = 64 << 10;

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
    Ok(([(header::CONTENT_TYPE, "application/json")], body(bytes.into())).into_response())
}

fn body(bytes: Bytes) -> Body {
    if bytes.len() <= PIECE_BYTES {
        return bytes.into();
    }
    Body::from_stream(stream::unfold(bytes, |mut rest: Bytes| async move {
        let piece = rest.split_to(rest.len().min(PIECE_BYTES));
        // Without this, a fast reader's connection would keep its thread until all is compressed.
        tokio::task::yield_now().await;
        (!piece.is_empty()).then_some((Ok::<_, Infallible>(piece), rest))
    }))
}
