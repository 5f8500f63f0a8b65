//! The job specification: TOML for people, the same shape as JSON for programs.
//!
//! Every key except `data.dataset` has a default. Parsing goes through [`check`], which reports all mistakes of a
//! document at once.

mod check;
mod data;
mod device;
mod document;
mod fewer_ranks;
mod foreign;
mod image_size;
mod keys;
mod loss;
mod mistake;
mod model;
pub(crate) mod named;
mod nearest;
mod recipe;
mod reference;
mod shard;
mod stop;
mod sweep;
mod train;

pub use check::{from_json, from_toml, read, read_leniently};
pub use data::{Augment, BrokenFiles, DataSpec, Validation, ValidationDivision};
pub use device::{DEVICE_KINDS, Device, DeviceKind};
pub use document::{apply_set, key_parts, set_key, toml_document};
pub use image_size::{ImageSize, MAX_SIZES, SIDES, SizeFrom};
pub use keys::{KEYS, Kind, Section};
pub use loss::{ClassWeights, LossKind, LossSpec};
pub use mistake::{SpecError, shortened};
pub use model::{Arch, KNOWN_WEIGHTS, ModelSpec, Stem};
pub use nearest::nearest;
pub use recipe::Recipe;
pub use reference::{KeyReference, RecipeReference, SectionReference, recipes, reference, sweep_reference};
pub use shard::{MAX_SHARDS, ShardSpec, Split};
pub use stop::StopSpec;
pub use sweep::{
    MAX_TRIALS, Setting, SweepMethod, SweepMetric, SweepSpec, key_mistakes, read_sweep, split_sweep,
    trial_document,
};
pub use train::{LossScale, OptimizerKind, Precision, ScheduleKind, TrainSpec};

use crate::labels;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// A complete training job: network, data, optimisation, ranks, and what follows a failure.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct JobSpec {
    /// Name on the dashboard; several jobs may have the same name. 1 to 200 characters.
    pub name: String,
    /// Jobs of higher priority start first; -1000 to 1000.
    pub priority: i32,
    /// A waiting job of higher priority may take this job's slots. This job then writes a checkpoint, returns to the
    /// queue and continues automatically.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub preemptible: bool,
    /// The project that the job belongs to; `default` when absent. A project exists as long as a job belongs to it.
    #[serde(skip_serializing_if = "labels::is_default_project")]
    pub project: String,
    /// Tags of the new job. A server stores tags apart from the specification, so they can be changed later: see the
    /// job's `tags`. Without a server they are ignored.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<String>,
    /// Notes on the new job, stored like `tags`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub notes: String,
    /// Only the owner and admins see the job.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub private: bool,
    pub model: ModelSpec,
    pub data: DataSpec,
    pub train: TrainSpec,
    pub loss: LossSpec,
    pub parallel: ParallelSpec,
    pub checkpoint: CheckpointSpec,
    pub recovery: RecoverySpec,
    pub evaluate: EvaluateSpec,
    #[serde(skip_serializing_if = "StopSpec::is_off")]
    pub stop: StopSpec,
    pub log: LogSpec,
}

/// How the work is spread over ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ParallelSpec {
    /// Number of processes that train in lockstep, one per slot; 1 to 1024.
    pub ranks: u32,
    /// Device that ranks compute on. `auto`: GPUs if the machine has some, otherwise CPU cores.
    pub device: Device,
    /// How ranks divide the work. `data`: every rank has the whole network and its own pictures. `hybrid`: ranks share the network as
    /// `model`, `height`, `pipeline` and `shard` say. `auto`: the ranks search at their start for the fastest plan that fits into memory;
    /// `model`, `height`, `pipeline` and `shard` fix parts of the plan.
    pub mode: String,
    /// Number of ranks that share one copy of the network (mode `hybrid`), a divisor of `ranks`; 1 when absent. Operators that `shard`
    /// names are split over these ranks. For other operators every rank has its own pictures, so batch sizes mean the same as in
    /// mode `data`.
    #[serde(skip_serializing_if = "is_one")]
    pub model: u32,
    /// Number of ranks that share the rows of each picture (mode `hybrid`), 1 when absent; `model` x `height` must divide `ranks`.
    /// These ranks have the same pictures, so with the same `train.batch_size` a step has fewer pictures than in mode `data`, by the
    /// factor `height`.
    #[serde(skip_serializing_if = "is_one")]
    pub height: u32,
    /// Number of stages of the network (mode `hybrid`), 1 when absent; `model` x `height` x `pipeline` must divide `ranks`.
    /// Each rank has the layers of one stage, and the `train.accumulate` micro-batches of a step pass through the stages one after another.
    /// The stages have the same pictures, so with the same `train.batch_size` a step has fewer pictures, by the factor `pipeline`.
    #[serde(skip_serializing_if = "is_one")]
    pub pipeline: u32,
    /// How operators are split over the ranks of `model`: tables with `match`, the name of a convolution or linear layer (`*` stands for
    /// any text), and `split`, which is `out` (output channels or classes), `in` (input channels) or `groups`. The last table that matches
    /// an operator counts. Without tables, the last layer is split over its classes. On GPUs, each rank needs a multiple
    /// of 8 channels of a split convolution.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shard: Vec<ShardSpec>,
    /// ZeRO-1: ranks whose gradients are summed divide the optimizer's state among themselves, instead of each keeping
    /// all of it. Checkpoints do not depend on this key.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub optimizer_sharding: bool,
    /// Compute batch norm's statistics over the whole global batch: the result is the same at any number of ranks.
    pub sync_batch_norm: bool,
    /// Average gradients over ranks; false sums them.
    pub gradients_mean: bool,
    /// Send rank 0's weights to all ranks before the first step, if the ranks' weights differ.
    pub parameter_broadcast: bool,
}

