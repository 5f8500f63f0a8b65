//! Times of a network's layers in one step.

use crate::net::TensorId;

/// Time of one operation in a step: forward and backward, including all fused operations.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerTime {
    /// Name of a convolution, batch norm or linear layer. `None` for other operations.
    pub name: Option<String>,
    pub output: TensorId,
    pub micros: f64,
}

/// The times of `ops`. `micros` has pairs (index in `ops`, microseconds) to add.
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
