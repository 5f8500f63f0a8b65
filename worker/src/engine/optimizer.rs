//! The optimizer of a run and the state that it keeps from step to step. The formulas are in `cpu/optimizer.rs`; the CUDA
//! engine's kernels (`worker/kernels/optimizer.cu`, `adam.cu`) follow them.

use super::NamedTensors;
use crate::net::{Network, Role};
use lockstep_protocol::spec::{OptimizerKind, TrainSpec};

/// Trust coefficient eta of LARS: the value of You, Gitman and Ginsburg (2017), section 5.
pub(in crate::engine) const LARS_TRUST: f32 = 0.001;

/// Most slots that an optimizer has.
pub(in crate::engine) const MOST_SLOTS: usize = 2;

/// An optimizer's settings, which stay the same over a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Optimizer {
    pub kind: OptimizerKind,
    /// For SGD and LARS.
    pub momentum: f32,
    pub weight_decay: f32,
    /// Whether batch norm's parameters and biases are decayed (never with LARS), and with LAMB adapted.
    pub decay_norm_and_bias: bool,
    /// For AdamW and LAMB. In float64 as in PyTorch: 1 - 0.999 has a relative error of 1e-5 in float32.
    pub beta1: f64,
    pub beta2: f64,
    pub epsilon: f64,
}

/// What an optimizer keeps from step to step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OptimizerState {
    /// `<parameter>.<slot>` for each of [`Optimizer::slots`], in the shape of the parameter.
    pub slots: NamedTensors,
    /// Updates done since the slots were zeros; steps that float16 skipped do not count.
    pub updates: u64,
}

/// How one parameter is treated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::engine) struct ParameterPolicy {
    /// Weight decay.
    pub(in crate::engine) decay: f32,
    /// Whether its learning rate follows from the norms of the parameter.
    pub(in crate::engine) adapted: bool,
    /// It is never changed, nor is what the optimizer keeps of it.
    pub(in crate::engine) frozen: bool,
}

impl ParameterPolicy {
    /// That of a parameter that stays as it is.
    pub(in crate::engine) const FROZEN: Self = Self { decay: 0.0, adapted: false, frozen: true };
}

impl Default for Optimizer {
    fn default() -> Self {
        Self::from(&TrainSpec::default())
    }
}

impl From<&TrainSpec> for Optimizer {
    fn from(spec: &TrainSpec) -> Self {
        Self {
            kind: spec.optimizer,
            momentum: spec.momentum,
            weight_decay: spec.weight_decay,
            decay_norm_and_bias: spec.decay_norm_and_bias,
            beta1: spec.beta1,
            beta2: spec.beta2,
            epsilon: spec.epsilon,
        }
    }
}

impl Optimizer {
    /// Names of what it keeps for each parameter: float32, zeros at first.
    pub fn slots(&self) -> &'static [&'static str] {
        slots(self.kind)
    }

    /// Whether a parameter's update needs the norms of all of it.
    pub(in crate::engine) fn needs_norms(&self) -> bool {
        matches!(self.kind, OptimizerKind::Lars | OptimizerKind::Lamb)
    }

    /// How a parameter is treated; `is_weight`: it is a weight of a convolution or linear layer, not of a batch norm, and
    /// no bias.
    pub(in crate::engine) fn policy(&self, is_weight: bool) -> ParameterPolicy {
        let decayed = match self.kind {
            OptimizerKind::Lars => is_weight,
            _ => is_weight || self.decay_norm_and_bias,
        };
        ParameterPolicy {
            decay: if decayed { self.weight_decay } else { 0.0 },
            adapted: decayed && self.needs_norms(),
            frozen: false,
        }
    }

    /// Names and shapes of its state for `network`.
    pub(in crate::engine) fn state_shapes(&self, network: &Network) -> Vec<(String, Vec<usize>)> {
        let trained = network.parameters().into_iter().filter(|p| p.role.is_trained());
        let of = |(name, shape): (String, Vec<usize>)| {
            self.slots().iter().map(move |slot| (slot_name(&name, slot), shape.clone()))
        };
        trained.map(|p| (p.name, p.shape)).flat_map(of).collect()
    }
}

/// [`Optimizer::slots`] of any optimizer of `kind`. Optimizers with equal slots can continue from each other's state.
pub fn slots(kind: OptimizerKind) -> &'static [&'static str] {
    match kind {
        OptimizerKind::Momentum | OptimizerKind::Nesterov | OptimizerKind::Lars => &["momentum"],
        OptimizerKind::AdamW | OptimizerKind::Lamb => &["exp_avg", "exp_avg_sq"],
    }
}

/// The name of a parameter's slot: `conv1.weight.exp_avg`.
pub fn slot_name(parameter: &str, slot: &str) -> String {
    format!("{parameter}.{slot}")
}

/// The name of a parameter, or of what is `kept` of it.
pub(in crate::engine) fn tensor_name(parameter: &str, kept: Option<&str>) -> String {
    kept.map_or_else(|| parameter.into(), |slot| slot_name(parameter, slot))
}

/// Whether a parameter is what [`Optimizer::treatment`] calls a weight.
pub(in crate::engine) fn is_weight(role: Role) -> bool {
    matches!(role, Role::ConvWeight | Role::LinearWeight)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batch_norms_and_biases_are_decayed_and_adapted_as_the_job_says() {
        let treat = |kind, decay_norm_and_bias, is_weight| {
            let optimizer =
                Optimizer { kind, weight_decay: 0.1, decay_norm_and_bias, ..Optimizer::default() };
            let ParameterPolicy { decay, adapted, .. } = optimizer.policy(is_weight);
            (decay, adapted)
        };
        for (kind, _) in OptimizerKind::ALL {
            let layer_wise = matches!(kind, OptimizerKind::Lars | OptimizerKind::Lamb);
            for decay_norm_and_bias in [true, false] {
                assert_eq!(treat(kind, decay_norm_and_bias, true), (0.1, layer_wise), "{kind:?}");
            }
            assert_eq!(treat(kind, false, false), (0.0, false), "{kind:?}");
            let usual = if kind == OptimizerKind::Lars { (0.0, false) } else { (0.1, layer_wise) };
            assert_eq!(treat(kind, true, false), usual, "{kind:?}");
        }
    }
}
