//! TensorBoard's event files: TFRecord records (<https://www.tensorflow.org/tutorials/load_data/tfrecord>) of messages from
//! `tensorboard/compat/proto/{event,summary}.proto` and `tensorboard/plugins/hparams/plugin_data.proto`. Fields that are not written are
//! left out. A `oneof` is represented as several optional fields, of which one is set.

use crc::{CRC_32_ISCSI, Crc};
use prost::Message;
use std::{
    collections::BTreeMap,
    io::{self, Write},
};

/// CRC-32C.
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
    #[prost(message, optional, tag = "9")]
    pub(super) metadata: Option<SummaryMetadata>,
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
    /// 1: success, 2: failure.
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
        Self::of_hparams(wall_time, "_hparams_/session_start_info", &data)
    }

    /// Returns the event that ends a run.
    pub(super) fn end(wall_time: f64, succeeded: bool) -> Self {
        let end = SessionEnd { status: if succeeded { 1 } else { 2 }, end_time_secs: wall_time };
        let data = HparamsData { session_start_info: None, session_end_info: Some(end) };
        Self::of_hparams(wall_time, "_hparams_/session_end_info", &data)
    }

    fn of_hparams(wall_time: f64, tag: &str, data: &HparamsData) -> Self {
        let plugin_data = PluginData { plugin_name: "hparams".into(), content: data.encode_to_vec() };
        let metadata = Some(SummaryMetadata { plugin_data: Some(plugin_data) });
        let value = vec![SummaryValue { tag: tag.into(), simple_value: None, metadata }];
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

fn masked_checksum(bytes: &[u8]) -> u32 {
    CASTAGNOLI.checksum(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_masked_crc32c() {
        // RFC 3720 has CRC-32C, whose check value is 0xe3069283.
        assert_eq!(masked_checksum(b"123456789"), 0xc78a_b0e5);
    }
}
