//! The kernels of `worker/kernels/` as operations: each method works out a launch and starts it.
//!
//! Activations are NHWC in the format that the kernels were compiled for, `T` below, channels a multiple of
//! 8, rows = pictures x pixels. Everything is deterministic: sums are taken in an order that depends on
//! shapes alone. Nothing depends on a host value that changes from step to step, so a captured sequence of
//! these calls can be replayed; what changes is in the [control block](self#control).
//!
//! # Control
//! Device memory: `u32 valid, 0; f32 stat_pictures, grad_scale, lr; u32 0, 0, 0`, then `u32` index, draw and
//! label of each of the batch's pictures. `valid` real pictures come first; the rest is padding, which
//! statistics, losses and gradients leave out (its gradients are zeros). `stat_pictures` is how many
//! pictures batch norm's statistics are of (over all ranks when they are synchronised), `grad_scale`
//! 1 / pictures of the whole step.
//!
//! # Pointers
//! 0 stands for "absent" where a field says that it may be.

mod adam;
mod block_end;
mod bottleneck;
mod elementwise;
mod input;
mod loss;
mod norm;
mod optimizer;
mod pool;
mod step;
mod through;

pub(super) use adam::{AdamW, Lamb, Moments};
pub(super) use block_end::BlockEnd;
pub(super) use bottleneck::{Before, Bottleneck, BottleneckForward};
pub(super) use elementwise::PlainPool;
pub(super) use input::{Gather, PadChannels, ScaleTable, Scaling, Which};
pub(super) use loss::{BiasedLogits, CrossEntropy};
pub(super) use norm::{Gradient, NormBackward, NormFold, NormForward, NormSite, Reduce, Shape, Shortcut};
pub(super) use optimizer::{Flat, GradientNorm, Gradients, LarsRates, Rates, Sgd, Update};
pub(super) use pool::{GlobalAverage, MaxPool, NormBackwardMaxPool, Pool};
pub(super) use step::{Fetch, Record};
pub(super) use through::Through;

use super::{
    device::{Ptr, Stream},
    error::CudaError,
    kernels::{Arg, DType, Geometry, Kernels},
    profile::Profile,
};

/// Counters at the start of the scratch memory, `u32` each: one a column of channels, then these two.
const COUNTERS: u64 = 1024;
const LOSS_COUNTER: u64 = 1022;
const NORM_COUNTER: u64 = 1023;

/// Starts operations. One stream at a time: they share scratch memory.
pub(super) struct Ops {
    kernels: Kernels,
    scratch: Ptr,
    clusters: bool,
}

impl Ops {
    /// `scratch`: [`Ops::scratch_bytes`] of device memory, zeros at first, for this alone. `clusters`:
    /// whether the device has thread block clusters (compute capability 9.0 and up).
    pub(super) fn new(kernels: Kernels, scratch: Ptr, clusters: bool) -> Self {
        Self { kernels, scratch, clusters }
    }

    /// Scratch memory for `pictures` a micro-batch, classes padded to `padded`, and `segments` parameters.
    pub(super) fn scratch_bytes(multiprocessors: u32, pictures: u32, padded: u32, segments: u32) -> u64 {
        let sums = u64::from(multiprocessors.max(256)) * 512 * 4;
        let loss = u64::from(loss::blocks(pictures)) * (16 + u64::from(padded) * 4);
        let norms = u64::from(segments) * optimizer::NORM_PARTS as u64 * 16;
        COUNTERS * 4 + sums.max(loss).max(norms)
    }

    /// Times calls, if somebody asks.
    pub(super) fn profile(&self) -> &Profile {
        &self.kernels.profile
    }

    fn counters(&self) -> Ptr {
        self.scratch
    }

    fn partials(&self) -> Ptr {
        self.scratch + COUNTERS * 4
    }

    fn counter(&self, number: u64) -> Arg {
        Arg::Ptr(self.scratch + number * 4)
    }

    fn launch(
        &self,
        stream: Stream,
        name: &'static str,
        geometry: Geometry,
        args: &[Arg],
    ) -> Result<(), CudaError> {
        self.kernels.launch(stream, name, geometry, args)
    }

    /// Whether there are kernels that multiply matrices themselves on a GPU of this compute capability.
    pub(super) fn multiplies_matrices(capability: u32, dtype: DType) -> bool {
        Kernels::has_warpgroups(capability) && dtype != DType::F32
    }

    /// Values of a row that one thread has in flight at a time; `IN_FLIGHT` of `numbers.cu`.
    fn in_flight(&self) -> u32 {
        match self.kernels.dtype() {
            DType::F32 => 2,
            DType::F16 | DType::Bf16 => 4,
        }
    }

    /// Blocks of `threads` that walk `rows` of `channels`, at most `per_multiprocessor` on each: (grid, block).
    fn walk(&self, rows: u32, channels: u32, threads: u32, per_multiprocessor: u32) -> Geometry {
        let groups = channels / 8;
        let x = groups.next_power_of_two().clamp(1, 32);
        let (y, columns) = (threads / x, groups.div_ceil(x).max(1));
        let most = (self.kernels.multiprocessors() * per_multiprocessor / columns).max(1);
        plain([rows.div_ceil(y).clamp(1, most), columns, 1], [x, y, 1])
    }

    /// [`Ops::walk`] for kernels that sum over rows: one block a multiprocessor, two rows a thread at least.
    fn sums(&self, rows: u32, channels: u32) -> Geometry {
        self.walk(rows.div_ceil(2), channels, 512, 1)
    }

    /// Blocks of 256 threads for `items` independent ones.
    fn items(&self, items: u64, per_multiprocessor: u32) -> Geometry {
        let most = u64::from(self.kernels.multiprocessors() * per_multiprocessor);
        plain([items.div_ceil(256).clamp(1, most) as u32, 1, 1], [256, 1, 1])
    }
}

/// A launch without a cluster or dynamic shared memory.
fn plain(grid: [u32; 3], block: [u32; 3]) -> Geometry {
    Geometry { grid, block, cluster: 1, shared_bytes: 0 }
}
