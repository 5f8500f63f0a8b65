//! Communication among the ranks of one attempt.

pub(crate) mod handshake;
pub mod nccl;
pub mod peers;
pub mod rendezvous;
pub mod ring;
pub mod shared;
pub mod watchdog;

use shared::SharedMemory;
use std::{sync::Arc, time::Duration};

/// Why a collective did not complete. The group is unusable afterwards.
#[derive(Debug, thiserror::Error)]
pub enum CommError {
    /// The time-out of the group passed.
    #[error("{operation}: no answer from rank {peer} for {secs:.0} s")]
    TimedOut { operation: &'static str, peer: u32, secs: f64 },
    /// A neighbour closed its connection or died.
    #[error("{operation}: lost the connection to rank {peer}: {detail}")]
    Disconnected { operation: &'static str, peer: u32, detail: String },
    /// The group was told to stop.
    #[error("{operation}: aborted: {reason}")]
    Aborted { operation: &'static str, reason: String },
    /// The ranks disagree about what they are doing.
    #[error("{operation}: rank {peer} {detail}")]
    Mismatch { operation: &'static str, peer: u32, detail: String },
    /// A device or its library failed.
    #[error("{operation}: {detail}")]
    Failed { operation: &'static str, detail: String },
}

impl CommError {
    /// The collective that did not complete.
    pub fn operation(&self) -> &'static str {
        match self {
            CommError::TimedOut { operation, .. }
            | CommError::Disconnected { operation, .. }
            | CommError::Aborted { operation, .. }
            | CommError::Mismatch { operation, .. }
            | CommError::Failed { operation, .. } => operation,
        }
    }
}

/// How values of several ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// Added in a fixed order, so the bits are the same on every rank and in every run.
    Sum,
    /// The sum divided by the world size.
    Mean,
}

/// Memory that all ranks see, or why there is none.
pub type SharedMemoryOrReason = Result<SharedMemory, String>;

/// Collectives among the ranks of a group; every rank calls the same ones in the same order.
///
/// Implementations are a TCP ring, shared memory beside it where all ranks are on one machine, and NCCL on GPUs
/// (whose engine adds its own, stream-ordered calls beside these).
pub trait Communicator: Send + Sync {
    /// This process's rank, from 0.
    fn rank(&self) -> u32;
    /// Ranks in the group.
    fn world_size(&self) -> u32;
    /// Replaces `values` by their reduction over all ranks; bit-identical on every rank.
    fn all_reduce(&self, values: &mut [f32], reduction: Reduction) -> Result<(), CommError>;
    /// As [`Communicator::all_reduce`] with a sum, in double precision: statistics and counts.
    fn all_reduce_f64(&self, values: &mut [f64]) -> Result<(), CommError>;
    /// Replaces `values` by those of rank `root`.
    fn broadcast(&self, values: &mut [f32], root: u32) -> Result<(), CommError>;
    /// The `values` of every rank (equally long), in rank order.
    fn all_gather(&self, values: &[f32]) -> Result<Vec<f32>, CommError>;
    /// Returns when every rank has called it.
    fn barrier(&self) -> Result<(), CommError>;
    /// Ends what is under way here with [`CommError::Aborted`], from any thread.
    fn abort(&self, reason: &str);
    /// Whether the ranks that this one is connected to are there, as far as can be told without a word to them: for
    /// those who wait for ranks in another way than by a call (`operation`).
    fn check(&self, _operation: &'static str) -> Result<(), CommError> {
        Ok(())
    }
    /// Longest wait for a neighbour before [`CommError::TimedOut`].
    fn timeout(&self) -> Duration;
    /// A second group of the same ranks whose collectives run at the same time as this one's, in an
    /// order of their own: a few statistics need not wait behind a bucket of gradients. `None`:
    /// there is only this one, and calls from several threads must keep one order by themselves.
    /// Aborting either aborts both.
    fn beside(&self) -> Option<Arc<dyn Communicator>> {
        None
    }
    /// `bytes` of zeroed memory that all ranks see, or why there is none; every rank gets the same.
    fn shared_memory(&self, _bytes: usize) -> Result<SharedMemoryOrReason, CommError> {
        Ok(Err("the ranks are not known to be on one machine".into()))
    }
}

/// A group of one.
#[derive(Debug, Default)]
pub struct Alone;

impl Communicator for Alone {
    fn rank(&self) -> u32 {
        0
    }
    fn world_size(&self) -> u32 {
        1
    }
    fn all_reduce(&self, _: &mut [f32], _: Reduction) -> Result<(), CommError> {
        Ok(())
    }
    fn all_reduce_f64(&self, _: &mut [f64]) -> Result<(), CommError> {
        Ok(())
    }
    fn broadcast(&self, _: &mut [f32], _: u32) -> Result<(), CommError> {
        Ok(())
    }
    fn all_gather(&self, values: &[f32]) -> Result<Vec<f32>, CommError> {
        Ok(values.to_vec())
    }
    fn barrier(&self) -> Result<(), CommError> {
        Ok(())
    }
    fn abort(&self, _: &str) {}
    fn timeout(&self) -> Duration {
        Duration::MAX
    }
}
