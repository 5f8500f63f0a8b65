//! A job as the server knows it: its id, its states and the moves between them.

use crate::{
    labels::DEFAULT_PROJECT,
    numbers::{accuracy_of, percent},
    reason::{Reason, ReasonCode},
    spec::JobSpec,
};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt, str::FromStr};
use utoipa::ToSchema;

/// Opaque id of a job: 22 lower-case letters and digits at most, sortable by creation time.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
pub struct JobId(String);

impl JobId {
    /// A new id, later in order than those made before it.
    pub fn generate() -> Self {
        // The 128 bits of a version 7 UUID in base 32, most significant first.
        const DIGITS: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
        let bits = uuid::Uuid::now_v7().as_u128();
        let digit = |i: u32| DIGITS[(bits >> (125 - 5 * i) & 31) as usize] as char;
        Self(format!(
            "j{}",
            (0..26)
                .map(|i| if i < 25 { digit(i) } else { DIGITS[(bits & 7) as usize] as char })
                .collect::<String>()
        ))
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

/// Text that is no job id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidJobId;

impl fmt::Display for InvalidJobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a job id is the letter j and 26 lower-case letters and digits")
    }
}

impl std::error::Error for InvalidJobId {}

impl FromStr for JobId {
    type Err = InvalidJobId;

    /// Accepts exactly what [`JobId::generate`] makes, so an id is always safe as a file name.
    fn from_str(text: &str) -> Result<Self, InvalidJobId> {
        let well_formed = text.len() == 27
            && text.starts_with('j')
            && text.bytes().all(|b| b.is_ascii_digit() || b.is_ascii_lowercase());
        if well_formed { Ok(Self(text.into())) } else { Err(InvalidJobId) }
    }
}

/// Where a job stands. See [`JobState::may_become`] for the legal moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum JobState {
    Queued,
    Starting,
    Running,
    Pausing,
    Paused,
    /// An attempt failed; the next one is about to start.
    Restarting,
    /// Its agent has been silent past the lease.
    Lost,
    Succeeded,
    Failed,
    Cancelled,
}

impl JobState {
    /// Every state, in the order of a job's life.
    pub const ALL: [JobState; 10] = [
        JobState::Queued,
        JobState::Starting,
        JobState::Running,
        JobState::Pausing,
        JobState::Paused,
        JobState::Restarting,
        JobState::Lost,
        JobState::Succeeded,
        JobState::Failed,
        JobState::Cancelled,
    ];

    /// The word used in SQL, JSON and on pages.
    pub fn as_str(self) -> &'static str {
        match self {
            JobState::Queued => "queued",
            JobState::Starting => "starting",
            JobState::Running => "running",
            JobState::Pausing => "pausing",
            JobState::Paused => "paused",
            JobState::Restarting => "restarting",
            JobState::Lost => "lost",
            JobState::Succeeded => "succeeded",
            JobState::Failed => "failed",
            JobState::Cancelled => "cancelled",
        }
    }

    /// Over for good: no attempt of it will run again unless somebody retries it.
    pub fn is_final(self) -> bool {
        matches!(self, JobState::Succeeded | JobState::Failed | JobState::Cancelled)
    }

    /// In the queue.
    pub fn is_waiting(self) -> bool {
        matches!(self, JobState::Queued | JobState::Restarting)
    }

    /// Holds slots.
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

impl fmt::Display for JobState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for JobState {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        JobState::ALL.into_iter().find(|s| s.as_str() == text).ok_or_else(|| {
            let names: Vec<_> = JobState::ALL.iter().map(|s| s.as_str()).collect();
            format!("no state is called {text:?}; the states are {}", names.join(", "))
        })
    }
}

