//! The kernels of `worker/kernels/` as operations: each method of [`Ops`] returns the launches of one or more kernels. No method accesses a
//! GPU. Activations are NHWC in the kernels' floating-point format, `T` below; channels are a multiple of 8, and rows = pictures x pixels.
//! All kernels are deterministic: sums are taken in an order that depends only on shapes. A captured sequence of launches can be replayed,
//! because arguments do not change between steps. Values that change are in the [control block](self#control).
//!
//! # Control
//! Kernels read a micro-batch's control block (`Control` in `numbers.cu`) in device memory. The first `valid` pictures are real. The other
//! pictures are padding, which statistics and losses ignore, and whose gradients are zeros. `stat_pictures` is the number of pictures in
//! batch norm's statistics, on all ranks if these are synchronised; `grad_scale` is 1 / (pictures of the whole step).
//!
//! # Operands
//! [`Operand::NONE`] means "absent", where a field's documentation allows it. An argument states how its kernel accesses the
//! memory, and the check of a step's commands relies on this statement. Kernels read each
//! input and write each output once, unless a method's documentation says otherwise ("Traffic").

mod adam;
mod block_end;
mod bottleneck;
mod channels;
mod elementwise;
mod input;
mod loss;
mod margin;
mod muon;
mod norm;
mod optimizer;
mod pool;
mod rows;
mod sample;
mod split_loss;
mod step;
mod through;

pub(super) use adam::Moments;
pub(super) use bottleneck::{Bottleneck, BottleneckForward, NormBefore};
pub(super) use channels::ChannelRows;
pub(super) use elementwise::{MAX_ROW_SUM_CHANNELS, PlainPool};
pub(super) use input::{BatchInput, GatherMode, ScaleTable};
pub(super) use loss::{CrossEntropy, LOSS_ROWS};
pub(super) use margin::Cosines;
pub(super) use muon::Muon;
pub(super) use norm::{Gradient, NormBackward, NormForward, NormSite, Reduce, SMALL_GROUPS, Shape, Shortcut};
pub(super) use optimizer::{FlatParameters, Gradients, NORM_PARTS, Rates, Update};
pub(super) use pool::Pool;
pub(super) use rows::{AddRows, TakeRows};
pub(super) use sample::{ParameterRows, SampleClasses};
pub(super) use split_loss::SplitLogits;
pub(super) use through::{OutputGradient, ROW_PADDING, TILE_CHANNELS, TILE_ROWS};

use super::{
    command::{Arg, Geometry, Kernel, Operand, Region},
    dtype::DType,
};

/// Number of `u32` counters at the start of the scratch memory: one per block column (`blockIdx.y`) of a kernel that sums over rows, then
/// one for the loss, and one for norms.
const COUNTERS: usize = 1024;
/// Index of the counter for the loss.
const LOSS_COUNTER: usize = 1022;
/// Index of the counter for norms.
const NORM_COUNTER: usize = 1023;

/// The control block of the current micro-batch.
pub(super) const CONTROL: Operand = Operand::whole(Region::Control);
/// `Scaler` of `optimizer.cu`.
const SCALER: Operand = Operand::whole(Region::Scaler);
/// Loss, number of correct predictions, and number of pictures.
const TOTALS: Operand = Operand::whole(Region::Totals);
/// Number of finished steps: the counter of [`Ops::record`].
const FINISHED_STEPS: Operand = Operand::new(Region::ResultCounter, 0, 4);

/// Number of groups of 8 values, each from a different row, that a thread loads at a time: 64 bytes.
pub(super) fn in_flight(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 2,
        DType::F16 | DType::Bf16 => 4,
    }
}

/// The only compute capability, times 10, with warpgroup matrix multiplication (wgmma).
pub(super) const WGMMA_CAPABILITY: u32 = 90;

/// Computes launches for one kind of GPU. All launches share scratch memory, so launches on two streams must not overlap.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ops {
    dtype: DType,
    multiprocessors: u32,
    has_clusters: bool,
}

