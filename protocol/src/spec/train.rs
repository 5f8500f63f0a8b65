//! `[train]`: optimizer, learning-rate schedule, batch size and arithmetic.

use super::{named::words, recipe::Recipe};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Number of epochs of a job that gives neither `epochs` nor `steps`.
pub(super) const DEFAULT_EPOCHS: u32 = 10;

/// How the network is optimised.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TrainSpec {
    /// Name of a recipe: a group of settings that replace the defaults of keys in several sections. Stored and shown jobs contain
    /// the recipe's settings as if the job file had given them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recipe: Option<Recipe>,
    /// Number of passes over the training data; 10 when neither this key nor `steps` is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epochs: Option<u32>,
    /// Number of optimizer steps, instead of `epochs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Number of pictures of a rank in one micro-batch; 32 when neither this key nor `global_batch_size` is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_size: Option<u32>,
    /// Number of pictures of all ranks in one optimizer step, instead of `batch_size`; a multiple of `accumulate` x `parallel.ranks` /
    /// (`parallel.height` x `parallel.pipeline`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub global_batch_size: Option<u32>,
    /// The optimizer. `momentum` and `nesterov`: PyTorch's SGD. `adamw`: PyTorch's `AdamW`. `lars` and `lamb`: layer-wise adaptive
    /// rates, for large batches. `muon`: the update of each convolution's filters is an orthogonal matrix, and all other parameters
    /// are updated as with `nesterov`.
    pub optimizer: OptimizerKind,
    /// The highest learning rate of the run; `schedule` gives the rate of each step. With a recipe, the default is the recipe's
    /// learning rate, scaled in proportion to the number of pictures in a step.
    pub lr: f32,
    /// `momentum`, `nesterov` and `lars`: the momentum. `muon`: the momentum of all parameters except filters.
    pub momentum: f32,
    /// `muon`: momentum of filters.
    pub filter_momentum: f32,
    /// `muon`: learning rate of batch norms, and of biases except those of linear layers, as a multiple of `lr`.
    pub bias_lr: f32,
    /// `muon`: learning rate of linear layers (weights and biases), as a multiple of `lr`.
    pub head_lr: f32,
    /// Weight decay. It is added to the gradient as an L2 penalty, as in PyTorch's SGD; with `adamw` and `lamb` it is decoupled from the
    /// gradient, as in PyTorch's `AdamW`. With `muon`, filters have no weight decay, and the weight decay of all other parameters is
    /// multiplied by `lr`, not by the rates that `bias_lr` and `head_lr` give.
    pub weight_decay: f32,
    /// False excludes all biases and the parameters of batch norms from weight decay, and with `lamb` also from layer-wise
    /// adaptation (`lars` always excludes them from both).
    pub decay_norm_and_bias: bool,
    /// `adamw` and `lamb`: decay of the running mean of the gradient.
    pub beta1: f64,
    /// `adamw` and `lamb`: decay of the running mean of the gradient's square.
    pub beta2: f64,
    /// `adamw` and `lamb`: added to the denominator, the square root of the running mean of squares.
    pub epsilon: f64,
    /// How the learning rate changes. `constant`: not at all; `step`: multiplied by `gamma` at each of the `milestones`; `cosine`: along
    /// half a cosine down to `final_lr_fraction`; `one_cycle`: up to `lr` and down again.
    pub schedule: ScheduleKind,
    /// Length of the linear warm-up, in epochs: the learning rate rises from 0 to `lr` before `schedule` applies.
    pub warmup_epochs: f32,
    /// `step`: the numbers of epochs after which the learning rate is multiplied by `gamma`.
    pub milestones: Vec<u32>,
    /// `step`: the factor at each milestone.
    pub gamma: f32,
    /// `one_cycle`: the fraction of all steps in which the learning rate rises to `lr`. It rises linearly from 0 and falls
    /// linearly to `final_lr_fraction`. By default PyTorch's `OneCycleLR` follows two half cosines from `lr / 25` instead.
    pub pct_start: f32,
    /// `cosine` and `one_cycle`: the learning rate of the last step, as a fraction of `lr`.
    pub final_lr_fraction: f32,
    /// The fraction of each label that is spread over all classes (PyTorch's `CrossEntropyLoss`).
    pub label_smoothing: f32,
    /// mixup (Zhang et al. 2018), torchvision's `RandomMixUp`: each picture of a step becomes `lambda` times itself
    /// plus `1 - lambda` times the previous picture of the step; targets are mixed in the same way. `lambda` is drawn
    /// for each step from Beta(`mixup`, `mixup`). 0: off.
    pub mixup: f32,
    /// cutmix (Yun et al. 2019), torchvision's `RandomCutMix`: in each picture of a step, a rectangle is replaced by
    /// the same rectangle of the previous picture. The rectangle's area is the fraction `1 - lambda` of the picture's; a part of the
    /// rectangle outside the picture is then cut off. `lambda` is drawn for each step from Beta(`cutmix`, `cutmix`). 0: off. If mixup is
    /// also on, each step applies one of the two, with equal probability.
    pub cutmix: f32,
    /// Decay of an exponential moving average (EMA) of the weights and running statistics: each update computes `average =
    /// ema_decay * average + (1 - ema_decay) * weights`. Until the first update after the warm-up, the average is a copy of the
    /// weights. torchvision's `--model-ema-decay` is another number, because torchvision adjusts it to the batch size before use.
    /// The average is evaluated too (`val_ema_accuracy`) and saved as `ema.safetensors`. 0: off.
    pub ema_decay: f64,
    /// Steps between two updates of the moving average (torchvision's `--model-ema-steps`).
    pub ema_steps: u64,
    /// Number of micro-batches of a rank in a step (gradient accumulation).
    pub accumulate: u32,
    /// Floating-point format of the convolutions. `auto`: on GPUs the fastest format that keeps the accuracy of fp32; on CPU cores fp32.
    /// On CPU cores, `bf16` needs a processor with AVX512-BF16; on other processors the job fails at its start. A server starts a `bf16`
    /// job on CPU cores only if the job has `parallel.device = "cpu"`.
    pub precision: Precision,
    /// With `fp16`: the factor by which the loss is multiplied before the backward pass; `dynamic` adapts it.
    pub loss_scale: LossScale,
    /// Compute deterministically on GPUs: every run gives the same bits, which may cost a few percent of the speed. CPU ranks always give
    /// the same bits.
    pub deterministic: bool,
    /// Seed of the initial weights, the order of pictures and their augmentation.
    pub seed: u64,
}

