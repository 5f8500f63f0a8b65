//! The job specification: TOML for people, the same shape as JSON for programs.
//!
//! Every key has a default but `data.dataset`. Parsing goes through [`check`], which reports all
//! mistakes of a document at once.

mod check;
mod document;
mod image_size;
mod keys;
mod mistake;
mod recipe;
mod renamed;

pub use check::{from_json, from_toml, read_leniently};
pub use document::{apply_set, key_parts, set_key, toml_document};
pub use image_size::{ImageSize, MAX_SIZES, SizeFrom};
pub use keys::{KEYS, Kind, Section, nearest};
pub use mistake::{SpecError, shortened};
pub use recipe::Recipe;
pub use renamed::{is_renamed, upgrade};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A training job, complete: what to train, on what, how, and on how many ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct JobSpec {
    /// Shown on the dashboard; not unique. 1 to 200 characters.
    pub name: String,
    /// Higher starts first; -1000 to 1000.
    pub priority: i32,
    pub model: ModelSpec,
    pub data: DataSpec,
    pub train: TrainSpec,
    pub parallel: ParallelSpec,
    pub checkpoint: CheckpointSpec,
    pub recovery: RecoverySpec,
    pub evaluate: EvaluateSpec,
    pub log: LogSpec,
}

/// The network.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ModelSpec {
    pub arch: Arch,
    pub stem: Stem,
    /// Start each residual block as the identity: gamma of its last batch norm is 0 (Goyal et al. 2017).
    pub zero_init_residual: bool,
    /// Path of a safetensors file with torchvision's names, which are timm's too, or a checkpoint's id. Where it has
    /// another number of classes, its last layer (`fc`) is initialised anew.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pretrained: Option<String>,
}

/// From this image size on, `auto` is the imagenet stem.
const IMAGENET_STEM_FROM: usize = 96;

impl ModelSpec {
    /// The stem for pictures of `image_size` pixels; never [`Stem::Auto`].
    pub fn stem_for(&self, image_size: usize) -> Stem {
        match self.stem {
            Stem::Auto if self.arch.is_cifar_family() || image_size < IMAGENET_STEM_FROM => Stem::Cifar,
            Stem::Auto => Stem::Imagenet,
            given => given,
        }
    }
}

/// Networks known by name. `resnet18` to `wide_resnet101_2` are torchvision's: ResNets (He et al. 2015), ResNeXts (Xie et
/// al. 2017) and wide ResNets (Zagoruyko and Komodakis 2016). `resnet20` to `resnet110` are the CIFAR family of He et al.
/// 2015, section 4.2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Arch {
    ResNet18,
    ResNet34,
    ResNet50,
    ResNet101,
    ResNet152,
    #[serde(rename = "resnext50_32x4d")]
    ResNeXt50_32x4d,
    #[serde(rename = "resnext101_32x8d")]
    ResNeXt101_32x8d,
    #[serde(rename = "resnext101_64x4d")]
    ResNeXt101_64x4d,
    #[serde(rename = "wide_resnet50_2")]
    WideResNet50_2,
    #[serde(rename = "wide_resnet101_2")]
    WideResNet101_2,
    ResNet20,
    ResNet32,
    ResNet44,
    ResNet56,
    ResNet110,
}

impl Arch {
    /// Every architecture with its name in a specification.
    pub const ALL: [(Arch, &'static str); 15] = [
        (Arch::ResNet18, "resnet18"),
        (Arch::ResNet34, "resnet34"),
        (Arch::ResNet50, "resnet50"),
        (Arch::ResNet101, "resnet101"),
        (Arch::ResNet152, "resnet152"),
        (Arch::ResNeXt50_32x4d, "resnext50_32x4d"),
        (Arch::ResNeXt101_32x8d, "resnext101_32x8d"),
        (Arch::ResNeXt101_64x4d, "resnext101_64x4d"),
        (Arch::WideResNet50_2, "wide_resnet50_2"),
        (Arch::WideResNet101_2, "wide_resnet101_2"),
        (Arch::ResNet20, "resnet20"),
        (Arch::ResNet32, "resnet32"),
        (Arch::ResNet44, "resnet44"),
        (Arch::ResNet56, "resnet56"),
        (Arch::ResNet110, "resnet110"),
    ];

    /// Their names alone.
    pub const NAMES: [&'static str; Self::ALL.len()] = {
        let mut names = [""; Self::ALL.len()];
        let mut i = 0;
        while i < names.len() {
            names[i] = Self::ALL[i].1;
            i += 1;
        }
        names
    };

    /// Its name in a specification, e.g. `resnet50`.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(a, _)| *a == self).map_or("resnet18", |(_, n)| n)
    }

