//! Operator fusion: the pass that decides which operations of a network run as one.
//!
//! [`fuse`] visits the network once and records its decisions in each [`FusedOp`]. The forward and backward passes of every
//! engine follow these decisions without looking at neighbouring operations again. The pass knows kernels only as an engine's
//! [`Capabilities`] and launches nothing, so tests can print and pin its result.
//!
//! | pattern | needs | forward | backward |
//! |---|---|---|---|
//! | batch norm + addition + ReLU | `norm_add_relu` | one pass | one pass; the gradient before the ReLU is also the shortcut's gradient |
//! | projection's batch norm + addition | `shortcut_norm` | the addition applies the batch norm | separate |
//! | batch norm + ReLU + max pooling 3x3, stride 2 | `norm_max_pool` | one pass | one pass |
//! | block's end + global average pooling | `norm_average_pool` | separate | batch norm spreads the mean's gradient |
//! | batch norm + ReLU + 1x1 convolution 64 -> 256 + batch norm | `wgmma` | the convolution applies the first batch norm and takes the second one's statistics | one pass: the second batch norm, dgrad, wgrad, and the first one's sums |
//! | block's end + 1x1 convolution 256 -> 64 + batch norm | `wgmma` | the convolution computes the block's end and takes statistics | as in the next row |
//! | block's end + 1x1 convolution to 64, 128 or 256 | `wgmma` | separate | batch norm's backward pass computes the dgrad |
//!
//! dgrad and wgrad are a convolution's gradients of its input and of its weights (cuDNN's terms). A block's end is the batch norm,
//! addition and ReLU at the end of a residual block.
//!
//! In a network with frozen batch norms, only patterns without statistics are fused ([`Capabilities::for_frozen_norm`]).

mod across_convolutions;
mod around_norm;
mod text;

#[cfg(test)]
mod tests;

pub(super) use across_convolutions::{EXPANDED, REDUCED};

use crate::net::{Network, Op, TensorId};
use lockstep_kernels::conv::ConvShape;

/// The fused kernels of an engine. By default there are none, and every operation runs separately.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Capabilities {
    /// Batch norm, addition and ReLU in one pass.
    pub(super) norm_add_relu: bool,
    /// The pass of `norm_add_relu` also applies the batch norm of a projection shortcut.
    pub(super) shortcut_norm: bool,
    /// Batch norm, ReLU and max pooling of 3x3 windows with stride 2 in one pass.
    pub(super) norm_max_pool: bool,
    /// Batch norm's backward pass reads the gradient of a global average pooling's output: one value per channel.
    pub(super) norm_average_pool: bool,
    /// There is only one buffer for the sums of a convolution's output, so statistics must be taken before the next
    /// convolution runs.
    pub(super) one_sum_buffer: bool,
    /// Kernels with their own matrix multiplication: Hopper's `wgmma`, 16-bit numbers.
    pub(super) wgmma: bool,
}

impl Capabilities {
    /// The capabilities that a network with frozen batch norms can use. The other kernels compute statistics, or sums in the backward pass.
    fn for_frozen_norm(self) -> Self {
        Self { norm_max_pool: false, one_sum_buffer: false, wgmma: false, ..self }
    }
}

/// A fused operation. Engines run them in forward order, and in reverse in the backward pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum FusedOp {
    /// A convolution, with parts of neighbouring batch norms.
    Conv(Conv),
    /// A batch norm, with the following addition, ReLU and pooling.
    Norm(Norm),
    /// max(x, 0), not fused.
    Relu { input: TensorId, output: TensorId },
    /// GELU of x, or of x plus the parameter `<bias>.bias`.
    Gelu { bias: Option<String>, input: TensorId, output: TensorId },
    /// branch + shortcut, not fused.
    Add { branch: TensorId, shortcut: TensorId, output: TensorId },
    /// Maximum over square windows, not fused.
    MaxPool { input: TensorId, output: TensorId, kernel: usize, stride: usize, padding: usize },
    /// Mean over height and width. `gradient_in_norm`: whether the batch norm that produces `input` spreads the gradient over
    /// the pixels in its backward pass.
    GlobalAveragePool { input: TensorId, output: TensorId, gradient_in_norm: bool },
    /// A linear layer. `is_head`: whether the layer produces the logits. An engine may add its bias in the loss.
    Linear { name: String, input: TensorId, output: TensorId, is_head: bool },
    /// The same activation in another placement.
    Redistribute { input: TensorId, output: TensorId },
    /// An activation extended by the rows of other ranks that windows reach; see [`Op::Halo`].
    Halo { input: TensorId, output: TensorId, lowest: bool },
    /// The mean over all rows, computed from each rank's mean over its own rows.
    MeanOfRows { input: TensorId, output: TensorId },
}

