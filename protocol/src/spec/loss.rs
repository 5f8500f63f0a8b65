//! `[loss]`: what classifiers of very many classes need.

use super::{Device, JobSpec, OptimizerKind, named::named};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The loss of classifiers of very many classes. Without it: cross-entropy over all classes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LossSpec {
    /// Partial FC: below 1, a step has this share of the classes, drawn at random on each rank from its own ones, and the classes of the
    /// step's labels. The loss, the accuracy of training and all gradients are those of a classifier of these classes. Weights, biases and
    /// optimizer state of all others stay as they are: they are not decayed either. Evaluations and predictions have all classes. On GPUs
    /// it needs `parallel.model` = `parallel.ranks` and `train.accumulate` = 1.
    pub sample_share: f64,
    /// `softmax`: cross-entropy of the logits. `arcface` and `cosface`, for embeddings of faces or products: logits are `scale` times the cosines
    /// between the features and the weights of each class, whose bias does not count, and in training the label's has a `margin`. On CPU
    /// ranks only.
    pub kind: LossKind,
    /// `arcface` and `cosface`: the factor of the cosines.
    pub scale: f32,
    /// `arcface`: what is added to the angle of the label's class, in radians; 0.5 when absent. `cosface`: what is taken from its cosine; 0.4 when
    /// absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub margin: Option<f32>,
}

/// What logits are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum LossKind {
    Softmax,
    ArcFace,
    CosFace,
}

named!(LossKind: Softmax = "softmax", ArcFace = "arcface", CosFace = "cosface");

impl Default for LossSpec {
    fn default() -> Self {
        Self { sample_share: 1.0, kind: LossKind::Softmax, scale: 64.0, margin: None }
    }
}

impl LossSpec {
    /// The margin, or that of the paper's authors.
    pub fn margin(&self) -> f32 {
        self.margin.unwrap_or(if self.kind == LossKind::ArcFace { 0.5 } else { 0.4 })
    }
}

/// Combinations with `[loss]` that cannot work.
pub(super) fn check_combinations(spec: &JobSpec, mistake: &mut impl FnMut(&str, String)) {
    let kind = spec.loss.kind;
    if kind != LossKind::Softmax {
        let name = kind.name();
        // On a machine with GPUs, "auto" would be those.
        if spec.parallel.device != Device::Cpu {
            let detail = format!(
                "only CPU ranks compute {name}: set parallel.device = \"cpu\", or kind = \"softmax\""
            );
            mistake("/loss/kind", detail);
        }
        let train = &spec.train;
        let (smoothing, mixup, cutmix) = (train.label_smoothing, train.mixup, train.cutmix);
        for (key, value) in [("label_smoothing", smoothing), ("mixup", mixup), ("cutmix", cutmix)] {
            if value > 0.0 {
                let detail = format!(
                    "spreads a label over classes, and the margin of {name} is for one: give 0, or kind = \"softmax\""
                );
                mistake(&format!("/train/{key}"), detail);
            }
        }
    } else if spec.loss.margin.is_some() {
        mistake("/loss/margin", "needs loss.kind = \"arcface\" or \"cosface\"".into());
    }
    if spec.loss.sample_share >= 1.0 {
        return;
    }
    let optimizer = spec.train.optimizer;
    if matches!(optimizer, OptimizerKind::Lars | OptimizerKind::Lamb | OptimizerKind::Muon) {
        let detail = format!(
            "{} needs whole parameters, and a step with loss.sample_share has only some rows of the last layer: give momentum, \
             nesterov or adamw, or leave sample_share out",
            optimizer.name()
        );
        mistake("/train/optimizer", detail);
    }
    if spec.train.label_smoothing > 0.0 {
        let detail = "spreads a label over all classes, and a step with loss.sample_share has only some: give 0, or leave sample_share out";
        mistake("/train/label_smoothing", detail.into());
    }
}
