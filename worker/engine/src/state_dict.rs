//! What the ranks of a group contribute to a checkpoint, and what they are given from one.

use super::{LossScaling, NamedTensors, OptimizerState};

/// All that an engine needs to continue, on the host.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StateDict {
    /// Weights, biases and running statistics.
    pub parameters: NamedTensors,
    /// The optimizer's named slots; `None`: those that the engine has stay as they are.
    pub optimizer: Option<OptimizerState>,
    /// The moving average of the parameters, where there is one; rank 0's.
    pub average: Option<NamedTensors>,
    /// The loss scaling of float16.
    pub loss_scaling: Option<LossScaling>,
}

/// What one rank has of the state that its group keeps.
///
/// Every rank has all of it today. An engine whose ranks keep parts of it contributes them by a variant of its own, which the
/// writer of a checkpoint then has to gather.
#[derive(Debug, Clone, PartialEq)]
pub enum Contribution {
    /// All of it: of rank 0 of a group whose ranks are replicas.
    Whole(Box<StateDict>),
    /// What rank 0 contributes already; nothing was copied off the device for it.
    Replica,
}
