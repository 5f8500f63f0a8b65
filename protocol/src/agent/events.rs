//! The events of an attempt: ranks and their agent record them, and the server stores them.

use crate::{
    dataset::ValidationSet,
    histograms::LayerHistograms,
    metric::MetricColumn,
    network::NetworkDescription,
    numbers::accuracy_of,
    reason::{FailureCode, Reason},
};
use serde::{Deserialize, Serialize};
use std::fmt;
use utoipa::ToSchema;

/// An event of an attempt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum AttemptEvent {
    /// All ranks are connected and have read the dataset; the first step is next.
    Running {
        total_steps: u64,
        steps_per_epoch: u64,
        /// Number of optimizer steps done before this attempt.
        start_step: u64,
        /// Number of pictures in the training split; 0 if unknown.
        #[serde(default)]
        train_samples: u64,
    },
    Metrics {
        rank: u32,
        columns: Vec<MetricColumn>,
    },
    Log {
        rank: u32,
        lines: Vec<LogLine>,
    },
    Rank {
        rank: u32,
        report: RankReport,
    },
    Checkpoint(CheckpointInfo),
    /// A checkpoint's files were deleted, because of `checkpoint.keep`.
    CheckpointRemoved {
        epoch: u32,
        step: u64,
    },
    Evaluation(Evaluation),
    /// Histograms of weights and gradients, every `log.histograms` steps. From rank 0.
    Histograms(LayerHistograms),
    /// The network's layers, once per attempt, and again when the layers' times are known. From rank 0.
    Network(NetworkDescription),
    /// float16 could not represent `what`: after `step`, training continues in bfloat16. From rank 0.
    PrecisionFallback {
        step: u64,
        what: String,
    },
    /// Early stopping: the run ends after `step`, before its last step. `why` follows the words `stopped early: `. From rank 0.
    StoppedEarly {
        step: u64,
        why: String,
    },
    /// A rank cannot continue. This is its last event, before its process ends.
    RankFailed {
        rank: u32,
        /// Number of optimizer steps that the rank had done.
        step: u64,
        /// For a person: what went wrong and, if known, what to do.
        reason: String,
        #[serde(default)]
        code: FailureCode,
        /// Whether another attempt may succeed.
        retriable: bool,
        /// Whether the rank only lost its connection to another rank. The other rank's reason takes precedence.
        secondary: bool,
        /// Neighbours of this rank whose machines do not answer: the machines are off or disconnected. A slow machine still answers.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        unreachable: Vec<u32>,
    },
    /// All ranks of this agent have ended. This is the agent's last event of the attempt; in an attempt on several agents, each agent sends
    /// it.
    Ended(Ending),
    /// An event of a newer version: acknowledged and skipped.
    #[serde(other)]
    Unknown,
}

/// One line of a rank's log (`rank.<r>.log`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LogLine {
    /// Number of the line, from 1, within the attempt and rank.
    pub number: u64,
    pub at: jiff::Timestamp,
    /// Without the newline; at most 4096 bytes.
    pub text: String,
}

/// State of a rank, and how the rank spends its time. A rank sends at most one report per second; times are averages over the steps
/// since its last report.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RankReport {
    /// One of `starting`, `training`, `evaluating`, `checkpointing`, `finished`, `paused`, `stopped` and `failed`.
    pub status: String,
    pub step: u64,
    pub epoch: u32,
    pub step_ms: f64,
    /// The part of `step_ms` spent waiting for other ranks' gradients.
    pub all_reduce_ms: f64,
    /// The part of `step_ms` spent waiting for data.
    pub data_ms: f64,
    /// Pictures of this rank per second of its steps, since the last report. The job's `images_per_second` covers all ranks.
    pub images_per_second: f64,
    pub pid: u32,
    /// The rank's device in words, such as `CPU, 1 thread` or `GPU 0`.
    pub device: String,
    /// The part of `step_ms` spent in exchanges along each axis of the mesh: transfers, and waiting for the other ranks. Only CPU ranks
    /// that share a network or pictures report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub axis_ms: Option<AxisTimes>,
}

