//! Batch norm backward that also computes its incoming gradient: the gradient of the next 1x1 convolution's input; see `norm_through.cu`.

use super::{Arg, Geometry, Kernel, NormBackward, Operand, Ops, Shape, kernel, norm::shape_args};

/// Rows of a tile in this kernel, `bottleneck.cu`, `bottleneck_forward.cu` and `block_end.cu`.
pub(in crate::cuda) const TILE_ROWS: u32 = 64;
/// Channels of a tile of this kernel.
pub(in crate::cuda) const TILE_CHANNELS: u32 = 256;
/// Padding, in values, of a product's rows in shared memory, which puts rows that a warp reads together into different banks.
pub(in crate::cuda) const ROW_PADDING: u32 = 8;

/// The gradient of a block's output, as `dy x weights + added`: `dy` `[rows, inner]` and `weights` `[inner, channels]` are of
/// the next block's first convolution, and `added` is the shortcut's gradient.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct OutputGradient {
    pub(in crate::cuda) dy: Operand,
    pub(in crate::cuda) weights: Operand,
    pub(in crate::cuda) inner: u32,
    /// May be absent.
    pub(in crate::cuda) added: Operand,
    /// The mask of the ReLU at the block's end.
    pub(in crate::cuda) mask: Operand,
}

impl Ops {
    /// As [`Ops::norm_backward_sums`], but with `gradient` instead of `p.gradient`; dz must be present. Traffic: dy a few
    /// times, mostly from the L2 cache.
    pub(in crate::cuda) fn norm_backward_through(&self, p: NormBackward, gradient: OutputGradient) -> Kernel {
        let OutputGradient { dy, weights, inner, added, mask } = gradient;
        let mut args = vec![Arg::In(p.x), Arg::In(dy), Arg::In(weights), Arg::U32(inner)];
        args.extend([Arg::In(added), Arg::In(mask), Arg::Out(p.dz)]);
        args.extend(shape_args(p.control, p.shape));
        args.extend([Arg::Out(self.partials()), self.counters()]);
        args.extend(p.site.backward_args(p.accumulate, p.reduce));
        args.extend(p.reduce.args());
        kernel("norm_backward_sums_through", self.tiles(p.shape, inner), args)
    }

    /// One block per multiprocessor, with columns of the weights, a tile of dy and a tile of the product in shared memory.
    fn tiles(&self, shape: Shape, inner: u32) -> Geometry {
        let values = inner * (TILE_CHANNELS + TILE_ROWS) + TILE_ROWS * (TILE_CHANNELS + ROW_PADDING);
        // 1024 bytes to align the tiles.
        let shared_bytes = 1024 + values * self.dtype.size() as u32;
        let columns = shape.channels / TILE_CHANNELS;
        let max_blocks = (self.multiprocessors / columns).max(1);
        let blocks = shape.rows().div_ceil(TILE_ROWS).clamp(1, max_blocks);
        Geometry { grid: [blocks, columns, 1], block: [32, 16, 1], cluster: 1, shared_bytes }
    }
}
