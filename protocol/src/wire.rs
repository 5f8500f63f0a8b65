//! MessagePack with named fields, between server, agents and ranks. Senders are not trusted, so a message that is nested
//! deeper than [`MESSAGE_NESTING`] is refused. A long message is sent in parts, with other messages between them.

use crate::limits::{MAX_PARTIAL_MESSAGES, MESSAGE_BYTES, MESSAGE_NESTING, PART_BYTES};
use rmp_serde::{Deserializer, decode, encode};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::collections::HashMap;

/// Encodes a message.
///
/// # Errors
/// MessagePack cannot represent the value; this does not happen for the program's messages.
pub fn encode(message: &impl Serialize) -> Result<Vec<u8>, encode::Error> {
    rmp_serde::to_vec_named(message)
}

/// Decodes a message.
///
/// # Errors
/// The bytes are not a message of this type, or are nested deeper than [`MESSAGE_NESTING`].
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, decode::Error> {
    let mut deserializer = Deserializer::from_read_ref(bytes);
    deserializer.set_max_depth(MESSAGE_NESTING);
    T::deserialize(&mut deserializer)
}

/// A part of a message that is too long for one frame.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// Number of the message, from 1, among the messages that the sender sends in parts on this connection.
    pub message: u64,
    /// Whether this is the message's last part.
    pub last: bool,
    #[serde(with = "serde_bytes")]
    pub bytes: Vec<u8>,
}

/// Encodes a message as one frame or, if it is longer than [`PART_BYTES`], as several frames. Each of these is a message
/// that `wrap` makes from a part. `number` counts the messages that the connection has sent in parts.
///
/// # Errors
/// As [`encode`].
pub fn frames<T: Serialize>(
    message: &T,
    number: &mut u64,
    wrap: impl Fn(Part) -> T,
) -> Result<Vec<Vec<u8>>, encode::Error> {
    let bytes = encode(message)?;
    if bytes.len() <= PART_BYTES {
        return Ok(vec![bytes]);
    }
    *number += 1;
    let count = bytes.len().div_ceil(PART_BYTES);
    let parts = bytes.chunks(PART_BYTES).enumerate().map(|(i, chunk)| {
        encode(&wrap(Part { message: *number, last: i + 1 == count, bytes: chunk.to_vec() }))
    });
    parts.collect()
}

/// The incomplete messages of one connection: some of their parts have not arrived yet.
#[derive(Debug)]
pub struct PartialMessages {
    messages: HashMap<u64, Vec<u8>>,
    bytes: usize,
    max_bytes: usize,
}

impl Default for PartialMessages {
    fn default() -> Self {
        Self::with_limit(MESSAGE_BYTES)
    }
}

impl PartialMessages {
    /// `max_bytes`: limit of the bytes of all incomplete messages together.
    pub fn with_limit(max_bytes: usize) -> Self {
        Self { messages: HashMap::new(), bytes: 0, max_bytes }
    }

    /// Adds a part; returns the whole message after its last part.
    ///
    /// # Errors
    /// There are too many incomplete messages, or they have too many bytes. The error is a phrase.
    pub fn add(&mut self, part: Part) -> Result<Option<Vec<u8>>, String> {
        self.bytes += part.bytes.len();
        if self.bytes > self.max_bytes {
            return Err(format!("incomplete messages of more than {} MiB", self.max_bytes >> 20));
        }
        let message = self.messages.entry(part.message).or_default();
        message.extend_from_slice(&part.bytes);
        if part.last {
            let whole = self.messages.remove(&part.message).unwrap_or_default();
            self.bytes -= whole.len();
            return Ok(Some(whole));
        }
        if self.messages.len() > MAX_PARTIAL_MESSAGES {
            return Err(format!("more than {MAX_PARTIAL_MESSAGES} incomplete messages at the same time"));
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::de::IgnoredAny;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(tag = "type")]
    enum TestMessage {
        Text { text: String },
        Part(Part),
    }

    #[test]
    fn a_long_message_is_split_and_joined() {
        let mut number = 0;
        // The bytes besides the text: tag, keys and length.
        let overhead =
            encode(&TestMessage::Text { text: "x".repeat(PART_BYTES) }).unwrap().len() - PART_BYTES;
        for (length, count) in [
            (PART_BYTES - overhead, 1),
            (PART_BYTES - overhead + 1, 2),
            (5 * PART_BYTES - overhead, 5),
            (5 * PART_BYTES - overhead + 1, 6),
        ] {
            let sent = TestMessage::Text { text: "x".repeat(length) };
            let frames = frames(&sent, &mut number, TestMessage::Part).unwrap();
            assert_eq!(frames.len(), count);
            assert!(frames.iter().all(|f| f.len() < PART_BYTES + 100));
            let mut partial = PartialMessages::default();
            let mut whole = None;
            for frame in frames {
                assert!(whole.is_none(), "the message is complete only after its last part");
                whole = match decode(&frame).unwrap() {
                    TestMessage::Part(part) => partial.add(part).unwrap().map(|b| decode(&b).unwrap()),
                    short => Some(short),
                };
            }
            assert_eq!(whole, Some(sent));
            assert_eq!(partial.bytes, 0);
        }
    }

    #[test]
    fn incomplete_messages_have_a_maximum_size_and_number() {
        let part = |message, length, last| Part { message, last, bytes: vec![0; length] };
        let mut partial = PartialMessages::default();
        assert_eq!(partial.add(part(1, MESSAGE_BYTES - 1, false)), Ok(None));
        let whole = partial.add(part(1, 1, true)).unwrap().unwrap();
        assert_eq!(whole.len(), MESSAGE_BYTES);
        assert_eq!(partial.add(part(2, MESSAGE_BYTES, false)), Ok(None));
        assert!(partial.add(part(3, 1, true)).unwrap_err().contains("64 MiB"));

        let mut partial = PartialMessages::default();
        for message in 0..MAX_PARTIAL_MESSAGES as u64 {
            assert_eq!(partial.add(part(message, 0, false)), Ok(None));
        }
        assert!(partial.add(part(99, 0, false)).unwrap_err().contains("more than 8"));
    }

    /// Nested lists.
    fn nested(depth: usize) -> Vec<u8> {
        let mut bytes = vec![0x91; depth];
        bytes.push(0xc0);
        bytes
    }

    #[test]
    fn messages_have_a_maximum_nesting() {
        assert!(decode::<IgnoredAny>(&nested(MESSAGE_NESTING - 1)).is_ok());
        let error = decode::<IgnoredAny>(&nested(MESSAGE_NESTING)).unwrap_err();
        assert!(error.to_string().contains("depth limit"), "{error}");
        assert!(decode::<IgnoredAny>(&nested(1 << 20)).is_err());
    }
}