/// A time for each axis of the mesh of ranks, in the unit that a field of this type names (`axis_ms`, `axis_secs`). The time of an exchange
/// over several axes counts for the first of the axes data, height and model that has several ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct AxisTimes {
    /// Between stages: activations and their gradients.
    pub pipeline: f64,
    /// Between copies of the network: gradients, statistics of batch norms, and parts of the optimizer's state.
    pub data: f64,
    /// Between ranks that share the rows of pictures.
    pub height: f64,
    /// Between ranks that share a copy of the network.
    pub model: f64,
}

impl AxisTimes {
    /// Adds `factor` times `other`.
    pub fn add(&mut self, other: Self, factor: f64) {
        self.pipeline += factor * other.pipeline;
        self.data += factor * other.data;
        self.height += factor * other.height;
        self.model += factor * other.model;
    }

    pub fn sum(self) -> f64 {
        self.pipeline + self.data + self.height + self.model
    }

    /// The four times, in the order of the fields.
    pub fn values_mut(&mut self) -> [&mut f64; 4] {
        [&mut self.pipeline, &mut self.data, &mut self.height, &mut self.model]
    }
}

/// A complete checkpoint on disk.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CheckpointInfo {
    pub epoch: u32,
    pub step: u64,
    pub val_accuracy: Option<f64>,
    pub val_loss: Option<f64>,
    /// The pictures on which the checkpoint was validated; absent without validation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation: Option<ValidationSet>,
    /// Whether the checkpoint is the best so far, by the metric `checkpoint.keep_best`.
    pub best: bool,
    /// The total size of the checkpoint's files.
    pub size_bytes: u64,
}

impl CheckpointInfo {
    /// The checkpoint's accuracy, with its number of pictures if known.
    pub fn accuracy_in_words(&self) -> Option<String> {
        Some(accuracy_of(self.val_accuracy?, self.validation.as_ref().map(|set| set.pictures)))
    }
}

/// The results of a validation, in which every validation picture is counted once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Evaluation {
    pub epoch: u32,
    pub step: u64,
    pub samples: u64,
    /// Fraction of the samples that were classified correctly, 0 to 1.
    #[serde(deserialize_with = "nan_if_null")]
    pub accuracy: f64,
    #[serde(deserialize_with = "nan_if_null")]
    pub loss: f64,
    pub secs: f64,
}

/// JSON has no NaN: the loss of a diverged model is written as `null`.
fn nan_if_null<'a, D: serde::Deserializer<'a>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}

/// How an attempt ended on one agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "how", rename_all = "snake_case")]
pub enum Ending {
    Succeeded {
        step: u64,
    },
    /// Stopped on the server's order.
    Stopped,
    Failed {
        reason: Reason,
        /// Whether another attempt may succeed (true after a killed process, false for a missing file).
        retriable: bool,
    },
    /// Ranks of this agent only lost connections to other machines' ranks, whose agents know the cause. Only for attempts on several
    /// machines.
    Secondary {
        reason: Reason,
    },
}

impl fmt::Display for Ending {
    /// Formats a line of a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ending::Succeeded { step } => write!(f, "an attempt has succeeded after step {step}"),
            Ending::Stopped => f.write_str("an attempt was stopped on the server's order"),
            Ending::Secondary { reason } => {
                write!(f, "an attempt has ended here: {}; another machine's agent knows why", reason.words())
            }
            Ending::Failed { reason, retriable } => {
                let next = if *retriable {
                    "another attempt may succeed, and the server starts one unless recovery.max_restarts is reached"
                } else {
                    "another attempt would fail in the same way, so none is started"
                };
                write!(f, "an attempt has failed: {}; {next}", reason.words())
            }
        }
    }
}
