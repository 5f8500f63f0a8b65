//! What is fused with a batch norm: the addition and the ReLU after it, the batch norm of a projection shortcut, a pooling.

use super::{
    Capabilities, Conv, ConvBackward, ConvForward, DeferredNorm, FusedOp, Norm, NormForward, Shortcut,
    StatisticsIn, reads,
};
use crate::net::{Network, Op, TensorId};
use lockstep_kernels::conv::ConvShape;

/// The operations of `network`, each batch norm with what is fused with it.
pub(super) fn fuse(network: &Network, capabilities: Capabilities) -> Vec<FusedOp> {
    Combined::new(network, capabilities).ops
}

/// The operations that read `tensor`.
fn readers(network: &Network, tensor: TensorId) -> Vec<&Op> {
    network.ops.iter().filter(|op| op.inputs().contains(&tensor)).collect()
}

/// The number of the batch norm that takes the statistics of `tensor`.
fn norm_after(network: &Network, tensor: TensorId) -> Option<usize> {
    if network.frozen_norm {
        return None;
    }
    let mut norms = network.ops.iter().filter(|op| matches!(op, Op::BatchNorm { .. }));
    norms.position(|op| op.inputs() == [tensor])
}

/// The operations so far.
struct Combined<'a> {
    network: &'a Network,
    can: Capabilities,
    ops: Vec<FusedOp>,
    norms: usize,
    /// Batch norms that wait for the addition that they are fused with.
    waiting: Vec<Norm>,
    /// ReLUs that are part of a batch norm, by their output.
    relus: Vec<TensorId>,
}

impl<'a> Combined<'a> {
    fn new(network: &'a Network, can: Capabilities) -> Self {
        let (ops, waiting, relus) = (Vec::new(), Vec::new(), Vec::new());
        let mut combined = Self { network, can, ops, norms: 0, waiting, relus };
        for op in &network.ops {
            combined.push(op);
        }
        combined
    }

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
            Op::BatchNorm { ref name, input, output } => return self.norm(name, input, output),
            Op::Relu { output, .. } if self.relus.contains(&output) => return,
            Op::Relu { input, output } => FusedOp::Relu { input, output },
            Op::Add { branch, shortcut, output } => {
                match self.waiting.iter().position(|norm| norm.output == branch) {
                    Some(at) => return self.block_end(at, shortcut, output),
                    None => FusedOp::Add { branch, shortcut, output },
                }
            }
            Op::MaxPool { input, output, kernel, stride, padding } => {
                if (kernel, stride, padding) == (3, 2, 1) && self.pool(input, output) {
                    return;
                }
                FusedOp::MaxPool { input, output, kernel, stride, padding }
            }
            Op::GlobalAveragePool { input, output } => {
                let block_end = |op: &FusedOp| matches!(op, FusedOp::Norm(norm) if norm.output == input && norm.relu && norm.shortcut.is_some());
                let gradient_in_norm = self.can.norm_average_pool
                    && reads(self.network, input) == 1
                    && self.ops.iter().any(block_end);
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

    fn norm(&mut self, name: &str, input: TensorId, output: TensorId) {
        let from_relu =
            self.ops.iter().any(|op| matches!(op, FusedOp::Relu { output, .. } if *output == input));
        let norm = Norm {
            name: name.into(),
            norm: self.norms,
            input,
            output,
            shortcut: None,
            relu: false,
            pooled: false,
            statistics: match self.network.frozen_norm {
                true => StatisticsIn::Frozen,
                false => StatisticsIn::Norm,
            },
            forward: NormForward::Here,
            backward_in_conv: false,
            // A ReLU by itself finds in its output what it let through.
            overwrites_input: reads(self.network, input) == 1 && input != self.network.input() && !from_relu,
        };
        self.norms += 1;
        match readers(self.network, output)[..] {
            [Op::Add { branch, shortcut, .. }]
                if self.can.norm_add_relu && *branch == output && shortcut != branch =>
            {
                self.waiting.push(norm);
            }
            _ => self.push_norm(norm),
        }
    }

    /// A batch norm with the addition that it waited for.
    fn block_end(&mut self, at: usize, tensor: TensorId, output: TensorId) {
        let norm = self.waiting.swap_remove(at);
        let deferred = if self.can.shortcut_norm { self.defer(tensor) } else { None };
        self.push_norm(Norm { shortcut: Some(Shortcut { tensor, deferred }), output, ..norm });
    }

    /// Adds a batch norm, and the ReLU that alone reads it.
    fn push_norm(&mut self, mut norm: Norm) {
        if let [Op::Relu { output, .. }] = readers(self.network, norm.output)[..]
            && self.can.norm_add_relu
        {
            self.relus.push(*output);
            (norm.relu, norm.output) = (true, *output);
        }
        self.ops.push(FusedOp::Norm(norm));
    }

    /// Leaves the batch norm that makes `tensor` to the addition that alone reads it, if there is nothing else to it.
    fn defer(&mut self, tensor: TensorId) -> Option<DeferredNorm> {
        let alone = reads(self.network, tensor) == 1;
        self.ops.iter_mut().find_map(|op| match op {
            FusedOp::Norm(norm)
                if alone && norm.output == tensor && !norm.relu && norm.shortcut.is_none() =>
            {
                norm.forward = NormForward::InShortcut;
                Some(DeferredNorm { norm: norm.norm, input: norm.input })
            }
            _ => None,
        })
    }

    /// Has the batch norm right before a max pooling do that, too; whether it can.
    fn pool(&mut self, input: TensorId, output: TensorId) -> bool {
        let alone = reads(self.network, input) == 1;
        match self.ops.last_mut() {
            Some(FusedOp::Norm(norm))
                if self.can.norm_max_pool
                    && alone
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
