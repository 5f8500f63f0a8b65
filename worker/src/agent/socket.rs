//! The websocket to the server, message by message.

use super::address::Address;
use futures_util::{SinkExt, StreamExt};
use lockstep_protocol::{
    agent::{FromAgent, ToAgent},
    wire::{self, PartialMessages},
};
use serde_json::Value;
use std::time::Duration;
use tokio::{net::TcpStream, time};
use tokio_tungstenite::{
    MaybeTlsStream, WebSocketStream,
    tungstenite::{self, Message},
};

/// Time limit for each part of connecting: the TCP connection, the handshakes, and the `Welcome`.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

pub(super) type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

/// A random time between half of `pause` and `pause`, so that many agents do not reconnect at the same moment.
pub(super) fn jittered(pause: Duration) -> Duration {
    let random = uuid::Uuid::new_v4().as_u128() as u16;
    pause.mul_f64(0.5 + 0.5 * f64::from(random) / f64::from(u16::MAX))
}

/// Opens a connection to the server, without sending anything.
pub(super) async fn reach(address: &Address) -> Result<TcpStream, String> {
    match time::timeout(CONNECT_TIMEOUT, TcpStream::connect(address.host_and_port())).await {
        Err(_) => Err("the server does not answer".into()),
        Ok(Err(error)) => Err(format!("IO error: {error}")),
        Ok(Ok(stream)) => {
            stream.set_nodelay(true).map_err(|error| error.to_string())?;
            Ok(stream)
        }
    }
}

/// Why there is no connection.
#[derive(Debug)]
pub(super) struct ConnectError {
    pub(super) reason: String,
    /// Whether the server itself reports that the agent's token is not valid. Any other reason may be temporary.
    pub(super) is_unauthorized: bool,
    /// Whether the server itself reports that the token is valid, but not for agents.
    pub(super) is_forbidden: bool,
}

impl ConnectError {
    pub(super) fn from_response(answer: &tungstenite::http::Response<Option<Vec<u8>>>) -> Self {
        let body = answer.body().as_deref().unwrap_or_default();
        // A problem document (RFC 9457). A response without a Lockstep error code comes from a proxy.
        let problem: Value = serde_json::from_slice(body).unwrap_or_default();
        let text = |key: &str| problem.get(key).and_then(Value::as_str);
        let body = String::from_utf8_lossy(body);
        let reason =
            format!("the server answered {} {}", answer.status(), text("detail").unwrap_or(body.trim()));
        let has_code = |code: &str| text("code") == Some(code);
        Self { reason, is_unauthorized: has_code("unauthorized"), is_forbidden: has_code("forbidden") }
    }
}

impl From<String> for ConnectError {
    fn from(reason: String) -> Self {
        Self { reason, is_unauthorized: false, is_forbidden: false }
    }
}

pub(super) async fn send(socket: &mut Socket, message: &FromAgent) -> Result<(), String> {
    let bytes = wire::encode(message).map_err(|e| e.to_string())?;
    socket.send(Message::Binary(bytes.into())).await.map_err(|e| e.to_string())
}

/// The next message. `None` for an unknown message, a part of a message, or a ping.
pub(super) async fn receive(
    socket: &mut Socket,
    partial: &mut PartialMessages,
) -> Result<Option<ToAgent>, String> {
    match socket.next().await {
        None => Err("the connection was closed".into()),
        Some(Err(error)) => Err(error.to_string()),
        Some(Ok(Message::Close(frame))) => Err(match frame {
            Some(frame) if !frame.reason.is_empty() => {
                format!("the server closed the connection: {}", frame.reason)
            }
            _ => "the server closed the connection".into(),
        }),
        Some(Ok(Message::Binary(bytes))) => match decode_message(&bytes) {
            Some(ToAgent::Part(part)) => Ok(partial.add(part)?.and_then(|whole| decode_message(&whole))),
            message => Ok(message),
        },
        Some(Ok(_)) => Ok(None),
    }
}

fn decode_message(bytes: &[u8]) -> Option<ToAgent> {
    let message = wire::decode(bytes);
    message
        .inspect_err(|error| {
            tracing::warn!(%error, "the server sent a message that this version does not know");
        })
        .ok()
}