    /// Whether it is of the CIFAR family (three stages of 16, 32 and 64 channels).
    pub fn is_cifar_family(self) -> bool {
        matches!(self, Arch::ResNet20 | Arch::ResNet32 | Arch::ResNet44 | Arch::ResNet56 | Arch::ResNet110)
    }
}

/// The first layers of the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Stem {
    /// `cifar` for the CIFAR family and for images under 96 pixels, else `imagenet`.
    Auto,
    /// 7x7 convolution of stride 2, then 3x3 max pooling of stride 2.
    Imagenet,
    /// 3x3 convolution of stride 1, no pooling.
    Cifar,
}

impl Stem {
    /// As in a specification.
    pub fn name(self) -> &'static str {
        match self {
            Stem::Auto => "auto",
            Stem::Imagenet => "imagenet",
            Stem::Cifar => "cifar",
        }
    }
}

/// What to train on and how a picture becomes an input.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DataSpec {
    /// A registered dataset's name, or (from the command line) a path.
    pub dataset: String,
    /// Where validation pictures come from. When absent: `test` (with some recipes `val`), and of a dataset that has no
    /// such split the first of `val`, `validation`, `valid`, `dev`, `test`, `eval` and `evaluation` that it has.
    pub validation: Validation,
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
    pub horizontal_flip: bool,
    pub vertical_flip: bool,
    /// How far brightness, contrast, saturation and hue may change (torchvision's `ColorJitter`).
    pub color_jitter: [f32; 4],
    pub augment: Augment,
    /// The probability that a random rectangle is 0 after normalisation (torchvision's `RandomErasing`).
    pub random_erasing: f32,
    /// Per channel, of pixels scaled to 0..1; the dataset's own when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean: Option<Vec<f32>>,
    /// Per channel, of pixels scaled to 0..1; the dataset's own when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub std: Option<Vec<f32>>,
    /// Leave out the last, smaller batch of an epoch.
    pub drop_remainder: bool,
    /// What a broken file does: end the job, or be left out (named in the log, and counted).
    pub broken_files: BrokenFiles,
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
    /// Held out of the training split at random (seeded): above 0, below 1.
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

/// The optimisation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TrainSpec {
    /// Whose settings stand in for the defaults of the keys that the job does not give, in all sections. A job that is
    /// stored or shown has them among its keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recipe: Option<Recipe>,
    /// Passes over the training data; 10 when neither this nor `steps` is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epochs: Option<u32>,
    /// Optimizer steps, instead of `epochs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Pictures a rank sees in one micro-batch; 32 when neither this nor `global_batch_size` is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_size: Option<u32>,
    /// Pictures all ranks see in one optimizer step, instead of `batch_size`:
    /// a multiple of `ranks` x `accumulate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub global_batch_size: Option<u32>,
    pub optimizer: OptimizerKind,
    pub lr: f32,
    /// Of `momentum`, `nesterov` and `lars`.
    pub momentum: f32,
    pub weight_decay: f32,
    /// False leaves batch norm's parameters and biases out of weight decay, and with `lamb` out of layer-wise
    /// adaptation, too (`lars` always leaves them out of both).
    pub decay_norm_and_bias: bool,
    /// `adamw` and `lamb`: decay of the running mean of the gradient.
    pub beta1: f64,
    /// `adamw` and `lamb`: decay of the running mean of the gradient's square.
    pub beta2: f64,
    /// `adamw` and `lamb`: what is added to the square root that the mean is divided by.
    pub epsilon: f64,
    pub schedule: ScheduleKind,
    /// Linear warm-up from 0, in epochs, before the schedule proper.
    pub warmup_epochs: f32,
    /// `step`: multiply the learning rate by `gamma` at each of these epochs.
    pub milestones: Vec<u32>,
    /// `step`: the factor at each milestone.
    pub gamma: f32,
    /// `one_cycle`: the share of all steps in which the learning rate rises to `lr`.
    pub rise: f32,
    /// `cosine` and `one_cycle`: the learning rate of the last step, as a share of `lr`.
    pub final_lr_share: f32,
    pub label_smoothing: f32,
    /// mixup (Zhang et al. 2018), torchvision's `RandomMixUp`: each picture of a step is `lambda` times itself plus `1 -
    /// lambda` times the one before it in the step, and so is its target; `lambda` is drawn for each step from
    /// Beta(`mixup`, `mixup`). 0: off.
    pub mixup: f32,
    /// cutmix (Yun et al. 2019), torchvision's `RandomCutMix`: in each picture of a step a rectangle, of the share `1 -
    /// lambda` before it is cut at the borders, is that of the picture before it. 0: off. With both on, each step takes one
    /// of them by a fair coin.
    pub cutmix: f32,
    /// Keep an exponential moving average of the weights and running statistics beside them: `average = ema_decay average +
    /// (1 - ema_decay) weights` at each update, a copy of them up to the first one after the warm-up. This is the
    /// effective decay of an update: torchvision's `--model-ema-decay` before it is adjusted to the batch size is another
    /// number. The average is evaluated too (`val_ema_accuracy`) and saved as `ema.safetensors`. 0: off.
    pub ema_decay: f64,
    /// Steps between two updates of that average (torchvision's `--model-ema-steps`).
    pub ema_steps: u64,
    /// Micro-batches a step.
    pub accumulate: u32,
    pub precision: Precision,
    pub loss_scale: LossScale,
    /// The same bits in every run on GPUs, too, where that costs a few percent of the speed. CPU ranks always give the
    /// same.
    pub deterministic: bool,
    pub seed: u64,
}

