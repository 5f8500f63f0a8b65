//! A job's event stream, for the commands that follow a job.

use super::Api;
use anyhow::bail;
use futures_util::StreamExt;
use lockstep_protocol::{
    Job,
    stream::{Frame, HEARTBEAT_SECS},
};
use reqwest::{
    StatusCode, Upgraded,
    header::{CONNECTION, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_VERSION, UPGRADE},
};
use std::time::Duration;
use tokio::time::Instant;
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{Message, handshake::client::generate_key, protocol::Role},
};

/// Time without a frame after which a connection counts as lost: at least two heartbeats are missing.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(2 * HEARTBEAT_SECS + 5);

pub(crate) struct Stream {
    socket: WebSocketStream<Upgraded>,
    /// When the last frame or heartbeat arrived.
    heard_at: Instant,
}

impl Stream {
    /// Returns the next frame other than a heartbeat, or `None` if the server has closed the stream. Can be cancelled and called again.
    ///
    /// # Errors
    /// The connection broke, or heartbeats are missing.
    pub(crate) async fn next(&mut self) -> anyhow::Result<Option<Frame>> {
        loop {
            let message =
                tokio::time::timeout_at(self.heard_at + HEARTBEAT_TIMEOUT, self.socket.next()).await;
            let message =
                message.map_err(|_| anyhow::anyhow!("the server sent nothing for {HEARTBEAT_TIMEOUT:?}"))?;
            self.heard_at = Instant::now();
            match message {
                None | Some(Ok(Message::Close(_))) => return Ok(None),
                Some(Err(error)) => return Err(error.into()),
                Some(Ok(Message::Text(text))) => match serde_json::from_str(&text) {
                    // A frame of a type that this version does not know is skipped.
                    Ok(Frame::Heartbeat { .. }) | Err(_) => {}
                    Ok(frame) => return Ok(Some(frame)),
                },
                Some(Ok(_)) => {}
            }
        }
    }
}

impl Api {
    /// Opens the stream of a job's events after the event with the number `since`. Uses the same client as other requests, because
    /// that client uses the proxy.
    ///
    /// # Errors
    /// The server is unreachable.
    pub(crate) async fn open_stream(&self, job: &Job, since: u64) -> anyhow::Result<Stream> {
        let url = self.url(&format!("/jobs/{}/stream?since={since}", job.id));
        let request = self.client.get(url).header(CONNECTION, "upgrade").header(UPGRADE, "websocket");
        let request = request.header(SEC_WEBSOCKET_VERSION, "13").header(SEC_WEBSOCKET_KEY, generate_key());
        let opening = async {
            let response = request.send().await.map_err(|error| self.request_error(&error))?;
            if response.status() != StatusCode::SWITCHING_PROTOCOLS {
                return Err(self.read_problem(response).await);
            }
            let connection = response.upgrade().await?;
            let socket = WebSocketStream::from_raw_socket(connection, Role::Client, None).await;
            Ok(Stream { socket, heard_at: Instant::now() })
        };
        match tokio::time::timeout(Duration::from_secs(10), opening).await {
            Ok(opened) => opened,
            Err(_) => bail!("the stream of {}: the server does not answer", job.id),
        }
    }
}
