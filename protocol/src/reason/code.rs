//! The codes of reasons.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// The longest code, in bytes.
pub(super) const CODE_BYTES: usize = 64;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// The kind of a reason. New codes may be added; a program that does not know a code shows the words.
        #[derive(Debug, Clone, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum ReasonCode {
            $($(#[$doc])* $name,)*
            /// A code that a newer version wrote.
            Other(String),
        }

        impl ReasonCode {
            /// Every code that this version knows.
            pub const KNOWN: &[ReasonCode] = &[$(ReasonCode::$name,)*];

            /// The code in JSON: snake_case.
            pub fn as_str(&self) -> &str {
                match self {
                    $(ReasonCode::$name => $text,)*
                    ReasonCode::Other(text) => text,
                }
            }
        }

        impl From<&str> for ReasonCode {
            fn from(text: &str) -> Self {
                match text {
                    $($text => ReasonCode::$name,)*
                    other => ReasonCode::Other(other[..other.floor_char_boundary(CODE_BYTES)].to_owned()),
                }
            }
        }
    };
}

codes! {
    // Reported by a rank or its agent.
    /// A rank reported what went wrong.
    RankFailed = "rank_failed",
    /// A rank's process ended with a status of its own.
    RankExited = "rank_exited",
    /// A rank was killed by a signal.
    RankKilled = "rank_killed",
    /// Somebody other than its agent asked a rank to stop.
    RankStopped = "rank_stopped",
    /// A rank ended while no agent watched it.
    RankVanished = "rank_vanished",
    /// A rank did no step for longer than `recovery.stall_timeout_secs`.
    Stalled = "stalled",
    /// The loss or weights are not finite any more.
    Diverged = "diverged",
    /// float16 could not represent the numbers of training, which continues in bfloat16.
    PrecisionFallback = "precision_fallback",
    /// float16 could not represent the numbers of training, and the job requires float16.
    PrecisionTooNarrow = "precision_too_narrow",
    /// A machine or a GPU had no memory left.
    OutOfMemory = "out_of_memory",
    /// The dataset's files cannot be read, or have changed since the job began.
    DatasetUnusable = "dataset_unusable",
    /// No disk space for checkpoints.
    DiskFull = "disk_full",
    /// Too little shared memory for NCCL.
    SharedMemoryTooSmall = "shared_memory_too_small",
    /// The ranks could not be started.
    NotStarted = "not_started",
    /// Ranks do not end, even after SIGKILL.
    Unkillable = "unkillable",
    /// The agent has received nothing from its server for longer than the lease.
    ServerSilent = "server_silent",
    /// Too many records wait for the server on the agent's disk.
    SpoolFull = "spool_full",
    /// An agent was killed before it had started the ranks, while it copied their dataset or made its checks.
    AgentRestarted = "agent_restarted",
    /// The ranks ended, and no rank reported why.
    Unexplained = "unexplained",

    // Reported by the server.
    /// Cancelled on request.
    CancelledByUser = "cancelled_by_user",
    /// The job's ranks are being stopped, because somebody cancelled the job.
    Cancelling = "cancelling",
    /// Paused on request.
    PausedByUser = "paused_by_user",
    /// The job's ranks write a checkpoint and stop, because somebody paused the job.
    Pausing = "pausing",
    /// The job's ranks write a checkpoint and stop, because a job of higher priority takes their slots.
    Preempting = "preempting",
    /// A job of higher priority took the job's slots.
    Preempted = "preempted",
    /// Resumed on request.
    ResumedByUser = "resumed_by_user",
    /// Paused at a rung of its sweep, which compares trials there.
    PausedBySweep = "paused_by_sweep",
    /// Resumed by its sweep: the trial is among the best at its rung.
    ResumedBySweep = "resumed_by_sweep",
    /// Ended by its sweep: other trials are better at the rung.
    EndedBySweep = "ended_by_sweep",
    /// Retried on request.
    RetriedByUser = "retried_by_user",
    /// A fork of another job.
    Forked = "forked",
    /// An agent was silent for longer than its lease.
    AgentLost = "agent_lost",
    /// An agent is online, but without the attempt's ranks.
    AgentWithoutRanks = "agent_without_ranks",
    /// An agent is online, but the order to start the attempt's ranks never reached it.
    StartLost = "start_lost",
    /// An agent was stopped in order.
    AgentStopped = "agent_stopped",
    /// An agent went offline between the claim of its slots and the start.
    AgentLeft = "agent_left",
    /// An agent is online but did not start the attempt: its folder cannot be written, or it is shutting down.
    AgentDeclined = "agent_declined",
    /// The dataset is no longer registered.
    DatasetMissing = "dataset_missing",
    /// The checkpoint to begin from no longer exists.
    CheckpointMissing = "checkpoint_missing",
    /// A path leads to a folder that jobs may not read (`serve --dataset-root`), by a link that is newer than the job.
    PathNotAllowed = "path_not_allowed",
    /// Another version of this program stored the specification.
    UnreadableSpec = "unreadable_spec",
    /// Waits: no agent is online.
    NoAgentOnline = "no_agent_online",
    /// Waits: all online agents take only other jobs.
    NoAgentAccepts = "no_agent_accepts",
    /// Waits: no machine has enough slots of the kind.
    TooFewSlots = "too_few_slots",
    /// Waits: machines have enough slots together, but some cannot reach each other.
    MachinesApart = "machines_apart",
    /// Waits for a checkpoint that another machine uploads.
    WaitingForCheckpoint = "waiting_for_checkpoint",
    /// Waits until slots are free.
    WaitingForSlots = "waiting_for_slots",
    /// The attempt has fewer ranks than the job, because not all ranks found a slot.
    FewerRanks = "fewer_ranks",
    /// The program of a run from elsewhere has sent nothing for a while.
    RunSilent = "run_silent",
    /// Only words, without a code.
    Unspecified = "unspecified",
}

impl fmt::Display for ReasonCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Serialize for ReasonCode {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.as_str())
    }
}

impl<'a> Deserialize<'a> for ReasonCode {
    fn deserialize<D: Deserializer<'a>>(from: D) -> Result<Self, D::Error> {
        Ok(String::deserialize(from)?.as_str().into())
    }
}