/// The rule that weights follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// v = m v + g + wd w; w -= lr v (PyTorch's SGD).
    Momentum,
    /// PyTorch's SGD with `nesterov=True`.
    Nesterov,
    /// Layer-wise adaptive rates (You, Gitman, Ginsburg 2017).
    Lars,
    /// PyTorch's AdamW (Loshchilov and Hutter 2019): weight decay is apart from the gradient.
    AdamW,
    /// Adam with layer-wise adaptive rates (You et al. 2019, arXiv 1904.00962, algorithm 2 with bias correction). The trust
    /// ratio is that of timm's `Lamb(always_adapt=True, max_grad_norm=None)`: |w| / |update|, 1 where either is 0, without
    /// bounds; gradients are not clipped.
    Lamb,
}

impl OptimizerKind {
    /// Every optimizer with its name in a specification.
    pub const ALL: [(OptimizerKind, &'static str); 5] = [
        (OptimizerKind::Momentum, "momentum"),
        (OptimizerKind::Nesterov, "nesterov"),
        (OptimizerKind::Lars, "lars"),
        (OptimizerKind::AdamW, "adamw"),
        (OptimizerKind::Lamb, "lamb"),
    ];

    /// Their names alone.
    pub const NAMES: [&'static str; Self::ALL.len()] = {
        let mut names = [""; Self::ALL.len()];
        let mut i = 0;
        while i < names.len() {
            names[i] = Self::ALL[i].1;
            i += 1;
        }
        names
    };

    /// Its name in a specification, e.g. `adamw`.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(kind, _)| *kind == self).map_or("momentum", |(_, name)| name)
    }
}

/// How the learning rate moves over a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleKind {
    Constant,
    Step,
    Cosine,
    OneCycle,
}

/// Arithmetic of the convolutions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    Auto,
    Fp32,
    Bf16,
    Fp16,
}

/// Loss scaling for fp16.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum LossScale {
    Static(f32),
    /// The word `dynamic`.
    Named(String),
}

/// How the work is spread over ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ParallelSpec {
    /// Processes that train in lockstep, one a slot; 1 to 1024.
    pub ranks: u32,
    pub device: Device,
    /// Only `data` today.
    pub mode: String,
    /// Batch norm's statistics over the whole global batch: the same result at any number of ranks.
    pub sync_batch_norm: bool,
    /// Average gradients over ranks; false sums them.
    pub gradients_mean: bool,
    /// Send rank 0's weights to all before the first step.
    pub parameter_broadcast: bool,
}

/// What ranks compute on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    Auto,
    Cuda,
    Cpu,
}

