//! What a checkpoint holds, in memory.

use crate::precision::SkippedSteps;
use lockstep_engine::{LossScaling, first_not_finite};
use lockstep_host::tensors::NamedTensors;
use lockstep_protocol::{
    agent::CheckpointInfo,
    best::is_better,
    dataset::ValidationSet,
    spec::{Division, OptimizerKind, Precision},
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What training needs besides tensors to continue as if it had never stopped.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// The epoch that the last step was in, from 1.
    pub epoch: u32,
    /// Optimizer steps done.
    pub step: u64,
    pub data_position: DataPosition,
    pub random_state: RandomState,
    pub world_size: u32,
    /// Pictures of a step, over all ranks.
    pub global_batch_size: u64,
    pub steps_per_epoch: u64,
    /// Validation right after this step, if there was one.
    pub val_accuracy: Option<f64>,
    /// Validation right after this step, if there was one.
    pub val_loss: Option<f64>,
    /// The pictures that measure the run; absent without validation.
    #[serde(default)]
    pub validation: Option<ValidationSet>,
    /// How the run, and those that it continues from, divided pictures into training and validation.
    #[serde(default)]
    pub divisions: Vec<Division>,
    /// The best checkpoint so far, this one included.
    pub best: Option<Best>,
    /// Versions of the programs that wrote it.
    pub versions: BTreeMap<String, String>,
    /// What convolutions were computed in.
    #[serde(default)]
    pub precision: Option<Precision>,
    /// The loss scaling of float16.
    #[serde(default)]
    pub loss_scaling: Option<LossScaling>,
    #[serde(default)]
    pub skipped_steps: SkippedSteps,
    pub optimizer: OptimizerNote,
}

/// The optimizer whose state a checkpoint has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OptimizerNote {
    pub kind: OptimizerKind,
    /// As [`lockstep_engine::OptimizerState::updates`].
    pub updates: u64,
}

/// The next picture.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DataPosition {
    /// From 0.
    pub epoch: u32,
    /// Steps of that epoch that are done.
    pub step_in_epoch: u64,
    /// Pictures of that epoch, in its order, that are done (over all ranks).
    pub samples_in_epoch: u64,
}

/// Where randomness comes from: order and augmentation follow from the seed and the position.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RandomState {
    pub seed: u64,
}

/// The best value of `keep_best`'s metric.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Best {
    pub metric: String,
    pub value: f64,
    /// Of the same validation, where it is known.
    #[serde(default)]
    pub loss: Option<f64>,
    pub epoch: u32,
    pub step: u64,
}

impl Best {
    /// A checkpoint with this state as the best so far, if it is better than `best` by `metric`. Of equal values the one with the
    /// lower loss is better, and of equal losses the newer one.
    pub fn improved(best: Option<&Self>, metric: &str, state: &State) -> Option<Self> {
        let measured = match metric {
            "val_accuracy" => state.val_accuracy,
            "val_loss" => state.val_loss,
            _ => None,
        };
        // Where the loss is not finite, the accuracy is that of guessing.
        let loss_is_finite = state.val_loss.is_none_or(f64::is_finite);
        let value = measured.filter(|value| value.is_finite() && loss_is_finite)?;
        let loss = state.val_loss;
        let sign = if metric == "val_loss" { -1.0 } else { 1.0 };
        let is_better = best.is_none_or(|best| is_better(sign * value, loss, (sign * best.value, best.loss)));
        is_better.then(|| Self { metric: metric.into(), value, loss, epoch: state.epoch, step: state.step })
    }
}

/// A checkpoint in memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    pub state: State,
    pub parameters: NamedTensors,
    /// As [`lockstep_engine::OptimizerState::slots`].
    pub optimizer: NamedTensors,
    /// The running average of the parameters, if there is one.
    pub average: Option<NamedTensors>,
    /// Batches that batch norm has seen.
    pub batches: u64,
    /// For `model.safetensors`: `classes`, `mean`, `std`, `spec`, `arch`, `image_size`, ...
    pub metadata: BTreeMap<String, String>,
}

impl State {
    /// What is reported once its checkpoint is written. `best` is the best checkpoint at that time.
    pub fn info(&self, best: Option<&Best>, size_bytes: u64) -> CheckpointInfo {
        let Self { epoch, step, val_accuracy, val_loss, .. } = *self;
        let best = best.is_some_and(|best| best.step == step);
        let validation = self.validation.clone();
        CheckpointInfo { epoch, step, val_accuracy, val_loss, validation, best, size_bytes }
    }
}

impl Snapshot {
    /// The first value that no model can continue from, in words.
    pub fn first_not_finite(&self) -> Option<String> {
        first_not_finite(&self.parameters)
            .or_else(|| {
                self.average
                    .as_ref()
                    .and_then(first_not_finite)
                    .map(|found| format!("of the average {found}"))
            })
            .or_else(|| {
                first_not_finite(&self.optimizer).map(|found| format!("of the optimizer's state {found}"))
            })
    }
}
