//! What the ranks of a group contribute to a checkpoint, and what they are given from one.

use super::{EngineError, LossScaling, NamedTensors, OptimizerState, net::Network};
use lockstep_comm::CommError;
use std::collections::HashSet;

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

/// Collective in a model group: completes tensors, of whose split ones each rank has its part and 0 for the rest. `part` is what this rank
/// has of the network, `add` adds values over the group.
///
/// # Errors
/// Those of `add`.
pub(super) fn complete<'a>(
    part: &Network,
    all: impl IntoIterator<Item = &'a mut NamedTensors>,
    add: impl Fn(&mut [f32]) -> Result<(), CommError>,
) -> Result<(), EngineError> {
    let parameters = part.parameters();
    let split: HashSet<_> =
        parameters.iter().filter(|p| p.slice.is_some()).map(|p| p.name.as_str()).collect();
    for (name, tensor) in all.into_iter().flatten() {
        // A parameter, or one of its slots in the optimizer's state.
        let parameter = name.rsplit_once('.').map_or("", |(parameter, _)| parameter);
        if split.contains(name.as_str()) || split.contains(parameter) {
            add(&mut tensor.values)?;
        }
    }
    Ok(())
}

impl StateDict {
    /// The tensors of the parameters, of the optimizer and of the average.
    pub(super) fn tensors_mut(&mut self) -> impl Iterator<Item = &mut NamedTensors> {
        let slots = self.optimizer.iter_mut().map(|optimizer| &mut optimizer.slots);
        std::iter::once(&mut self.parameters).chain(slots).chain(&mut self.average)
    }
}
