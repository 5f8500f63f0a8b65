//! Fusion across 1x1 convolutions, with kernels that have their own matrix multiplication. It saves writes and reads of
//! the largest tensors of a bottleneck network.
//!
//! Which convolutions are fused depends only on the network and the floating-point format, never on measurements: ranks
//! that synchronise statistics must reach the same batch norms in the same order.

use super::{
    Conv, ConvBackward, ConvForward, FusedOp, Norm, NormForward, StatisticsIn, count_reads, norm_mut,
};
use crate::net::{Network, TensorId};

/// Channels on the two sides of the convolutions that are fused in both passes. `bottleneck.cu`, `bottleneck_forward.cu`
/// and `block_end.cu` keep the weights of such a convolution in shared memory.
pub(crate) const REDUCED: u32 = 64;
pub(crate) const EXPANDED: u32 = 256;

/// Whether `norm_through.cu` can compute the dgrad of a 1x1 convolution: the weights for 256 input channels must fit in
/// shared memory.
fn dgrad_fits(inputs: u32, outputs: u32) -> bool {
    matches!(outputs, 64 | 128 | 256) && inputs.is_multiple_of(256)
}

pub(super) fn fuse(network: &Network, ops: &mut [FusedOp]) {
    for index in 0..ops.len() {
        let FusedOp::Conv(conv) = &ops[index] else { continue };
        if !conv.is_pointwise() {
            continue;
        }
        match (conv.shape.in_c as u32, conv.shape.out_c as u32) {
            (REDUCED, EXPANDED) => fuse_with_norms(network, ops, index),
            (inputs, outputs) => {
                if (inputs, outputs) == (EXPANDED, REDUCED) {
                    fuse_with_block_end(ops, index);
                }
                if dgrad_fits(inputs, outputs) {
                    fuse_dgrad_with_norm(network, ops, index);
                }
            }
        }
    }
}

fn conv_at(ops: &[FusedOp], index: usize) -> Option<&Conv> {
    match &ops[index] {
        FusedOp::Conv(conv) => Some(conv),
        _ => None,
    }
}

/// The batch norm whose output, after all fused operations, is `tensor`.
fn norm_of(ops: &[FusedOp], tensor: TensorId) -> Option<&Norm> {
    ops.iter().find_map(|op| match op {
        FusedOp::Norm(norm) if norm.output == tensor => Some(norm),
        _ => None,
    })
}

/// Fuses a convolution 64 -> 256 with the batch norms on both sides.
fn fuse_with_norms(network: &Network, ops: &mut [FusedOp], index: usize) {
    let Some(&Conv { input, output, norm_after: Some(after), .. }) = conv_at(ops, index) else { return };
    let Some(norm) = norm_mut(ops, after) else { return };
    // The kernel reads the gradient of the ReLU's input, which is kept only for a batch norm with a shortcut.
    if (norm.relu && norm.shortcut.is_none()) || count_reads(network, output) != 1 {
        return;
    }
    norm.backward_in_conv = true;
    norm.statistics = StatisticsIn::Conv;
    let norm_before = norm_of(ops, input)
        .filter(|norm| {
            norm.relu && !norm.pooled && norm.shortcut.is_none() && count_reads(network, input) == 1
        })
        .map(|norm| norm.norm);
    if let Some(norm) = norm_before.and_then(|before| norm_mut(ops, before)) {
        norm.forward = NormForward::InConv;
    }
    if let FusedOp::Conv(conv) = &mut ops[index] {
        conv.forward = ConvForward::WithNorms { norm_before };
        conv.backward = ConvBackward::WithNorms { norm_before };
    }
}

/// Fuses a convolution 256 -> 64 with the end of the preceding block.
fn fuse_with_block_end(ops: &mut [FusedOp], index: usize) {
    let Some(&Conv { input, norm_after: Some(after), .. }) = conv_at(ops, index) else { return };
    let Some(FusedOp::Norm(end)) = ops[..index].last_mut() else { return };
    if end.output != input || !end.relu || end.shortcut.is_none() {
        return;
    }
    end.forward = NormForward::InConvAndStored;
    let block_end = end.norm;
    if let Some(norm) = norm_mut(ops, after) {
        norm.statistics = StatisticsIn::Conv;
    }
    if let FusedOp::Conv(conv) = &mut ops[index] {
        conv.forward = ConvForward::WithBlockEnd { block_end };
    }
}

/// Moves the dgrad of a block's first convolution into the batch norm at the end of the preceding block.
fn fuse_dgrad_with_norm(network: &Network, ops: &mut [FusedOp], index: usize) {
    let Some(&Conv { input, .. }) = conv_at(ops, index) else { return };
    let is_block_end =
        norm_of(ops, input).is_some_and(|norm| norm.relu && !norm.pooled && norm.shortcut.is_some());
    // If two convolutions read the tensor, one of the two gradients would have to be stored.
    let pointwise_readers = ops
        .iter()
        .filter(|op| matches!(op, FusedOp::Conv(conv) if conv.input == input && conv.is_pointwise()))
        .count();
    if !is_block_end || pointwise_readers != 1 || count_reads(network, input) > 2 {
        return;
    }
    if let FusedOp::Conv(conv) = &mut ops[index] {
        conv.backward = ConvBackward::DgradInNorm;
    }
}