/// A convolution without bias.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Conv {
    pub(super) name: String,
    /// With a batch of 1; engines replace the batch at run time.
    pub(super) shape: ConvShape,
    pub(super) input: TensorId,
    pub(super) output: TensorId,
    /// Whether the input has a gradient, which the pictures have not.
    pub(super) needs_input_gradient: bool,
    /// Index of the batch norm that reads the output and needs its statistics. `None` if no batch norm reads it, or a frozen one.
    pub(super) norm_after: Option<usize>,
    pub(super) forward: ConvForward,
    pub(super) backward: ConvBackward,
}

impl Conv {
    /// Whether this is a matrix multiplication per pixel: 1x1, stride 1, no groups.
    fn is_pointwise(&self) -> bool {
        let ConvShape { kernel, stride, groups, .. } = self.shape;
        (kernel, stride, groups) == (1, 1, 1)
    }
}

/// How a convolution's output is computed in training. In evaluation every convolution is [`ConvForward::Plain`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ConvForward {
    /// Not fused. `early_statistics`: whether the batch norm's statistics are taken right after the convolution, because another
    /// convolution runs before the batch norm. All ranks decide alike: ranks that synchronise statistics must reach the same
    /// batch norm.
    Plain { early_statistics: bool },
    /// Applies the preceding batch norm and ReLU, if given, and takes the statistics of the following batch norm.
    WithNorms { norm_before: Option<usize> },
    /// Computes the end of the preceding block (batch norm `block_end`, addition, ReLU), and takes the statistics of
    /// the following batch norm.
    WithBlockEnd { block_end: usize },
}

/// How a convolution's gradients are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ConvBackward {
    /// Separate wgrad and dgrad.
    Plain,
    /// Separate wgrad; the dgrad is computed inside the backward pass of the preceding batch norm.
    DgradInNorm,
    /// Applies the backward pass of the following batch norm, computes wgrad and dgrad, and takes the sums of the preceding
    /// batch norm, if given.
    WithNorms { norm_before: Option<usize> },
}

/// y = relu(batch_norm(x) + shortcut); the shortcut and the ReLU are optional.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Norm {
    pub(super) name: String,
    /// Index of this batch norm among all batch norms, in forward order.
    pub(super) norm: usize,
    pub(super) input: TensorId,
    /// Output of all operations fused with this batch norm. The output of a deferred batch norm is never in memory.
    pub(super) output: TensorId,
    pub(super) shortcut: Option<Shortcut>,
    pub(super) relu: bool,
    /// Whether a max pooling of 3x3 windows with stride 2 is fused; `output` is then the pooling's output.
    pub(super) pooled: bool,
    pub(super) statistics: StatisticsIn,
    pub(super) forward: NormForward,
    /// Whether the backward pass only takes the sums, which the preceding convolution's backward pass applies.
    pub(super) backward_in_conv: bool,
    /// Whether the gradient of the input may overwrite the input, because no other backward pass reads the input.
    pub(super) overwrites_input: bool,
}

impl Norm {
    /// Whether this batch norm normalises with its running statistics during training, too.
    pub(super) fn is_frozen(&self) -> bool {
        self.statistics == StatisticsIn::Frozen
    }
}

/// The tensor that is added to a batch norm's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shortcut {
    pub(super) tensor: TensorId,
    /// The deferred batch norm that produces `tensor`: the addition applies it. `None` if `tensor` is in memory.
    pub(super) deferred: Option<DeferredNorm>,
}

impl Shortcut {
    /// The tensor that the addition reads from memory: `tensor`, or the input of the deferred batch norm.
    pub(super) fn stored_tensor(self) -> TensorId {
        self.deferred.map_or(self.tensor, |norm| norm.input)
    }
}

/// A batch norm that another operation applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DeferredNorm {
    pub(super) norm: usize,
    pub(super) input: TensorId,
}

/// Where the statistics of a batch norm are taken in training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StatisticsIn {
    /// When the batch norm runs.
    Norm,
    AfterConv,
    /// In the kernel of the preceding convolution.
    Conv,
    /// Not taken: a frozen batch norm normalises with its running statistics, and its parameters have no gradients.
    Frozen,
}

