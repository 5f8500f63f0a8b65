//! MessagePack with named fields, as server, agents and ranks speak it. What is read may come from anybody, so it is
//! never nested deeper than our own messages are.

use crate::limits::MESSAGE_NESTING;
use rmp_serde::{Deserializer, decode, encode};
use serde::{Serialize, de::DeserializeOwned};

/// A message as bytes.
///
/// # Errors
/// A value that MessagePack cannot hold; none of ours is.
pub fn encode(message: &impl Serialize) -> Result<Vec<u8>, encode::Error> {
    rmp_serde::to_vec_named(message)
}

/// The message that `bytes` are.
///
/// # Errors
/// They are no such message, or nested deeper than [`MESSAGE_NESTING`].
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, decode::Error> {
    let mut deserializer = Deserializer::from_read_ref(bytes);
    deserializer.set_max_depth(MESSAGE_NESTING);
    T::deserialize(&mut deserializer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::de::IgnoredAny;

    /// Lists inside each other.
    fn nested(depth: usize) -> Vec<u8> {
        let mut bytes = vec![0x91; depth];
        bytes.push(0xc0);
        bytes
    }

    #[test]
    fn a_message_is_read_up_to_the_limit_of_nesting() {
        assert!(decode::<IgnoredAny>(&nested(MESSAGE_NESTING - 1)).is_ok());
        let error = decode::<IgnoredAny>(&nested(MESSAGE_NESTING)).unwrap_err();
        assert!(error.to_string().contains("depth limit"), "{error}");
        assert!(decode::<IgnoredAny>(&nested(1 << 20)).is_err());
    }
}
