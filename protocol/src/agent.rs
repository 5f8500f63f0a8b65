//! Between server and agent: one websocket an agent, each message a binary frame of MessagePack
//! with named fields.
//!
//! A rank appends what it has to say to a file of numbered records; its agent (any agent that finds
//! the file) reads on from the number that the server has acknowledged. So nothing is lost or told
//! twice whichever of the three dies: the files are the spool.

use crate::{
    dataset::{DatasetInfo, PicturesFingerprint},
    job::JobId,
    look::{EvaluateModel, FitWeights, ModelEvaluation, NamedPicture, Pick, Prediction, Samples},
    metric::MetricColumn,
    reason::{Reason, ReasonCode},
    spec::JobSpec,
    wire::Part,
};
use serde::{Deserialize, Serialize};
use std::fmt;
use utoipa::ToSchema;

/// Raised when a message changes in a way that older programs cannot read.
pub const PROTOCOL_VERSION: u32 = 3;

/// The oldest version whose agents a server still understands: up to 2, some of a job's keys were called something else.
pub const OLDEST_PROTOCOL_VERSION: u32 = 3;

/// One place a rank can run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Slot {
    pub index: u32,
    /// `cpu` or `cuda`.
    pub device: String,
    /// `4 cores of AMD EPYC`, `NVIDIA H200`.
    pub name: String,
    /// GPU memory; 0 for a CPU slot.
    pub memory_bytes: u64,
    /// Which GPU it is (`GPU-...`); absent for a CPU slot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
}

/// A machine as it introduces itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Machine {
    pub hostname: String,
    pub cpu: String,
    pub cores: u32,
    pub memory_bytes: u64,
    pub disk_free_bytes: u64,
    pub version: String,
}

/// One attempt of a job, as agents and server name it to each other.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AttemptRef {
    pub job: JobId,
    pub attempt: u32,
    /// Fencing token: grows with every attempt of any job; writes with an old one are refused.
    pub token: u64,
}

/// What an agent says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromAgent {
    /// First on every connection.
    Hello {
        protocol: u32,
        /// Made once and kept in the agent's directory, so a restarted agent is the same agent.
        agent_id: String,
        name: String,
        machine: Machine,
        slots: Vec<Slot>,
        /// Attempts whose ranks are alive here.
        attempts: Vec<AttemptRef>,
        /// Serve this job alone.
        only_job: Option<JobId>,
    },
    /// Every `heartbeat_secs` of `Welcome`.
    Heartbeat { attempts: Vec<AttemptRef> },
    /// Records `first..first + events.len()` of one source of an attempt, to be stored before they
    /// are acknowledged. Records below the acknowledged number are ignored by the server.
    Report { attempt: AttemptRef, source: Source, first: u64, events: Vec<AttemptEvent> },
    /// The answer to `Ask`.
    Answer { request: u64, answer: Result<Answer, String> },
    /// An orderly stop: no new work, please.
    Leaving { reason: String },
    /// A part of any of these that is too long to go at once.
    Part(Part),
}

/// Who wrote a file of records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    Rank(u32),
    Agent,
}

/// How many records of a source are stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Acknowledged {
    pub attempt: AttemptRef,
    pub source: Source,
    /// Records `0..records` are stored.
    pub records: u64,
    /// Somebody watches the job live: points are wanted soon rather than many at a time.
    #[serde(default)]
    pub watched: bool,
}

/// What happened in an attempt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum AttemptEvent {
    /// All ranks have met, the dataset is read, the first step is next.
    Running {
        total_steps: u64,
        steps_per_epoch: u64,
        start_step: u64,
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
    /// A checkpoint's files were deleted, as `keep` says.
    CheckpointRemoved {
        epoch: u32,
        step: u64,
    },
    Evaluation(Evaluation),
    /// float16 could not hold `what`: after `step` training goes on in bfloat16. From rank 0.
    PrecisionFallback {
        step: u64,
        what: String,
    },
    /// The last words of a rank that cannot go on, before its process ends.
    RankFailed {
        rank: u32,
        /// Optimizer steps it had done.
        step: u64,
        /// For a person: what went wrong and, where known, what to do.
        reason: String,
        /// What kind of failure it was, where the rank knows.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        code: Option<ReasonCode>,
        /// Whether another attempt may fare better.
        retriable: bool,
        /// It only lost contact to another rank, whose own reason comes first.
        secondary: bool,
    },
    /// Every rank of this agent is gone. The last event of an attempt.
    Ended(Ending),
    /// What a newer version tells: acknowledged, and passed over.
    #[serde(other)]
    Unknown,
}

/// One line of a rank's log (`rank.<r>.log`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LogLine {
    /// From 1, within the attempt and rank.
    pub number: u64,
    #[schema(value_type = String)]
    pub at: jiff::Timestamp,
    /// Without the newline; at most 4096 bytes.
    pub text: String,
}

/// Where a rank is and how its time goes: averages since the last report, at most one a second.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RankReport {
    /// `starting`, `training`, `evaluating`, `checkpointing`, `finished`, `stopped`, `failed`.
    pub status: String,
    pub step: u64,
    pub epoch: u32,
    pub step_ms: f64,
    /// Waiting for other ranks' gradients, of `step_ms`.
    pub all_reduce_ms: f64,
    /// Waiting for data, of `step_ms`.
    pub data_ms: f64,
    pub images_per_second: f64,
    pub pid: u32,
    /// `CPU, 1 thread`, `GPU 0`.
    pub device: String,
}

