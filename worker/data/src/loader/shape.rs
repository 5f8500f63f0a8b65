//! The shape of a dataset, as a job uses it: sizes, channels, classes, counts and normalisation.

use lockstep_protocol::dataset::ValidationSet;

/// The shape of a dataset, as a job uses it.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    /// Side of the network's input in pixels for evaluation and predictions.
    pub image_size: usize,
    /// Sides of the training input, each with the epoch (from 0) that it begins in; the first begins in epoch 0. None is
    /// larger than `image_size`.
    pub training_sizes: Vec<(u32, usize)>,
    /// 1 or 3.
    pub channels: usize,
    /// Names, in the order of the labels.
    pub classes: Vec<String>,
    /// Without held-out and broken pictures.
    pub train_samples: u64,
    /// 0 when there is no validation.
    pub validation_samples: u64,
    /// The validation pictures; `None` when there are none.
    pub validation: Option<ValidationSet>,
    /// By channel, of pixels scaled to 0..1.
    pub mean: Vec<f32>,
    /// By channel, of pixels scaled to 0..1.
    pub std: Vec<f32>,
    /// Broken files that were left out (`broken_files = "skip"`), each with what is wrong.
    pub skipped: Vec<String>,
    /// What the job's log says about the classes that a fraction is held out of.
    pub notes: Vec<String>,
    /// The pictures lie in one packed file and are not square. Each is scaled as a whole to the network's square.
    pub whole_pictures: bool,
    /// The short side that validation pictures are resized to before the centre crop. Absent: their largest centred
    /// square is scaled.
    pub resize: Option<u32>,
}

impl Shape {
    /// Side of the training input in an epoch, from 0.
    pub fn training_size(&self, epoch: u32) -> usize {
        self.training_sizes.get(self.entry_of(epoch)).map_or(self.image_size, |(_, side)| *side)
    }

    /// The entry of [`Shape::training_sizes`] that an epoch belongs to.
    pub(super) fn entry_of(&self, epoch: u32) -> usize {
        self.training_sizes.partition_point(|(from, _)| *from <= epoch).saturating_sub(1)
    }
}
