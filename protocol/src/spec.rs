//! The job specification: TOML for people, the same shape as JSON for programs.
//!
//! Every key has a default but `data.dataset`. Parsing goes through [`check`], which reports all
//! mistakes of a document at once.

mod check;
mod data;
mod device;
mod document;
mod fewer_ranks;
mod image_size;
mod keys;
mod mistake;
mod model;
mod named;
mod nearest;
mod recipe;
mod reference;
mod shard;
mod train;

pub use check::{from_json, from_toml, read, read_leniently};
pub use data::{Augment, BrokenFiles, DataSpec, Division, Validation};
pub use device::{DEVICE_KINDS, DEVICE_NAMES, Device, DeviceKind};
pub use document::{apply_set, key_parts, set_key, toml_document};
pub use image_size::{ImageSize, MAX_SIZES, SizeFrom};
pub use keys::{KEYS, Kind, Section};
pub use mistake::{SpecError, shortened};
pub use model::{Arch, ModelSpec, Stem};
pub use nearest::nearest;
pub use recipe::Recipe;
pub use reference::{KeyReference, RecipeReference, SectionReference, recipes, reference};
pub use shard::{MOST_SHARDS, ShardSpec, Split};
pub use train::{LossScale, OptimizerKind, Precision, ScheduleKind, TrainSpec};

use crate::labels;
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
    /// A waiting job of higher priority may have its slots: it writes a checkpoint, goes back to the queue and continues from there by
    /// itself.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub preemptible: bool,
    /// The project that the job belongs to; `default` when absent. A project is a name and exists while a job has it.
    #[serde(skip_serializing_if = "labels::is_default_project")]
    pub project: String,
    /// Tags of the new job. A server keeps them beside the specification, where they can be changed later: see the job's
    /// `tags`. Without a server they mean nothing.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<String>,
    /// Notes on the new job, kept as its tags are.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub notes: String,
    /// Only its owner and admins see the job.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub private: bool,
    pub model: ModelSpec,
    pub data: DataSpec,
    pub train: TrainSpec,
    pub parallel: ParallelSpec,
    pub checkpoint: CheckpointSpec,
    pub recovery: RecoverySpec,
    pub evaluate: EvaluateSpec,
    pub log: LogSpec,
}

/// How the work is spread over ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ParallelSpec {
    /// Processes that train in lockstep, one a slot; 1 to 1024.
    pub ranks: u32,
    /// What ranks compute on. `auto` is GPUs where the machine has some, else CPU cores.
    pub device: Device,
    /// `data`: every rank has the whole network and pictures of its own. `hybrid`: what `model`, `height`, `pipeline` and `shard` say.
    /// `auto`: the ranks search for the fastest plan whose memory suffices, when they start; `model`, `height` and `shard` pin parts of it.
    pub mode: String,
    /// Ranks that share one copy of the network, a divisor of `ranks` (mode `hybrid`); 1 when absent. Operators that `shard` names are split over
    /// them; for all others every rank has its own pictures, so batch sizes are those of mode `data`.
    #[serde(skip_serializing_if = "is_one")]
    pub model: u32,
    /// Ranks that share the rows of each picture (mode `hybrid`), 1 when absent; `model` x `height` must divide `ranks`. They have the same
    /// pictures, so a step has `ranks / height` micro-batches of pictures.
    #[serde(skip_serializing_if = "is_one")]
    pub height: u32,
    /// Stages of the network (mode `hybrid`), 1 when absent; `model` x `height` x `pipeline` must divide `ranks`. Each rank has the layers of one
    /// stage, and the `train.accumulate` micro-batches of a step pass the stages one after another. On CPU ranks only.
    #[serde(skip_serializing_if = "is_one")]
    pub pipeline: u32,
    /// How operators are split over the ranks of `model`: tables with `match`, the name of a convolution or linear layer (`*` stands for
    /// any text), and `split`, which is `out` (output channels or classes), `in` (input channels) or `groups`. The last one that matches
    /// an operator counts. Without any, the last layer is split over its classes; GPUs split nothing else.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shard: Vec<ShardSpec>,
    /// ZeRO-1: ranks that add up gradients divide the optimizer's state among them, instead of each keeping all of it. Checkpoints
    /// are the same.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub optimizer_sharding: bool,
    /// Batch norm's statistics over the whole global batch: the same result at any number of ranks.
    pub sync_batch_norm: bool,
    /// Average gradients over ranks; false sums them.
    pub gradients_mean: bool,
    /// Send rank 0's weights to all before the first step.
    pub parameter_broadcast: bool,
}

