//! TensorBoard's event files: records of TFRecord (<https://www.tensorflow.org/tutorials/load_data/tfrecord>) with messages of
//! `tensorboard/compat/proto/{event,summary,tensor}.proto` and `tensorboard/plugins/hparams/plugin_data.proto`. Fields that are
//! neither written nor read are left out; a `oneof` is several optional fields, of which one is set.

use crc::{CRC_32_ISCSI, Crc};
use prost::Message;
use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufReader, Read, Write},
    path::Path,
};

/// Algorithm of the records' checksums: CRC-32C.
static CASTAGNOLI: Crc<u32> = Crc::<u32>::new(&CRC_32_ISCSI);
/// The content of a file's first event.
pub(super) const FILE_VERSION: &str = "brain.Event:2";

#[derive(Clone, PartialEq, Message)]
pub(super) struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    pub(super) wall_time: f64,
    #[prost(int64, tag = "2")]
    pub(super) step: i64,
    #[prost(string, optional, tag = "3")]
    pub(super) file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    pub(super) summary: Option<Summary>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Summary {
    #[prost(message, repeated, tag = "1")]
    pub(super) value: Vec<SummaryValue>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SummaryValue {
    #[prost(string, tag = "1")]
    pub(super) tag: String,
    #[prost(float, optional, tag = "2")]
    pub(super) simple_value: Option<f32>,
    #[prost(message, optional, tag = "8")]
    pub(super) tensor: Option<Tensor>,
    #[prost(message, optional, tag = "9")]
    pub(super) metadata: Option<SummaryMetadata>,
}

/// `TensorProto`: numbers as bytes or in the list of their type.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Tensor {
    /// Type of the elements: 1 (float32), 2 (float64), 3 (int32) or 9 (int64).
    #[prost(int32, tag = "1")]
    pub(super) dtype: i32,
    #[prost(bytes = "vec", tag = "4")]
    pub(super) content: Vec<u8>,
    #[prost(float, repeated, tag = "5")]
    pub(super) floats: Vec<f32>,
    #[prost(double, repeated, tag = "6")]
    pub(super) doubles: Vec<f64>,
    #[prost(int32, repeated, tag = "7")]
    pub(super) ints: Vec<i32>,
    #[prost(int64, repeated, tag = "10")]
    pub(super) longs: Vec<i64>,
}

impl Tensor {
    /// Returns the value of a tensor that has one element.
    fn scalar(&self) -> Option<f64> {
        let bytes = &self.content[..];
        if !bytes.is_empty() {
            return match self.dtype {
                1 => bytes.try_into().ok().map(f32::from_le_bytes).map(f64::from),
                2 => bytes.try_into().ok().map(f64::from_le_bytes),
                3 => bytes.try_into().ok().map(i32::from_le_bytes).map(f64::from),
                9 => bytes.try_into().ok().map(|bytes| i64::from_le_bytes(bytes) as f64),
                _ => None,
            };
        }
        match (self.dtype, &self.floats[..], &self.doubles[..], &self.ints[..], &self.longs[..]) {
            (1, [value], [], [], []) => Some(f64::from(*value)),
            (2, [], [value], [], []) => Some(*value),
            (3, [], [], [value], []) => Some(f64::from(*value)),
            (9, [], [], [], [value]) => Some(*value as f64),
            _ => None,
        }
    }
}