/// Where a batch norm is applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NormForward {
    /// In its own operation.
    Here,
    /// In the addition that reads the output, in training and evaluation.
    InShortcut,
    /// In the convolution that is the only reader of the output; in evaluation as `Here`.
    InConv,
    /// In the following convolution, which also writes the batch norm's output; in evaluation as `Here`.
    InConvAndStored,
}

impl FusedOp {
    /// The activation that this operation produces.
    pub(super) fn output(&self) -> TensorId {
        match *self {
            FusedOp::Conv(Conv { output, .. })
            | FusedOp::Norm(Norm { output, .. })
            | FusedOp::Relu { output, .. }
            | FusedOp::Gelu { output, .. }
            | FusedOp::Add { output, .. }
            | FusedOp::MaxPool { output, .. }
            | FusedOp::GlobalAveragePool { output, .. }
            | FusedOp::Linear { output, .. }
            | FusedOp::Redistribute { output, .. }
            | FusedOp::Halo { output, .. }
            | FusedOp::MeanOfRows { output, .. } => output,
        }
    }

    /// The name of the module whose parameters this operation has, and the last parts of the parameters' names.
    pub(super) fn parameters(&self) -> Option<(&str, &'static [&'static str])> {
        let (name, suffixes): (_, &[&str]) = match self {
            FusedOp::Conv(Conv { name, .. }) => (name, &["weight"]),
            FusedOp::Norm(Norm { name, .. }) | FusedOp::Linear { name, .. } => (name, &["weight", "bias"]),
            // A GELU's bias has the name of the convolution before it.
            FusedOp::Gelu { bias, .. } => (bias.as_ref()?, &["bias"]),
            _ => return None,
        };
        Some((name, suffixes))
    }

    /// The activations that this operation reads in evaluation, where only batch norms of shortcuts are deferred.
    pub(super) fn reads(&self) -> Vec<TensorId> {
        match *self {
            FusedOp::Norm(Norm { forward: NormForward::InShortcut, .. }) => Vec::new(),
            FusedOp::Norm(Norm { input, shortcut, .. }) => {
                std::iter::once(input).chain(shortcut.map(Shortcut::stored_tensor)).collect()
            }
            FusedOp::Add { branch, shortcut, .. } => vec![branch, shortcut],
            FusedOp::Conv(Conv { input, .. })
            | FusedOp::Relu { input, .. }
            | FusedOp::Gelu { input, .. }
            | FusedOp::MaxPool { input, .. }
            | FusedOp::GlobalAveragePool { input, .. }
            | FusedOp::Linear { input, .. }
            | FusedOp::Redistribute { input, .. }
            | FusedOp::Halo { input, .. }
            | FusedOp::MeanOfRows { input, .. } => vec![input],
        }
    }
}

/// Fuses the operations of `network` for an engine with these capabilities.
pub(super) fn fuse(network: &Network, capabilities: &Capabilities) -> Vec<FusedOp> {
    let capabilities = if network.frozen_norm { capabilities.for_frozen_norm() } else { *capabilities };
    let mut ops = around_norm::fuse(network, capabilities);
    if capabilities.wgmma {
        across_convolutions::fuse(network, &mut ops);
    }
    if capabilities.one_sum_buffer {
        take_statistics_early(&mut ops);
    }
    ops
}

/// Number of reads of `tensor`: `x + x` reads x twice.
fn count_reads(network: &Network, tensor: TensorId) -> usize {
    network.ops.iter().flat_map(Op::inputs).filter(|input| *input == tensor).count()
}

/// Takes statistics right after each convolution that its batch norm does not directly follow.
fn take_statistics_early(ops: &mut [FusedOp]) {
    for index in 0..ops.len() {
        let FusedOp::Conv(Conv {
            output, norm_after: Some(after), forward: ConvForward::Plain { .. }, ..
        }) = ops[index]
        else {
            continue;
        };
        if matches!(ops.get(index + 1), Some(FusedOp::Norm(norm)) if norm.input == output) {
            continue;
        }
        if let FusedOp::Conv(conv) = &mut ops[index] {
            conv.forward = ConvForward::Plain { early_statistics: true };
        }
        if let Some(norm) = norm_mut(ops, after) {
            norm.statistics = StatisticsIn::AfterConv;
        }
    }
}

/// The batch norm with the index `norm`.
fn norm_mut(ops: &mut [FusedOp], norm: usize) -> Option<&mut Norm> {
    ops.iter_mut().find_map(|op| match op {
        FusedOp::Norm(found) if found.norm == norm => Some(found),
        _ => None,
    })
}
