//! A network as engines run it: batch norm, residual add and ReLU become one step, so that an activation is written once.

use super::{EngineError, shape::ConvShape};
use crate::net::{Network, Op, TensorId};

/// What an engine runs, in forward order; backward runs it in reverse.
#[derive(Debug, Clone)]
pub(super) enum Step {
    Conv {
        name: String,
        /// With a batch of 1; the real batch is put in at run time.
        shape: ConvShape,
        input: TensorId,
        output: TensorId,
        /// False when nothing before it is trained: the first convolution.
        needs_input_gradient: bool,
        /// A batch norm reads the output, so its channel sums are taken along.
        feeds_norm: bool,
    },
    /// y = relu(batch_norm(x) + shortcut), the last two as present.
    Norm {
        name: String,
        /// Number of this batch norm, in forward order.
        norm: usize,
        input: TensorId,
        shortcut: Option<TensorId>,
        relu: bool,
        output: TensorId,
    },
    MaxPool {
        input: TensorId,
        output: TensorId,
        kernel: usize,
        stride: usize,
        padding: usize,
    },
    GlobalAveragePool {
        input: TensorId,
        output: TensorId,
    },
    Linear {
        name: String,
        input: TensorId,
        output: TensorId,
    },
}

impl Step {
    pub(super) fn output(&self) -> TensorId {
        match *self {
            Step::Conv { output, .. }
            | Step::Norm { output, .. }
            | Step::MaxPool { output, .. }
            | Step::GlobalAveragePool { output, .. }
            | Step::Linear { output, .. } => output,
        }
    }
}

/// Fuses the operations of `network`.
///
/// # Errors
/// A network that engines do not run: a ReLU or an addition that no batch norm feeds.
pub(super) fn compile(network: &Network) -> Result<Vec<Step>, EngineError> {
    let consumers = |tensor: TensorId| -> Vec<&Op> {
        network.ops.iter().filter(|op| op.inputs().contains(&tensor)).collect()
    };
    // The ReLU that alone reads `tensor`, if so.
    let relu_after = |tensor: TensorId| match consumers(tensor)[..] {
        [Op::Relu { output, .. }] => Some(*output),
        _ => None,
    };
    let mut steps = Vec::new();
    let mut norms = 0;
    // Batch norms that wait for the addition that they are fused with: (output, name, number, input).
    let mut waiting: Vec<(TensorId, String, usize, TensorId)> = Vec::new();
    let mut fused_relus: Vec<TensorId> = Vec::new();
    for op in &network.ops {
        match op {
            Op::Conv { name, input, output, kernel, stride, padding, groups } => {
                let (from, to) = (network.tensors[*input], network.tensors[*output]);
                steps.push(Step::Conv {
                    name: name.clone(),
                    shape: ConvShape {
                        batch: 1,
                        in_h: from.height,
                        in_w: from.width,
                        in_c: from.channels,
                        out_c: to.channels,
                        kernel: *kernel,
                        stride: *stride,
                        padding: *padding,
                        groups: *groups,
                    },
                    input: *input,
                    output: *output,
                    feeds_norm: consumers(*output).iter().any(|op| matches!(op, Op::BatchNorm { .. })),
                    needs_input_gradient: *input != network.input(),
                });
            }
            Op::BatchNorm { name, input, output } => {
                let (name, norm, input) = (name.clone(), norms, *input);
                norms += 1;
                if let [Op::Add { branch, .. }] = consumers(*output)[..]
                    && branch == output
                {
                    waiting.push((*output, name, norm, input));
                    continue;
                }
                let relu = relu_after(*output);
                fused_relus.extend(relu);
                let output = relu.unwrap_or(*output);
                steps.push(Step::Norm { name, norm, input, shortcut: None, relu: relu.is_some(), output });
            }
            Op::Add { branch, shortcut, output } => {
                let Some(at) = waiting.iter().position(|(tensor, ..)| tensor == branch) else {
                    return Err(unsupported("an addition whose branch does not end in a batch norm"));
                };
                let (_, name, norm, input) = waiting.swap_remove(at);
                let relu = relu_after(*output);
                fused_relus.extend(relu);
                let output = relu.unwrap_or(*output);
                let shortcut = Some(*shortcut);
                steps.push(Step::Norm { name, norm, input, shortcut, relu: relu.is_some(), output });
            }
            Op::Relu { output, .. } => {
                if !fused_relus.contains(output) {
                    return Err(unsupported("a ReLU that does not follow a batch norm or an addition"));
                }
            }
            Op::MaxPool { input, output, kernel, stride, padding } => steps.push(Step::MaxPool {
                input: *input,
                output: *output,
                kernel: *kernel,
                stride: *stride,
                padding: *padding,
            }),
            Op::GlobalAveragePool { input, output } => {
                steps.push(Step::GlobalAveragePool { input: *input, output: *output });
            }
            Op::Linear { name, input, output } => {
                steps.push(Step::Linear { name: name.clone(), input: *input, output: *output });
            }
        }
    }
    Ok(steps)
}

fn unsupported(what: &str) -> EngineError {
    EngineError::Parameters(format!("engines do not run {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::resnet;
    use lockstep_protocol::spec::{Arch, ModelSpec};

    #[test]
    fn a_residual_network_becomes_convolutions_and_fused_norms() {
        let net =
            resnet::build(&ModelSpec { arch: Arch::ResNet20, ..ModelSpec::default() }, 32, 3, 10).unwrap();
        let steps = compile(&net).unwrap();
        let norms = |with_shortcut, with_relu| {
            steps
                .iter()
                .filter(|s| {
                    matches!(s, Step::Norm { shortcut, relu, .. }
                    if shortcut.is_some() == with_shortcut && *relu == with_relu)
                })
                .count()
        };
        // Stem and first of each block; ends of blocks; the two projections.
        assert_eq!((norms(false, true), norms(true, true), norms(false, false)), (10, 9, 2));
        assert_eq!(steps.len(), 21 + 21 + 2);
    }
}
