//! Messages of an agent, as they come: whole or in parts, and how long.

use super::End;
use axum::{
    body::Bytes,
    extract::ws::{Message, close_code},
};
use lockstep_protocol::{
    agent::FromAgent,
    wire::{self, Unfinished},
};
use tokio::sync::Semaphore;

/// A report holds about a mebibyte at most; a long tail of log lines may make it somewhat more.
pub(super) const MESSAGE_BYTES: usize = 16 << 20;
/// The largest `Hello`, with every slot, attempt and description at its limit, is smaller.
pub(super) const HELLO_BYTES: usize = 2 << 20;
/// Longer messages are decoded one at a time, apart from the threads that serve connections: what decodes for a second would keep all
/// heartbeats waiting, and takes up to forty times its bytes.
const DECODED_HERE_BYTES: usize = 2 << 20;
static DECODING: Semaphore = Semaphore::const_new(1);

/// The message that has come and its length; none before the last of its parts.
pub(super) async fn read(
    message: Message,
    unfinished: &mut Unfinished,
) -> std::result::Result<Option<(FromAgent, usize)>, End> {
    let bytes = match message {
        Message::Binary(bytes) => bytes,
        Message::Text(_) => {
            return Err(End { why: "it sent text".into(), code: close_code::UNSUPPORTED });
        }
        Message::Ping(_) | Message::Pong(_) | Message::Close(_) => return Ok(None),
    };
    let length = bytes.len();
    match decoded(bytes).await? {
        FromAgent::Part(part) => match unfinished.add(part).map_err(End::protocol)? {
            Some(whole) => {
                let length = whole.len();
                Ok(Some((decoded(whole.into()).await?, length)))
            }
            None => Ok(None),
        },
        whole => Ok(Some((whole, length))),
    }
}

async fn decoded(bytes: Bytes) -> std::result::Result<FromAgent, End> {
    let decode = |bytes: &[u8]| {
        wire::decode(bytes).map_err(|e| End::protocol(format!("it sent what cannot be read: {e}")))
    };
    if bytes.len() <= DECODED_HERE_BYTES {
        return decode(&bytes);
    }
    let _one_at_a_time = DECODING.acquire().await.map_err(|e| e.to_string())?;
    tokio::task::spawn_blocking(move || decode(&bytes)).await.map_err(|e| e.to_string())?
}

/// The first message, which is `Hello` from an agent.
pub(super) async fn first(
    message: Message,
    unfinished: &mut Unfinished,
) -> std::result::Result<Option<FromAgent>, End> {
    if matches!(&message, Message::Binary(bytes) if bytes.len() > HELLO_BYTES) {
        return Err(End::protocol("its first message is longer than 2 MiB, and no Hello is"));
    }
    Ok(read(message, unfinished).await?.map(|(message, _)| message))
}
