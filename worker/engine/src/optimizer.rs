//! Optimizer state: names, shapes and values.

use super::NamedTensors;
use crate::net::{Network, Role};
pub(crate) use lockstep_kernels::optimizer::ParameterKind;
pub use lockstep_kernels::optimizer::{Optimizer, slots};

/// The state of an optimizer between two steps.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OptimizerState {
    /// `<parameter>.<slot>` for each of [`Optimizer::slots`], in the shape of the parameter.
    pub slots: NamedTensors,
    /// Number of updates since the slots were zeros, without the steps that float16 skipped.
    pub updates: u64,
}

/// Names and shapes of an optimizer's state for `network`.
pub(crate) fn state_shapes(optimizer: &Optimizer, network: &Network) -> Vec<(String, Vec<usize>)> {
    let trained = network.parameters().into_iter().filter(|p| p.role.is_trained());
    let slots_of = |(name, shape): (String, Vec<usize>)| {
        optimizer.slots().iter().map(move |slot| (slot_name(&name, slot), shape.clone()))
    };
    trained.map(|p| (p.name, p.shape)).flat_map(slots_of).collect()
}

/// The name of a parameter's slot: `conv1.weight.exp_avg`.
pub(crate) fn slot_name(parameter: &str, slot: &str) -> String {
    format!("{parameter}.{slot}")
}

/// The name of the tensor of a parameter, or of the parameter's `optimizer_slot`.
pub(crate) fn tensor_name(parameter: &str, optimizer_slot: Option<&str>) -> String {
    optimizer_slot.map_or_else(|| parameter.into(), |slot| slot_name(parameter, slot))
}

pub(crate) fn kind(role: Role) -> ParameterKind {
    match role {
        Role::ConvWeight => ParameterKind::Filters,
        Role::LinearWeight => ParameterKind::LinearWeight,
        Role::LinearBias => ParameterKind::LinearBias,
        Role::Gamma { .. } | Role::Beta | Role::RunningMean | Role::RunningVar => ParameterKind::Vector,
    }
}
