//! Decoding and resizing on a device such as a GPU: the interface of the decoder, and statistics.
//! A device returns bytes in host memory, in the same layout as the CPU path. All steps after the crop are shared, and
//! a batch may contain pictures from both paths.

use lockstep_host::lock;
use lockstep_protocol::numbers::plural;
use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex},
};

pub use super::picture::{
    ScaleTable,
    decode::for_hardware,
    jpeg::{CpuDecodeReason, MAX_SIDE, Stored, Subsampling},
};

/// A JPEG file, and the rectangle that is cut out of it, resized and optionally mirrored. The rectangle is in the upright picture:
/// the stored picture after its EXIF orientation is applied.
#[derive(Debug)]
pub struct Encoded<'a> {
    pub bytes: &'a [u8],
    pub stored: Stored,
    /// The column of the upright picture that is input 0 of `columns`.
    pub left: u32,
    /// The row of the upright picture that is input 0 of `rows`.
    pub top: u32,
    /// The weights by which rows of the upright picture become rows of the output.
    pub rows: &'a ScaleTable,
    /// The same for columns.
    pub columns: &'a ScaleTable,
    /// Whether the picture is mirrored left to right after resizing.
    pub flip: bool,
}

/// Decodes JPEG files on a device instead of CPU cores.
pub trait DeviceDecoder: Send + Sync + fmt::Debug {
    /// The name for the log.
    fn name(&self) -> String;

    /// Maximum number of concurrent calls of [`DeviceDecoder::decode`] that make progress. Further calls wait.
    fn concurrent_calls(&self) -> usize {
        1
    }

    /// When the device is ready, calls `take_pictures` with its batch size, and receives up to that many pictures. Makes RGB
    /// pixels of `size` (width, height) from each picture, and calls `use_results` once with the results in order; the result
    /// is `None` for a picture that the device refuses. If `take_pictures` returns no pictures, `use_results` is not called.
    /// Several threads may call this method at the same time.
    ///
    /// # Errors
    /// All pictures from `take_pictures` failed; `use_results` was not called.
    fn decode<'a>(
        &self,
        size: (u32, u32),
        take_pictures: &mut dyn FnMut(usize) -> Vec<Encoded<'a>>,
        use_results: &mut dyn FnMut(&[Option<&[u8]>]),
    ) -> Result<(), String>;

    /// Waits for decoding in progress and closes the device. Nothing can be decoded afterwards.
    fn close(&self) {}
}

/// Maximum size of a batch's files kept in memory for the device. CPU cores decode the other files.
pub(super) const MAX_HELD_BYTES: usize = 512 << 20;
/// Number of consecutive failed batches after which only CPU cores decode.
const MAX_FAILURES: u32 = 4;

/// How many of a job's pictures the device and CPU cores have decoded so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Decoded {
    pub by_device: u64,
    pub by_cores: BTreeMap<CpuDecodeReason, u64>,
    /// The most recent error of the device.
    pub failure: Option<String>,
    /// Whether the device has failed too often, so that only cores decode from now on.
    pub given_up: bool,
    /// The number of batches that failed since the last success.
    consecutive_failures: u32,
}

impl fmt::Display for Decoded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cores: u64 = self.by_cores.values().sum();
        write!(f, "decoded by the GPU: {}", plural(self.by_device, "picture"))?;
        if cores > 0 {
            let kinds: Vec<String> = self.by_cores.iter().map(|(why, n)| format!("{n} {why}")).collect();
            write!(f, ", {cores} on cores ({})", kinds.join(", "))?;
        }
        if let Some(failure) = &self.failure {
            write!(f, "; it failed with: {failure}")?;
        }
        if self.given_up {
            f.write_str("; cores decode all pictures from now on")?;
        }
        Ok(())
    }
}

/// A device that decodes pictures for a job, and its statistics.
#[derive(Debug)]
pub(super) struct OnDevice {
    pub(super) decoder: Arc<dyn DeviceDecoder>,
    /// Maximum size in bytes of a batch's files held in memory.
    pub(super) max_held_bytes: usize,
    decoded: Mutex<Decoded>,
}

impl OnDevice {
    pub(super) fn new(decoder: Arc<dyn DeviceDecoder>, max_held_bytes: usize) -> Self {
        Self { decoder, max_held_bytes, decoded: Mutex::default() }
    }

    pub(super) fn decoded(&self) -> Decoded {
        lock(&self.decoded).clone()
    }

    pub(super) fn is_in_use(&self) -> bool {
        !lock(&self.decoded).given_up
    }

    /// Counts pictures that are left to cores.
    pub(super) fn count_for_cores(&self, why: CpuDecodeReason, pictures: u64) {
        if pictures > 0 {
            *lock(&self.decoded).by_cores.entry(why).or_insert(0) += pictures;
        }
    }

    /// Counts pictures that the device has decoded, and pictures that it refused.
    pub(super) fn count_decoded(&self, pictures: u64, refused: u64) {
        self.count_for_cores(CpuDecodeReason::Refused, refused);
        let mut decoded = lock(&self.decoded);
        decoded.by_device += pictures;
        decoded.consecutive_failures = 0;
    }

    /// Counts pictures of a batch that failed. `is_first_of_batch`: no other pictures of the batch have failed before.
    pub(super) fn count_failed(&self, why: String, pictures: u64, is_first_of_batch: bool) {
        tracing::warn!("the GPU could not decode {pictures} pictures; CPU cores decode them: {why}");
        self.count_for_cores(CpuDecodeReason::Failed, pictures);
        let mut decoded = lock(&self.decoded);
        decoded.failure = Some(why);
        decoded.consecutive_failures += u32::from(is_first_of_batch);
        decoded.given_up |= decoded.consecutive_failures >= MAX_FAILURES;
    }
}