impl Ops {
    /// `capability` is the compute capability times 10. GPUs from 9.0 on have thread block clusters.
    pub(super) fn new(dtype: DType, multiprocessors: u32, capability: u32) -> Self {
        Self { dtype, multiprocessors, has_clusters: capability >= 90 }
    }

    /// Bytes of scratch memory for `pictures` pictures per micro-batch, `padded` classes (including padding) and `segments` parameters. The
    /// memory must be zero at first, and only these operations may use it.
    pub(super) fn scratch_bytes(&self, pictures: u32, padded: u32, segments: u32) -> usize {
        // Per block: two float32 sums for each of at most 256 channels; or loss and count (f64), and a float32 bias gradient per class.
        let sums = u64::from(self.multiprocessors.max(256)) * 512 * 4;
        let loss = u64::from(loss::blocks(pictures)) * (16 + u64::from(padded) * 4);
        // Two f64 sums for each part of a parameter.
        let norms = u64::from(segments) * optimizer::NORM_PARTS as u64 * 16;
        COUNTERS * 4 + sums.max(loss).max(norms) as usize
    }

    /// The counters of kernels that sum over rows, and the partial results of blocks.
    pub(super) fn scratch(&self) -> [Operand; 2] {
        [Operand::new(Region::Scratch, 0, LOSS_COUNTER * 4), self.partials()]
    }

    /// The counters with which the blocks of a kernel find out which of them finishes last. They are zero again after each launch.
    fn counters(&self) -> Arg {
        let [counters, _] = self.scratch();
        Arg::InOut(counters)
    }

    /// The counter with this index, for a kernel without block columns.
    fn counter(&self, index: usize) -> Arg {
        Arg::InOut(Operand::new(Region::Scratch, index * 4, 4))
    }

    /// The partial results of blocks, which the block that finishes last adds up.
    pub(super) fn partials(&self) -> Operand {
        Operand::new(Region::Scratch, COUNTERS * 4, usize::MAX - COUNTERS * 4)
    }

    /// Whether a GPU of this compute capability runs kernels with their own matrix multiplication that compute in `dtype`.
    pub(super) fn multiplies_matrices(capability: u32, dtype: DType) -> bool {
        capability == WGMMA_CAPABILITY && dtype != DType::F32
    }

    /// Geometry of a grid-stride loop over `rows` of `channels`, with blocks of `threads` threads, at most `per_multiprocessor` on each
    /// multiprocessor.
    fn grid_stride(&self, rows: u32, channels: u32, threads: u32, per_multiprocessor: u32) -> Geometry {
        let groups = channels / 8;
        let x = groups.next_power_of_two().clamp(1, 32);
        let (y, columns) = (threads / x, groups.div_ceil(x).max(1));
        let max_blocks = (self.multiprocessors * per_multiprocessor / columns).max(1);
        plain([rows.div_ceil(y).clamp(1, max_blocks), columns, 1], [x, y, 1])
    }

    /// [`Ops::grid_stride`] for kernels that sum over rows: one block per multiprocessor, at least two rows per thread.
    fn sum_over_rows(&self, rows: u32, channels: u32) -> Geometry {
        self.grid_stride(rows.div_ceil(2), channels, 512, 1)
    }

    /// Blocks of 256 threads for `items` independent items.
    fn per_item(&self, items: u64, per_multiprocessor: u32) -> Geometry {
        let max_blocks = u64::from(self.multiprocessors * per_multiprocessor);
        plain([items.div_ceil(256).clamp(1, max_blocks) as u32, 1, 1], [256, 1, 1])
    }
}

/// A geometry without a cluster or dynamic shared memory.
fn plain(grid: [u32; 3], block: [u32; 3]) -> Geometry {
    Geometry { grid, block, cluster: 1, shared_bytes: 0 }
}

fn kernel(name: &'static str, geometry: Geometry, args: impl Into<Vec<Arg>>) -> Kernel {
    Kernel { name, geometry, args: args.into() }
}
