//! What an engine says of a network's layers when somebody asks.

use crate::net::TensorId;

/// How long one operation took in a step, forward and backward, with what is fused with it.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerTime {
    /// Of a convolution, batch norm or linear layer.
    pub name: Option<String>,
    /// What the operation makes.
    pub output: TensorId,
    pub micros: f64,
}

/// Times by operation, as the sum of some that are reported one after another.
pub(super) fn layer_times(
    ops: &[super::fuse::FusedOp],
    micros: impl IntoIterator<Item = (usize, f64)>,
) -> Vec<LayerTime> {
    use super::fuse::{Conv, FusedOp, Norm};
    let name = |op: &FusedOp| match op {
        FusedOp::Conv(Conv { name, .. })
        | FusedOp::Norm(Norm { name, .. })
        | FusedOp::Linear { name, .. } => Some(name.clone()),
        _ => None,
    };
    let time = |op: &FusedOp| LayerTime { name: name(op), output: op.output(), micros: 0.0 };
    let mut times: Vec<LayerTime> = ops.iter().map(time).collect();
    for (op, micros) in micros {
        if let Some(time) = times.get_mut(op) {
            time.micros += micros;
        }
    }
    times
}