/// A complete checkpoint on disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CheckpointInfo {
    pub epoch: u32,
    pub step: u64,
    pub val_accuracy: Option<f64>,
    pub val_loss: Option<f64>,
    /// Best by `keep_best` so far.
    pub best: bool,
    /// Of all its files.
    pub size_bytes: u64,
}

/// Validation over the whole split, every sample counted once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Evaluation {
    pub epoch: u32,
    pub step: u64,
    pub samples: u64,
    /// 0 to 1.
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
    /// Stopped because the server said so.
    Stopped,
    Failed {
        reason: Reason,
        /// Whether another attempt may fare better (a killed process may; a missing file will not).
        retriable: bool,
    },
}

impl fmt::Display for Ending {
    /// A line of a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ending::Succeeded { step } => write!(f, "an attempt has succeeded after step {step}"),
            Ending::Stopped => f.write_str("an attempt was stopped as the server said"),
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

/// What the server says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToAgent {
    /// Answers `Hello`.
    Welcome {
        heartbeat_secs: f64,
        /// Ranks whose agent has had no `Welcome` or `HeartbeatAck` for this long are fenced.
        lease_secs: f64,
        /// For the attempts of `Hello`, how far each source's records are stored.
        acknowledged: Vec<Acknowledged>,
        /// Attempts of `Hello` that are no longer theirs to run: end them.
        revoked: Vec<AttemptRef>,
        /// The file that this server keeps locked as long as it runs. An agent that finds it locked is on the same
        /// machine, and can tell a server that is gone from one that it cannot reach.
        #[serde(default)]
        server_lock: Option<String>,
    },
    /// Why the connection is about to be closed for good (wrong version, bad token, name taken).
    Refused {
        reason: String,
    },
    HeartbeatAck,
    /// Stored, on disk.
    Ack(Acknowledged),
    Start(Box<StartAttempt>),
    /// End these ranks: TERM, then KILL. Answered by `Ended(Stopped)`.
    Stop {
        attempt: AttemptRef,
        reason: String,
        /// First let them finish the step they are at and keep a checkpoint of it, for up to two minutes.
        #[serde(default)]
        patient: bool,
    },
    Ask {
        request: u64,
        question: Question,
    },
    /// A part of any of these that is too long to go at once.
    Part(Part),
}

/// Start these ranks of an attempt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StartAttempt {
    pub attempt: AttemptRef,
    /// Complete: every default filled in.
    pub spec: JobSpec,
    /// The dataset's path on this machine.
    pub dataset_path: String,
    pub world_size: u32,
    /// The ranks to start here: global rank and slot index.
    pub ranks: Vec<(u32, u32)>,
    /// Where rank 0 listens. Port 0 (single machine): the agent picks a free one.
    pub master_addr: String,
    pub master_port: u16,
    /// Shared secret of the attempt, hexadecimal.
    pub secret: String,
    /// The job's folder when the server's data directory is on this machine; else the agent's own.
    pub job_dir: Option<String>,
    /// Checkpoint to continue from: its folder's name, `<epoch>-<step>`.
    pub resume: Option<String>,
}

/// What the server, which opens no dataset itself, asks of an agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Question {
    /// Whether these files or folders are there. Answered at once, whatever else is being answered.
    HasFiles {
        paths: Vec<String>,
    },
    InspectDataset {
        path: String,
    },
    /// How far the looking at a dataset is that an `InspectDataset` asked for. Answered at once, whatever else is being
    /// answered.
    InspectProgress {
        path: String,
    },
    /// Which pictures the dataset at `path` holds. Only an agent asks this, of a process of its own.
    Fingerprint {
        path: String,
        /// The job began with it: files in folders that are the same are not looked at one by one.
        #[serde(default)]
        known: bool,
    },
    /// Pictures of the dataset at `path`.
    Samples {
        path: String,
        pick: Pick,
    },
    Evaluate(EvaluateModel),
    /// Whether weights can be begun from. Agents of before do not answer it.
    FitWeights(FitWeights),
    /// `model`: a checkpoint's folder, or a safetensors file.
    Predict {
        model: String,
        pictures: Vec<NamedPicture>,
    },
}

impl Question {
    /// Files and folders that whoever answers needs.
    pub fn paths(&self) -> Vec<String> {
        match self {
            Question::HasFiles { paths } => paths.clone(),
            Question::InspectDataset { path }
            | Question::InspectProgress { path }
            | Question::Fingerprint { path, .. }
            | Question::Samples { path, .. } => vec![path.clone()],
            Question::Evaluate(EvaluateModel { model, dataset, .. }) => vec![model.clone(), dataset.clone()],
            Question::Predict { model, .. } => vec![model.clone()],
            Question::FitWeights(FitWeights { weights, .. }) => vec![weights.clone()],
        }
    }

    /// Whether it may take minutes: such questions have a queue of their own, so that short ones need not wait for them.
    pub fn is_long(&self) -> bool {
        matches!(self, Question::Evaluate(_))
    }
}

/// The answers, in kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Answer {
    /// In the order of the question's paths.
    Files {
        there: Vec<bool>,
    },
    /// What keeps weights from being begun from, in words; absent where nothing does.
    Weights {
        mistake: Option<String>,
    },
    Dataset {
        path: String,
        info: DatasetInfo,
    },
    /// Pictures (or shards) looked at and in all; none when no such looking goes on.
    Progress {
        looked: Option<(u64, u64)>,
    },
    /// None of a format whose files are few: those are compared themselves.
    Fingerprint {
        found: Option<PicturesFingerprint>,
    },
    Samples(Samples),
    Evaluation(Box<ModelEvaluation>),
    Predictions {
        predictions: Vec<Prediction>,
    },
}
