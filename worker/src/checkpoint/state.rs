//! The content of a checkpoint, in memory.

use crate::precision::SkippedSteps;
use lockstep_engine::{LossScaling, first_invalid};
use lockstep_host::{files, tensors::NamedTensors};
use lockstep_protocol::{
    agent::CheckpointInfo,
    best::is_better,
    checkpoint_files::STATE,
    dataset::ValidationSet,
    limits::STATE_FILE_BYTES,
    spec::{OptimizerKind, Precision, ValidationDivision},
};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, path::Path};

/// Everything besides tensors that training needs in order to continue as if it had never stopped.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// The epoch of the last step, from 1.
    pub epoch: u32,
    /// Number of optimizer steps done.
    pub step: u64,
    pub data_position: DataPosition,
    pub random_state: RandomState,
    pub world_size: u32,
    /// Number of pictures in a step, over all ranks.
    pub global_batch_size: u64,
    pub steps_per_epoch: u64,
    /// The validation accuracy after this step, if it was measured.
    pub val_accuracy: Option<f64>,
    /// The validation loss after this step, if it was measured.
    pub val_loss: Option<f64>,
    /// The validation pictures of the run. Absent if the run is not validated.
    pub validation: Option<ValidationSet>,
    /// How this run, and the runs from which it continues, divided pictures into training and validation.
    pub divisions: Vec<ValidationDivision>,
    /// The best checkpoint so far, including this checkpoint.
    pub best: Option<Best>,
    /// The state of early stopping. Absent before the first validation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop: Option<StopProgress>,
    /// Versions of the programs that wrote the checkpoint.
    pub versions: BTreeMap<String, String>,
    /// The floating-point format of convolutions.
    pub precision: Precision,
    /// The state of loss scaling. Absent unless the run uses float16.
    pub loss_scaling: Option<LossScaling>,
    pub skipped_steps: SkippedSteps,
    pub optimizer: OptimizerNote,
}

/// The optimizer to which the checkpoint's slots belong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OptimizerNote {
    pub kind: OptimizerKind,
    /// As [`lockstep_engine::OptimizerState::updates`].
    pub updates: u64,
}

/// The position of the next picture in the training data.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DataPosition {
    /// The epoch, from 0.
    pub epoch: u32,
    /// Number of completed steps in this epoch.
    pub step_in_epoch: u64,
    /// Number of processed pictures of this epoch, over all ranks, in the order of the epoch.
    pub samples_in_epoch: u64,
}

/// The source of randomness: order and augmentation follow from the seed and the position.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RandomState {
    pub seed: u64,
}

/// The best value of the metric `keep_best`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Best {
    pub metric: String,
    pub value: f64,
    /// The loss of the same validation, if known.
    pub loss: Option<f64>,
    pub epoch: u32,
    pub step: u64,
}

/// The progress of early stopping.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StopProgress {
    /// The metric of `[stop]`.
    pub metric: String,
    /// The newest value that was an improvement by `min_delta`, and the epoch of its validation. [`Best`] has the best checkpoint.
    pub value: f64,
    pub epoch: u32,
    /// Number of validations since `value` was measured.
    pub without: u32,
}

impl Best {
    /// A record of this state's checkpoint. `None` unless it is better than `best` by `metric`. If values are equal, a lower loss is
    /// better. If losses are equal too, the newer checkpoint is better.
    pub fn if_better(best: Option<&Self>, metric: &str, state: &State) -> Option<Self> {
        let measured = match metric {
            "val_accuracy" => state.val_accuracy,
            "val_loss" => state.val_loss,
            _ => None,
        };
        // If the loss is not finite, the accuracy is meaningless.
        let is_loss_finite = state.val_loss.is_none_or(f64::is_finite);
        let value = measured.filter(|value| value.is_finite() && is_loss_finite)?;
        let loss = state.val_loss;
        let sign = if metric == "val_loss" { -1.0 } else { 1.0 };
        let is_best = best.is_none_or(|best| is_better(sign * value, loss, (sign * best.value, best.loss)));
        is_best.then(|| Self { metric: metric.into(), value, loss, epoch: state.epoch, step: state.step })
    }
}

/// A checkpoint in memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    pub state: State,
    pub parameters: NamedTensors,
    /// As [`lockstep_engine::OptimizerState::slots`].
    pub optimizer: NamedTensors,
    /// The moving average of the parameters, if there is one.
    pub average: Option<NamedTensors>,
    /// Number of batches that batch norm has processed.
    pub batches: u64,
    /// The metadata of `model.safetensors`: `classes`, `mean`, `std`, `spec`, `arch`, `image_size`, ...
    pub metadata: BTreeMap<String, String>,
}

impl State {
    /// The report after the checkpoint has been written. `best` is the best checkpoint at that time.
    pub fn info(&self, best: Option<&Best>, size_bytes: u64) -> CheckpointInfo {
        let Self { epoch, step, val_accuracy, val_loss, .. } = *self;
        let best = best.is_some_and(|best| best.step == step);
        let validation = self.validation.clone();
        CheckpointInfo { epoch, step, val_accuracy, val_loss, validation, best, size_bytes }
    }
}

impl Snapshot {
    /// A description of the first value that is not finite. Training cannot continue from such a value.
    pub fn first_invalid(&self) -> Option<String> {
        first_invalid(&self.parameters)
            .or_else(|| {
                self.average.as_ref().and_then(first_invalid).map(|found| format!("of the average {found}"))
            })
            .or_else(|| {
                first_invalid(&self.optimizer).map(|found| format!("of the optimizer's state {found}"))
            })
    }
}

/// The state of the checkpoint in `folder`, without verification of checksums. `None` if it cannot be read.
pub fn unverified_state(folder: &Path) -> Option<State> {
    serde_json::from_slice(&files::read(&folder.join(STATE), STATE_FILE_BYTES).ok()?).ok()
}
