//! The network as this engine runs it: beside what every engine fuses, the batch norm of a downsampling
//! branch goes into the addition that it feeds, and the stem's max pooling into its batch norm.

use crate::{
    engine::{
        EngineError,
        plan::{self, Step},
    },
    net::{Network, TensorId},
};

/// What goes around a residual branch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shortcut {
    None,
    /// The block's input.
    Tensor(TensorId),
    /// The output of a convolution, still to be normalised by this batch norm.
    Norm(usize),
}

/// One batch norm and what is fused with it.
#[derive(Debug, Clone)]
pub(super) struct NormNode {
    pub(super) name: String,
    /// Number in forward order.
    pub(super) norm: usize,
    pub(super) input: TensorId,
    /// After all that is fused; for a batch norm that is applied elsewhere, what it stands for.
    pub(super) output: TensorId,
    pub(super) shortcut: Shortcut,
    pub(super) relu: bool,
    /// Followed by the stem's max pooling, whose output `output` is.
    pub(super) pooled: bool,
    /// Applied by the addition that reads it.
    pub(super) deferred: bool,
}

/// A step of the engine.
#[derive(Debug, Clone)]
pub(super) enum Node {
    Conv {
        name: String,
        kernel: usize,
        stride: usize,
        padding: usize,
        groups: usize,
        input: TensorId,
        output: TensorId,
        first: bool,
    },
    Norm(NormNode),
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

/// Fuses `network`.
///
/// # Errors
/// A network of other parts than ResNets have.
pub(super) fn compile(network: &Network) -> Result<(Vec<Step>, Vec<Node>), EngineError> {
    let steps = plan::compile(network)?;
    let mut nodes: Vec<Node> = Vec::new();
    for step in &steps {
        match step {
            Step::Conv { name, shape, input, output, needs_input_gradient, .. } => nodes.push(Node::Conv {
                name: name.clone(),
                kernel: shape.kernel,
                stride: shape.stride,
                padding: shape.padding,
                groups: shape.groups,
                input: *input,
                output: *output,
                first: !needs_input_gradient,
            }),
            Step::Norm { name, norm, input, shortcut, relu, output } => {
                let shortcut = match shortcut {
                    None => Shortcut::None,
                    Some(tensor) => defer(&mut nodes, *tensor).unwrap_or(Shortcut::Tensor(*tensor)),
                };
                nodes.push(Node::Norm(NormNode {
                    name: name.clone(),
                    norm: *norm,
                    input: *input,
                    output: *output,
                    shortcut,
                    relu: *relu,
                    pooled: false,
                    deferred: false,
                }));
            }
            Step::MaxPool { input, output, kernel: 3, stride: 2, padding: 1 } => match nodes.last_mut() {
                Some(Node::Norm(norm))
                    if norm.output == *input && norm.shortcut == Shortcut::None && norm.relu =>
                {
                    norm.output = *output;
                    norm.pooled = true;
                }
                _ => return Err(unsupported("a max pooling that does not follow a batch norm and a ReLU")),
            },
            Step::MaxPool { .. } => return Err(unsupported("a max pooling other than 3x3 with stride 2")),
            Step::GlobalAveragePool { input, output } => {
                nodes.push(Node::GlobalAveragePool { input: *input, output: *output });
            }
            Step::Linear { name, input, output } => {
                nodes.push(Node::Linear { name: name.clone(), input: *input, output: *output });
            }
        }
    }
    Ok((steps, nodes))
}

/// Leaves the batch norm that makes `tensor` to its reader, when it is a plain one.
fn defer(nodes: &mut [Node], tensor: TensorId) -> Option<Shortcut> {
    nodes.iter_mut().find_map(|node| match node {
        Node::Norm(norm) if norm.output == tensor && !norm.relu && norm.shortcut == Shortcut::None => {
            norm.deferred = true;
            Some(Shortcut::Norm(norm.norm))
        }
        _ => None,
    })
}

fn unsupported(what: &str) -> EngineError {
    EngineError::Parameters(format!("the CUDA engine does not run {what}"))
}