/// When checkpoints are written and which are kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointSpec {
    /// 1 when neither this nor `every_steps` is given; 0 writes only the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_epochs: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_steps: Option<u64>,
    /// The newest ones kept, never fewer than 2.
    pub keep: u32,
    /// A metric whose best checkpoint is kept beside them: `val_accuracy`, `val_loss` or `none`.
    pub keep_best: String,
}

/// What happens when a rank or its machine dies.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RecoverySpec {
    pub max_restarts: u32,
    /// A rank with no progress for this long is dead.
    pub stall_timeout_secs: u32,
}

/// When validation runs. A run's last step is always followed by one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EvaluateSpec {
    /// 0: only at the end.
    pub every_epochs: u32,
}

/// Loss lines in the rank logs; metrics always hold every step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LogSpec {
    /// 0: at most 10 a second and the last of each epoch; 1: every step.
    pub every_steps: u64,
}

impl Default for JobSpec {
    fn default() -> Self {
        Self {
            name: "untitled".into(),
            priority: 0,
            model: ModelSpec::default(),
            data: DataSpec::default(),
            train: TrainSpec::default(),
            parallel: ParallelSpec::default(),
            checkpoint: CheckpointSpec::default(),
            recovery: RecoverySpec::default(),
            evaluate: EvaluateSpec::default(),
            log: LogSpec::default(),
        }
    }
}

impl Default for ModelSpec {
    fn default() -> Self {
        Self { arch: Arch::ResNet50, stem: Stem::Auto, zero_init_residual: false, pretrained: None }
    }
}

impl Default for DataSpec {
    fn default() -> Self {
        Self {
            dataset: String::new(),
            validation: Validation::Split("test".into()),
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

impl Default for TrainSpec {
    fn default() -> Self {
        Self {
            recipe: None,
            epochs: None,
            steps: None,
            batch_size: None,
            global_batch_size: None,
            optimizer: OptimizerKind::Momentum,
            lr: 0.01,
            momentum: 0.9,
            weight_decay: 0.0,
            decay_norm_and_bias: true,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            schedule: ScheduleKind::Constant,
            warmup_epochs: 0.0,
            milestones: Vec::new(),
            gamma: 0.1,
            rise: 0.3,
            final_lr_share: 0.0,
            label_smoothing: 0.0,
            mixup: 0.0,
            cutmix: 0.0,
            ema_decay: 0.0,
            ema_steps: 32,
            accumulate: 1,
            precision: Precision::Auto,
            loss_scale: LossScale::Named("dynamic".into()),
            deterministic: false,
            seed: 0,
        }
    }
}

impl Default for ParallelSpec {
    fn default() -> Self {
        Self {
            ranks: 1,
            device: Device::Auto,
            mode: "data".into(),
            sync_batch_norm: true,
            gradients_mean: true,
            parameter_broadcast: true,
        }
    }
}

impl Default for CheckpointSpec {
    fn default() -> Self {
        Self { every_epochs: None, every_steps: None, keep: 5, keep_best: "val_accuracy".into() }
    }
}

impl Default for RecoverySpec {
    fn default() -> Self {
        Self { max_restarts: 3, stall_timeout_secs: 120 }
    }
}

impl Default for EvaluateSpec {
    fn default() -> Self {
        Self { every_epochs: 1 }
    }
}

impl JobSpec {
    /// Pictures one rank sees in one micro-batch.
    pub fn micro_batch_size(&self) -> u32 {
        match (self.train.batch_size, self.train.global_batch_size) {
            (Some(b), _) => b,
            (None, Some(g)) => g / (self.parallel.ranks.max(1) * self.train.accumulate.max(1)),
            (None, None) => 32,
        }
    }

    /// Pictures all ranks see in one optimizer step.
    pub fn global_batch_size(&self) -> u64 {
        u64::from(self.micro_batch_size()) * u64::from(self.train.accumulate) * u64::from(self.parallel.ranks)
    }

    /// Optimizer steps an epoch over `samples` training pictures takes.
    pub fn steps_per_epoch(&self, samples: u64) -> u64 {
        let global = self.global_batch_size().max(1);
        if self.data.drop_remainder { samples / global } else { samples.div_ceil(global) }
    }

    /// Optimizer steps of the whole run.
    pub fn total_steps(&self, samples: u64) -> u64 {
        self.train
            .steps
            .unwrap_or_else(|| self.steps_per_epoch(samples) * u64::from(self.train.epochs.unwrap_or(10)))
    }
}
