//! The state that an optimizer keeps from step to step.

use super::NamedTensors;
use crate::net::{Network, Role};
pub use lockstep_kernels::optimizer::{Optimizer, slots};

/// What an optimizer keeps from step to step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OptimizerState {
    /// `<parameter>.<slot>` for each of [`Optimizer::slots`], in the shape of the parameter.
    pub slots: NamedTensors,
    /// Updates done since the slots were zeros; steps that float16 skipped do not count.
    pub updates: u64,
}

/// Names and shapes of an optimizer's state for `network`.
pub(crate) fn state_shapes(optimizer: &Optimizer, network: &Network) -> Vec<(String, Vec<usize>)> {
    let trained = network.parameters().into_iter().filter(|p| p.role.is_trained());
    let of = |(name, shape): (String, Vec<usize>)| {
        optimizer.slots().iter().map(move |slot| (slot_name(&name, slot), shape.clone()))
    };
    trained.map(|p| (p.name, p.shape)).flat_map(of).collect()
}

/// The name of a parameter's slot: `conv1.weight.exp_avg`.
pub(crate) fn slot_name(parameter: &str, slot: &str) -> String {
    format!("{parameter}.{slot}")
}

/// The name of a parameter, or of what is `kept` of it.
pub(crate) fn tensor_name(parameter: &str, kept: Option<&str>) -> String {
    kept.map_or_else(|| parameter.into(), |slot| slot_name(parameter, slot))
}

/// Whether a parameter is what [`Optimizer::policy`] calls a weight.
pub(crate) fn is_weight(role: Role) -> bool {
    matches!(role, Role::ConvWeight | Role::LinearWeight)
}
