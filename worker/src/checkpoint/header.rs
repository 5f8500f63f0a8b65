//! The header of a safetensors file (<https://github.com/huggingface/safetensors#format>): eight bytes with its
//! length, then JSON with the type, shape and offsets of each tensor. Errors name the tensor, and are found before
//! any values are read.

use safetensors::Dtype;
use serde::Deserialize;
use serde_json::Value;
use std::{
    collections::{BTreeMap, HashMap},
    io::Read,
};

/// Maximum size of a header. A typical header has a few kilobytes.
pub(super) const HEADER_BYTES: u64 = 16 << 20;
/// Size of the length field before the header.
const LENGTH_BYTES: u64 = 8;

/// A tensor's entry in the header.
#[derive(Debug, Deserialize)]
pub(super) struct Entry {
    pub(super) dtype: String,
    pub(super) shape: Vec<usize>,
    /// Begin and end, relative to the end of the header.
    pub(super) data_offsets: [u64; 2],
}

impl Entry {
    /// The type, if it is known.
    pub(super) fn dtype(&self) -> Option<Dtype> {
        serde_json::from_value(Value::String(self.dtype.clone())).ok()
    }

    /// The size in bytes according to type and shape. `None` if the bits do not fill whole bytes, or if the type is
    /// unknown.
    pub(super) fn bytes(&self) -> Option<u64> {
        let mut bits = u64::try_from(self.dtype()?.bitsize()).ok()?;
        for side in &self.shape {
            bits = bits.checked_mul(u64::try_from(*side).ok()?)?;
        }
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

#[derive(Debug)]
pub(super) struct Header {
    pub(super) tensors: BTreeMap<String, Entry>,
    pub(super) metadata: HashMap<String, String>,
    /// The number of bytes after the header, according to the file's length.
    pub(super) data_bytes: u64,
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
    let mut all: BTreeMap<String, Value> =
        serde_json::from_slice(&bytes).map_err(|e| invalid(e.to_string()))?;
    let metadata = all.remove("__metadata__").map(serde_json::from_value).transpose();
    let metadata = metadata.map_err(|e| invalid(format!("__metadata__: {e}")))?.unwrap_or_default();
    let mut tensors = BTreeMap::new();
    for (name, entry) in all {
        let entry = serde_json::from_value(entry).map_err(|e| invalid(format!("{name}: {e}")))?;
        tensors.insert(name, entry);
    }
    Ok(Header { tensors, metadata, data_bytes: bytes_after_length.saturating_sub(length) })
}

impl Header {
    /// Checks that the tensors follow each other in the file without gaps or other data, each with the length that
    /// follows from its type and shape.
    ///
    /// # Errors
    /// The first invalid tensor, by name.
    pub(super) fn check_layout(&self) -> Result<(), String> {
        let mut ranges: Vec<_> =
            self.tensors.iter().map(|(name, entry)| (entry.data_offsets, name)).collect();
        ranges.sort();
        let furthest = ranges.iter().max_by_key(|([_, end], _)| *end);
        if let Some(([_, end], name)) = furthest.filter(|([_, end], _)| *end > self.data_bytes) {
            return Err(format!(
                "it has {} bytes of tensors, and {name} ends at byte {end} of them; it was cut off, or its header is wrong",
                self.data_bytes
            ));
        }
        for (name, entry) in &self.tensors {
            let [begin, end] = entry.data_offsets;
            let bytes = entry.bytes();
            if end.checked_sub(begin).is_none_or(|file_bytes| Some(file_bytes) != bytes) {
                let size =
                    bytes.map_or_else(|| "an unknown number of bytes".into(), |n| format!("{n} bytes"));
                return Err(format!(
                    "{name} is {:?} of {}, which takes {size}, and lies from byte {begin} to {end}",
                    entry.shape, entry.dtype
                ));
            }
        }
        let (mut previous, mut previous_end) = ("the header", 0);
        for ([begin, end], name) in ranges {
            if begin < previous_end {
                return Err(format!(
                    "{name} begins at byte {begin}, before {previous} ends (byte {previous_end})"
                ));
            }
            if begin > previous_end {
                return Err(format!(
                    "{name} begins at byte {begin}, and {previous} ends at byte {previous_end}"
                ));
            }
            (previous, previous_end) = (name.as_str(), end);
        }
        if previous_end < self.data_bytes {
            let rest = self.data_bytes - previous_end;
            return Err(format!("{rest} bytes after {previous} belong to no tensor"));
        }
        Ok(())
    }
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

    fn check_layout(header: &str, data: usize) -> Result<(), String> {
        let bytes = file(header, data);
        read(&bytes[..], bytes.len() as u64).unwrap().check_layout()
    }

    fn two(first: [u64; 2], second: [u64; 2], shape: &str) -> String {
        format!(
            r#"{{"a":{{"dtype":"F32","shape":[2],"data_offsets":{first:?}}},"b":{{"dtype":"F32","shape":{shape},"data_offsets":{second:?}}}}}"#
        )
    }

    #[test]
    fn a_tensor_with_invalid_offsets_is_named() {
        assert_eq!(check_layout(&two([0, 8], [8, 20], "[3]"), 12 + 8), Ok(()));
        assert_eq!(check_layout(&two([12, 20], [0, 12], "[3]"), 20), Ok(()), "tensors may be in any order");
        for (header, data, detail) in [
            (two([0, 8], [4, 16], "[3]"), 20, "b begins at byte 4, before a ends (byte 8)"),
            (two([0, 8], [0, 8], "[2]"), 8, "b begins at byte 0, before a ends (byte 8)"),
            (two([0, 8], [12, 24], "[3]"), 24, "b begins at byte 12, and a ends at byte 8"),
            (two([4, 12], [12, 24], "[3]"), 24, "a begins at byte 4, and the header ends at byte 0"),
            (two([0, 8], [8, 20], "[3]"), 19, "it has 19 bytes of tensors, and b ends at byte 20"),
            (
                two([0, 8], [8, 20], "[4]"),
                20,
                "b is [4] of F32, which takes 16 bytes, and lies from byte 8 to 20",
            ),
            (
                two([0, 8], [20, 8], "[3]"),
                20,
                "b is [3] of F32, which takes 12 bytes, and lies from byte 20 to 8",
            ),
            (two([0, 8], [8, 20], "[3]"), 21, "1 bytes after b belong to no tensor"),
            (
                two([0, 8], [8, 20], "[4294967296,4294967296,4]"),
                20,
                "which takes an unknown number of bytes, and lies from byte 8 to 20",
            ),
        ] {
            let message = check_layout(&header, data).unwrap_err();
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
