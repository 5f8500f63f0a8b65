//! Why a call of a group failed.

use super::rendezvous::RendezvousError;

/// Why a call of a group failed. After every kind but [`CommError::Invalid`] the group is unusable.
#[derive(Debug, thiserror::Error)]
pub enum CommError {
    /// The time-out of the group passed.
    #[error("{operation}: no answer from rank {peer} for {secs:.0} s")]
    TimedOut { operation: &'static str, peer: u32, secs: f64 },
    /// A rank closed its connection or died.
    #[error("{operation}: lost the connection to rank {peer}: {detail}")]
    Disconnected { operation: &'static str, peer: u32, detail: String },
    /// The machines of these ranks do not answer.
    #[error("{operation}: {detail}")]
    Unreachable { operation: &'static str, peers: Vec<u32>, detail: String },
    /// The group was asked to stop.
    #[error("{operation}: aborted: {reason}")]
    Aborted { operation: &'static str, reason: String },
    /// The ranks disagree about what they are doing.
    #[error("{operation}: rank {peer} {detail}")]
    Mismatch { operation: &'static str, peer: u32, detail: String },
    /// This rank's call makes no sense: a peer that the group does not have, buffers that do not fit each other. Nothing was
    /// sent, and the group can be used on.
    #[error("{operation}: {detail}")]
    Invalid { operation: &'static str, detail: String },
    /// A device or its library failed.
    #[error("{operation}: {detail}")]
    Failed { operation: &'static str, detail: String },
}

impl CommError {
    /// The call that did not complete.
    pub fn operation(&self) -> &'static str {
        match self {
            CommError::TimedOut { operation, .. }
            | CommError::Disconnected { operation, .. }
            | CommError::Unreachable { operation, .. }
            | CommError::Aborted { operation, .. }
            | CommError::Mismatch { operation, .. }
            | CommError::Invalid { operation, .. }
            | CommError::Failed { operation, .. } => operation,
        }
    }

    /// The error of a group of these `ranks`, with their numbers in place of those in the group.
    #[must_use]
    pub fn among(mut self, ranks: &[u32]) -> Self {
        let number = |rank: &mut u32| *rank = ranks.get(*rank as usize).copied().unwrap_or(*rank);
        match &mut self {
            CommError::TimedOut { peer, .. }
            | CommError::Disconnected { peer, .. }
            | CommError::Mismatch { peer, .. } => number(peer),
            CommError::Unreachable { peers, .. } => peers.iter_mut().for_each(number),
            CommError::Aborted { .. } | CommError::Invalid { .. } | CommError::Failed { .. } => {}
        }
        self
    }

    /// The error of a call that needed the rendezvous.
    pub(super) fn at_rendezvous(operation: &'static str, error: RendezvousError) -> Self {
        match error {
            RendezvousError::Stopped => CommError::Aborted { operation, reason: "asked to stop".into() },
            RendezvousError::Lost(detail) => {
                CommError::Disconnected { operation, peer: 0, detail: detail.to_string() }
            }
            other => CommError::Failed { operation, detail: other.to_string() },
        }
    }
}
