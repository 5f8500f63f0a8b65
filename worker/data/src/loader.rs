//! A dataset as one job reads it: opened, split, and delivered in batches.

use super::{
    DataError, Picture,
    device::{Decoded, DeviceDecoder, MOST_HELD, OnDevice},
    held_out::{Identity, is_held_out},
    transform::{Crop, Transform},
};
use lockstep_protocol::spec::Division;
use std::sync::{Arc, Mutex};

pub use super::shard::EpochPlan;
pub use batch::{Batch, BatchFormat};
pub use epoch::Batches;
pub use mix::{Mix, MixParams};
pub use mixing::Mixing;
pub use shape::Shape;

use batch::BatchBuilder;
use part::{Part, Pixels};
use workers::Workers;

mod ahead;
mod batch;
mod broken;
mod epoch;
mod mix;
mod mixing;
mod on_device;
mod open;
mod part;
pub mod replaced;
mod shape;
mod splits;
mod workers;

/// A dataset opened for a job. Every rank reads the same files; which pictures a rank gets follows
/// from its number.
#[derive(Debug)]
pub struct DataSource {
    /// Classes, sizes and counts that opening it has found.
    pub shape: Shape,
    /// The training transforms, one for each entry of [`Shape::training_sizes`].
    training: Vec<Arc<Transform>>,
    evaluation: Arc<Transform>,
    train: Arc<Part>,
    validation: Arc<Part>,
    /// The validation pictures.
    measured: Vec<Identity>,
    seed: u64,
    format: BatchFormat,
    mixing: Mixing,
    /// Whether engines must not keep a copy of the pictures.
    stays: bool,
    device: Option<Arc<OnDevice>>,
    /// The threads that make pictures, which keep their buffers from epoch to epoch. Also for how many threads they were made, and whether
    /// for a device.
    workers: Mutex<Option<((usize, bool), Arc<Workers>)>>,
}

/// All pictures of a job as bytes in memory, for an engine that keeps a copy and does the augmentation itself.
#[derive(Debug, Clone)]
pub struct Resident {
    /// The training split: height, width, channels of each picture, one after another.
    pub train: Arc<Vec<u8>>,
    /// The validation split; the same pictures where it is a fraction held out of training.
    pub validation: Arc<Vec<u8>>,
    /// Height of a picture in pixels.
    pub height: usize,
    /// Width of a picture in pixels.
    pub width: usize,
    /// Black pixels around a picture before a crop of its own size is taken.
    pub crop_padding: usize,
}

impl DataSource {
    /// A checksum over classes and samples (content, label, name and order). All ranks must have the same.
    pub fn digest(&self) -> u32 {
        let mut hash = crc32fast::Hasher::new();
        for class in &self.shape.classes {
            hash.update(class.as_bytes());
            hash.update(&[0]);
        }
        self.train.add_to(&mut hash);
        self.validation.add_to(&mut hash);
        hash.finalize()
    }

    /// How many validation pictures, of a fraction held out, were training pictures under one of these divisions of the split.
    pub fn trained_on(&self, divisions: &[Division]) -> u64 {
        let trained =
            |picture: &&Identity| divisions.iter().any(|division| !is_held_out(division, **picture));
        self.measured.iter().filter(trained).count() as u64
    }

    /// Normalises with these values, by channel, in place of what was found: a run that continues from a checkpoint must
    /// normalise as it did at its start.
    pub fn set_normalisation(&mut self, mean: Vec<f32>, std: Vec<f32>) {
        for transform in self.training.iter_mut().chain([&mut self.evaluation]) {
            Arc::make_mut(transform).set_normalisation(&mean, &std);
        }
        (self.shape.mean, self.shape.std) = (mean, std);
    }

    /// The transform of an epoch (from 0) of training; with `None` that of evaluation.
    fn transform(&self, epoch: Option<u32>) -> &Arc<Transform> {
        epoch.and_then(|epoch| self.training.get(self.shape.entry_of(epoch))).unwrap_or(&self.evaluation)
    }

    /// Sets the format of the batches. Erased rectangles are 0 after normalisation, which a byte cannot express: with random
    /// erasing, [`BatchFormat::Bytes`] gives normalised batches.
    pub fn set_format(&mut self, format: BatchFormat) {
        self.format = if format == BatchFormat::Bytes && self.evaluation.erases() {
            BatchFormat::Normalised
        } else {
            format
        };
    }

    /// Sets how the training pictures of each step are mixed.
    pub fn set_mixing(&mut self, mixing: Mixing) {
        self.mixing = mixing;
    }