impl TrainSpec {
    /// Number of passes over the training data, if the job does not give `steps`.
    pub fn epochs(&self) -> u32 {
        self.epochs.unwrap_or(DEFAULT_EPOCHS)
    }

    /// The key of this section that gives the batch size.
    pub fn batch_key(&self) -> &'static str {
        if self.global_batch_size.is_some() { "global_batch_size" } else { "batch_size" }
    }
}

words! {
    /// The update rule of the weights.
    #[derive(ToSchema)]
    pub enum OptimizerKind: "optimizer" {
        /// PyTorch's SGD: v = m v + g + d w; w -= lr v, with momentum m, gradient g and weight decay d.
        Momentum = "momentum",
        /// PyTorch's SGD with `nesterov=True`.
        Nesterov = "nesterov",
        /// Layer-wise adaptive rates (You, Gitman, Ginsburg 2017).
        Lars = "lars",
        /// PyTorch's AdamW (Loshchilov and Hutter 2019): weight decay is decoupled from the gradient.
        AdamW = "adamw",
        /// Adam with layer-wise adaptive rates (You et al. 2019, arXiv 1904.00962, algorithm 2 with bias correction). The
        /// trust ratio is |w| / |update| without bounds, and 1 where either is 0, as in timm's `Lamb(always_adapt=True,
        /// max_grad_norm=None)`. Gradients are not clipped.
        Lamb = "lamb",
        /// Momentum orthogonalised by Newton-Schulz iterations (Jordan et al. 2024), for the filters of convolutions. A convolution's
        /// filters w are a matrix with one row per output channel. v = m v + g; u = g + m v; three quintic iterations bring the singular
        /// values of u near 1; then w = sqrt(rows) w / |w| - lr u. Filters have no weight decay, because each step sets their norm.
        Muon = "muon",
    }
}

words! {
    /// How the learning rate changes over a run.
    #[derive(ToSchema)]
    pub enum ScheduleKind: "schedule" {
        Constant = "constant",
        Step = "step",
        Cosine = "cosine",
        OneCycle = "one_cycle",
    }
}

words! {
    /// Floating-point format of the convolutions.
    #[derive(ToSchema)]
    pub enum Precision: "precision" {
        Auto = "auto",
        Fp32 = "fp32",
        Bf16 = "bf16",
        Fp16 = "fp16",
    }
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
            filter_momentum: 0.6,
            bias_lr: 1.0,
            head_lr: 1.0,
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
