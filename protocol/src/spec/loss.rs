//! `[loss]`: class weights, margins (ArcFace, CosFace) and sampled classes (Partial FC).

use super::{
    JobSpec, OptimizerKind,
    mistake::{Mistakes, describe_value, shortened},
    named::words,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{collections::BTreeMap, ops::RangeInclusive};
use utoipa::ToSchema;

/// Maximum number of weights in a specification.
pub(super) const MAX_WEIGHTS: usize = 10_000;
/// The smallest and the largest weight of a class.
pub(super) const WEIGHT_RANGE: RangeInclusive<f64> = 1e-6..=1e6;

/// The loss. Without keys: cross-entropy over all classes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LossSpec {
    /// Share of the classes that each step draws at random (Partial FC, An et al. 2022). Each rank draws from its own classes.
    /// Below 1, a step computes logits only for the drawn classes and for the classes of its labels. Its loss, training accuracy and
    /// gradients are those of a classifier of only these classes. Weights, biases and optimizer state of all other classes stay unchanged,
    /// also without weight decay. Evaluations and predictions use all classes. On GPUs a share below 1 needs `parallel.model` =
    /// `parallel.ranks` and `train.accumulate` = 1.
    pub sample_share: f64,
    /// The loss function. `softmax`: cross-entropy of the logits. `arcface` and `cosface`, for embeddings of faces or products: logits are
    /// `scale` times the cosines between the features and the weights of each class, without bias. In training, the logit of the label's
    /// class has a `margin`.
    pub kind: LossKind,
    /// `arcface` and `cosface`: the factor of the cosines.
    pub scale: f32,
    /// `arcface`: angle, in radians, that is added to the angle of the label's class; 0.5 when absent. `cosface`: number that is subtracted
    /// from the cosine of the label's class; 0.4 when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub margin: Option<f32>,
    /// Weights of the classes in the loss of training, as in PyTorch's `CrossEntropyLoss(weight=...)`; all 1 when absent. `balanced`: the
    /// number of training pictures divided by the number of classes and by the class's number of pictures, as in scikit-learn. Otherwise a
    /// list in the order of the classes, or a table by class name, in which missing classes have weight 1. Validation is not weighted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class_weights: Option<ClassWeights>,
}

/// Weights of the classes in the loss.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum ClassWeights {
    /// `balanced`.
    Rule(String),
    /// In the order of the classes.
    InOrder(Vec<f32>),
    /// By class name; all other classes have weight 1.
    ByName(BTreeMap<String, f32>),
}

impl ClassWeights {
    /// The weight of each class in `classes`. `counts` has the number of training pictures of each class.
    ///
    /// # Errors
    /// The weights are for other classes, or the rule `balanced` meets a class without training pictures.
    pub fn of(&self, classes: &[String], counts: &[u64]) -> Result<Vec<f32>, String> {
        match self {
            Self::Rule(_) => {
                if let Some((name, _)) = classes.iter().zip(counts).find(|(_, count)| **count == 0) {
                    return Err(format!(
                        "\"balanced\" divides by the number of pictures of each class, and class {:?} has no training picture: add \
                         some, or give the weights as a table by class name",
                        shortened(name)
                    ));
                }
                let total: u64 = counts.iter().sum();
                let weight = |count: &u64| (total as f64 / (classes.len() as f64 * *count as f64)) as f32;
                Ok(counts.iter().map(weight).collect())
            }
            Self::InOrder(weights) if weights.len() == classes.len() => Ok(weights.clone()),
            Self::InOrder(weights) => Err(format!(
                "has {} weights, and the dataset has {} classes: give one weight for each class",
                weights.len(),
                classes.len()
            )),
            Self::ByName(weights) => match weights.keys().find(|name| !classes.contains(name)) {
                Some(name) => Err(format!("the dataset has no class {:?}", shortened(name))),
                None => Ok(classes.iter().map(|name| weights.get(name).copied().unwrap_or(1.0)).collect()),
            },
        }
    }
}

