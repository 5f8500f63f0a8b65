//! A plain websocket client of the streams.

use crate::server::{Server, TIMEOUT, number, state_of};
use futures_util::StreamExt;
use lockstep_protocol::JobState;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio_tungstenite::{
    MaybeTlsStream, WebSocketStream, connect_async,
    tungstenite::{Message, client::IntoClientRequest, http::HeaderValue},
};

/// An open stream whose `hello` has been read.
pub(crate) struct Socket {
    socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
    /// The first frame.
    pub(crate) hello: Value,
    /// The frames after `hello`, in the order of arrival.
    pub(crate) frames: Vec<Value>,
}

impl Socket {
    /// The stream of a job.
    pub(crate) async fn of_job(server: &Server, id: &str, since: u64) -> Self {
        let url = server.api(&format!("/jobs/{id}/stream?since={since}")).replacen("http", "ws", 1);
        let mut request = url.into_client_request().expect("a URL");
        let token = format!("Bearer {}", server.token());
        request.headers_mut().insert("authorization", HeaderValue::from_str(&token).expect("a header"));
        let (mut socket, _) = connect_async(request).await.expect("a stream");
        let hello = frame(&mut socket).await.expect("a first frame");
        assert_eq!(hello["type"], "hello", "{hello}");
        assert_eq!(hello["job"]["id"], id);
        Self { socket, hello, frames: Vec::new() }
    }

    /// The next frame.
    pub(crate) async fn next(&mut self) -> Value {
        let frame = frame(&mut self.socket).await.expect("another frame");
        self.frames.push(frame.clone());
        frame
    }

    /// Reads up to the first frame for which `condition` holds.
    pub(crate) async fn until(&mut self, condition: impl Fn(&Value) -> bool) -> Value {
        loop {
            let frame = self.next().await;
            if condition(&frame) {
                return frame;
            }
        }
    }

    /// Reads until the job has ended.
    pub(crate) async fn read_to_end(&mut self) -> Value {
        self.until(is_end).await
    }

    /// The events among the frames read so far.
    pub(crate) fn events(&self) -> Vec<Value> {
        self.frames.iter().filter(|f| is_event(f)).cloned().collect()
    }

    /// Sequence number of the last event read, or `since`.
    pub(crate) fn last_seq(&self, since: u64) -> u64 {
        self.events().last().map_or(since, |e| number(&e["seq"]))
    }

    /// Drops the connection without closing it, and returns the events read so far.
    pub(crate) fn drop_connection(self) -> Vec<Value> {
        self.events()
    }
}

/// The next text frame, or the reason why none arrived in time.
async fn frame(socket: &mut WebSocketStream<MaybeTlsStream<TcpStream>>) -> Result<Value, String> {
    loop {
        let message = tokio::time::timeout(TIMEOUT, socket.next()).await;
        match message.map_err(|_| format!("no frame within {TIMEOUT:?}"))? {
            Some(Ok(Message::Text(text))) => {
                return serde_json::from_str(&text).map_err(|e| format!("{e}: {text}"));
            }
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
            other => return Err(format!("the stream ended: {other:?}")),
        }
    }
}

/// Whether a frame is a stored event.
fn is_event(frame: &Value) -> bool {
    frame.get("seq").is_some() && frame["type"] != "live"
}

/// Whether a frame is the final state of the job.
pub(crate) fn is_end(frame: &Value) -> bool {
    frame["type"] == "state" && state_of(frame).is_final()
}

/// Whether a frame has points of this metric.
pub(crate) fn is_metric(frame: &Value, name: &str) -> bool {
    frame["type"] == "metrics" && frame["name"] == name
}

/// Highest step of a metrics frame.
pub(crate) fn last_step(frame: &Value) -> u64 {
    frame["steps"].as_array().and_then(|s| s.last()).map_or(0, number)
}

/// The states of a job's events. A waiting job repeats its state with each new reason; repetitions are left out.
pub(crate) fn states(events: &[Value]) -> Vec<JobState> {
    let mut states: Vec<_> = events.iter().filter(|e| e["type"] == "state").map(state_of).collect();
    states.dedup();
    states
}

/// Waits until a job has passed a step.
pub(crate) async fn wait_for_step(server: &Server, id: &str, step: u64) {
    let mut socket = Socket::of_job(server, id, 0).await;
    socket.until(|f| is_metric(f, "loss") && last_step(f) >= step).await;
}

/// All stored events of a job.
pub(crate) async fn stored(server: &Server, id: &str) -> Vec<Value> {
    let mut socket = Socket::of_job(server, id, 0).await;
    let last = number(&socket.hello["last_seq"]);
    let live = socket.until(|f| f["type"] == "live").await;
    assert!(number(&live["seq"]) >= last, "live {live} after hello {}", socket.hello);
    let events = socket.events();
    assert_unbroken(&events, 0);
    events
}

/// Asserts that the sequence numbers are `since + 1`, `since + 2` and so on.
pub(crate) fn assert_unbroken(events: &[Value], since: u64) {
    for (expected, event) in (since + 1..).zip(events) {
        assert_eq!(number(&event["seq"]), expected, "a missing or repeated number: {event}");
    }
}
