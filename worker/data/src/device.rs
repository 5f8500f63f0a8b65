//! Decoding and resizing on a device: what a GPU takes, and who decodes the other pictures.
//!
//! A device's result is bytes in the host's memory, in the form in which cores make them. So everything after the crop is the
//! same for both, and each picture of a batch may come from either.

use lockstep_protocol::numbers::plural;
use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

pub use super::picture::{
    ScaleTable,
    decode::for_hardware,
    jpeg::{CpuDecodeReason, MOST_SIDE, Stored, Subsampling},
};

/// A JPEG file and what is made of it: an upright part, resized, mirrored or not.
#[derive(Debug)]
pub struct Encoded<'a> {
    pub bytes: &'a [u8],
    pub stored: Stored,
    /// First column of the upright picture that the tables count from.
    pub left: u32,
    /// First row.
    pub top: u32,
    pub rows: &'a ScaleTable,
    pub columns: &'a ScaleTable,
    /// Mirrored left to right after resizing.
    pub flip: bool,
}

/// Decodes JPEG files on a device instead of the host's cores.
pub trait DeviceDecoder: Send + Sync + fmt::Debug {
    /// For the log.
    fn name(&self) -> String;

    /// How many calls of [`DeviceDecoder::decode`] make progress at a time; others wait for their turn.
    fn at_a_time(&self) -> usize {
        1
    }

    /// Asks `next` for pictures once it can begin, with how many it decodes together; makes `size` (width, height) RGB
    /// pixels of each, and calls `then` once with them, in order: `None` where the device does not take a picture. Where
    /// `next` has none, `then` is not called. May be called from several threads at a time.
    ///
    /// # Errors
    /// None of the pictures that `next` gave could be made; `then` was not called.
    fn decode<'a>(
        &self,
        size: (u32, u32),
        next: &mut dyn FnMut(usize) -> Vec<Encoded<'a>>,
        then: &mut dyn FnMut(&[Option<&[u8]>]),
    ) -> Result<(), String>;

    /// Waits for decoding in progress and closes the device; nothing can be decoded afterwards.
    fn close(&self) {}
}

/// At most so many bytes of a batch's files wait in memory for the device. Cores decode the other files.
pub(super) const MOST_HELD: usize = 512 << 20;
/// Batches that may fail one after another before cores do everything.
const MOST_FAILURES: u32 = 4;

/// Where a job's pictures were decoded so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Decoded {
    pub by_device: u64,
    pub by_cores: BTreeMap<CpuDecodeReason, u64>,
    /// The device's last error.
    pub failure: Option<String>,
    /// It has failed too often: cores do everything from now on.
    pub given_up: bool,
    /// Batches that have failed since one did not.
    failures: u32,
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

/// A device that decodes for a job, and what it has done.
#[derive(Debug)]
pub(super) struct OnDevice {
    pub(super) decoder: Arc<dyn DeviceDecoder>,
    /// Bytes of a batch's files, at most.
    pub(super) most_held: usize,
    decoded: Mutex<Decoded>,
}

impl OnDevice {
    pub(super) fn new(decoder: Arc<dyn DeviceDecoder>, most_held: usize) -> Self {
        Self { decoder, most_held, decoded: Mutex::default() }
    }

    pub(super) fn decoded(&self) -> Decoded {
        self.with(|decoded| decoded.clone())
    }

    pub(super) fn is_in_use(&self) -> bool {
        self.with(|decoded| !decoded.given_up)
    }

    /// Counts pictures that cores decode.
    pub(super) fn for_cores(&self, why: CpuDecodeReason, pictures: u64) {
        if pictures == 0 {
            return;
        }
        self.with(|decoded| *decoded.by_cores.entry(why).or_insert(0) += pictures);
    }

    /// Counts pictures that the device has decoded, and some that it did not take.
    pub(super) fn done(&self, pictures: u64, refused: u64) {
        self.with(|decoded| {
            decoded.by_device += pictures;
            decoded.failures = 0;
        });
        if refused > 0 {
            self.for_cores(CpuDecodeReason::Refused, refused);
        }
    }

    /// Counts pictures of a batch that failed; `is_first`: nothing else of it has.
    pub(super) fn failed(&self, why: String, pictures: u64, is_first: bool) {
        tracing::warn!("the GPU could not decode {pictures} pictures, cores do: {why}");
        self.for_cores(CpuDecodeReason::Failed, pictures);
        self.with(|decoded| {
            decoded.failure = Some(why);
            decoded.failures += u32::from(is_first);
            decoded.given_up |= decoded.failures >= MOST_FAILURES;
        });
    }

    fn with<T>(&self, look: impl FnOnce(&mut Decoded) -> T) -> T {
        look(&mut self.decoded.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
