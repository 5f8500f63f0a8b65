//! A job as the server knows it: its id, its states and their transitions.

use crate::{
    numbers::accuracy_of,
    reason::{Reason, ReasonKind},
    spec::{JobSpec, named::words},
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::{collections::BTreeMap, fmt, str::FromStr};
use utoipa::ToSchema;

/// Opaque id of a job: the letter j and 26 lower-case letters and digits, sortable by creation time.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
pub struct JobId(String);

impl JobId {
    /// A new id, which sorts after all ids made before it.
    pub fn generate() -> Self {
        // A version 7 UUID begins with the time.
        Self::of_bits(uuid::Uuid::now_v7().as_u128())
    }

    /// The id with these bits: 26 digits of base 32 in Crockford's alphabet, the most significant first.
    pub fn of_bits(bits: u128) -> Self {
        const DIGITS: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
        let digit = |i: u32| DIGITS[(bits >> (125 - 5 * i) & 31) as usize] as char;
        Self(format!("j{}", (0..26).map(digit).collect::<String>()))
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for JobId {
    type Err = &'static str;

    /// Accepts the letter j and any 26 lower-case letters and digits, so an id is always safe as a file name.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_well_formed = text.len() == 27
            && text.starts_with('j')
            && text.bytes().all(|b| b.is_ascii_digit() || b.is_ascii_lowercase());
        if !is_well_formed {
            return Err("a job id is the letter j and 26 lower-case letters and digits");
        }
        Ok(Self(text.into()))
    }
}

words! {
    /// The state of a job. [`JobState::may_become`] has the legal transitions.
    #[derive(Hash, ToSchema)]
    pub enum JobState: "state" {
        Queued = "queued",
        Starting = "starting",
        Running = "running",
        Pausing = "pausing",
        Paused = "paused",
        /// An attempt has failed, and the next attempt is about to start.
        Restarting = "restarting",
        /// The job's agent has been silent past the lease.
        Lost = "lost",
        Succeeded = "succeeded",
        Failed = "failed",
        Cancelled = "cancelled",
    }
}

/// The state of a trial that its sweep has ended, for a person. The trial's job is cancelled.
pub(crate) const ENDED_EARLY: &str = "ended early";

impl JobState {
    /// The state as a predicate: `has failed`, `was cancelled`, `is running`.
    pub fn predicate(self) -> String {
        match self {
            JobState::Succeeded | JobState::Failed => format!("has {self}"),
            JobState::Cancelled => format!("was {self}"),
            _ => format!("is {self}"),
        }
    }

    /// Whether the job has ended: no attempt will start unless the job is retried.
    pub fn is_final(self) -> bool {
        matches!(self, JobState::Succeeded | JobState::Failed | JobState::Cancelled)
    }

    /// Whether the job is in the queue.
    pub fn is_waiting(self) -> bool {
        matches!(self, JobState::Queued | JobState::Restarting)
    }

    /// Whether the job has slots.
    pub fn is_active(self) -> bool {
        matches!(self, JobState::Starting | JobState::Running | JobState::Pausing)
    }

    /// Whether a job may move from this state to `next`.
    pub fn may_become(self, next: JobState) -> bool {
        use JobState::*;
        match self {
            Queued => matches!(next, Starting | Cancelled | Failed | Paused),
            Starting => matches!(next, Running | Queued | Restarting | Lost | Failed | Cancelled | Pausing),
            Running => matches!(next, Succeeded | Failed | Cancelled | Pausing | Restarting | Lost | Queued),
            Pausing => matches!(next, Paused | Failed | Cancelled | Lost | Succeeded | Restarting | Queued),
            Paused => matches!(next, Queued | Cancelled),
            Restarting => matches!(next, Starting | Running | Failed | Cancelled | Queued | Paused),
            Lost => matches!(next, Restarting | Failed | Cancelled | Running),
            Succeeded | Failed | Cancelled => matches!(next, Queued),
        }
    }
}

/// A job as `GET /jobs/{id}` shows it. Times are RFC 3339 UTC.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Job {
    #[schema(value_type = String)]
    pub id: JobId,
    pub name: String,
    pub state: JobState,
    /// Why the job is in this state, in words that tell a person what to do; absent if nothing is unusual.
    pub reason: Option<String>,
    /// The same reason as a code and facts, for programs; `reason` is its text.
    pub cause: Option<Reason>,
    /// Why the job failed, in a few fields for programs. Only failed jobs have this field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<Failure>,
    /// The project to which the job belongs.
    pub project: String,
    /// The job's tags, sorted, without duplicates.
    pub tags: Vec<String>,
    /// The place of a waiting job in the queue, and why the job waits. Absent in streams, and until the scheduler has considered the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<Waiting>,
    /// Notes on the job; may be empty and may be long. Absent in streams, and in lists unless `fields` names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub notes: Option<String>,
    /// The parent: the job and the checkpoint from which this job was forked. If the parent is private and this job is not, present only in
    /// `GET /jobs/{id}` and in the `hello` of the job's stream, and only for callers who may see both.
    pub parent: Option<Parent>,
    /// The sweep that started the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trial: Option<TrialOf>,
    /// The person who submitted the job, or the name of the token that was used; absent if the server has no sign-in.
    pub owner: Option<String>,
    /// The stored part of the job that this version of the server does not understand. The job's readable part is
    /// shown, and the job is not started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unreadable: Option<String>,
    /// Fields of a run from elsewhere (`POST /runs`), which is a job that another program trains. The job's
    /// `spec` has only defaults.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub external: Option<External>,
    pub spec: JobSpec,
    /// The number of pictures in a step, from `spec` and from defaults. Absent if the specification cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<Batch>,
    /// Warnings that matter before the job runs, in words. Only in the answer to a submission.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// Number of the newest attempt; 0 before the first start.
    pub attempt: u32,
    pub ranks: u32,
    /// Names of the agents that have the job's slots, in rank order, without repetition.
    pub agents: Vec<String>,
    /// Number of optimizer steps done.
    pub step: u64,
    /// The epoch in progress, from 1; 0 before the first epoch. For a run from elsewhere, the newest value of its metric `epoch`, rounded
    /// down; 0 if there is none.
    pub epoch: u32,
    /// Number of optimizer steps in the whole run; 0 until the ranks have read the dataset.
    pub total_steps: u64,
    pub steps_per_epoch: u64,
    /// Pictures per second of the newest attempt that has trained: pictures of all ranks divided by the time of its steps.
    /// Evaluations, checkpoints, pauses, earlier attempts and a fork's parent do not count. Kept when the job is over.
    pub images_per_second: Option<f64>,
    /// Seconds that the remaining steps take at the speed of the newest one to two minutes of training; absent unless the job trains.
    pub eta_secs: Option<f64>,
    pub created_at: jiff::Timestamp,
    pub started_at: Option<jiff::Timestamp>,
    pub finished_at: Option<jiff::Timestamp>,
    /// Seconds in which attempts had their slots, from the start of each attempt to its end. Pauses, waiting in the
    /// queue and a running attempt do not count. An attempt that ended while the server was off counts until the server
    /// learns of its end. Absent before the first attempt has ended.
    pub ran_secs: Option<f64>,
    /// Highest validation accuracy of all evaluations so far, 0 to 1. There may be no checkpoint with this accuracy. For a run from
    /// elsewhere, the highest value of its metric `val_accuracy` that is in 0 to 1.
    pub best: Option<Measured>,
    /// A few sentences about the results, for a person; absent if nothing can be said. For a job that succeeded and was validated: why the
    /// validation accuracy is low or uncertain, and what to change, or that training and validation accuracy agree. For a running job:
    /// that the training loss has exploded (from the first validation on), and whether the validation accuracy improves (from the second
    /// on). For a job whose training diverged: the learning rate to try. Begins with `trained_validation`, if the job has it, unless the
    /// training loss has exploded or the training has diverged. Only in `GET /jobs/{id}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diagnosis: Option<String>,
    /// If validation pictures were training pictures of the run that the weights are from, a sentence that says so and begins with their
    /// number. Only in `GET /jobs` and `GET /jobs/{id}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trained_validation: Option<String>,
    /// The newest value of every metric.
    pub last: LastValues,
    /// Sequence number of the newest event.
    pub last_seq: u64,
    /// About 40 losses (mean over ranks) spread over the run, for a sparkline.
    pub sparkline: Vec<f32>,
}

/// Data that a program reports about a run that it trains itself.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct External {
    /// The id that the program chose, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// The run's settings.
    #[schema(value_type = Object)]
    pub config: Map<String, Value>,
    /// The run's results.
    #[schema(value_type = Object)]
    pub summary: Map<String, Value>,
    /// Tags with values, as clients of MLflow set them.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub values: BTreeMap<String, String>,
    /// Whether `lockstep import` has created the run. Webhooks get no messages about it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub imported: bool,
}