/// Checks the value of `class_weights`.
pub(super) fn check_weights(value: &Value) -> Result<(), String> {
    let is_weight = |value: &Value| value.as_f64().is_some_and(|weight| WEIGHT_RANGE.contains(&weight));
    let is_valid = match value {
        Value::String(rule) => rule == "balanced",
        Value::Array(list) => (1..=MAX_WEIGHTS).contains(&list.len()) && list.iter().all(is_weight),
        Value::Object(table) => (1..=MAX_WEIGHTS).contains(&table.len()) && table.values().all(is_weight),
        _ => false,
    };
    if is_valid {
        return Ok(());
    }
    Err(format!(
        "must be \"balanced\", a list such as [1.0, 2.5] or a table such as {{cat = 1.0, dog = 2.5}}, with at most {MAX_WEIGHTS} weights \
         from {} to {}; is {}",
        WEIGHT_RANGE.start(),
        WEIGHT_RANGE.end(),
        describe_value(value)
    ))
}

words! {
    /// How logits are computed.
    #[derive(ToSchema)]
    pub enum LossKind: "loss function" {
        Softmax = "softmax",
        ArcFace = "arcface",
        CosFace = "cosface",
    }
}

impl Default for LossSpec {
    fn default() -> Self {
        Self { sample_share: 1.0, kind: LossKind::Softmax, scale: 64.0, margin: None, class_weights: None }
    }
}

impl LossSpec {
    /// The margin; by default the value in the loss's publication.
    pub fn margin(&self) -> f32 {
        self.margin.unwrap_or(if self.kind == LossKind::ArcFace { 0.5 } else { 0.4 })
    }
}

/// Reports combinations of `[loss]` with other keys that cannot work.
pub(super) fn check_combinations(spec: &JobSpec, errors: &mut Mistakes<'_>) {
    let kind = spec.loss.kind;
    if spec.loss.class_weights.is_some() {
        let key = "/loss/class_weights";
        if kind != LossKind::Softmax {
            errors.add(key, format!("has no meaning for {kind}: leave it out, or give kind = \"softmax\""));
        }
        if spec.loss.sample_share < 1.0 {
            errors.add(
                key,
                "needs all classes in each step: leave out loss.class_weights or loss.sample_share",
            );
        }
        if spec.parallel.model > 1 {
            errors.add(
                key,
                "needs all classes on each rank, and parallel.model splits them: leave one of the two out",
            );
        }
    }
    if kind != LossKind::Softmax {
        let train = &spec.train;
        let (smoothing, mixup, cutmix) = (train.label_smoothing, train.mixup, train.cutmix);
        for (key, value) in [("label_smoothing", smoothing), ("mixup", mixup), ("cutmix", cutmix)] {
            if value > 0.0 {
                let detail = format!(
                    "gives a picture several classes, but {kind} adds its margin to exactly one: give 0, or kind = \"softmax\""
                );
                errors.add(&format!("/train/{key}"), detail);
            }
        }
    } else if spec.loss.margin.is_some() {
        errors.add("/loss/margin", "needs loss.kind = \"arcface\" or \"cosface\"");
    }
    if spec.loss.sample_share >= 1.0 {
        return;
    }
    let optimizer = spec.train.optimizer;
    if matches!(optimizer, OptimizerKind::Lars | OptimizerKind::Lamb | OptimizerKind::Muon) {
        let detail = format!(
            "{optimizer} needs whole parameters, and a step with loss.sample_share has only some rows of the last layer: give momentum, \
             nesterov or adamw, or leave sample_share out"
        );
        errors.add("/train/optimizer", detail);
    }
    if spec.train.label_smoothing > 0.0 {
        let detail = "spreads a label over all classes, and a step with loss.sample_share has only some of them: give 0, or leave \
                      sample_share out";
        errors.add("/train/label_smoothing", detail);
    }
}
