//! The pass that decides which operations of a network run as one.
//!
//! [`fuse`] goes through the network once. What it decides is part of each [`FusedOp`], and the forward and the backward pass of
//! every engine follow it; neither examines an operation's neighbours again. It knows kernels only by what an engine says
//! it has ([`Capabilities`]), and starts nothing, so its result can be printed and pinned by a test.
//!
//! | pattern | needs | forward | backward |
//! |---|---|---|---|
//! | batch norm + addition + ReLU | `norm_add_relu` | one pass | one pass; the gradient before the ReLU is the shortcut's, too |
//! | projection's batch norm + that addition | `shortcut_norm` | the addition applies it | by itself |
//! | batch norm + ReLU + max pooling 3x3, stride 2 | `norm_max_pool` | one pass | one pass |
//! | block's end + global average pooling | `norm_average_pool` | separate | batch norm spreads the mean's gradient |
//! | batch norm + ReLU + 1x1 convolution 64 -> 256 + batch norm | `wgmma` | the convolution applies the first and takes the second one's statistics | dgrad, wgrad, the second one's application and the first one's sums in one pass |
//! | block's end + 1x1 convolution 256 -> 64 + batch norm | `wgmma` | the convolution makes the block's end and takes statistics | as below |
//! | block's end + 1x1 convolution to 64, 128 or 256 | `wgmma` | separate | batch norm's backward pass computes the dgrad |
//!
//! Of a network whose batch norms are frozen, only what needs no statistics is fused ([`Capabilities::for_frozen_norm`]).

mod across_convolutions;
mod around_norm;
mod text;

#[cfg(test)]
mod tests;

pub(super) use across_convolutions::{EXPANDED, REDUCED};

use crate::net::{Network, Op, TensorId};
use lockstep_kernels::conv::ConvShape;

/// The fused kernels that an engine has. With none (the default) every operation runs by itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Capabilities {
    /// Batch norm, the addition that reads it and the ReLU after it in one pass.
    pub(super) norm_add_relu: bool,
    /// That pass also applies the batch norm of a projection shortcut.
    pub(super) shortcut_norm: bool,
    /// Batch norm, ReLU and max pooling of 3x3 windows with stride 2 in one pass.
    pub(super) norm_max_pool: bool,
    /// Batch norm's backward pass takes the gradient of a global average pooling as it is: one value a channel.
    pub(super) norm_average_pool: bool,
    /// The sums of one convolution's output can be kept at a time, so statistics are taken before the next convolution runs.
    pub(super) one_sum_buffer: bool,
    /// Kernels that multiply matrices themselves: Hopper's `wgmma`, 16-bit numbers.
    pub(super) wgmma: bool,
}

impl Capabilities {
    /// Without those that a network with frozen batch norms cannot use: their kernels compute statistics, or sums in the backward pass.
    fn for_frozen_norm(self) -> Self {
        Self { norm_max_pool: false, one_sum_buffer: false, wgmma: false, ..self }
    }
}

/// What an engine runs, in forward order; the backward pass runs it in reverse.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum FusedOp {
    Conv(Conv),
    Norm(Norm),
    /// max(x, 0), by itself.
    Relu {
        input: TensorId,
        output: TensorId,
    },
    /// branch + shortcut, by itself.
    Add {
        branch: TensorId,
        shortcut: TensorId,
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
        /// The batch norm that makes `input` spreads the gradient over the pixels in its backward pass.
        gradient_in_norm: bool,
    },
    Linear {
        name: String,
        input: TensorId,
        output: TensorId,
        /// It makes the logits; an engine may leave its bias to the loss.
        is_head: bool,
    },
    /// The same activation in another placement.
    Redistribute {
        input: TensorId,
        output: TensorId,
    },
    /// An activation with the rows of other ranks that windows reach.
    Halo {
        input: TensorId,
        output: TensorId,
        lowest: bool,
    },
    /// The mean over all rows, from that over each rank's own.
    MeanOfRows {
        input: TensorId,
        output: TensorId,
    },
}

/// A convolution without bias.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Conv {
    pub(super) name: String,
    /// With a batch of 1; the real batch is put in at run time.
    pub(super) shape: ConvShape,
    pub(super) input: TensorId,
    pub(super) output: TensorId,
    /// False where the input is the pictures.
    pub(super) needs_input_gradient: bool,
    /// Number of the batch norm that reads the output and takes its statistics: of none that is frozen.
    pub(super) norm_after: Option<usize>,
    pub(super) forward: ConvForward,
    pub(super) backward: ConvBackward,
}

impl Conv {
    /// Whether it multiplies each pixel with one matrix: 1x1, stride 1, no groups.
    fn is_pointwise(&self) -> bool {
        let ConvShape { kernel, stride, groups, .. } = self.shape;
        (kernel, stride, groups) == (1, 1, 1)
    }
}

/// How a convolution's output is computed in training. In evaluation every convolution is [`ConvForward::Plain`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ConvForward {
    /// By itself.
    Plain {
        /// The statistics of its batch norm are taken right after it, because another convolution runs before the batch norm
        /// does. On every rank: ranks that synchronise statistics have to come to the same batch norm.
        early_statistics: bool,
    },
    /// Applies the batch norm and ReLU before it, if given, and takes the statistics of the one after it.
    WithNorms { norm_before: Option<usize> },
    /// Makes the end of the block before it (batch norm number `block_end`, addition, ReLU), and takes the statistics of the
    /// batch norm after it.
    WithBlockEnd { block_end: usize },
}

/// How a convolution's gradients are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ConvBackward {
    /// wgrad and dgrad by themselves.
    Plain,
    /// wgrad by itself; the dgrad is computed inside the backward pass of the batch norm before it.
    DgradInNorm,
    /// Applies the batch norm after it (deferred until here), computes wgrad and dgrad, and takes the sums of the batch norm
    /// before it, if given.
    WithNorms { norm_before: Option<usize> },
}

