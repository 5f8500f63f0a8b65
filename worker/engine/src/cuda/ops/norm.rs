//! Batch normalisation with the shortcut's addition and the ReLU; see `norm_forward.cu`, `norm_backward.cu`.
//!
//! There are two variants, chosen by size ([`Ops::one_launch_geometry`]). For small activations, one launch computes the statistics and
//! applies them: a cluster of at most 8 blocks owns 16 or 32 channels and keeps its rows in registers or the L1 cache. Otherwise there
//! are two launches, each limited by memory bandwidth.

use super::{Arg, Geometry, Kernel, Operand, Ops, in_flight, kernel, plain};
use lockstep_comm::nccl;

mod backward;
mod forward;

pub(in crate::cuda) use backward::{Gradient, NormBackward};
pub(in crate::cuda) use forward::NormForward;

/// The shape of an activation, which has pictures x pixels rows.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct Shape {
    pub(in crate::cuda) pictures: u32,
    /// Pixels of one picture: height x width.
    pub(in crate::cuda) pixels: u32,
    /// A multiple of 8.
    pub(in crate::cuda) channels: u32,
}

impl Shape {
    pub(super) fn rows(self) -> u32 {
        self.pictures * self.pixels
    }
}

/// One batch norm's memory: float32, one value per channel. All operands are multiples of 16 bytes.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct NormSite {
    pub(in crate::cuda) gamma: Operand,
    pub(in crate::cuda) beta: Operand,
    /// May be absent: the running statistics are then not updated.
    pub(in crate::cuda) running_mean: Operand,
    pub(in crate::cuda) running_var: Operand,
    /// Share of a new batch in the running statistics, 0 to 1.
    pub(in crate::cuda) running_momentum: f32,
    /// Mean of the batch; written by the forward pass, read by the backward pass.
    pub(in crate::cuda) mean: Operand,
    /// 1 / standard deviation of the batch; written by the forward pass, read by the backward pass.
    pub(in crate::cuda) inv_std: Operand,
    /// y = scale x + bias. The statistics kernels write both; the kernels that apply the batch norm and the backward pass read them.
    pub(in crate::cuda) scale: Operand,
    pub(in crate::cuda) bias: Operand,
    /// Gradients of gamma and beta: sums over this rank's pictures, even if statistics are synchronised.
    pub(in crate::cuda) dgamma: Operand,
    pub(in crate::cuda) dbeta: Operand,
    /// Coefficients of the backward pass: dx = scale g + slope x + offset.
    pub(in crate::cuda) slope: Operand,
    pub(in crate::cuda) offset: Operand,
}

/// How a rank's channel sums are reduced.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) enum Reduce {
    /// Not reduced, because statistics are those of this rank's pictures.
    Local,
    /// The kernel stores the sums, float32 `[2, C]`, in `sums` and ends; `norm_finish` or `norm_backward_finish` continues from there.
    StoreSums { sums: Operand },
    /// The kernel sums over ranks through peer memory (`peers.cu`). `peers` is `struct Peers` in device memory. `at` is this batch norm's byte
    /// offset in every rank's exchange buffer, where it has 2 copies x ranks x 2 C values of 8 bytes. `sequence` is `u32 [2 C]`. Buffers
    /// and sequences are zero at first and are never reset. The forward and the backward pass of a batch norm may share them. All ranks must
    /// launch the same shapes.
    Exchange { peers: Operand, at: u64, sequence: Operand },
}

impl Reduce {
    /// Whether the kernel waits for other ranks.
    fn waits_for_ranks(self) -> bool {
        matches!(self, Reduce::Exchange { .. })
    }

    /// Whether the kernel stores the sums and ends.
    fn stores_sums(self) -> bool {
        matches!(self, Reduce::StoreSums { .. })
    }

    pub(super) fn args(self) -> [Arg; 5] {
        const NONE: Operand = Operand::NONE;
        let (mode, peers, at, sequence, sums) = match self {
            Reduce::Local => (0, NONE, 0, NONE, NONE),
            Reduce::StoreSums { sums } => (1, NONE, 0, NONE, sums),
            Reduce::Exchange { peers, at, sequence } => (2, peers, at, sequence, NONE),
        };
        [Arg::U32(mode), Arg::In(peers), Arg::U64(at), Arg::InOut(sequence), Arg::Out(sums)]
    }
}

/// The tensor that is added before the ReLU.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) enum Shortcut {
    None,
    /// T, with the shape of y.
    Plain(Operand),
    /// Output of a projection's convolution, and scale and bias (float32 per channel) of its batch norm.
    Norm {
        x: Operand,
        scale: Operand,
        bias: Operand,
    },
}

impl Shortcut {
    pub(super) fn args(self) -> [Arg; 3] {
        let (x, scale, bias) = match self {
            Shortcut::None => (Operand::NONE, Operand::NONE, Operand::NONE),
            Shortcut::Plain(x) => (x, Operand::NONE, Operand::NONE),
            Shortcut::Norm { x, scale, bias } => (x, scale, bias),
        };
        [Arg::In(x), Arg::In(scale), Arg::In(bias)]
    }
}