/// A message of a program about its run, for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Alert {
    pub title: String,
    /// The message; may be empty.
    #[serde(default)]
    pub text: String,
    #[serde(default)]
    pub level: AlertLevel,
}

/// How urgent an alert is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "UPPERCASE")]
pub enum AlertLevel {
    #[default]
    Info,
    Warn,
    Error,
}

/// A file that a program has uploaded to its run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RunFile {
    /// Path within the run, such as `weights/model.safetensors`.
    pub path: String,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Time of the file's last change if the program reported it, otherwise of the upload; in milliseconds since 1970.
    pub modified_ms: i64,
}

/// Why a job failed. `cause` has all facts of the code, and `GET /jobs/{id}/attempts` has every attempt's reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Failure {
    /// The code in `cause`: `rank_killed`, `diverged`, `out_of_memory`, ... `unknown` without a cause.
    pub code: String,
    /// The rank that failed first, if known.
    pub rank: Option<u32>,
    /// Number of optimizer steps done at the failure, if known.
    pub step: Option<u64>,
    /// The reason for a person, the same as `reason`.
    pub words: String,
}

impl Failure {
    /// The failure of a job in this state, for this reason; `None` unless the job has failed.
    pub fn of(state: JobState, reason: Option<&str>, cause: Option<&Reason>) -> Option<Self> {
        let words = reason.filter(|_| state == JobState::Failed)?.to_owned();
        let code = cause.map_or("unknown".to_owned(), Reason::code);
        let (rank, step) = cause.map_or((None, None), Reason::rank_and_step);
        Some(Self { code, rank, step, words })
    }
}

