//! The errors of process groups.

use super::rendezvous::RendezvousError;

/// Why a call of a process group failed. Except after [`CommError::Invalid`], the group is unusable.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CommError {
    /// A rank did not respond within the group's time-out.
    #[error("{operation}: no answer from rank {peer} for {secs:.0} s")]
    TimedOut { operation: &'static str, peer: u32, secs: f64 },
    /// A rank closed its connection or died.
    #[error("{operation}: lost the connection to rank {peer}{}", .detail.as_ref().map(|why| format!(": {why}")).unwrap_or_default())]
    Disconnected { operation: &'static str, peer: u32, detail: Option<String> },
    /// The machines of the ranks `peers` do not respond.
    #[error("{operation}: {detail}")]
    Unreachable { operation: &'static str, peers: Vec<u32>, detail: String },
    /// The group had ended by [`ProcessGroup::abort`](crate::ProcessGroup::abort), or because another call failed.
    #[error("{operation}: aborted: {reason}")]
    Aborted { operation: &'static str, reason: String },
    /// The ranks made calls that do not match.
    #[error("{operation}: rank {peer} {detail}")]
    Mismatch { operation: &'static str, peer: u32, detail: String },
    /// An argument of this rank's call is invalid: for example, the group has no such rank, or the lengths of two
    /// buffers do not match. Nothing was sent, and the group remains usable.
    #[error("{operation}: {detail}")]
    Invalid { operation: &'static str, detail: String },
    /// A device or its library failed.
    #[error("{operation}: {detail}")]
    Failed { operation: &'static str, detail: String },
}

impl CommError {
    /// The name of the call that failed.
    pub(super) fn operation_mut(&mut self) -> &mut &'static str {
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

    /// Replaces the ranks of a group in the error by the ranks of the parent group: rank `r` of the group is rank
    /// `parent_ranks[r]` of the parent.
    #[must_use]
    pub fn in_parent(mut self, parent_ranks: &[u32]) -> Self {
        let to_parent = |rank: &mut u32| *rank = parent_ranks.get(*rank as usize).copied().unwrap_or(*rank);
        match &mut self {
            CommError::TimedOut { peer, .. }
            | CommError::Disconnected { peer, .. }
            | CommError::Mismatch { peer, .. } => to_parent(peer),
            CommError::Unreachable { peers, .. } => peers.iter_mut().for_each(to_parent),
            CommError::Aborted { .. } | CommError::Invalid { .. } | CommError::Failed { .. } => {}
        }
        self
    }

    /// The error of a call that failed at the rendezvous.
    pub(super) fn at_rendezvous(operation: &'static str, error: RendezvousError) -> Self {
        match error {
            RendezvousError::Stopped => CommError::Aborted { operation, reason: "asked to stop".into() },
            RendezvousError::Lost(detail) => {
                CommError::Disconnected { operation, peer: 0, detail: Some(detail.to_string()) }
            }
            other => CommError::Failed { operation, detail: other.to_string() },
        }
    }
}