/// y = relu(batch_norm(x) + shortcut), the last two as present.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Norm {
    pub(super) name: String,
    /// Number of this batch norm, in forward order.
    pub(super) norm: usize,
    pub(super) input: TensorId,
    /// After all that is fused with it. Of a deferred one: what it stands for, which is never in memory.
    pub(super) output: TensorId,
    pub(super) shortcut: Option<Shortcut>,
    pub(super) relu: bool,
    /// Followed by a max pooling of 3x3 windows with stride 2, whose output `output` is.
    pub(super) pooled: bool,
    pub(super) statistics: StatisticsIn,
    pub(super) forward: NormForward,
    /// In the backward pass only the sums are taken; the convolution before it applies them to its input's gradient.
    pub(super) backward_in_conv: bool,
    /// The gradient of the input may lie where the input is: the backward pass of no other operation reads it.
    pub(super) overwrites_input: bool,
}

impl Norm {
    /// Whether it normalises with its running statistics in training, too.
    pub(super) fn is_frozen(&self) -> bool {
        self.statistics == StatisticsIn::Frozen
    }
}

/// What is added to a batch norm's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shortcut {
    pub(super) tensor: TensorId,
    /// The addition applies the batch norm whose output `tensor` would be.
    pub(super) deferred: Option<DeferredNorm>,
}

impl Shortcut {
    /// The tensor that is in memory: of a deferred batch norm its input.
    pub(super) fn read(self) -> TensorId {
        self.deferred.map_or(self.tensor, |norm| norm.input)
    }
}

/// A batch norm whose application is left to another operation.
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
    /// Right after its convolution.
    AfterConv,
    /// In its convolution's kernel.
    Conv,
    /// Nowhere: the batch norm is frozen. It normalises with the running statistics, and its parameters have no gradients.
    Frozen,
}

/// Where a batch norm is applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NormForward {
    /// Here.
    Here,
    /// In the addition that reads it, in training and evaluation.
    InShortcut,
    /// In the convolution that alone reads it; in evaluation here.
    InConv,
    /// In the convolution after it, which also writes its output; in evaluation here.
    InNextConv,
}

impl FusedOp {
    /// The activation that it produces.
    pub(super) fn output(&self) -> TensorId {
        match *self {
            FusedOp::Conv(Conv { output, .. })
            | FusedOp::Norm(Norm { output, .. })
            | FusedOp::Relu { output, .. }
            | FusedOp::Add { output, .. }
            | FusedOp::MaxPool { output, .. }
            | FusedOp::GlobalAveragePool { output, .. }
            | FusedOp::Linear { output, .. }
            | FusedOp::Redistribute { output, .. }
            | FusedOp::Halo { output, .. }
            | FusedOp::MeanOfRows { output, .. } => output,
        }
    }

    /// The activations that it reads in an evaluation, where only shortcuts' batch norms are deferred.
    pub(super) fn reads(&self) -> Vec<TensorId> {
        match *self {
            FusedOp::Norm(Norm { forward: NormForward::InShortcut, .. }) => Vec::new(),
            FusedOp::Norm(Norm { input, shortcut, .. }) => {
                std::iter::once(input).chain(shortcut.map(Shortcut::read)).collect()
            }
            FusedOp::Add { branch, shortcut, .. } => vec![branch, shortcut],
            FusedOp::Conv(Conv { input, .. })
            | FusedOp::Relu { input, .. }
            | FusedOp::MaxPool { input, .. }
            | FusedOp::GlobalAveragePool { input, .. }
            | FusedOp::Linear { input, .. }
            | FusedOp::Redistribute { input, .. }
            | FusedOp::Halo { input, .. }
            | FusedOp::MeanOfRows { input, .. } => vec![input],
        }
    }
}

/// Decides what of `network` is fused, for an engine that has `capabilities`.
pub(super) fn fuse(network: &Network, capabilities: &Capabilities) -> Vec<FusedOp> {
    let capabilities = match network.frozen_norm {
        true => capabilities.for_frozen_norm(),
        false => *capabilities,
    };
    let mut ops = around_norm::fuse(network, capabilities);
    if capabilities.wgmma {
        across_convolutions::fuse(network, &mut ops);
    }
    if capabilities.one_sum_buffer {
        take_statistics_early(&mut ops);
    }
    ops
}

/// How often `tensor` is read: `x + x` reads x twice.
fn reads(network: &Network, tensor: TensorId) -> usize {
    network.ops.iter().flat_map(Op::inputs).filter(|input| *input == tensor).count()
}

/// Moves statistics to right after the convolution where the batch norm does not follow it.
fn take_statistics_early(ops: &mut [FusedOp]) {
    for at in 0..ops.len() {
        let next = ops.get(at + 1).map(|op| match op {
            FusedOp::Norm(norm) => Some(norm.input),
            _ => None,
        });
        let FusedOp::Conv(Conv {
            output,
            norm_after: Some(after),
            forward: ConvForward::Plain { early_statistics },
            ..
        }) = &mut ops[at]
        else {
            continue;
        };
        if next == Some(Some(*output)) {
            continue;
        }
        *early_statistics = true;
        let after = *after;
        if let Some(norm) = norm_mut(ops, after) {
            norm.statistics = StatisticsIn::AfterConv;
        }
    }
}

/// Batch norm number `norm`.
fn norm_mut(ops: &mut [FusedOp], norm: usize) -> Option<&mut Norm> {
    ops.iter_mut().find_map(|op| match op {
        FusedOp::Norm(found) if found.norm == norm => Some(found),
        _ => None,
    })
}
