//! The end of a bottleneck block fused with the next block's first convolution; see `block_end.cu`.

use super::{
    Arg, CONTROL, Geometry, Kernel, NormForward, NormSite, Operand, Ops, Reduce, Shortcut, kernel,
    norm::shape_args,
    through::{ROW_PADDING, TILE_ROWS},
};
use crate::fuse::{EXPANDED, REDUCED};

impl Ops {
    /// `p` is the batch norm at the end of the block. Computes its output y = relu(scale x + bias + shortcut), T `[rows, 256]`, and the
    /// ReLU's mask. An earlier kernel must have computed scale and bias, and the shortcut must not be [`Shortcut::None`]. Also computes z,
    /// T `[rows, 64]`, a 1x1 convolution of y with `weights`, T `[64, 256]`. Like [`Ops::norm_statistics`], computes the statistics of the
    /// batch norm `after`, which reads z. `reduce` says how the sums are reduced.
    pub(in crate::cuda) fn block_end(
        &self,
        p: NormForward,
        weights: Operand,
        z: Operand,
        after: NormSite,
        reduce: Reduce,
    ) -> Kernel {
        let blocks = p.shape.rows().div_ceil(TILE_ROWS).clamp(1, self.multiprocessors);
        let mut args = [p.x, p.site.scale, p.site.bias].map(Arg::In).to_vec();
        args.extend(p.shortcut.args());
        args.extend([Arg::Out(p.y), Arg::Out(p.mask), Arg::In(weights), Arg::Out(z)]);
        let [control, pixels, rows, _] = shape_args(CONTROL, p.shape);
        args.extend([control, pixels, rows, Arg::Out(self.partials()), self.counters()]);
        args.extend(after.forward_args(reduce));
        args.extend(reduce.args());
        let weight_values = REDUCED * EXPANDED;
        // One tile of y, one of z with padded rows, two of x and two of the shortcut.
        let tile_values = TILE_ROWS * (EXPANDED + (REDUCED + ROW_PADDING) + 2 * EXPANDED + 2 * EXPANDED);
        // Scale and bias of x and of the shortcut, in float32.
        let coefficient_bytes = 4 * EXPANDED * 4;
        // 1024 bytes to align the tiles.
        let shared_bytes =
            1024 + (weight_values + tile_values) * self.dtype.size() as u32 + coefficient_bytes;
        let geometry = Geometry { grid: [blocks, 1, 1], block: [8, 64, 1], cluster: 1, shared_bytes };
        let name = match p.shortcut {
            Shortcut::Norm { .. } => "block_end_add_norm",
            Shortcut::Plain(_) | Shortcut::None => "block_end_add",
        };
        kernel(name, geometry, args)
    }
}
