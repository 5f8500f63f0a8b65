//! Decoding and resizing on a device: what a GPU is asked for, and what becomes of pictures that it does not take.
//!
//! A device gives back bytes that lie in the host's memory, as cores make them, so everything after the crop stays as
//! it is, and each picture of a batch may come from either.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

pub use super::picture::jpeg::ForCores;
#[cfg(test)]
pub(crate) use super::picture::jpeg::MOST_SIDE;
pub(crate) use super::picture::{
    ScaleTable,
    jpeg::{Stored, for_hardware},
};

/// A JPEG file and what is made of it: an upright part, resized, mirrored or not.
#[derive(Debug)]
pub struct Encoded<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) stored: Stored,
    /// First column of the upright picture that the tables count from.
    pub(crate) left: u32,
    /// First row.
    pub(crate) top: u32,
    pub(crate) rows: &'a ScaleTable,
    pub(crate) columns: &'a ScaleTable,
    /// Mirrored left to right after resizing.
    pub(crate) flip: bool,
}

/// Decodes JPEG files somewhere else than on the host's cores.
pub trait DeviceDecoder: Send + Sync + fmt::Debug {
    /// For the log.
    fn name(&self) -> String;

    /// Makes `size` (width, height) RGB pixels of each picture, and calls `then` once with them, in order: `None` where
    /// the device does not take a picture. May be called from several threads at a time.
    ///
    /// # Errors
    /// None of them could be made; `then` was not called.
    fn decode(
        &self,
        pictures: &[Encoded<'_>],
        size: (u32, u32),
        then: &mut dyn FnMut(&[Option<&[u8]>]),
    ) -> Result<(), String>;

    /// Waits for what is under way; nothing can be decoded any more.
    fn close(&self) {}
}

/// Files of a batch that wait for the device, in bytes; the rest is decoded on cores.
const MOST_HELD: usize = 512 << 20;
/// Batches that may fail one after another before cores do everything.
const MOST_FAILURES: u32 = 4;

/// Where a job's pictures were decoded so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Decoded {
    pub by_device: u64,
    pub by_cores: BTreeMap<ForCores, u64>,
    /// What the device said last when it failed.
    pub failure: Option<String>,
    /// It has failed too often: cores do everything from now on.
    pub given_up: bool,
    /// Batches that have failed since one did not.
    failures: u32,
}

impl fmt::Display for Decoded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cores: u64 = self.by_cores.values().sum();
        write!(f, "{} pictures were decoded by the GPU", self.by_device)?;
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

/// Who decodes what a device takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// The device, all of it.
    DeviceAlone,
    /// The device and idle cores, as much each as takes them equally long.
    WithCores,
}

/// The device's share of the first batch; afterwards by what both took.
const FIRST_SHARE: f64 = 0.75;
/// It always has some, and so have cores: who has nothing shows no speed.
const SHARES: [f64; 2] = [1.0 / 64.0, 63.0 / 64.0];
/// How much of the way to the share that the last batch suggests is gone.
const STEP: f64 = 0.125;

/// A device that decodes for a job, and what it has done.
#[derive(Debug)]
pub(super) struct OnDevice {
    pub(super) decoder: Arc<dyn DeviceDecoder>,
    /// Bytes of a batch's files, at most.
    pub(super) most_held: usize,
    sharing: Sharing,
    /// The device's, of what it takes.
    share: Mutex<f64>,
    decoded: Mutex<Decoded>,
}

impl OnDevice {
    pub(super) fn new(decoder: Arc<dyn DeviceDecoder>, sharing: Sharing) -> Self {
        Self::with_room(decoder, sharing, MOST_HELD)
    }

    pub(super) fn with_room(decoder: Arc<dyn DeviceDecoder>, sharing: Sharing, most_held: usize) -> Self {
        Self { decoder, most_held, sharing, share: Mutex::new(FIRST_SHARE), decoded: Mutex::default() }
    }

    /// How many of so many pictures the device decodes.
    pub(super) fn share(&self, pictures: usize) -> usize {
        match self.sharing {
            Sharing::DeviceAlone => pictures,
            Sharing::WithCores => {
                let share = *self.share.lock().unwrap_or_else(PoisonError::into_inner);
                (pictures as f64 * share).round() as usize
            }
        }
    }

    /// Notes how long the device and cores took for so many pictures of a batch.
    pub(super) fn took(&self, device: (usize, Duration), cores: (usize, Duration)) {
        let rate = |(pictures, took): (usize, Duration)| pictures as f64 / took.as_secs_f64().max(1e-6);
        if device.0 == 0 || cores.0 == 0 {
            return;
        }
        let wanted = rate(device) / (rate(device) + rate(cores));
        let mut share = self.share.lock().unwrap_or_else(PoisonError::into_inner);
        *share = (*share + STEP * (wanted - *share)).clamp(SHARES[0], SHARES[1]);
    }

    pub(super) fn decoded(&self) -> Decoded {
        self.with(|decoded| decoded.clone())
    }

    pub(super) fn is_in_use(&self) -> bool {
        self.with(|decoded| !decoded.given_up)
    }

    /// Counts pictures that cores decode.
    pub(super) fn for_cores(&self, why: ForCores, pictures: u64) {
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
            self.for_cores(ForCores::Refused, refused);
        }
    }

    /// Counts pictures of a batch that failed.
    pub(super) fn failed(&self, why: String, pictures: u64) {
        tracing::warn!("the GPU could not decode {pictures} pictures, cores do: {why}");
        self.for_cores(ForCores::Failed, pictures);
        self.with(|decoded| {
            decoded.failure = Some(why);
            decoded.failures += 1;
            decoded.given_up |= decoded.failures >= MOST_FAILURES;
        });
    }

    fn with<T>(&self, look: impl FnOnce(&mut Decoded) -> T) -> T {
        look(&mut self.decoded.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Nobody;

    impl DeviceDecoder for Nobody {
        fn name(&self) -> String {
            "nobody".into()
        }

        fn decode(
            &self,
            _: &[Encoded<'_>],
            _: (u32, u32),
            _: &mut dyn FnMut(&[Option<&[u8]>]),
        ) -> Result<(), String> {
            Err("there is nobody".into())
        }
    }

    #[test]
    fn the_shares_of_device_and_cores_become_such_that_both_take_equally_long() {
        let device = OnDevice::new(Arc::new(Nobody), Sharing::WithCores);
        assert_eq!(device.share(256), 192);
        // 6,000 and 4,000 pictures a second.
        for _ in 0..60 {
            let own = device.share(256);
            let secs = |pictures: usize, rate: f64| Duration::from_secs_f64(pictures as f64 / rate);
            device.took((own, secs(own, 6000.0)), (256 - own, secs(256 - own, 4000.0)));
        }
        assert!((153..=155).contains(&device.share(256)), "{}", device.share(256));
        // However slow one of them is, it keeps a few, so that it is seen when it becomes faster; and times of nothing, or
        // none, say nothing.
        for _ in 0..100 {
            device.took((100, Duration::from_secs(1)), (1, Duration::from_secs(50)));
        }
        assert_eq!(device.share(256), 252);
        for _ in 0..100 {
            device.took((1, Duration::from_secs(50)), (100, Duration::ZERO));
        }
        assert_eq!(device.share(256), 4);
        device.took((0, Duration::ZERO), (256, Duration::from_secs(1)));
        assert_eq!(device.share(256), 4);
        assert_eq!(OnDevice::new(Arc::new(Nobody), Sharing::DeviceAlone).share(256), 256);
    }
}