impl Job {
    /// Sets the reason for the job's state.
    pub fn set_reason(&mut self, reason: Option<Reason>) {
        self.reason = reason.as_ref().map(|r| r.words().to_owned());
        self.failure = Failure::of(self.state, self.reason.as_deref(), reason.as_ref());
        self.cause = reason;
    }

    /// Whether the job is a trial that its sweep, not a person, has paused at a rung for a comparison.
    pub fn waits_for_sweep(&self) -> bool {
        let is_pause_by_sweep = |why: &Reason| matches!(why.kind(), ReasonKind::PausedBySweep { .. });
        self.state == JobState::Paused && self.cause.as_ref().is_some_and(is_pause_by_sweep)
    }

    /// Whether the job is a trial that its sweep has ended, because other trials are better at a rung.
    pub fn ended_early(&self) -> bool {
        let is_end_by_sweep = |why: &Reason| matches!(why.kind(), ReasonKind::EndedBySweep);
        self.state == JobState::Cancelled && self.cause.as_ref().is_some_and(is_end_by_sweep)
    }

    /// The job's state for a person: `ended early` for a trial that its sweep has ended, otherwise the state's name. The same as
    /// `stateWords` in `static/job/states.js`.
    pub fn state_in_words(&self) -> &'static str {
        if self.ended_early() { ENDED_EARLY } else { self.state.as_str() }
    }

    /// Whether the next attempt may use fewer ranks: the last attempt failed, or its agent left. False if the attempt was
    /// stopped on request or preempted.
    pub fn may_use_fewer_ranks(&self) -> bool {
        let has_left = |why: &Reason| {
            matches!(
                why.kind(),
                ReasonKind::AgentStopped { .. }
                    | ReasonKind::AgentLeft { .. }
                    | ReasonKind::AgentDeclined { .. }
                    | ReasonKind::AgentRestarted { .. }
            )
        };
        match self.state {
            JobState::Restarting => true,
            JobState::Queued => self.attempt > 0 && self.cause.as_ref().is_some_and(has_left),
            _ => false,
        }
    }

    /// Number of ranks of the running attempt, which may have fewer ranks than the job; the job's number if no attempt runs.
    pub fn rank_count_now(&self) -> u32 {
        match self.cause.as_ref().map(Reason::kind) {
            Some(ReasonKind::FewerRanks { ranks, .. }) if self.state.is_active() => *ranks,
            _ => self.ranks,
        }
    }
}