/// When checkpoints are written and which are kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointSpec {
    /// 1 when neither this nor `every_steps` is given; 0 writes only the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_epochs: Option<u32>,
    /// Steps between two checkpoints, instead of `every_epochs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_steps: Option<u64>,
    /// The newest ones kept, never fewer than 2.
    pub keep: u32,
    /// A metric whose best checkpoint is kept in addition to the newest: `val_accuracy`, `val_loss` or `none`.
    pub keep_best: String,
    /// Every rank that has the folder of checkpoints writes some of the tensors, in parts with an index as Hugging Face reads them.
    /// `false` when absent: rank 0 writes all, each kind in one file. Training continues from both alike.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub sharded: bool,
}

/// What happens when a rank or its machine dies.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RecoverySpec {
    /// How often a job continues from its newest checkpoint by itself after a failure that a restart may repair. The loss of a machine
    /// counts only where the attempt had kept no newer checkpoint than the one that it began from.
    pub max_restarts: u32,
    /// A rank with no progress for this long is dead.
    pub stall_timeout_secs: u32,
    /// With how many ranks at least the job continues when it has lost an attempt and there is no place for all of them. Without it, it
    /// waits for all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_ranks: Option<u32>,
    /// How long it waits for a place for all of them first. Without `min_ranks` it means nothing.
    pub wait_seconds: u32,
}

/// When validation runs. A run's last step is always followed by one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EvaluateSpec {
    /// Epochs between two validations; 0: only at the end.
    pub every_epochs: u32,
}

/// What ranks report in addition to metrics, which always hold every step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LogSpec {
    /// Steps between two loss lines of a rank. 0: at most 10 a second and the last of each epoch; 1: every step.
    pub every_steps: u64,
    /// Steps between two looks at how the weights and the gradients of each layer are distributed: histograms of 64 bins. At
    /// least 10; 0: none.
    pub histograms: u64,
}

impl Default for JobSpec {
    fn default() -> Self {
        Self {
            name: "untitled".into(),
            priority: 0,
            preemptible: false,
            project: labels::DEFAULT_PROJECT.into(),
            tags: Vec::new(),
            notes: String::new(),
            private: false,
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

impl Default for ParallelSpec {
    fn default() -> Self {
        Self {
            ranks: 1,
            device: Device::Auto,
            mode: "data".into(),
            model: 1,
            height: 1,
            pipeline: 1,
            shard: Vec::new(),
            optimizer_sharding: false,
            sync_batch_norm: true,
            gradients_mean: true,
            parameter_broadcast: true,
        }
    }
}

impl Default for CheckpointSpec {
    fn default() -> Self {
        Self {
            every_epochs: None,
            every_steps: None,
            keep: 5,
            keep_best: "val_accuracy".into(),
            sharded: false,
        }
    }
}

impl Default for RecoverySpec {
    fn default() -> Self {
        Self { max_restarts: 3, stall_timeout_secs: 120, min_ranks: None, wait_seconds: 60 }
    }
}

impl Default for EvaluateSpec {
    fn default() -> Self {
        Self { every_epochs: 1 }
    }
}

fn is_one(count: &u32) -> bool {
    *count == 1
}

impl JobSpec {
    /// Pictures one rank sees in one micro-batch.
    pub fn micro_batch_size(&self) -> u32 {
        match (self.train.batch_size, self.train.global_batch_size) {
            (Some(b), _) => b,
            (None, Some(g)) => g / (self.parallel.data_ranks().max(1) * self.train.accumulate.max(1)),
            (None, None) => 32,
        }
    }

    /// Pictures all ranks see in one optimizer step.
    pub fn global_batch_size(&self) -> u64 {
        let parts = u64::from(self.train.accumulate) * u64::from(self.parallel.data_ranks());
        u64::from(self.micro_batch_size()) * parts
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
