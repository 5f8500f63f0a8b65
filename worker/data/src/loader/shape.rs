//! The shape of a dataset as used by a job: sizes, channels, classes, counts and normalisation.

use lockstep_protocol::dataset::ValidationSet;
use std::sync::Arc;

/// The shape of a dataset as used by a job.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Shape {
    /// Side of the network's input in pixels for evaluation and predictions.
    pub image_size: usize,
    /// Sides of the training input in pixels, each with the epoch (from 0) in which it begins. The first begins in
    /// epoch 0. No side is larger than `image_size`.
    pub training_sizes: Vec<(u32, usize)>,
    /// Number of channels of a picture: 1 or 3.
    pub channels: usize,
    /// The names of the classes, in the order of the labels.
    pub classes: Vec<String>,
    /// Number of training pictures, without held-out and broken pictures.
    pub train_samples: u64,
    /// Number of validation pictures. 0 without validation.
    pub validation_samples: u64,
    /// The fingerprint of the validation pictures. `None` if there are none.
    pub validation: Option<ValidationSet>,
    /// The weight of each class in the loss, if [set](super::DataSource::set_class_weights).
    pub class_weights: Option<Arc<[f32]>>,
    /// Mean of each channel, for pixels scaled to 0..1.
    pub mean: Vec<f32>,
    /// Standard deviation of each channel, for pixels scaled to 0..1.
    pub std: Vec<f32>,
    /// Broken files that were left out (`broken_files = "skip"`), each with the reason.
    pub skipped: Vec<String>,
    /// Notes for the job's log about classes from which a fraction holds out no picture or every picture.
    pub notes: Vec<String>,
    /// Whether the pictures are in a packed file and not square. Whole pictures are then scaled to the network's square
    /// input.
    pub whole_pictures: bool,
    /// The length to which the short side of validation pictures is resized before the centre crop. If absent, the largest
    /// centred square of each picture is scaled.
    pub resize: Option<u32>,
}

impl Shape {
    /// Side of the training input in an epoch (from 0).
    pub fn training_size(&self, epoch: u32) -> usize {
        self.training_sizes.get(self.entry_of(epoch)).map_or(self.image_size, |(_, side)| *side)
    }

    /// Index of an epoch's entry in [`Shape::training_sizes`].
    pub(super) fn entry_of(&self, epoch: u32) -> usize {
        self.training_sizes.partition_point(|(from, _)| *from <= epoch).saturating_sub(1)
    }
}
