//! Messages between a rank and the store: a length, then MessagePack.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    io::{self, Read, Write},
    net::TcpStream,
};

/// Maximum length of a message. Values are short, such as addresses.
const MAX_MESSAGE_BYTES: u32 = 1 << 20;

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// Sets a value, or replaces it.
    Set { key: String, value: Vec<u8> },
    /// Waits until all keys are set, or for `wait_ms`.
    Get { keys: Vec<String>, wait_ms: u64 },
}

/// The values of the keys of a [`Request::Get`], `None` for keys that are not set. Empty for a [`Request::Set`].
pub(super) type Reply = Vec<Option<Vec<u8>>>;

pub(super) fn send(stream: &mut TcpStream, message: &impl Serialize) -> io::Result<()> {
    let body = lockstep_protocol::wire::encode(message).map_err(io::Error::other)?;
    let mut bytes = Vec::from((body.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&body);
    stream.write_all(&bytes)
}

pub(super) fn receive<T: DeserializeOwned>(stream: &mut TcpStream) -> io::Result<T> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > MAX_MESSAGE_BYTES {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("a message of {length} bytes; at most {MAX_MESSAGE_BYTES} are allowed"),
        ));
    }
    let mut body = vec![0; length as usize];
    stream.read_exact(&mut body)?;
    lockstep_protocol::wire::decode(&body).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// Sends a message of `length` bytes that are not a request, and returns the receiver's error.
    fn receive_error(length: u32) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let sender = std::thread::spawn(move || {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(&length.to_le_bytes()).unwrap();
            // Fails if the receiver refuses the length and closes the connection.
            let _ = stream.write_all(&vec![0xc1; length as usize]);
        });
        let (mut stream, _) = listener.accept().unwrap();
        let error = receive::<Request>(&mut stream).unwrap_err();
        drop(stream);
        sender.join().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        error.to_string()
    }

    #[test]
    fn a_message_above_a_mebibyte_is_refused() {
        assert!(
            !receive_error(MAX_MESSAGE_BYTES).contains("bytes"),
            "the message is read, but is not a request"
        );
        assert_eq!(
            receive_error(MAX_MESSAGE_BYTES + 1),
            "a message of 1048577 bytes; at most 1048576 are allowed"
        );
    }
}
