//! Transforms a picture into the network's input on CPU cores, with torchvision's semantics. The random numbers do
//! not depend on the rank.
//!
//! Training: a random crop (padded, or resized: [`Crop`]), flips, colour jitter, automatic augmentation,
//! normalisation and random erasing, in torchvision's order. Evaluation: scaling, or resizing and a centre crop.

mod auto_augment;
mod color;
mod crop;
mod geometry;
mod op;
mod params;
mod pipeline;
#[cfg(test)]
mod tests;

pub(super) use params::AugmentParams;
pub(super) use pipeline::{Pipeline, reflected_window};

use auto_augment::Policy;
use lockstep_protocol::spec::{Augment, DataSpec};

/// The transform of a job's pictures.
#[derive(Debug, Clone)]
pub(super) struct Transform {
    /// The height of pictures for padded crops.
    pub(super) height: usize,
    /// The width of pictures for padded crops.
    pub(super) width: usize,
    pub(super) channels: usize,
    /// The side of the network's input.
    pub(super) side: usize,
    /// The first step of the training transform.
    pub(super) crop: Crop,
    /// In evaluation, the length of the short side before the centre crop. `None` if pictures are scaled as a whole.
    pub(super) resize: Option<u32>,
    /// Whether the border of a padded crop mirrors the picture; else it is black.
    pub(super) reflects: bool,
    pub(super) horizontal_flip: bool,
    /// Whether a picture is mirrored in every other epoch instead of at random.
    pub(super) alternating_flip: bool,
    pub(super) vertical_flip: bool,
    /// torchvision's `ColorJitter(brightness, contrast, saturation, hue)`.
    pub(super) color_jitter: [f64; 4],
    augment: Option<Policy>,
    /// The probability of `RandomErasing`.
    pub(super) random_erasing: f64,
    pub(super) seed: u64,
    /// The normalised value of each byte, by channel.
    pub(super) table: Vec<[f32; 256]>,
}

/// The part of a picture that is used in training.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Crop {
    /// A crop of the picture's own size, from the picture with a border of this width in pixels; scaled afterwards.
    Padded(usize),
    /// torchvision's `RandomResizedCrop`: limits of the crop's area (fraction of the picture's area) and of its width / height.
    RandomResized { scale: [f64; 2], ratio: [f64; 2] },
}

impl Transform {
    /// A transform to `side` x `side` pixels. Pictures have `height` x `width` pixels, or any size if they are decoded in each step.
    /// `normalisation`: mean and standard deviation of each channel.
    pub(super) fn new(
        spec: &DataSpec,
        [height, width, channels]: [usize; 3],
        side: usize,
        seed: u64,
        normalisation: (&[f32], &[f32]),
    ) -> Self {
        let crop = if spec.random_resized_crop {
            Crop::RandomResized {
                scale: spec.crop_scale.map(f64::from),
                ratio: spec.crop_ratio.map(f64::from),
            }
        } else {
            Crop::Padded(spec.crop_padding as usize)
        };
        Self {
            height,
            width,
            channels,
            side,
            crop,
            resize: evaluation_resize(spec, side),
            reflects: spec.reflect_border,
            horizontal_flip: spec.horizontal_flip,
            alternating_flip: spec.alternating_flip,
            vertical_flip: spec.vertical_flip,
            color_jitter: spec.color_jitter.map(f64::from),
            augment: match spec.augment {
                Augment::None => None,
                Augment::Trivial => Some(Policy::TrivialAugmentWide),
                Augment::Rand => Some(Policy::RandAugment),
            },
            random_erasing: spec.random_erasing.into(),
            seed,
            table: Self::normalisation(normalisation.0, normalisation.1),
        }
    }

    /// The [`Transform::table`] for these means and standard deviations of the channels.
    pub(super) fn normalisation(mean: &[f32], std: &[f32]) -> Vec<[f32; 256]> {
        mean.iter().zip(std).map(|(m, s)| std::array::from_fn(|v| (v as f32 / 255.0 - m) / s)).collect()
    }

    /// Converts bytes to the network's input.
    pub(super) fn normalise(&self, bytes: &[u8], out: &mut [f32]) {
        match &self.table[..] {
            [grey] => out.iter_mut().zip(bytes).for_each(|(o, v)| *o = grey[usize::from(*v)]),
            tables => {
                for (o, v) in out.chunks_exact_mut(tables.len()).zip(bytes.chunks_exact(tables.len())) {
                    for ((o, v), table) in o.iter_mut().zip(v).zip(tables) {
                        *o = table[usize::from(*v)];
                    }
                }
            }
        }
    }

    /// Whether the transform consists only of a padded crop, a horizontal flip and scaling, which GPUs can do.
    pub(super) fn is_padded_crop_and_flip(&self) -> bool {
        matches!(self.crop, Crop::Padded(_))
            && self.resize.is_none()
            && !self.changes_after_crop()
            && !self.erases()
    }

    /// Whether pixels change between the crop (with its horizontal flip) and normalisation.
    fn changes_after_crop(&self) -> bool {
        self.vertical_flip || self.color_jitter.iter().any(|v| *v > 0.0) || self.augment.is_some()
    }

    /// Whether some pixels are set to 0 after normalisation, which a byte cannot express.
    pub(super) fn erases(&self) -> bool {
        self.random_erasing > 0.0
    }
}

/// The length in pixels to which evaluation resizes the short side before it crops `side` pixels: `data.resize_size`. With random
/// resized crops, the default is ImageNet's proportion (256 to 224, rounded down).
pub(super) fn evaluation_resize(spec: &DataSpec, side: usize) -> Option<u32> {
    spec.resize_size.or_else(|| spec.random_resized_crop.then_some((side * 256 / 224) as u32))
}
