//! A request in flight: its connection counts as in use until the response is completely sent, and the response's bytes are counted.

use super::{Connection, lock};
use crate::http::access_log::Line;
use axum::body::Body;
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Instant,
};

/// Marks a connection as in use, from the head of a request to the end of its response.
pub(super) struct InFlightRequest(Arc<Connection>);

impl InFlightRequest {
    pub(super) fn begin(connection: &Arc<Connection>) -> Self {
        lock(&connection.state).requests += 1;
        Self(connection.clone())
    }
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.requests -= 1;
        state.idle_since = Instant::now();
    }
}

/// The body of a response. When it is sent or dropped, the request is no longer in flight.
pub(super) struct CountedBody {
    pub(super) body: Body,
    pub(super) line: Option<Box<Line>>,
    pub(super) _in_flight: InFlightRequest,
}

impl http_body::Body for CountedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        if let (Some(line), Poll::Ready(Some(Ok(frame)))) = (&mut self.line, &frame) {
            line.bytes += frame.data_ref().map_or(0, Bytes::len) as u64;
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
