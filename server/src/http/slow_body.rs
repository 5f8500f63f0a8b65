//! Requests with slow or large bodies. A body that stops arriving is refused, because it would hold its connection and its handler's
//! resources until the handler's time limit. The rest of a body that is too large is read and dropped. If the connection were closed while
//! the client sends, the client would get a broken pipe instead of the response.

use crate::{config::ServeConfig, http::error::Error, util::lock};
use axum::{
    body::{Body, Bytes, HttpBody},
    extract::{Request, State},
    http::{HeaderValue, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use http_body::Frame;
use http_body_util::{BodyExt, Limited};
use std::{
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};
use tower_http::timeout::{TimeoutBody, TimeoutError};

/// Maximum number of bytes that are read and dropped of a body that is too large.
const MAX_DRAINED_BYTES: usize = 256 << 20;
/// Time limit for reading and dropping. The connection of a slower sender is closed.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);

/// Limits the time between two parts of a request's body. If the body stops arriving, the response is 408 instead of the handler's
/// response. If the handler's response is 413, the rest of the body is read first.
pub(crate) async fn limit_body_time(
    State(config): State<Arc<ServeConfig>>,
    request: Request,
    next: Next,
) -> Response {
    if request.body().is_end_stream() {
        return next.run(request).await;
    }
    let timeout = config.body_timeout;
    let has_stopped = Arc::new(AtomicBool::new(false));
    let mut rest = None;
    let request = request.map(|body| {
        let body = SharedBody(Arc::new(Mutex::new(body)));
        rest = Some(body.clone());
        let has_stopped = has_stopped.clone();
        Body::new(TimeoutBody::new(timeout, body).inspect_err(move |error| {
            has_stopped.fetch_or(error.is::<TimeoutError>(), Ordering::Relaxed);
        }))
    });
    let response = next.run(request).await;
    if !has_stopped.load(Ordering::Relaxed) {
        if let (StatusCode::PAYLOAD_TOO_LARGE, Some(rest)) = (response.status(), rest) {
            // The response does not depend on the result.
            let _ = tokio::time::timeout(DRAIN_TIMEOUT, drain(rest)).await;
        }
        return response;
    }
    let detail =
        format!("no byte of the body arrived for {} s; send the request again", timeout.as_secs_f32());
    let mut response = Error::Refused(StatusCode::REQUEST_TIMEOUT, detail).into_response();
    // The connection is closed without reading the rest of the body.
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// Reads a body to its end, or past [`MAX_DRAINED_BYTES`].
async fn drain(body: impl HttpBody<Data = Bytes, Error = axum::Error> + Unpin) {
    let mut body = Limited::new(body, MAX_DRAINED_BYTES);
    while let Some(Ok(_)) = body.frame().await {}
}

/// A body that outlives its handler.
#[derive(Clone)]
struct SharedBody(Arc<Mutex<Body>>);

impl HttpBody for SharedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let mut body = lock(&self.0);
        Pin::new(&mut *body).poll_frame(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{io, sync::atomic::AtomicUsize};

    #[tokio::test]
    async fn reading_a_body_that_is_too_large_stops_after_256_mib() {
        let read = async |bytes: usize| {
            let taken = Arc::new(AtomicUsize::new(0));
            let part = Bytes::from_static(&[0; 1 << 20]);
            let sizes = std::iter::repeat_n(1 << 20, bytes >> 20).chain([bytes % (1 << 20)]);
            let parts: Vec<_> = sizes.map(|size| part.slice(..size)).collect();
            let seen = Arc::clone(&taken);
            let stream = futures_util::stream::iter(parts.into_iter().map(move |part| {
                seen.fetch_add(part.len(), Ordering::Relaxed);
                Ok::<_, io::Error>(part)
            }));
            drain(Body::from_stream(stream)).await;
            taken.load(Ordering::Relaxed)
        };
        assert_eq!(read(MAX_DRAINED_BYTES - 1).await, MAX_DRAINED_BYTES - 1);
        assert_eq!(read(MAX_DRAINED_BYTES).await, MAX_DRAINED_BYTES);
        assert_eq!(read(MAX_DRAINED_BYTES + 1).await, MAX_DRAINED_BYTES + 1);
        assert_eq!(read(2 * MAX_DRAINED_BYTES).await, MAX_DRAINED_BYTES + (1 << 20));
    }
}