/// A job as `GET /jobs/{id}` shows it. Times are RFC 3339 UTC.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Job {
    #[schema(value_type = String)]
    pub id: JobId,
    pub name: String,
    pub state: JobState,
    /// Why it is in this state, in words a person can act on; absent on the happy path.
    pub reason: Option<String>,
    /// The same as a code and facts, for programs; its words are `reason`. Absent when a version that had no codes said it.
    #[serde(default)]
    pub cause: Option<Reason>,
    /// Why it failed, for programs, in a few fields; of a job that has failed alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<Failure>,
    /// The project that it belongs to.
    #[serde(default = "default_project")]
    pub project: String,
    /// What people tagged it with: sorted, each once.
    #[serde(default)]
    pub tags: Vec<String>,
    /// Where a waiting job stands, and what it waits for just now. Absent until the server has looked at it, and in streams.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<Waiting>,
    /// What people wrote on it; may be empty. Absent in lists, unless `fields` names it, and in streams: it may be long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub notes: Option<String>,
    /// What it was forked from. Absent where that is private and this is not, but for those who see both, in `GET /jobs/{id}` and the `hello` of
    /// its stream.
    #[serde(default)]
    pub parent: Option<Parent>,
    /// The person who submitted it, or the name of the token that did; absent where nobody is asked who they are.
    #[serde(default)]
    pub owner: Option<String>,
    /// What of it is stored in a way that this version of the server does not understand. Such a job is shown as far as
    /// it can be read, and not started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unreadable: Option<String>,
    pub spec: JobSpec,
    /// How many pictures a step takes: what `spec` gives, and what follows from it and from defaults. Absent where the
    /// specification cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<Batch>,
    /// Warnings that matter before the job runs, in words. Only the answer to a submission has them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// 0 before the first start.
    pub attempt: u32,
    pub ranks: u32,
    /// Names of the agents that hold its slots, in rank order, without repetition.
    pub agents: Vec<String>,
    /// Optimizer steps done.
    pub step: u64,
    /// The epoch under way, from 1; 0 before the first.
    pub epoch: u32,
    /// Optimizer steps of the whole run; 0 until its ranks have read the dataset.
    pub total_steps: u64,
    pub steps_per_epoch: u64,
    /// Pictures of the newest attempt that has trained, of all ranks, over the time that its steps took: evaluations, checkpoints,
    /// pauses and the steps of earlier attempts or of a fork's parent do not count. It stays when the job is over.
    pub images_per_second: Option<f64>,
    /// Time that the steps left take at that speed; absent unless it trains.
    pub eta_secs: Option<f64>,
    #[schema(value_type = String)]
    pub created_at: jiff::Timestamp,
    #[schema(value_type = Option<String>)]
    pub started_at: Option<jiff::Timestamp>,
    #[schema(value_type = Option<String>)]
    pub finished_at: Option<jiff::Timestamp>,
    /// Seconds in which its attempts had their slots, from the start of each to its end: pauses, waiting in the queue and an attempt
    /// that still runs do not count. Absent before the first has ended.
    #[serde(default)]
    pub ran_secs: Option<f64>,
    /// Highest validation accuracy so far, 0 to 1, of all evaluations: there may be no checkpoint of it.
    pub best: Option<Measured>,
    /// The newest value of every metric.
    pub last: LastValues,
    /// Sequence number of the newest event.
    pub last_seq: u64,
    /// About 40 losses (mean over ranks) spread over the run, for a sparkline.
    pub sparkline: Vec<f32>,
}

fn default_project() -> String {
    DEFAULT_PROJECT.to_owned()
}

/// Why a job failed. `cause` has every fact that belongs to the code, `GET /jobs/{id}/attempts` every attempt's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Failure {
    /// As in `cause`: `rank_killed`, `diverged`, `out_of_memory`, ... `unknown` where a version without codes said it.
    pub code: String,
    /// The rank that it began with, where one is known.
    pub rank: Option<u32>,
    /// Optimizer steps done then, where they are known.
    pub step: Option<u64>,
    /// For a person; the same as `reason`.
    pub words: String,
}

