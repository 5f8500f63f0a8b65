//! `[train]`: optimizer, learning-rate schedule, batch size and arithmetic.

use super::named::named;
use super::recipe::Recipe;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Epochs of a job that gives neither epochs nor steps.
pub(super) const DEFAULT_EPOCHS: u32 = 10;

/// How the network is optimised.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TrainSpec {
    /// The recipe, whose settings replace defaults in all sections. A job that is stored or shown has these settings
    /// among its keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recipe: Option<Recipe>,
    /// Passes over the training data; 10 when neither this nor `steps` is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epochs: Option<u32>,
    /// Optimizer steps, instead of `epochs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Pictures of a rank in one micro-batch; 32 when neither this key nor `global_batch_size` is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_size: Option<u32>,
    /// Pictures of all ranks in one optimizer step, instead of `batch_size`; a multiple of `ranks` x `accumulate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub global_batch_size: Option<u32>,
    /// The optimizer: PyTorch's SGD (`momentum`, `nesterov`) and `AdamW` (`adamw`); `lars` and `lamb` have layer-wise
    /// adaptive rates for large batches; `muon` makes the update of each convolution's filters an orthogonal matrix, and updates all
    /// other parameters as `nesterov` does.
    pub optimizer: OptimizerKind,
    /// The highest learning rate of the run; `schedule` changes it over the run. A recipe's learning rate is the
    /// default of its jobs, in proportion to the pictures of a step.
    pub lr: f32,
    /// Momentum of `momentum`, `nesterov` and `lars`, and with `muon` of all parameters except filters.
    pub momentum: f32,
    /// `muon`: momentum of filters.
    pub filter_momentum: f32,
    /// `muon`: learning rate of batch norms and biases, as a multiple of `lr`.
    pub bias_lr: f32,
    /// `muon`: learning rate of linear layers, as a multiple of `lr`.
    pub head_lr: f32,
    /// L2 penalty as in PyTorch's optimizers; `adamw` and `lamb` decouple it from the gradient. With `muon` every parameter except
    /// filters decays by `lr` times this number per step, independent of its own learning rate.
    pub weight_decay: f32,
    /// False excludes batch norm's parameters and biases from weight decay, and with `lamb` also from layer-wise
    /// adaptation (`lars` always excludes them from both).
    pub decay_norm_and_bias: bool,
    /// `adamw` and `lamb`: decay of the running mean of the gradient.
    pub beta1: f64,
    /// `adamw` and `lamb`: decay of the running mean of the gradient's square.
    pub beta2: f64,
    /// `adamw` and `lamb`: added to the denominator, the square root of the running mean of squares.
    pub epsilon: f64,
    /// How the learning rate changes. `constant`: not at all; `step`: by `gamma` at `milestones`; `cosine`: along half
    /// a cosine down to `final_lr_fraction`; `one_cycle`: up to `lr` and down again.
    pub schedule: ScheduleKind,
    /// Linear warm-up from 0, in epochs, before `schedule` applies.
    pub warmup_epochs: f32,
    /// `step`: multiply the learning rate by `gamma` at each of these epochs.
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
    /// the same rectangle of the previous picture. Its area is `1 - lambda` of the picture before it is cut at the
    /// borders. 0: off. With mixup also on, each step applies one of the two, with equal probability.
    pub cutmix: f32,
    /// Decay of an exponential moving average (EMA) of the weights and running statistics: each update computes `average =
    /// ema_decay average + (1 - ema_decay) weights`. Until the first update after the warm-up, the average is a copy of the
    /// weights. torchvision's `--model-ema-decay` is another number, because torchvision adjusts it to the batch size before use.
    /// The average is evaluated too (`val_ema_accuracy`) and saved as `ema.safetensors`. 0: off.
    pub ema_decay: f64,
    /// Steps between two updates of the moving average (torchvision's `--model-ema-steps`).
    pub ema_steps: u64,
    /// Micro-batches of a rank in a step (gradient accumulation).
    pub accumulate: u32,
    /// Arithmetic of the convolutions. `auto`: on GPUs the fastest that keeps fp32's accuracy; on CPU cores fp32. CPU cores compute in
    /// `bf16` only on processors with AVX512-BF16, and a server starts such jobs on CPU cores only with `parallel.device = "cpu"`; on other
    /// processors the job fails at its start.
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
    /// Passes over the training data of a job without `steps`.
    pub fn epochs(&self) -> u32 {
        self.epochs.unwrap_or(DEFAULT_EPOCHS)
    }
}

/// The update rule of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// v = m v + g + wd w; w -= lr v (PyTorch's SGD).
    Momentum,
    /// PyTorch's SGD with `nesterov=True`.
    Nesterov,
    /// Layer-wise adaptive rates (You, Gitman, Ginsburg 2017).
    Lars,
    /// PyTorch's AdamW (Loshchilov and Hutter 2019): weight decay is decoupled from the gradient.
    AdamW,
    /// Adam with layer-wise adaptive rates (You et al. 2019, arXiv 1904.00962, algorithm 2 with bias correction). The
    /// trust ratio is |w| / |update| without bounds, and 1 where either is 0, as in timm's `Lamb(always_adapt=True,
    /// max_grad_norm=None)`. Gradients are not clipped.
    Lamb,
    /// Momentum orthogonalised by Newton-Schulz (Jordan et al. 2024), for the filters of convolutions: v = m v + g, u = g + m v;
    /// three quintic iterations bring the singular values of u, as a matrix with a row for each output channel, near 1;
    /// w = sqrt(rows) w / |w| - lr u. Filters have no weight decay, because each step sets their norm.
    Muon,
}

named!(OptimizerKind:
    Momentum = "momentum",
    Nesterov = "nesterov",
    Lars = "lars",
    AdamW = "adamw",
    Lamb = "lamb",
    Muon = "muon",
);

/// How the learning rate changes over a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleKind {
    Constant,
    Step,
    Cosine,
    OneCycle,
}

named!(ScheduleKind: Constant = "constant", Step = "step", Cosine = "cosine", OneCycle = "one_cycle");

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
