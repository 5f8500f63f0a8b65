//! Fusion of a batch norm with the following addition, ReLU and pooling, and with the batch norm of a projection shortcut.

use super::{
    Capabilities, Conv, ConvBackward, ConvForward, DeferredNorm, FusedOp, Norm, NormForward, Shortcut,
    StatisticsIn, count_reads,
};
use crate::net::{Network, Op, TensorId};
use lockstep_kernels::conv::ConvShape;

/// The operations of `network`, with fused batch norms.
pub(super) fn fuse(network: &Network, capabilities: Capabilities) -> Vec<FusedOp> {
    let (ops, waiting, fused_relus) = (Vec::new(), Vec::new(), Vec::new());
    let mut fusion = Fusion { network, capabilities, ops, norm_count: 0, waiting, fused_relus };
    network.ops.iter().for_each(|op| fusion.push(op));
    fusion.ops
}

/// The operations that read `tensor`.
fn readers(network: &Network, tensor: TensorId) -> Vec<&Op> {
    network.ops.iter().filter(|op| op.inputs().contains(&tensor)).collect()
}

/// Index of the batch norm that takes the statistics of `tensor`.
fn norm_after(network: &Network, tensor: TensorId) -> Option<usize> {
    if network.frozen_norm {
        return None;
    }
    let mut norms = network.ops.iter().filter(|op| matches!(op, Op::BatchNorm { .. }));
    norms.position(|op| op.inputs() == [tensor])
}

/// The fused operations so far.
struct Fusion<'a> {
    network: &'a Network,
    capabilities: Capabilities,
    ops: Vec<FusedOp>,
    /// Number of batch norms so far.
    norm_count: usize,
    /// Batch norms that will be fused with a later addition.
    waiting: Vec<Norm>,
    /// Outputs of ReLUs that are fused with a batch norm.
    fused_relus: Vec<TensorId>,
}

