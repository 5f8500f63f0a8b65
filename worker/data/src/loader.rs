//! A dataset as read by one job: opened, divided and delivered in batches.

use super::{
    DataError, Picture,
    device::{Decoded, DeviceDecoder, MAX_HELD_BYTES, OnDevice},
    held_out::{Identity, is_held_out},
    label::class_counts,
    transform::{Crop, Transform},
};
use lockstep_protocol::spec::ValidationDivision;
use std::sync::{Arc, Mutex};

pub use super::shard::EpochPlan;
pub use batch::{Batch, BatchFormat};
pub use epoch::Batches;
pub use mixing::{Mix, MixParams, Mixing};
pub use shape::Shape;
pub use view::View;

use batch::BatchBuilder;
use part::{Part, Pixels};
use workers::Workers;

mod ahead;
mod batch;
mod epoch;
mod mixing;
mod on_device;
mod open;
mod part;
pub mod replaced;
mod shape;
mod splits;
mod view;
mod workers;

/// A dataset opened for a job. Every rank opens the same files, and gets its own part of the pictures.
#[derive(Debug)]
pub struct DataSource {
    /// Classes, sizes and counts, as found when the dataset was opened.
    pub shape: Shape,
    /// The training transforms, one for each entry of [`Shape::training_sizes`].
    training: Vec<Arc<Transform>>,
    evaluation: Arc<Transform>,
    train: Arc<Part>,
    validation: Arc<Part>,
    validation_identities: Vec<Identity>,
    seed: u64,
    format: BatchFormat,
    mixing: Mixing,
    /// Whether the pictures stay in host memory, that is, engines must not copy the pictures to their devices.
    stays_on_host: bool,
    device: Option<Arc<OnDevice>>,
    /// The threads that make pictures, which keep their buffers from epoch to epoch.
    workers: Mutex<Option<Arc<Workers>>>,
}

/// All pictures of a job as bytes in host memory, for an engine that keeps a copy and augments pictures itself.
#[derive(Debug, Clone)]
pub struct Resident {
    /// The training split: pictures one after another, as height, width, channels.
    pub train: Arc<Vec<u8>>,
    /// The validation split. It is the same as `train` if a fraction of the training split is held out.
    pub validation: Arc<Vec<u8>>,
    /// Height of a picture in pixels.
    pub height: usize,
    /// Width of a picture in pixels.
    pub width: usize,
    /// Width in pixels of the border added to a picture before a crop of the original size is taken.
    pub crop_padding: usize,
    /// Whether the border mirrors the picture; else it is black.
    pub reflects: bool,
}

impl DataSource {
    /// A checksum of classes and samples (content, label, name and order). It must be the same on all ranks.
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

    /// The number of validation pictures that were training pictures under one of `divisions`, as returned by
    /// [`foreign_divisions`](super::held_out::foreign_divisions).
    pub fn count_trained_on(&self, divisions: &[ValidationDivision]) -> u64 {
        let trained =
            |picture: &&Identity| divisions.iter().any(|division| !is_held_out(division, **picture));
        self.validation_identities.iter().filter(trained).count() as u64
    }

    /// Replaces the normalisation by these values per channel. A run that continues from a checkpoint must normalise
    /// as it did at its start.
    pub fn set_normalisation(&mut self, mean: Vec<f32>, std: Vec<f32>) {
        for transform in self.training.iter_mut().chain([&mut self.evaluation]) {
            Arc::make_mut(transform).table = Transform::normalisation(&mean, &std);
        }
        (self.shape.mean, self.shape.std) = (mean, std);
    }

    /// The transform of an epoch of training (from 0). `None` means evaluation.
    fn transform(&self, epoch: Option<u32>) -> &Arc<Transform> {
        epoch.and_then(|epoch| self.training.get(self.shape.entry_of(epoch))).unwrap_or(&self.evaluation)
    }

    /// Sets the format of the batches. With random erasing, [`BatchFormat::Bytes`] gives normalised batches, because
    /// an erased rectangle is 0 after normalisation, which a byte cannot express.
    pub fn set_format(&mut self, format: BatchFormat) {
        self.format = if format == BatchFormat::Bytes && self.evaluation.erases() {
            BatchFormat::Normalised
        } else {
            format
        };
    }

    /// The number of training pictures of each class.
    pub fn class_counts(&self) -> Vec<u64> {
        let labels = self.train.chosen.iter().map(|position| self.train.split.labels[*position as usize]);
        class_counts(self.shape.classes.len(), labels)
    }

    /// The position in the split of the training picture with this index. The index must be below [`Shape::train_samples`].
    pub fn training_position(&self, index: u64) -> u64 {
        self.train.chosen[index as usize].into()
    }

    /// Sets the weight of each class in the loss.
    pub fn set_class_weights(&mut self, weights: Vec<f32>) {
        self.shape.class_weights = Some(weights.into());
    }

