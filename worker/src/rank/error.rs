//! Why a rank could not continue, and whether a retry may help.

use crate::train::TrainError;
use lockstep_comm::rendezvous::RendezvousError;
use lockstep_engine::EngineError;
use lockstep_protocol::reason::FailureCode;

#[derive(Debug, thiserror::Error)]
pub(super) enum RankError {
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    #[error("{}{}", .0, .0.advice())]
    Train(#[from] TrainError),
    #[error(transparent)]
    System(#[from] std::io::Error),
    /// Steps no longer complete.
    #[error("{0}")]
    Stalled(String),
    /// The rank was asked to stop, but the step did not end, or its checkpoint was not written.
    #[error("asked to stop: {why}. {lost}")]
    Interrupted { why: String, lost: String, secondary: bool, unreachable: Vec<u32> },
}

impl RankError {
    pub(super) fn is_retriable(&self) -> bool {
        match self {
            RankError::Train(error) => error.is_retriable(),
            _ => true,
        }
    }

    pub(super) fn code(&self) -> FailureCode {
        match self {
            RankError::Train(TrainError::Diverged { .. }) => FailureCode::Diverged,
            RankError::Train(TrainError::Overflow { .. }) => FailureCode::PrecisionTooNarrow,
            RankError::Train(TrainError::Engine(EngineError::Backend(error))) if error.is_out_of_memory() => {
                FailureCode::OutOfMemory
            }
            RankError::Train(TrainError::Memory(_)) => FailureCode::OutOfMemory,
            RankError::Train(TrainError::Data(_)) => FailureCode::DatasetUnusable,
            RankError::Stalled(_) => FailureCode::Stalled,
            _ => FailureCode::Other,
        }
    }

    /// The ranks whose machines do not respond, if this is the reason.
    pub(super) fn unreachable(&self) -> &[u32] {
        match self {
            RankError::Train(error) => error.unreachable(),
            RankError::Interrupted { unreachable, .. } => unreachable,
            _ => &[],
        }
    }

    /// Whether the rank failed only because it lost another rank.
    pub(super) fn is_secondary(&self) -> bool {
        match self {
            RankError::Train(error) => error.is_secondary(),
            RankError::Rendezvous(error) => {
                matches!(error, RendezvousError::Lost(_) | RendezvousError::Stopped)
            }
            RankError::System(_) | RankError::Stalled(_) => false,
            RankError::Interrupted { secondary, .. } => *secondary,
        }
    }
}