impl Failure {
    /// Of a job in this state, for this reason.
    pub fn of(state: JobState, reason: Option<&str>, cause: Option<&Reason>) -> Option<Self> {
        let words = reason.filter(|_| state == JobState::Failed)?.to_owned();
        let (code, rank, step) = match cause {
            Some(cause) => (cause.code().as_str().to_owned(), cause.facts().rank, cause.facts().step),
            None => ("unknown".to_owned(), None, None),
        };
        Some(Self { code, rank, step, words })
    }
}

impl Job {
    /// Says why it is in its state.
    pub fn set_reason(&mut self, reason: Option<Reason>) {
        self.reason = reason.as_ref().map(|r| r.words().to_owned());
        self.failure = Failure::of(self.state, self.reason.as_deref(), reason.as_ref());
        self.cause = reason;
    }

    /// Whether the job's last attempt ended because something was lost: not on request, and not for a job of higher priority. Only then does
    /// it take fewer ranks.
    pub fn has_lost_attempt(&self) -> bool {
        let left = |why: &Reason| {
            matches!(
                why.code(),
                ReasonCode::AgentStopped
                    | ReasonCode::AgentLeft
                    | ReasonCode::AgentDeclined
                    | ReasonCode::AgentRestarted
            )
        };
        match self.state {
            JobState::Restarting => true,
            JobState::Queued => self.attempt > 0 && self.cause.as_ref().is_some_and(left),
            _ => false,
        }
    }

    /// Ranks of the attempt that runs, which may be fewer than the job's.
    pub fn ranks_now(&self) -> u32 {
        let fewer =
            self.cause.as_ref().filter(|why| self.state.is_active() && *why.code() == ReasonCode::FewerRanks);
        fewer.and_then(|why| why.facts().ranks).unwrap_or(self.ranks)
    }
}

/// The pictures of a step, in the words of a specification's `[train]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Batch {
    /// Pictures that a rank sees in one micro-batch.
    pub batch_size: u32,
    /// Micro-batches of a step.
    pub accumulate: u32,
    /// Pictures that all ranks see in one optimizer step: `batch_size` x `accumulate` x ranks.
    pub global_batch_size: u64,
    /// Pictures of an epoch whose last step may have fewer than the others (`data.drop_remainder = false`), as the newest
    /// attempt that has trained found them; 0 where every step is whole, or none has trained.
    #[serde(default)]
    pub epoch_samples: u64,
}

impl Batch {
    /// What a specification comes to.
    pub fn of(spec: &JobSpec) -> Self {
        Self {
            batch_size: spec.micro_batch_size(),
            accumulate: spec.train.accumulate,
            global_batch_size: spec.global_batch_size(),
            epoch_samples: 0,
        }
    }
}

/// What a fork began from; both may be gone by now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Parent {
    /// The other job's id.
    pub job: String,
    /// The checkpoint's id.
    pub checkpoint: String,
}

/// A value and where it was measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Measured {
    pub value: f64,
    /// Of the same validation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
    pub step: u64,
    pub epoch: u32,
}

/// A place in the queue.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Waiting {
    /// From 1. Jobs before it get slots first, if they fit.
    pub place: u64,
    /// What it waits for now, which may be another thing than its `reason` says: that may tell how its last attempt ended.
    pub reason: Option<Reason>,
}

/// The newest values of a job. Every other metric stands next to these by its name (`grad_norm`, `step_ms`, ...), as a mean over the ranks
/// that report it; in lists those that `metrics` names.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LastValues {
    pub loss: Option<f64>,
    pub accuracy: Option<f64>,
    pub lr: Option<f64>,
    pub val_loss: Option<f64>,
    pub val_accuracy: Option<f64>,
    /// Pictures that `val_accuracy` and `val_loss` are of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub val_pictures: Option<u64>,
    /// By their names.
    #[serde(flatten)]
    pub others: BTreeMap<String, f64>,
}

impl LastValues {
    /// The validation accuracy, and of how many pictures it is where that is known.
    pub fn accuracy_in_words(&self) -> Option<String> {
        let accuracy = self.val_accuracy?;
        Some(self.val_pictures.map_or_else(|| percent(accuracy), |pictures| accuracy_of(accuracy, pictures)))
    }
}