impl Fusion<'_> {
    fn push(&mut self, op: &Op) {
        let fused = match *op {
            Op::Conv { ref name, input, output, kernel, stride, padding, groups } => {
                let (from, to) = (self.network.tensors[input], self.network.tensors[output]);
                let (in_h, in_w, in_c, out_c) = (from.height, from.width, from.channels, to.channels);
                let row_padding = self.network.row_padding(input, padding);
                FusedOp::Conv(Conv {
                    name: name.clone(),
                    shape: ConvShape {
                        batch: 1,
                        in_h,
                        in_w,
                        in_c,
                        out_c,
                        kernel,
                        stride,
                        padding,
                        row_padding,
                        groups,
                    },
                    input,
                    output,
                    needs_input_gradient: !self.network.is_pictures(input),
                    norm_after: norm_after(self.network, output),
                    forward: ConvForward::Plain { early_statistics: false },
                    backward: ConvBackward::Plain,
                })
            }
            Op::BatchNorm { ref name, input, output } => return self.push_batch_norm(name, input, output),
            Op::Relu { output, .. } if self.fused_relus.contains(&output) => return,
            Op::Relu { input, output } => FusedOp::Relu { input, output },
            Op::Gelu { ref bias, input, output } => FusedOp::Gelu { bias: bias.clone(), input, output },
            Op::Add { branch, shortcut, output } => {
                match self.waiting.iter().position(|norm| norm.output == branch) {
                    Some(index) => return self.fuse_addition(index, shortcut, output),
                    None => FusedOp::Add { branch, shortcut, output },
                }
            }
            Op::MaxPool { input, output, kernel, stride, padding } => {
                if (kernel, stride, padding) == (3, 2, 1) && self.fuse_max_pool(input, output) {
                    return;
                }
                FusedOp::MaxPool { input, output, kernel, stride, padding }
            }
            Op::GlobalAveragePool { input, output } => {
                let is_block_end = |op: &FusedOp| match op {
                    FusedOp::Norm(norm) => norm.output == input && norm.relu && norm.shortcut.is_some(),
                    _ => false,
                };
                let gradient_in_norm = self.capabilities.norm_average_pool
                    && count_reads(self.network, input) == 1
                    && self.ops.iter().any(is_block_end);
                FusedOp::GlobalAveragePool { input, output, gradient_in_norm }
            }
            Op::Linear { ref name, input, output } => {
                let is_head = output == self.network.logits();
                FusedOp::Linear { name: name.clone(), input, output, is_head }
            }
            Op::Redistribute { input, output } => FusedOp::Redistribute { input, output },
            Op::Halo { input, output, lowest } => FusedOp::Halo { input, output, lowest },
            Op::MeanOfRows { input, output } => FusedOp::MeanOfRows { input, output },
        };
        self.ops.push(fused);
    }

    fn push_batch_norm(&mut self, name: &str, input: TensorId, output: TensorId) {
        let is_from_relu =
            self.ops.iter().any(|op| matches!(op, FusedOp::Relu { output, .. } if *output == input));
        let norm = Norm {
            name: name.into(),
            norm: self.norm_count,
            input,
            output,
            shortcut: None,
            relu: false,
            pooled: false,
            statistics: if self.network.frozen_norm { StatisticsIn::Frozen } else { StatisticsIn::Norm },
            forward: NormForward::Here,
            backward_in_conv: false,
            // The backward pass of a ReLU that is not fused reads the ReLU's output.
            overwrites_input: count_reads(self.network, input) == 1
                && input != self.network.input()
                && !is_from_relu,
        };
        self.norm_count += 1;
        match readers(self.network, output)[..] {
            [Op::Add { branch, shortcut, .. }]
                if self.capabilities.norm_add_relu && *branch == output && shortcut != branch =>
            {
                self.waiting.push(norm);
            }
            _ => self.push_fused_norm(norm),
        }
    }

    fn fuse_addition(&mut self, index: usize, shortcut: TensorId, output: TensorId) {
        let norm = self.waiting.swap_remove(index);
        let deferred = if self.capabilities.shortcut_norm { self.defer(shortcut) } else { None };
        let shortcut = Some(Shortcut { tensor: shortcut, deferred });
        self.push_fused_norm(Norm { shortcut, output, ..norm });
    }

    /// Adds a batch norm, fused with the ReLU that is its only reader.
    fn push_fused_norm(&mut self, mut norm: Norm) {
        if let [Op::Relu { output, .. }] = readers(self.network, norm.output)[..]
            && self.capabilities.norm_add_relu
        {
            self.fused_relus.push(*output);
            (norm.relu, norm.output) = (true, *output);
        }
        self.ops.push(FusedOp::Norm(norm));
    }

    /// Defers the batch norm that produces `tensor` to the addition that reads `tensor`. Returns `None` if `tensor` has other readers,
    /// or if the batch norm is fused already.
    fn defer(&mut self, tensor: TensorId) -> Option<DeferredNorm> {
        let has_one_reader = count_reads(self.network, tensor) == 1;
        self.ops.iter_mut().find_map(|op| match op {
            FusedOp::Norm(norm)
                if has_one_reader && norm.output == tensor && !norm.relu && norm.shortcut.is_none() =>
            {
                norm.forward = NormForward::InShortcut;
                Some(DeferredNorm { norm: norm.norm, input: norm.input })
            }
            _ => None,
        })
    }

    /// Fuses a max pooling with the batch norm directly before it. Returns whether that is possible.
    fn fuse_max_pool(&mut self, input: TensorId, output: TensorId) -> bool {
        let has_one_reader = count_reads(self.network, input) == 1;
        match self.ops.last_mut() {
            Some(FusedOp::Norm(norm))
                if self.capabilities.norm_max_pool
                    && has_one_reader
                    && norm.output == input
                    && norm.relu
                    && norm.shortcut.is_none() =>
            {
                norm.output = output;
                norm.pooled = true;
                true
            }
            _ => false,
        }
    }
}