/// The pictures of a step, with the names of a specification's `[train]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Batch {
    /// Number of pictures of a rank in one micro-batch.
    pub batch_size: u32,
    /// Number of micro-batches in a step.
    pub accumulate: u32,
    /// Number of pictures of all ranks in one optimizer step: `batch_size` x `accumulate` x the number of ranks, where ranks that have the
    /// same pictures (`parallel.height`, `parallel.pipeline`) count as one.
    pub global_batch_size: u64,
    /// Only with `data.drop_remainder = false`, which may make the last step of an epoch smaller: number of pictures in an epoch,
    /// reported by the newest attempt that has trained. Otherwise 0.
    #[serde(default)]
    pub epoch_samples: u64,
}

impl Batch {
    /// The batch that a specification describes.
    pub fn of(spec: &JobSpec) -> Self {
        Self {
            batch_size: spec.micro_batch_size(),
            accumulate: spec.train.accumulate,
            global_batch_size: spec.global_batch_size(),
            epoch_samples: 0,
        }
    }
}

/// The job and the checkpoint from which a fork began. Both may have been deleted since.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Parent {
    /// The other job's id.
    pub job: String,
    /// The checkpoint's id.
    pub checkpoint: String,
}

/// A job's place in a sweep.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TrialOf {
    /// The sweep's id.
    pub sweep: String,
    /// The trial's number, from 1.
    pub number: u32,
}

/// A value, and the step and the epoch at which it was measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Measured {
    pub value: f64,
    /// Loss of the same validation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
    pub step: u64,
    /// The epoch, from 1; 0 if unknown.
    pub epoch: u32,
}

impl Measured {
    /// When the value was measured: `epoch 3`, or `step 120` if the epoch is unknown. The same as `measuredAt` in
    /// `static/job/checkpoints.js`.
    pub fn epoch_or_step(&self) -> String {
        if self.epoch > 0 { format!("epoch {}", self.epoch) } else { format!("step {}", self.step) }
    }
}

/// A place in the queue.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Waiting {
    /// The job's place in the queue, from 1. Jobs with lower places get slots first, if they fit.
    pub place: u64,
    /// Why the job waits. The job's own `reason` may instead describe the end of its last attempt.
    pub reason: Option<Reason>,
}

/// The newest values of a job. Besides the fields below, every other metric is a field with its own name (`grad_norm`,
/// `step_ms`, ...), averaged over the ranks that report it. `GET /jobs` returns only those other metrics that the query
/// parameter `metrics` names.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LastValues {
    pub loss: Option<f64>,
    pub accuracy: Option<f64>,
    pub lr: Option<f64>,
    pub val_loss: Option<f64>,
    pub val_accuracy: Option<f64>,
    /// Number of pictures on which `val_accuracy` and `val_loss` were measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub val_pictures: Option<u64>,
    /// Other metrics, by name.
    #[serde(flatten)]
    pub others: BTreeMap<String, f64>,
}

impl LastValues {
    /// The values by the names of their metrics.
    pub fn by_name(&self) -> impl Iterator<Item = (&str, f64)> {
        let Self { loss, accuracy, lr, val_loss, val_accuracy, val_pictures: _, others } = self;
        let fields = [
            ("loss", *loss),
            ("accuracy", *accuracy),
            ("lr", *lr),
            ("val_loss", *val_loss),
            ("val_accuracy", *val_accuracy),
        ];
        let fields = fields.into_iter().filter_map(|(name, value)| Some((name, value?)));
        fields.chain(others.iter().map(|(name, value)| (name.as_str(), *value)))
    }

    /// The validation accuracy, with its number of pictures if known.
    pub fn accuracy_in_words(&self) -> Option<String> {
        Some(accuracy_of(self.val_accuracy?, self.val_pictures))
    }
}
