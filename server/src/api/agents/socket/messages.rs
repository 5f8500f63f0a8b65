//! Reading the messages of an agent, which may come in parts.

use super::End;
use axum::{
    body::Bytes,
    extract::ws::{Message, close_code},
};
use lockstep_protocol::{
    agent::FromAgent,
    wire::{self, PartialMessages},
};
use tokio::sync::Semaphore;

/// Maximum size of a message, in bytes. A report has at most about a mebibyte, or somewhat more with many log lines.
pub(super) const MESSAGE_BYTES: usize = 16 << 20;
/// Maximum size of `Hello`, in bytes. The largest valid `Hello`, with all slots, attempts and descriptions at their limits, is smaller.
pub(super) const HELLO_BYTES: usize = 2 << 20;
/// Maximum size of a message that is decoded on the connection's thread, in bytes. Longer messages are decoded on a blocking thread,
/// because decoding may take a second, which would delay all heartbeats. Only one longer message is decoded at a time, because decoding
/// may need memory of forty times the message's size.
const DECODED_HERE_BYTES: usize = 2 << 20;
static DECODING: Semaphore = Semaphore::const_new(1);

/// Returns a message and its length in bytes. `None` for a part of a message, unless it is the last part, and for frames of the websocket
/// protocol itself, such as a ping.
pub(super) async fn read(
    message: Result<Message, axum::Error>,
    partial: &mut PartialMessages,
) -> Result<Option<(FromAgent, usize)>, End> {
    let bytes = match message? {
        Message::Binary(bytes) => bytes,
        Message::Text(_) => {
            return Err(End { why: "the agent sent text".into(), code: close_code::UNSUPPORTED });
        }
        Message::Ping(_) | Message::Pong(_) | Message::Close(_) => return Ok(None),
    };
    let length = bytes.len();
    match decode_message(bytes).await? {
        FromAgent::Part(part) => match partial.add(part).map_err(End::protocol)? {
            Some(joined) => {
                let length = joined.len();
                Ok(Some((decode_message(joined.into()).await?, length)))
            }
            None => Ok(None),
        },
        message => Ok(Some((message, length))),
    }
}

async fn decode_message(bytes: Bytes) -> Result<FromAgent, End> {
    let decode = |bytes: &[u8]| {
        wire::decode(bytes)
            .map_err(|e| End::protocol(format!("the agent sent a message that cannot be read: {e}")))
    };
    if bytes.len() <= DECODED_HERE_BYTES {
        return decode(&bytes);
    }
    let _one_at_a_time = DECODING.acquire().await.map_err(|e| e.to_string())?;
    tokio::task::spawn_blocking(move || decode(&bytes)).await.map_err(|e| e.to_string())?
}

/// Reads the first message, which must be `Hello`.
pub(super) async fn read_first(
    message: Result<Message, axum::Error>,
    partial: &mut PartialMessages,
) -> Result<Option<FromAgent>, End> {
    if matches!(&message, Ok(Message::Binary(bytes)) if bytes.len() > HELLO_BYTES) {
        return Err(End::protocol("the first message is longer than 2 MiB, the maximum size of Hello"));
    }
    Ok(read(message, partial).await?.map(|(message, _)| message))
}