    /// Sets how the training pictures of each step are mixed.
    pub fn set_mixing(&mut self, mixing: Mixing) {
        self.mixing = mixing;
    }

    /// Prevents engines from copying the pictures to their devices. Otherwise an engine copies them if they fit, and
    /// results could depend on the amount of free memory.
    pub fn keep_on_host(&mut self) {
        self.stays_on_host = true;
    }

    /// Sets a decoder for the JPEG files that it supports; CPU cores decode the others. Batches already in
    /// preparation keep their decoder.
    pub fn set_decoder(&mut self, decoder: Arc<dyn DeviceDecoder>) {
        self.set_decoder_with_limit(decoder, MAX_HELD_BYTES);
    }

    /// As [`DataSource::set_decoder`], with a limit in bytes for the files of a batch held in memory.
    pub fn set_decoder_with_limit(&mut self, decoder: Arc<dyn DeviceDecoder>, max_held_bytes: usize) {
        self.device = Some(Arc::new(OnDevice::new(decoder, max_held_bytes)));
    }

    /// The number of pictures decoded by the device and by cores. `None` without a device.
    pub fn decoded(&self) -> Option<Decoded> {
        self.device.as_ref().map(|device| device.decoded())
    }

    /// Waits until the device has finished decoding, and closes it. The process must not end while the device is
    /// decoding.
    pub fn close_decoder(&self) {
        if let Some(device) = &self.device {
            device.decoder.close();
        }
    }

    /// Whether JPEG files are decoded in each step.
    pub fn decodes_jpeg(&self) -> bool {
        [&self.train, &self.validation].into_iter().any(|part| {
            part.files()
                .is_some_and(|files| part.chosen.iter().any(|position| files.is_jpeg(*position as usize)))
        })
    }

    /// Whether preparing a batch is work for more than one thread, because pictures are decoded in each step, mixed,
    /// or transformed by more than a crop, a flip and scaling. False if the engine does all of this
    /// ([`BatchFormat::AugmentParams`]).
    pub fn is_prepared_each_step(&self) -> bool {
        self.format != BatchFormat::AugmentParams
            && (self.train.files().is_some()
                || self.validation.files().is_some()
                || !self.evaluation.is_padded_crop_and_flip()
                || self.mixing.is_on())
    }

    /// All pictures, if they are in memory and an engine can augment them itself: by a padded crop, a flip, scaling
    /// and mixing.
    pub fn resident(&self) -> Option<Resident> {
        let memory = |part: &Part| match &part.split.pixels {
            Pixels::Memory(bytes) => Some(bytes.clone()),
            Pixels::Files { .. } => None,
        };
        let Crop::Padded(crop_padding) = self.evaluation.crop else { return None };
        let Transform { height, width, reflects, .. } = *self.evaluation;
        if self.stays_on_host || !self.evaluation.is_padded_crop_and_flip() {
            return None;
        }
        let (train, validation) = (memory(&self.train)?, memory(&self.validation)?);
        Some(Resident { train, validation, height, width, crop_padding, reflects })
    }

    /// One picture as the network sees it, at the network's input size: augmented as in `epoch` (from 0), or with
    /// `None` as in evaluation. `position` is in the validation split if `is_validation`, otherwise in the training split. The
    /// picture is prepared as for a batch, and the normalisation is then undone.
    ///
    /// # Errors
    /// The split has no picture at `position`, or the file cannot be read.
    pub fn picture(
        &self,
        is_validation: bool,
        position: u64,
        epoch: Option<u32>,
    ) -> Result<(u32, Picture), DataError> {
        let part = if is_validation { &self.validation } else { &self.train };
        let count = part.split.labels.len();
        let Some(chosen) = u32::try_from(position).ok().filter(|p| (*p as usize) < count) else {
            return Err(DataError::Invalid(format!("there is no picture {position}: the split has {count}")));
        };
        let (transform, workers) = (self.transform(epoch), &Workers::default());
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

    /// The file of the picture at a position as in [`DataSource::picture`]; `None` if a file has several pictures.
    pub fn file(&self, is_validation: bool, position: u64) -> Option<String> {
        let part = if is_validation { &self.validation } else { &self.train };
        let files = part.files().or(part.split.decoded_files.as_ref())?;
        usize::try_from(position).ok().filter(|index| *index < files.len()).map(|index| files.name(index))
    }

    /// Log lines for pictures found to be unreadable since the last call, and the number of all unreadable pictures.
    pub fn take_newly_broken(&self) -> (Vec<String>, usize) {
        let (mut lines, training) = self.train.broken.take_unlogged();
        let (validation_lines, validation) = self.validation.broken.take_unlogged();
        lines.extend(validation_lines);
        (lines, training + validation)
    }
}