    /// Keeps the pictures from engines that would hold a copy in their memory if they fit: so what a run computes does not depend on
    /// how much of it is free.
    pub fn stay(&mut self) {
        self.stays = true;
    }

    /// Makes `decoder` decode the JPEG files that it can; CPU cores decode the others. Batches that are being made keep the
    /// decoder that they began with.
    pub fn set_decoder(&mut self, decoder: Arc<dyn DeviceDecoder>) {
        self.set_decoder_with_room(decoder, MOST_HELD);
    }

    /// As [`DataSource::set_decoder`], with a limit for the bytes of a batch's files that are held in memory.
    pub fn set_decoder_with_room(&mut self, decoder: Arc<dyn DeviceDecoder>, most_held: usize) {
        self.device = Some(Arc::new(OnDevice::new(decoder, most_held)));
    }

    /// How many pictures the device and the cores have decoded; `None` without a device.
    pub fn decoded(&self) -> Option<Decoded> {
        self.device.as_ref().map(|device| device.decoded())
    }

    /// Waits until the device has finished decoding, and closes it. A process must not end while the device is decoding.
    pub fn close_decoder(&self) {
        if let Some(device) = &self.device {
            device.decoder.close();
        }
    }

    /// Whether JPEG files are decoded for each step.
    pub fn decodes_jpeg(&self) -> bool {
        [&self.train, &self.validation].into_iter().any(|part| {
            part.files().is_some_and(|files| part.chosen.iter().any(|place| files.is_jpeg(*place as usize)))
        })
    }

    /// Whether preparing a batch is work for more than one thread: pictures are decoded for each step, mixed, or transformed
    /// with more than a crop, a flip and scaling. Where the engine does all of it ([`BatchFormat::AugmentParams`]), nothing is left.
    pub fn is_prepared_each_step(&self) -> bool {
        self.format != BatchFormat::AugmentParams
            && (self.train.is_decoded_each_step()
                || self.validation.is_decoded_each_step()
                || !self.evaluation.is_padded_crop_and_flip()
                || self.mixing.is_on())
    }

    /// All pictures, when they are in memory and an engine can augment them itself: with a padded crop, a flip, scaling and
    /// mixing.
    pub fn resident(&self) -> Option<Resident> {
        let memory = |part: &Part| match &part.pixels {
            Pixels::Memory(bytes) => Some(bytes.clone()),
            Pixels::Files { .. } => None,
        };
        let Crop::Padded(crop_padding) = self.evaluation.crop else { return None };
        let Transform { height, width, .. } = *self.evaluation;
        if self.stays || !self.evaluation.is_padded_crop_and_flip() {
            return None;
        }
        let (train, validation) = (memory(&self.train)?, memory(&self.validation)?);
        Some(Resident { train, validation, height, width, crop_padding })
    }

    /// One picture as the network sees it, at the network's input size: augmented as in `epoch` (from 0), or with `None` as in
    /// evaluation. It is prepared as for a batch and the normalisation is undone, so what is shown is what is trained on.
    ///
    /// # Errors
    /// A place that the split does not have, or a file that is gone.
    pub fn picture(
        &self,
        validation: bool,
        place: u64,
        epoch: Option<u32>,
    ) -> Result<(u32, Picture), DataError> {
        let part = if validation { &self.validation } else { &self.train };
        let chosen = u32::try_from(place).ok().filter(|p| (*p as usize) < part.labels.len());
        let Some(chosen) = chosen else {
            return Err(DataError::Invalid(format!(
                "there is no picture {place}: there are {}",
                part.labels.len()
            )));
        };
        let (transform, workers) = (self.transform(epoch), &Workers::alone(1));
        let builder =
            BatchBuilder { part, transform, format: BatchFormat::Normalised, workers, device: None };
        let batch = builder.make(&[chosen], epoch)?;
        let channels = self.shape.channels;
        let byte = |(i, v): (usize, &f32)| {
            let channel = i % channels;
            ((v * self.shape.std[channel] + self.shape.mean[channel]) * 255.0).round().clamp(0.0, 255.0) as u8
        };
        let pixels = batch.images.iter().enumerate().map(byte).collect();
        let side = transform.side as u32;
        Ok((batch.labels[0], Picture { width: side, height: side, channels: channels as u32, pixels }))
    }

    /// A line for each picture that could not be read since the last call, and the number of all such pictures so far.
    pub fn newly_broken(&self) -> (Vec<String>, usize) {
        let (mut news, training) = self.train.broken.news();
        let (more, validation) = self.validation.broken.news();
        news.extend(more);
        (news, training + validation)
    }
}
