//! `[train]`: optimizer, learning-rate schedule, batch size and arithmetic.

use super::named::named;
use super::recipe::Recipe;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The optimisation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TrainSpec {
    /// The recipe whose settings are the defaults of the keys that the job does not give, in all sections. A job that is
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
    /// The rule that weights follow: PyTorch's SGD (`momentum`, `nesterov`) and `AdamW` (`adamw`); `lars` and `lamb` have
    /// layer-wise adaptive rates for large batches.
    pub optimizer: OptimizerKind,
    /// The highest learning rate of the run; `schedule` says how it moves. With a recipe that of the recipe, in proportion to the
    /// pictures of a step.
    pub lr: f32,
    /// For `momentum`, `nesterov` and `lars`.
    pub momentum: f32,
    /// L2 penalty as in PyTorch's optimizers; of `adamw` and `lamb` apart from the gradient.
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
    /// How the learning rate moves: not at all, by `gamma` at `milestones`, along half a cosine down to `final_lr_fraction`, or up to
    /// `lr` and down again.
    pub schedule: ScheduleKind,
    /// Linear warm-up from 0, in epochs, before the schedule proper.
    pub warmup_epochs: f32,
    /// `step`: multiply the learning rate by `gamma` at each of these epochs.
    pub milestones: Vec<u32>,
    /// `step`: the factor at each milestone.
    pub gamma: f32,
    /// `one_cycle`: the fraction of all steps in which the learning rate rises to `lr`. Both ways are straight lines, up from 0 and down to
    /// `final_lr_fraction`: not the two half cosines from `lr / 25` that PyTorch's `OneCycleLR` takes by default with the same `pct_start`.
    pub pct_start: f32,
    /// `cosine` and `one_cycle`: the learning rate of the last step, as a fraction of `lr`.
    pub final_lr_fraction: f32,
    /// The share of a label that is spread over all classes (PyTorch's `CrossEntropyLoss`).
    pub label_smoothing: f32,
    /// mixup (Zhang et al. 2018), torchvision's `RandomMixUp`: each picture of a step is `lambda` times itself plus `1 -
    /// lambda` times the one before it in the step, and so is its target; `lambda` is drawn for each step from
    /// Beta(`mixup`, `mixup`). 0: off.
    pub mixup: f32,
    /// cutmix (Yun et al. 2019), torchvision's `RandomCutMix`: in each picture of a step a rectangle, of the share `1 -
    /// lambda` before it is cut at the borders, is that of the picture before it. 0: off. With both on, each step takes one
    /// of them by a fair coin.
    pub cutmix: f32,
    /// Keep an exponential moving average of the weights and running statistics in addition to them: `average = ema_decay average +
    /// (1 - ema_decay) weights` at each update, a copy of them up to the first one after the warm-up. This is the
    /// effective decay of an update: torchvision's `--model-ema-decay` before it is adjusted to the batch size is another
    /// number. The average is evaluated too (`val_ema_accuracy`) and saved as `ema.safetensors`. 0: off.
    pub ema_decay: f64,
    /// Steps between two updates of that average (torchvision's `--model-ema-steps`).
    pub ema_steps: u64,
    /// Micro-batches a step.
    pub accumulate: u32,
    /// Arithmetic of the convolutions. `auto` is on a GPU the fastest that keeps fp32's accuracy, and fp32 on CPU cores, which have no
    /// other.
    pub precision: Precision,
    /// With `fp16`: what the loss is multiplied by before the backward pass; `dynamic` finds it.
    pub loss_scale: LossScale,
    /// The same bits in every run on GPUs, too, where that costs a few percent of the speed. CPU ranks always give the
    /// same.
    pub deterministic: bool,
    /// Of initial weights, the order of pictures and their augmentation.
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

named!(OptimizerKind:
    Momentum = "momentum",
    Nesterov = "nesterov",
    Lars = "lars",
    AdamW = "adamw",
    Lamb = "lamb",
);

/// How the learning rate moves over a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleKind {
    Constant,
    Step,
    Cosine,
    OneCycle,
}

impl ScheduleKind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Constant => "constant",
            Self::Step => "step",
            Self::Cosine => "cosine",
            Self::OneCycle => "one_cycle",
        }
    }
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
            pct_start: 0.3,
            final_lr_fraction: 0.0,
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