/// When checkpoints are written and which are kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointSpec {
    /// Epochs between two checkpoints; 1 when neither this key nor `every_steps` is given. 0: only the checkpoint at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_epochs: Option<u32>,
    /// Steps between two checkpoints, instead of `every_epochs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_steps: Option<u64>,
    /// Number of newest checkpoints to keep, at least 2.
    pub keep: u32,
    /// A metric whose best checkpoint is kept in addition to the newest checkpoints: `val_accuracy`, `val_loss` or `none`.
    pub keep_best: String,
    /// Every rank that can reach the checkpoint folder writes some of the tensors, in several files with an index in Hugging
    /// Face's format. `false` when absent: rank 0 writes all tensors, each kind in one file. Training continues from either form.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub sharded: bool,
}

/// What happens when a rank or its machine dies.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RecoverySpec {
    /// Maximum number of times that a job continues automatically, from its newest checkpoint, after a failure that a restart may
    /// repair. The loss of a machine counts only if the attempt wrote no newer checkpoint than the one from which it began.
    pub max_restarts: u32,
    /// Seconds without progress after which a rank counts as dead.
    pub stall_timeout_secs: u32,
    /// The smallest number of ranks with which the job continues if, after a lost attempt, not all of its ranks find a
    /// slot. When absent, the job waits for slots for all ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_ranks: Option<u32>,
    /// Seconds to wait for slots for all ranks before continuing with fewer. Ignored without `min_ranks`.
    pub wait_seconds: u32,
}

/// When validation runs. The last step of a run is always followed by a validation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EvaluateSpec {
    /// Epochs between two validations; 0: only at the end.
    pub every_epochs: u32,
    /// Number of views of each picture whose logits are averaged (test-time augmentation). 2: the picture and its mirror image. 6: these
    /// two views, which together have half of the weight, and both shifted by one pixel up and left, and by one pixel down and right.
    #[serde(skip_serializing_if = "is_one")]
    pub views: u32,
}

/// What ranks report in addition to metrics, which are always recorded for every step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LogSpec {
    /// Steps between two lines with the loss in a rank's log. 0: at most 10 lines a second, and the last step of each epoch; 1: every step.
    pub every_steps: u64,
    /// Steps between two histograms (64 bins) of the weights and of the gradients of each layer. At least 10; 0: no
    /// histograms.
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
            loss: LossSpec::default(),
            parallel: ParallelSpec::default(),
            checkpoint: CheckpointSpec::default(),
            recovery: RecoverySpec::default(),
            evaluate: EvaluateSpec::default(),
            stop: StopSpec::default(),
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
        Self { every_epochs: 1, views: 1 }
    }
}

fn is_one(count: &u32) -> bool {
    *count == 1
}

/// Removes from `own` the values that equal the values of the same keys in `defaults`, and then the empty objects.
fn remove_defaults(own: &mut Map<String, Value>, defaults: &Map<String, Value>) {
    own.retain(|key, value| match (value, defaults.get(key)) {
        (Value::Object(own), Some(Value::Object(defaults))) => {
            remove_defaults(own, defaults);
            !own.is_empty()
        }
        (value, default) => default != Some(&*value),
    });
}

impl JobSpec {
    /// All settings as JSON. The conversion goes through text, so that the float32 0.01 stays 0.01 and does not become
    /// 0.009999999776.
    fn settings(&self) -> Map<String, Value> {
        let text = serde_json::to_string(self).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    }

    /// The job's settings, nested as in a specification, without settings that equal their defaults. Keys that the job's recipe sets are
    /// always kept.
    pub fn non_default(&self) -> Map<String, Value> {
        let (mut own, mut defaults) = (self.settings(), JobSpec::default().settings());
        // A recipe's values replace defaults, so a setting that equals its default may differ from the recipe.
        let recipe = self.train.recipe.map(|recipe| recipe.settings().keys).unwrap_or_default();
        for (section, keys) in recipe.as_object().into_iter().flatten() {
            if let Some(defaults) = defaults.get_mut(section).and_then(Value::as_object_mut) {
                defaults.retain(|key, _| key != "lr" && keys.get(key).is_none());
            }
        }
        remove_defaults(&mut own, &defaults);
        own
    }

    /// Number of pictures of one rank in one micro-batch.
    pub fn micro_batch_size(&self) -> u32 {
        match (self.train.batch_size, self.train.global_batch_size) {
            (Some(b), _) => b,
            (None, Some(g)) => g / (self.parallel.data_ranks().max(1) * self.train.accumulate.max(1)),
            (None, None) => 32,
        }
    }

    /// Number of pictures of all ranks in one optimizer step.
    pub fn global_batch_size(&self) -> u64 {
        let parts = u64::from(self.train.accumulate) * u64::from(self.parallel.data_ranks());
        u64::from(self.micro_batch_size()) * parts
    }

    /// Number of optimizer steps in an epoch of `samples` training pictures.
    pub fn steps_per_epoch(&self, samples: u64) -> u64 {
        let global = self.global_batch_size().max(1);
        if self.data.drop_remainder { samples / global } else { samples.div_ceil(global) }
    }

    /// Number of optimizer steps in the whole run.
    pub fn total_steps(&self, samples: u64) -> u64 {
        self.train.steps.unwrap_or_else(|| self.steps_per_epoch(samples) * u64::from(self.train.epochs()))
    }
}