impl SummaryValue {
    /// Returns a scalar that PyTorch or TensorFlow 2 has written.
    pub(super) fn scalar(&self) -> Option<f64> {
        self.simple_value.map(f64::from).or_else(|| self.tensor.as_ref()?.scalar())
    }
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SummaryMetadata {
    #[prost(message, optional, tag = "1")]
    pub(super) plugin_data: Option<PluginData>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PluginData {
    #[prost(string, tag = "1")]
    pub(super) plugin_name: String,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) content: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct HparamsData {
    #[prost(message, optional, tag = "3")]
    pub(super) session_start_info: Option<SessionStart>,
    #[prost(message, optional, tag = "4")]
    pub(super) session_end_info: Option<SessionEnd>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SessionStart {
    #[prost(btree_map = "string, message", tag = "1")]
    pub(super) hparams: BTreeMap<String, Hparam>,
    #[prost(double, tag = "5")]
    pub(super) start_time_secs: f64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SessionEnd {
    /// 1 if the run succeeded, 2 if it failed.
    #[prost(int32, tag = "1")]
    pub(super) status: i32,
    #[prost(double, tag = "2")]
    pub(super) end_time_secs: f64,
}

/// `google.protobuf.Value`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Hparam {
    #[prost(double, optional, tag = "2")]
    pub(super) number: Option<f64>,
    #[prost(string, optional, tag = "3")]
    pub(super) text: Option<String>,
    #[prost(bool, optional, tag = "4")]
    pub(super) flag: Option<bool>,
}

impl Event {
    /// Returns the event that starts a run with these settings.
    pub(super) fn start(wall_time: f64, hparams: BTreeMap<String, Hparam>) -> Self {
        let start = SessionStart { hparams, start_time_secs: wall_time };
        let data = HparamsData { session_start_info: Some(start), session_end_info: None };
        Self::hparams_event(wall_time, "_hparams_/session_start_info", &data)
    }

    /// Returns the event that ends a run.
    pub(super) fn end(wall_time: f64, has_succeeded: bool) -> Self {
        let end = SessionEnd { status: if has_succeeded { 1 } else { 2 }, end_time_secs: wall_time };
        let data = HparamsData { session_start_info: None, session_end_info: Some(end) };
        Self::hparams_event(wall_time, "_hparams_/session_end_info", &data)
    }

    fn hparams_event(wall_time: f64, tag: &str, data: &HparamsData) -> Self {
        let plugin_data = PluginData { plugin_name: "hparams".into(), content: data.encode_to_vec() };
        let metadata = Some(SummaryMetadata { plugin_data: Some(plugin_data) });
        let value = vec![SummaryValue { tag: tag.into(), metadata, ..SummaryValue::default() }];
        Self { wall_time, summary: Some(Summary { value }), ..Self::default() }
    }

    /// Appends the event as a record: length, its checksum, message, its checksum.
    ///
    /// # Errors
    /// Writing to `out` fails.
    pub(super) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let data = self.encode_to_vec();
        let length = (data.len() as u64).to_le_bytes();
        out.write_all(&length)?;
        out.write_all(&masked_checksum(&length).to_le_bytes())?;
        out.write_all(&data)?;
        out.write_all(&masked_checksum(&data).to_le_bytes())
    }
}

/// Passes the events of a file to `on_event`, in order. Returns what could not be read, if anything.
///
/// # Errors
/// The file cannot be opened or read.
pub(super) fn read(path: &Path, mut on_event: impl FnMut(Event)) -> io::Result<Option<&'static str>> {
    const UNFINISHED: Option<&str> = Some("events that are not complete");
    const DAMAGED: Option<&str> = Some("ends of damaged files");
    /// Maximum size of an event. Events with scalars are smaller.
    const MAX_EVENT_BYTES: u64 = 1 << 30;
    let mut reader = BufReader::new(File::open(path)?);
    let mut record = Vec::new();
    loop {
        // The length (8 bytes) and its checksum (4 bytes).
        let mut head = Vec::new();
        match (&mut reader).take(12).read_to_end(&mut head)? {
            0 => return Ok(None),
            12 => {}
            _ => return Ok(UNFINISHED),
        }
        let (length, checksum) = head.split_at(8);
        if masked_checksum(length).to_le_bytes() != *checksum {
            return Ok(DAMAGED);
        }
        let length = length.try_into().map_or(u64::MAX, u64::from_le_bytes);
        if length > MAX_EVENT_BYTES {
            return Ok(DAMAGED);
        }
        record.clear();
        if (&mut reader).take(length + 4).read_to_end(&mut record)? < length as usize + 4 {
            return Ok(UNFINISHED);
        }
        let (data, checksum) = record.split_at(length as usize);
        match Event::decode(data) {
            Ok(event) if masked_checksum(data).to_le_bytes() == *checksum => on_event(event),
            _ => return Ok(DAMAGED),
        }
    }
}

/// Returns the CRC-32C in the masked form that TFRecord stores.
fn masked_checksum(bytes: &[u8]) -> u32 {
    CASTAGNOLI.checksum(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_masked_crc32c() {
        // Before masking, the checksum is 0xe3069283, the check value of CRC-32C (RFC 3720).
        assert_eq!(masked_checksum(b"123456789"), 0xc78a_b0e5);
    }
}
