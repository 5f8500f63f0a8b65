//! `[loss]`: what classifiers of very many classes need.

use super::{JobSpec, OptimizerKind};
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
}

impl Default for LossSpec {
    fn default() -> Self {
        Self { sample_share: 1.0 }
    }
}

/// Combinations with `[loss]` that cannot work.
pub(super) fn check_combinations(spec: &JobSpec, mistake: &mut impl FnMut(&str, String)) {
    if spec.loss.sample_share >= 1.0 {
        return;
    }
    let optimizer = spec.train.optimizer;
    if matches!(optimizer, OptimizerKind::Lars | OptimizerKind::Lamb) {
        let detail = format!(
            "{} needs the norms of whole parameters, and a step with loss.sample_share has only some rows of the last layer: give momentum, \
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
