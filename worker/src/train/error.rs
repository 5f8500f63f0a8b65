//! Why training ends early, and whether another attempt may succeed.

use crate::checkpoint::CheckpointError;
use lockstep_comm::CommError;
use lockstep_data::DataError;
use lockstep_engine::EngineError;

/// Why training ended early.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The job cannot be run as specified.
    #[error("{0}")]
    Impossible(String),
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The machine has less memory than the job needs. Nothing was allocated.
    #[error("{0}")]
    Memory(String),
    /// Values exceed the range of float32 (which bfloat16 shares). `what` describes the values, without a full stop.
    #[error(
        "training has diverged at step {step} (epoch {epoch}): {what}. Try a lower train.lr (the schedule gave {lr} at this step), or \
         train.warmup_epochs; with the same settings, training diverges again"
    )]
    Diverged { what: String, step: u64, epoch: u32, lr: f32 },
    /// Ranks that should have the same weights have different weights.
    #[error(
        "{what} after step {step}, although all ranks should have the same weights: a device or memory may be faulty, or the machines \
         differ. No checkpoint of these weights is written; the job can continue from its newest checkpoint. If it happens again, leave \
         that rank's device out"
    )]
    ReplicasDiffer { what: String, step: u64 },
    /// The job requires float16, whose range does not suffice.
    #[error(
        "float16 could not hold {what} (up to step {step}). Set train.precision = \"auto\", which continues in bfloat16 \
         then, or \"bf16\""
    )]
    Overflow { what: String, step: u64 },
    /// The operating system reported an error about a thread, memory or a file.
    #[error(transparent)]
    System(#[from] std::io::Error),
}

impl TrainError {
    fn comm(&self) -> Option<&CommError> {
        match self {
            TrainError::Comm(error) | TrainError::Engine(EngineError::Comm(error)) => Some(error),
            _ => None,
        }
    }

    /// Whether the error is only a consequence of the end of another rank.
    pub fn is_secondary(&self) -> bool {
        matches!(
            self.comm(),
            Some(CommError::Disconnected { .. } | CommError::Unreachable { .. } | CommError::Aborted { .. })
        )
    }

    /// What to change if ranks were too slow, for the end of the message.
    pub fn advice(&self) -> &'static str {
        match self.comm() {
            Some(CommError::TimedOut { .. }) => {
                "; if the ranks are only slow, use a smaller network, smaller pictures or fewer ranks, or raise recovery.stall_timeout_secs"
            }
            _ => "",
        }
    }

    /// Whether other ranks are lost. False if this rank itself was asked to end, because the program that ends it may
    /// start another attempt in the same folder.
    pub fn has_lost_ranks(&self) -> bool {
        matches!(self.comm(), Some(CommError::Disconnected { .. } | CommError::Unreachable { .. }))
    }

    /// The ranks whose machines do not respond, if this is the reason.
    pub fn unreachable(&self) -> &[u32] {
        match self.comm() {
            Some(CommError::Unreachable { peers, .. }) => peers,
            _ => &[],
        }
    }

    /// Whether another attempt may succeed.
    pub fn is_retriable(&self) -> bool {
        match self {
            TrainError::System(_)
            | TrainError::Checkpoint(CheckpointError::Io { .. })
            | TrainError::ReplicasDiffer { .. } => true,
            TrainError::Engine(EngineError::Backend(error)) => error.is_retriable(),
            _ => self.comm().is_some_and(|error| !matches!(error, CommError::Mismatch { .. })),
        }
    }
}
