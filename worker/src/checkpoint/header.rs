//! The header of a safetensors file (<https://github.com/huggingface/safetensors#format>): eight bytes with its
//! length, then JSON with the type, shape and offsets of each tensor. Errors are found before any values are read.

use safetensors::tensor::{Metadata, TensorInfo};
use std::{
    collections::{BTreeMap, HashMap},
    io::Read,
};

/// Maximum size of a header. A typical header has a few kilobytes.
pub(super) const HEADER_BYTES: u64 = 16 << 20;
/// Size of the length field before the header.
const LENGTH_BYTES: u64 = 8;

#[derive(Debug)]
pub(super) struct Header {
    pub(super) tensors: BTreeMap<String, TensorInfo>,
    pub(super) metadata: HashMap<String, String>,
    /// The offset in the file of the first tensor's values.
    pub(super) data_begin: u64,
}

/// Why a file has no valid header.
#[derive(Debug)]
pub(super) enum NoHeader {
    /// The file was written by `torch.save`.
    Pickled,
    /// A sentence with another reason.
    Other(String),
}

/// Whether the file was written by `torch.save`: an archive or, before PyTorch 1.6, a bare pickle, which begins with
/// the number of its protocol.
fn is_pickled(bytes: &[u8]) -> bool {
    bytes.starts_with(b"PK\x03\x04") || matches!(bytes, [0x80, 2..=5, ..])
}

/// Reads the header of a file of `file_bytes` bytes.
///
/// # Errors
/// The file is not a safetensors file. The error tells what it is instead.
pub(super) fn read(mut file: impl Read, file_bytes: u64) -> Result<Header, NoHeader> {
    let mut first = Vec::new();
    let result = file.by_ref().take(LENGTH_BYTES).read_to_end(&mut first);
    result.map_err(|e| NoHeader::Other(e.to_string()))?;
    match read_after_length(&first, file, file_bytes) {
        // The length field of a valid header may begin with the same bytes as a pickle. So the header is tried first.
        Err(NoHeader::Other(_)) if is_pickled(&first) => Err(NoHeader::Pickled),
        read => read,
    }
}

/// Reads the header after its length field. `first` has the first [`LENGTH_BYTES`] bytes of the file, or all bytes of a shorter
/// file.
fn read_after_length(first: &[u8], file: impl Read, file_bytes: u64) -> Result<Header, NoHeader> {
    let invalid = NoHeader::Other;
    let bytes_after_length = file_bytes.saturating_sub(LENGTH_BYTES);
    let length = <[u8; LENGTH_BYTES as usize]>::try_from(first).map(u64::from_le_bytes);
    let length = match length {
        Err(_) => return Err(invalid("it has no header".into())),
        Ok(length) if length > bytes_after_length => {
            let detail = "it has no header, or is cut off within its header";
            return Err(invalid(detail.into()));
        }
        Ok(length) if length > HEADER_BYTES => {
            return Err(invalid(format!(
                "its header has {length} bytes; at most {HEADER_BYTES} are allowed: remove unneeded metadata"
            )));
        }
        Ok(length) => length,
    };
    let mut bytes = Vec::new();
    file.take(length).read_to_end(&mut bytes).map_err(|e| invalid(e.to_string()))?;
    // Parsing checks that the tensors follow each other without gaps, each with the length that follows from its type and shape.
    let parsed: Metadata = serde_json::from_slice(&bytes).map_err(|e| invalid(e.to_string()))?;
    let data_bytes = bytes_after_length - length;
    if parsed.data_len() as u64 != data_bytes {
        return Err(invalid(format!(
            "it has {data_bytes} bytes of tensors, and its header describes {}; it was cut off, or its header is wrong",
            parsed.data_len()
        )));
    }
    let tensors = parsed.tensors().into_iter().map(|(name, info)| (name, info.clone())).collect();
    let metadata = parsed.metadata().clone().unwrap_or_default();
    Ok(Header { tensors, metadata, data_begin: LENGTH_BYTES + length })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    fn two(first: [u64; 2], second: [u64; 2], shape: &str) -> String {
        format!(
            r#"{{"a":{{"dtype":"F32","shape":[2],"data_offsets":{first:?}}},"b":{{"dtype":"F32","shape":{shape},"data_offsets":{second:?}}}}}"#
        )
    }

    #[test]
    fn invalid_layouts_are_refused() {
        let read_file = |header: &str, data: usize| {
            let bytes = file(header, data);
            match read(&bytes[..], bytes.len() as u64) {
                Err(NoHeader::Other(message)) => Err(message),
                other => Ok(other.unwrap().tensors.len()),
            }
        };
        assert_eq!(read_file(&two([0, 8], [8, 20], "[3]"), 20), Ok(2));
        assert_eq!(read_file(&two([12, 20], [0, 12], "[3]"), 20), Ok(2), "tensors may be in any order");
        for (header, data, detail) in [
            (two([0, 8], [4, 16], "[3]"), 20, "invalid offset for tensor `b`"),
            (two([0, 8], [12, 24], "[3]"), 24, "invalid offset for tensor `b`"),
            (two([4, 12], [12, 24], "[3]"), 24, "invalid offset for tensor `a`"),
            (two([0, 8], [20, 8], "[3]"), 20, "invalid offset for tensor `b`"),
            (two([0, 8], [8, 20], "[3]"), 19, "it has 19 bytes of tensors, and its header describes 20"),
            (two([0, 8], [8, 20], "[3]"), 21, "it has 21 bytes of tensors, and its header describes 20"),
            (two([0, 8], [8, 20], "[4]"), 20, "invalid shape, data type, or offset"),
            (two([0, 8], [8, 20], "[4294967296,4294967296,4]"), 20, "overflow"),
        ] {
            let message = read_file(&header, data).unwrap_err();
            assert!(message.contains(detail), "{detail:?} in {message}");
        }
    }

    #[test]
    fn files_without_a_header_of_at_most_16_mib_are_refused() {
        let read_all = |bytes: &[u8]| read(bytes, bytes.len() as u64);
        let file_of = |bytes: u64| file(&format!("{{}}{}", " ".repeat(bytes as usize - 2)), 0);
        assert!(read_all(&file_of(HEADER_BYTES)).unwrap().tensors.is_empty());
        for (refused, expected) in [
            (file_of(HEADER_BYTES + 1), "its header has 16777217 bytes; at most 16777216 are allowed"),
            (b"a letter to my aunt".to_vec(), "it has no header"),
        ] {
            let Err(NoHeader::Other(message)) = read_all(&refused) else { panic!("{expected}") };
            assert!(message.starts_with(expected), "{message}");
        }
    }
}
