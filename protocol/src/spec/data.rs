//! `[data]`: the dataset, and how a picture becomes an input.

use super::image_size::ImageSize;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What to train on and how a picture becomes an input.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DataSpec {
    /// A registered dataset's name, or (from the command line) a path.
    pub dataset: String,
    /// Where validation pictures come from. When absent: `test` (with some recipes `val`), and of a dataset that has no
    /// such split the first of `val`, `validation`, `valid`, `dev`, `test`, `eval` and `evaluation` that it has.
    pub validation: Validation,
    /// With a fraction in `validation`: chooses the pictures that are held out. Each is chosen by itself, from this seed and
    /// its class and file name (in a folder of pictures) or its content (in other formats), so adding or removing others moves
    /// none, and the fraction is the expected share of each class. `train.seed` has no influence on it.
    pub validation_seed: u64,
    /// Height and width of the network's input, in pixels, or a list of `[epoch, pixels]`, sizes with the epochs that
    /// they begin in; the dataset's own when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_size: Option<ImageSize>,
    /// Height and width of the input where the network is measured and asked; `image_size`, of several the last, when
    /// absent. Never less than that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_size: Option<u32>,
    /// Zero padding in pixels around a picture before a random crop of its own size; 0 for no crop.
    pub crop_padding: u32,
    /// Instead of the padded crop: a random part of the whole picture, resized (torchvision's `RandomResizedCrop`).
    pub random_resized_crop: bool,
    /// `random_resized_crop`: the smallest and the largest area, as a share of the picture's.
    pub crop_scale: [f32; 2],
    /// `random_resized_crop`: the smallest and the largest width over height.
    pub crop_ratio: [f32; 2],
    /// Validation: resize the short side to so many pixels, then crop `validation_size` at the centre (torchvision's
    /// `Resize` and `CenterCrop`). When absent: `validation_size` * 256 / 224 with `random_resized_crop`; without, the
    /// largest centred square is scaled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resize_size: Option<u32>,
    /// Mirror half of the training pictures left to right.
    pub horizontal_flip: bool,
    /// Turn half of the training pictures upside down, by mirroring them.
    pub vertical_flip: bool,
    /// How far brightness, contrast, saturation and hue may change (torchvision's `ColorJitter`).
    pub color_jitter: [f32; 4],
    /// A policy that chooses operations on a training picture: `trivial` is one of any strength (torchvision's
    /// `TrivialAugmentWide()`), `rand` two of strength 9 (`RandAugment(2, 9)`).
    pub augment: Augment,
    /// The probability that a random rectangle is 0 after normalisation (torchvision's `RandomErasing`).
    pub random_erasing: f32,
    /// Per channel, of pixels scaled to 0..1; the dataset's own when absent. Grey pictures take the average of three.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean: Option<Vec<f32>>,
    /// Per channel, of pixels scaled to 0..1; the dataset's own when absent. Grey pictures take the average of three.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub std: Option<Vec<f32>>,
    /// Leave out the last, smaller batch of an epoch. With `false`, one that has fewer pictures than there are ranks times
    /// `train.accumulate` is filled up with the epoch's first pictures, so the result depends on the number of ranks; the log
    /// says so.
    pub drop_remainder: bool,
    /// What a broken file does: end the job, or be left out (named in the log, and counted).
    pub broken_files: BrokenFiles,
}

/// How a job divides the training split of its dataset into training and validation pictures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Division {
    pub dataset: String,
    pub validation: Validation,
    pub validation_seed: u64,
}

impl Division {
    /// The division that a job asks for.
    pub fn of(spec: &DataSpec) -> Self {
        Self {
            dataset: spec.dataset.clone(),
            validation: spec.validation.clone(),
            validation_seed: spec.validation_seed,
        }
    }
}

/// Policies that choose operations on a picture by themselves, as torchvision has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Augment {
    None,
    /// One operation of any strength (Müller, Hutter 2021): `TrivialAugmentWide()`.
    Trivial,
    /// Two operations of strength 9 (Cubuk et al. 2019): `RandAugment(2, 9)`.
    Rand,
}

/// Where validation pictures come from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum Validation {
    /// Held out of the training split at random (see `validation_seed`): above 0, below 1.
    Fraction(f64),
    /// A split of the dataset, such as `test`; `none` for no validation.
    Split(String),
}

/// What a file that cannot be decoded does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum BrokenFiles {
    Fail,
    Skip,
}

impl Default for DataSpec {
    fn default() -> Self {
        Self {
            dataset: String::new(),
            validation: Validation::Split("test".into()),
            validation_seed: 0,
            image_size: None,
            validation_size: None,
            crop_padding: 4,
            random_resized_crop: false,
            crop_scale: [0.08, 1.0],
            crop_ratio: [0.75, 1.3333],
            resize_size: None,
            horizontal_flip: true,
            vertical_flip: false,
            color_jitter: [0.0; 4],
            augment: Augment::None,
            random_erasing: 0.0,
            mean: None,
            std: None,
            drop_remainder: true,
            broken_files: BrokenFiles::Fail,
        }
    }
}

impl DataSpec {
    /// Height and width of the input where the network is measured and asked; `None`: the dataset's own.
    pub fn evaluation_size(&self) -> Option<u32> {
        self.validation_size.or(self.image_size.as_ref().map(ImageSize::last))
    }
}
