//! The codes of reasons.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// The longest code that is kept, in bytes.
pub(super) const CODE_BYTES: usize = 64;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// What kind of reason it is. New ones are added; a program that does not know one shows the words.
        #[derive(Debug, Clone, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum ReasonCode {
            $($(#[$doc])* $name,)*
            /// One that a newer version wrote.
            Other(String),
        }

        impl ReasonCode {
            /// Every code that this version knows.
            pub const KNOWN: &[ReasonCode] = &[$(ReasonCode::$name,)*];

            /// As in JSON: snake_case.
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
    // What a rank or its agent says.
    /// A rank said itself what went wrong.
    RankFailed = "rank_failed",
    /// A rank's process ended with a status of its own.
    RankExited = "rank_exited",
    /// A rank was killed by a signal.
    RankKilled = "rank_killed",
    /// A rank was asked to stop, and not by its agent.
    RankStopped = "rank_stopped",
    /// A rank ended while nobody watched it.
    RankVanished = "rank_vanished",
    /// A rank did no step for longer than `recovery.stall_timeout_secs`.
    Stalled = "stalled",
    /// Loss or weights are no numbers any more.
    Diverged = "diverged",
    /// float16 did not hold the numbers of training, which continues in bfloat16.
    PrecisionFallback = "precision_fallback",
    /// float16 did not hold the numbers of training, and the job asks for float16.
    PrecisionTooNarrow = "precision_too_narrow",
    /// A machine or a GPU had no memory left.
    OutOfMemory = "out_of_memory",
    /// The dataset's files cannot be read, or are not those that the job began with.
    DatasetUnusable = "dataset_unusable",
    /// No disk space for checkpoints.
    DiskFull = "disk_full",
    /// Too little shared memory for NCCL.
    SharedMemoryTooSmall = "shared_memory_too_small",
    /// The ranks could not be started.
    NotStarted = "not_started",
    /// Ranks do not end, not even by SIGKILL.
    Unkillable = "unkillable",
    /// The agent has not heard of its server for longer than the lease.
    ServerSilent = "server_silent",
    /// Too many records wait for the server on the agent's disk.
    SpoolFull = "spool_full",
    /// An agent ended, not in order, before it had started the ranks: while it copied their dataset, or made its checks.
    AgentRestarted = "agent_restarted",
    /// The ranks ended and none said why.
    Unexplained = "unexplained",

    // What the server knows.
    /// Cancelled on request.
    CancelledByUser = "cancelled_by_user",
    /// Its ranks are being stopped, as somebody cancelled it.
    Cancelling = "cancelling",
    /// Paused on request.
    PausedByUser = "paused_by_user",
    /// Its ranks are writing a checkpoint and stopping, as somebody paused it.
    Pausing = "pausing",
    /// Its ranks are writing a checkpoint and stopping, as a job of higher priority takes their slots.
    Preempting = "preempting",
    /// A job of higher priority took its slots.
    Preempted = "preempted",
    /// Resumed on request.
    ResumedByUser = "resumed_by_user",
    /// Retried on request.
    RetriedByUser = "retried_by_user",
    /// A fork of another job.
    Forked = "forked",
    /// An agent was silent for longer than its lease.
    AgentLost = "agent_lost",
    /// An agent is there, without the attempt's ranks.
    AgentWithoutRanks = "agent_without_ranks",
    /// An agent is there, and the order to start the attempt's ranks has never reached it.
    StartLost = "start_lost",
    /// An agent was stopped in order.
    AgentStopped = "agent_stopped",
    /// An agent went away between the claim of its slots and the start.
    AgentLeft = "agent_left",
    /// An agent is there and did not start the attempt: its folder cannot be written, or it is shutting down.
    AgentDeclined = "agent_declined",
    /// The dataset is no longer registered.
    DatasetMissing = "dataset_missing",
    /// A checkpoint to begin from is no longer there.
    CheckpointMissing = "checkpoint_missing",
    /// A path leads where jobs may read nothing (`serve --dataset-root`), by a link that was made after the job was submitted.
    PathNotAllowed = "path_not_allowed",
    /// The stored specification is of another version of this program.
    UnreadableSpec = "unreadable_spec",
    /// Waits: no agent is online.
    NoAgentOnline = "no_agent_online",
    /// Waits: the agents that are online take other jobs only.
    NoAgentAccepts = "no_agent_accepts",
    /// Waits: no machine has a slot of the kind, or none has as many.
    TooFewSlots = "too_few_slots",
    /// Waits: machines have enough slots together, but not those that reach each other.
    MachinesApart = "machines_apart",
    /// Waits for a checkpoint that another machine uploads.
    WaitingForCheckpoint = "waiting_for_checkpoint",
    /// Waits until slots are free.
    WaitingForSlots = "waiting_for_slots",
    /// The attempt has fewer ranks than the job, as there was no place for all of them.
    FewerRanks = "fewer_ranks",
    /// Given in words alone.
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
