//! `[data]`: the dataset, and how a picture becomes an input.

use super::{image_size::ImageSize, named::words};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What to train on and how a picture becomes an input.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DataSpec {
    /// A registered dataset's name, or (from the command line) a path.
    pub dataset: String,
    /// Source of the validation pictures. When absent: the split `test` (with some recipes: `val`), if the dataset has it; otherwise
    /// the first of these splits that the dataset has: `val`, `validation`, `valid`, `dev`, `test`, `eval`, `evaluation`. If the
    /// dataset has only training pictures, a tenth of them is held out; a fifth if they are fewer than 1,000, three tenths if fewer
    /// than 50.
    pub validation: Validation,
    /// Seed that chooses the pictures of `folds`, and the held-out pictures if `validation` is a fraction. With a fraction, whether a
    /// picture is held out depends only on this seed and on the picture: its class and file name in a folder of pictures, its content in
    /// other formats. So pictures can be added or removed without effect on the others, and the share of a class that is held out
    /// equals the fraction only on average. `train.seed` has no influence.
    pub validation_seed: u64,
    /// Stratified k-fold cross-validation: the training pictures of each class are divided into this many equal parts, at random by
    /// `validation_seed`. Fold number `fold` validates the job, which trains on the other folds. `validation` is then not used, so a test
    /// split stays untouched.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub folds: Option<u32>,
    /// Number of the fold on which the job is validated, 1 to `folds`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fold: Option<u32>,
    /// Height and width of the network's input, in pixels, or a list of `[epoch, pixels]`: each size applies from its epoch on, and the
    /// first epoch is 1. When absent, the dataset's own size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_size: Option<ImageSize>,
    /// Height and width of the input in validation and in predictions; when absent, `image_size` or the last size of
    /// its list. Never smaller than the last training size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_size: Option<u32>,
    /// Zero padding, in pixels, around a picture before a random crop of the picture's size; 0: no crop.
    pub crop_padding: u32,
    /// With `crop_padding`: mirror the picture at its border (PyTorch's `reflect`) instead of padding with zeros.
    pub reflect_border: bool,
    /// Instead of the padded crop, use a random part of the whole picture, resized (torchvision's `RandomResizedCrop`).
    pub random_resized_crop: bool,
    /// With `random_resized_crop`: the smallest and the largest area of the crop, as a fraction of the picture's area.
    pub crop_scale: [f32; 2],
    /// With `random_resized_crop`: the smallest and the largest aspect ratio (width / height) of the crop.
    pub crop_ratio: [f32; 2],
    /// In validation: resize the short side to this many pixels, then crop `validation_size` at the centre (torchvision's
    /// `Resize` and `CenterCrop`). When absent: `validation_size` * 256 / 224 with `random_resized_crop`; otherwise the
    /// largest centred square is scaled to `validation_size`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resize_size: Option<u32>,
    /// Mirror a random half of the training pictures left to right.
    pub horizontal_flip: bool,
    /// With `horizontal_flip`: mirror a random half of the pictures in the first epoch, the other half in the second one, and so on in turn
    /// (Jordan 2024), so that two successive epochs have both views of each picture.
    pub alternating_flip: bool,
    /// Mirror a random half of the training pictures top to bottom.
    pub vertical_flip: bool,
    /// Strengths of the random changes of brightness, contrast, saturation and hue (torchvision's `ColorJitter`). With strength `s`, each
    /// of the first three is multiplied by a factor from `1 - s` (at least 0) to `1 + s`; hue moves by up to `s` of a full turn of
    /// the colour circle. 0: no change.
    pub color_jitter: [f32; 4],
    /// How training pictures are changed at random: `trivial` applies one operation of random strength to each picture (torchvision's
    /// `TrivialAugmentWide()`), `rand` two operations of strength 9 (`RandAugment(2, 9)`), `none` no operation.
    pub augment: Augment,
    /// The probability that a random rectangle of a picture is set to 0 after normalisation (torchvision's `RandomErasing`).
    pub random_erasing: f32,
    /// Mean of each channel, of pixels scaled to 0..1; the dataset's own when absent. If the pictures are
    /// grey and three values are given, their average is used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean: Option<Vec<f32>>,
    /// Standard deviation of each channel, of pixels scaled to 0..1; the dataset's own when absent. If the pictures are
    /// grey and three values are given, their average is used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub std: Option<Vec<f32>>,
    /// Leave out the last batch of an epoch if it is smaller than the others. With `false`, a last batch with fewer
    /// pictures than ranks times `train.accumulate` is filled up with the epoch's first pictures. The result then
    /// depends on the number of ranks, and the log says so.
    pub drop_remainder: bool,
    /// What happens if a file cannot be decoded: `fail` ends the job, `skip` leaves the file out (named in the log, and counted).
    pub broken_files: BrokenFiles,
}

/// How a job divides the training split of its dataset into training and validation pictures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ValidationDivision {
    pub dataset: String,
    pub validation: Validation,
    pub validation_seed: u64,
    /// The fold on which the job is validated, counted from 1, and the number of folds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fold: Option<(u32, u32)>,
}

impl ValidationDivision {
    /// The division that a job asks for.
    pub fn of(spec: &DataSpec) -> Self {
        Self {
            dataset: spec.dataset.clone(),
            validation: spec.validation.clone(),
            validation_seed: spec.validation_seed,
            fold: spec.fold.zip(spec.folds),
        }
    }

    /// Whether some of the training pictures validate the network.
    pub fn holds_out(&self) -> bool {
        self.fold.is_some() || matches!(self.validation, Validation::Fraction(_))
    }
}

words! {
    /// Augmentation policies, as in torchvision.
    #[derive(ToSchema)]
    pub enum Augment: "augmentation" {
        None = "none",
        /// One operation of random strength (Müller, Hutter 2021): `TrivialAugmentWide()`.
        Trivial = "trivial",
        /// Two operations of strength 9 (Cubuk et al. 2019): `RandAugment(2, 9)`.
        Rand = "rand",
    }
}

/// Where validation pictures come from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum Validation {
    /// Fraction of the training split to hold out at random (see `validation_seed`): above 0, below 1.
    Fraction(f64),
    /// A split of the dataset, such as `test`; `none` for no validation.
    Split(String),
}

words! {
    /// What happens if a file cannot be decoded.
    #[derive(ToSchema)]
    pub enum BrokenFiles: "mode" {
        Fail = "fail",
        Skip = "skip",
    }
}

impl Default for DataSpec {
    fn default() -> Self {
        Self {
            dataset: String::new(),
            validation: Validation::Split("test".into()),
            validation_seed: 0,
            folds: None,
            fold: None,
            image_size: None,
            validation_size: None,
            crop_padding: 4,
            reflect_border: false,
            random_resized_crop: false,
            crop_scale: [0.08, 1.0],
            crop_ratio: [0.75, 1.3333],
            resize_size: None,
            horizontal_flip: true,
            alternating_flip: false,
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
    /// Whether pictures validate the job.
    pub fn is_validated(&self) -> bool {
        self.folds.is_some() || self.validation != Validation::Split("none".into())
    }

    /// Height and width of the input in validation and in predictions: `validation_size`, otherwise the last `image_size`.
    /// `None`: the dataset's own size.
    pub fn effective_validation_size(&self) -> Option<u32> {
        self.validation_size.or(self.image_size.as_ref().map(ImageSize::last))
    }
}
