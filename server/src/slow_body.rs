//! Whoever sends a request's body must go on sending it: one that stops coming would hold its connection, and what its
//! handler holds, until the handler's time is over.

use crate::{app::App, error::Error};
use axum::{
    body::{Body, Bytes, HttpBody},
    extract::{Request, State},
    http::{HeaderValue, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use http_body::{Frame, SizeHint};
use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::Sleep;

/// Answers 408 to a request whose body stops coming, whatever its handler makes of that.
pub(crate) async fn refuse(State(app): State<App>, request: Request, next: Next) -> Response {
    if request.body().is_end_stream() {
        return next.run(request).await;
    }
    let patience = app.config.body_patience;
    let stopped = Arc::new(AtomicBool::new(false));
    let request = request
        .map(|body| Body::new(Watched { body, patience, silence: None, stopped: Arc::clone(&stopped) }));
    let response = next.run(request).await;
    if !stopped.load(Ordering::Relaxed) {
        return response;
    }
    let detail = format!("no byte of the body came for {} s; send it again", patience.as_secs_f32());
    timeout(detail)
}

/// 408; the rest of the body, if it still comes, is not waited for.
fn timeout(detail: String) -> Response {
    let mut response = Error::Refused(StatusCode::REQUEST_TIMEOUT, detail).into_response();
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// A body that fails when nothing of it came for some time while somebody waited for it.
struct Watched {
    body: Body,
    patience: Duration,
    /// Ends when the patience does; there since the last part came and the next was waited for.
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
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
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
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
