//! Requests with slow or large bodies. A body that stops arriving is refused, because it would hold its connection and its handler's
//! resources until the handler's time limit. The rest of a body that is too large is read and dropped: a client whose connection is closed
//! while it sends sees a broken pipe, and not the answer.

use crate::{config::ServeConfig, http::error::Error};
use axum::{
    body::{Body, Bytes, HttpBody},
    extract::{Request, State},
    http::{HeaderValue, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use http_body::{Frame, SizeHint};
use std::{
    future::poll_fn,
    io,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::Sleep;

/// Bytes of a body that is too large which are read and dropped, so that its sender reads the answer.
const DRAINED_BYTES: usize = 256 << 20;
/// Time limit for reading and dropping. The connection of a slower sender is closed.
const DRAINING: Duration = Duration::from_secs(30);

/// Answers 408 to a request whose body stops arriving, whatever its handler answers. Answers 413 only after the body was read.
pub(crate) async fn refuse(State(config): State<Arc<ServeConfig>>, request: Request, next: Next) -> Response {
    if request.body().is_end_stream() {
        return next.run(request).await;
    }
    let patience = config.body_patience;
    let stopped = Arc::new(AtomicBool::new(false));
    let mut rest = None;
    let request = request.map(|body| {
        let body = Shared::new(body);
        rest = Some(body.clone());
        Body::new(Watched { body, patience, silence: None, stopped: Arc::clone(&stopped) })
    });
    let response = next.run(request).await;
    if !stopped.load(Ordering::Relaxed) {
        if let (StatusCode::PAYLOAD_TOO_LARGE, Some(rest)) = (response.status(), rest) {
            // The answer does not depend on how this ends.
            let _ = tokio::time::timeout(DRAINING, rest.drain()).await;
        }
        return response;
    }
    let detail = format!("no byte of the body came for {} s; send it again", patience.as_secs_f32());
    timeout(detail)
}

/// 408; the connection is closed without reading the rest of the body.
fn timeout(detail: String) -> Response {
    let mut response = Error::Refused(StatusCode::REQUEST_TIMEOUT, detail).into_response();
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// A body that outlives its handler.
#[derive(Clone)]
struct Shared(Arc<Mutex<Body>>);

impl Shared {
    fn new(body: Body) -> Self {
        Self(Arc::new(Mutex::new(body)))
    }

    fn lock(&self) -> MutexGuard<'_, Body> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn poll_frame(&self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut *self.lock()).poll_frame(context)
    }

    /// Reads to the end, or as far as [`DRAINED_BYTES`].
    async fn drain(&self) {
        let mut left = DRAINED_BYTES;
        while let Some(Ok(frame)) = poll_fn(|context| self.poll_frame(context)).await {
            let bytes = frame.data_ref().map_or(0, Bytes::len);
            left = left.saturating_sub(bytes);
            if left == 0 {
                return;
            }
        }
    }
}

/// A body that fails if nothing arrives for some time while its handler waits.
struct Watched {
    body: Shared,
    patience: Duration,
    /// The timer; set while the handler waits for the next part.
    silence: Option<Pin<Box<Sleep>>>,
    stopped: Arc<AtomicBool>,
}

impl HttpBody for Watched {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if let Poll::Ready(frame) = self.body.poll_frame(context) {
            self.silence = None;
            return Poll::Ready(frame);
        }
        let patience = self.patience;
        let silence = self.silence.get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
        if silence.as_mut().poll(context).is_pending() {
            return Poll::Pending;
        }
        self.stopped.store(true, Ordering::Relaxed);
        let error = io::Error::new(io::ErrorKind::TimedOut, "the body stopped coming");
        Poll::Ready(Some(Err(axum::Error::new(error))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.lock().is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.lock().size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[tokio::test]
    async fn of_a_body_that_is_too_large_256_mib_are_read_and_no_more() {
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
            Shared::new(Body::from_stream(stream)).drain().await;
            taken.load(Ordering::Relaxed)
        };
        assert_eq!(read(DRAINED_BYTES - 1).await, DRAINED_BYTES - 1);
        assert_eq!(read(DRAINED_BYTES).await, DRAINED_BYTES);
        assert_eq!(read(DRAINED_BYTES + 1).await, DRAINED_BYTES);
        assert_eq!(read(2 * DRAINED_BYTES).await, DRAINED_BYTES);
    }
}
