//! Responses that may have megabytes. At most two such responses are produced at a time, and blocking threads serialize them, so that other
//! requests are not delayed.

use crate::api::prelude::*;
use crate::http::error::run_blocking;
use std::time::Duration;
use tokio::sync::{Semaphore, SemaphorePermit};

/// Maximum number of elements of a page that needs no permit.
const SMALL_PAGE: u32 = 100;
/// Each large page needs a permit while it is produced.
static PERMITS: Semaphore = Semaphore::const_new(2);
/// Maximum time to wait for a permit.
const PERMIT_TIMEOUT: Duration = Duration::from_secs(30);

/// Returns a permit to hold while a page of at most `limit` elements is read and serialized; `None` for a small page.
///
/// # Errors
/// 503: other requests hold the permits for too long.
pub(super) async fn acquire_permit(limit: u32) -> Result<Option<SemaphorePermit<'static>>> {
    if limit <= SMALL_PAGE {
        return Ok(None);
    }
    let permit = tokio::time::timeout(PERMIT_TIMEOUT, PERMITS.acquire()).await;
    let busy = || {
        Error::Unavailable(
            "other requests are reading large pages; try again, or request a lower `limit`".into(),
        )
    };
    permit.map_err(|_| busy())?.map(Some).map_err(|_| busy())
}

/// Returns a response with this value as JSON.
pub(super) async fn json_response(value: impl Serialize + Send + 'static) -> Result<Response> {
    let bytes = run_blocking(move || serde_json::to_vec(&value)).await??;
    Ok(([(header::CONTENT_TYPE, "application/json")], bytes).into_response())
}