impl NormSite {
    pub(in crate::cuda) fn channels(&self) -> usize {
        self.scale.bytes / size_of::<f32>()
    }

    pub(super) fn forward_args(&self, reduce: Reduce) -> [Arg; 9] {
        let [gamma, beta] = [self.gamma, self.beta].map(Arg::In);
        let [mean, var] = [self.running_mean, self.running_var].map(Arg::InOut);
        let [batch_mean, inv_std, scale, bias] =
            [self.mean, self.inv_std, self.scale, self.bias].map(Arg::Out);
        let momentum = Arg::F32(self.running_momentum);
        let args = [gamma, beta, mean, var, batch_mean, inv_std, scale, bias, momentum];
        if reduce.stores_sums() { args.map(Arg::unused) } else { args }
    }

    pub(super) fn backward_args(&self, accumulate: bool, reduce: Reduce) -> [Arg; 9] {
        let [mean, inv_std, scale, bias] = [self.mean, self.inv_std, self.scale, self.bias].map(Arg::In);
        let [dgamma, dbeta] = [self.dgamma, self.dbeta].map(|gradient| Arg::out(gradient, accumulate));
        let between = [self.slope, self.offset].map(Arg::Out);
        let [slope, offset] = if reduce.stores_sums() { between.map(Arg::unused) } else { between };
        [mean, inv_std, scale, bias, dgamma, dbeta, Arg::U32(accumulate.into()), slope, offset]
    }
}

/// The arguments that describe an activation's shape: `control`, pixels, rows, channels.
pub(super) fn shape_args(control: Operand, shape: Shape) -> [Arg; 4] {
    [Arg::In(control), Arg::U32(shape.pixels), Arg::U32(shape.rows()), Arg::U32(shape.channels)]
}

/// Maximum number of rows per thread in the one-launch variant. With more rows, two launches on all multiprocessors
/// are faster: on an H200 ResNet-50's step at 224 pixels and batch 32 takes 5.13 ms with 4 or 8 here and 5.43 ms with 16.
const SMALL_ROWS_PER_THREAD: u32 = 4;
/// Maximum number of groups of 8 channels per block in the one-launch variant.
pub(in crate::cuda) const SMALL_GROUPS: u32 = 4;

impl Ops {
    /// Geometry of the one-launch variant, if that variant is faster.
    ///
    /// A cluster of `k` blocks owns 16 channels (32 if there would be too many blocks); a thread has
    /// rows / (256 k) rows. If the kernel waits for other ranks (`waits_for_ranks`), all clusters have to be resident at once. The grid
    /// then has at most one block per multiprocessor, without the multiprocessors for NCCL's blocks.
    pub(in crate::cuda) fn one_launch_geometry(
        &self,
        shape: Shape,
        waits_for_ranks: bool,
    ) -> Option<Geometry> {
        let (rows, groups) = (shape.rows(), shape.channels / 8);
        let reserved_blocks = if waits_for_ranks { nccl::MAX_BLOCKS } else { 0 };
        let max_blocks = self.multiprocessors.saturating_sub(reserved_blocks);
        let x = match groups {
            0 => return None,
            1 => 1,
            _ if groups.div_ceil(2) <= max_blocks => 2,
            _ => SMALL_GROUPS,
        };
        let (columns, max_y) = (groups.div_ceil(x), 512 / x);
        let rows_per_thread = |k: u32| rows.div_ceil(max_y * k);
        let mut k = 1;
        while self.has_clusters
            && k < 8
            && rows_per_thread(k) > in_flight(self.dtype)
            && columns * k * 2 <= max_blocks
        {
            k *= 2;
        }
        if rows == 0 || columns * k > max_blocks || rows_per_thread(k) > SMALL_ROWS_PER_THREAD {
            return None;
        }
        // At least two threads per channel, which finish a block's sums.
        let y = rows.div_ceil(k).next_power_of_two().clamp(32 / x, max_y).max(16);
        Some(Geometry { cluster: k, ..plain([k, columns, 1], [x, y, 1]) })
    }
}

/// Blocks of 64 channels, two threads each, for kernels that only finish sums.
fn per_channel(channels: u32) -> Geometry {
    plain([1, channels.div_ceil(64), 1], [8, 16, 1])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::dtype::DType;

    #[test]
    fn kernels_that_wait_for_other_ranks_leave_multiprocessors_for_nccl() {
        // A small Ampere GPU, A100, H100 PCIe, H100 SXM and H200.
        for (multiprocessors, capability) in [(46, 86), (108, 80), (114, 90), (132, 90)] {
            let ops = Ops::new(DType::F16, multiprocessors, capability);
            let mut max_blocks = 0;
            for channels in (8..=4096).step_by(8) {
                for pixels in [1, 4, 49, 196, 784] {
                    let shape = Shape { pictures: 32, pixels, channels };
                    let blocks = |g: Geometry| g.grid.iter().product::<u32>();
                    max_blocks = max_blocks.max(ops.one_launch_geometry(shape, true).map_or(0, blocks));
                }
            }
            assert!(
                max_blocks > 0 && max_blocks + nccl::MAX_BLOCKS <= multiprocessors,
                "{max_blocks} of {multiprocessors}"
            );
        }
    }
}
