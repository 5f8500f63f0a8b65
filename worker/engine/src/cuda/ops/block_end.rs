//! The end of a bottleneck block fused with the next block's first convolution; see `block_end.cu`.

use super::{
    Arg, Geometry, Kernel, NormSite, Operand, Ops, Reduce, Shape, Shortcut, kernel,
    norm::shape_args,
    through::{ROW_PADDING, TILE_ROWS},
};
use crate::fuse::{EXPANDED, REDUCED};

/// y = relu(scale x + bias + shortcut), and z, a 1x1 convolution of y.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct BlockEnd {
    /// T `[rows, 256]`.
    pub(in crate::cuda) x: Operand,
    /// The batch norm of x, whose scale and bias must have been computed.
    pub(in crate::cuda) site: NormSite,
    /// Must not be [`Shortcut::None`].
    pub(in crate::cuda) shortcut: Shortcut,
    pub(in crate::cuda) y: Operand,
    /// One bit per value of y: y > 0.
    pub(in crate::cuda) mask: Operand,
    /// T `[64, 256]`.
    pub(in crate::cuda) weights: Operand,
    /// T `[rows, 64]`.
    pub(in crate::cuda) z: Operand,
    pub(in crate::cuda) control: Operand,
    pub(in crate::cuda) shape: Shape,
    /// The batch norm that reads z, and how its sums are reduced.
    pub(in crate::cuda) after: NormSite,
    pub(in crate::cuda) reduce: Reduce,
}

impl Ops {
    /// Computes y, the mask, z, and z's statistics as [`Ops::norm_statistics`] does. Traffic: x, the shortcut, y, the mask
    /// and z once.
    pub(in crate::cuda) fn block_end(&self, p: BlockEnd) -> Kernel {
        let blocks = p.shape.rows().div_ceil(TILE_ROWS).clamp(1, self.multiprocessors);
        let mut args = [p.x, p.site.scale, p.site.bias].map(Arg::In).to_vec();
        args.extend(p.shortcut.args());
        args.extend([Arg::Out(p.y), Arg::Out(p.mask), Arg::In(p.weights), Arg::Out(p.z)]);
        let [control, pixels, rows, _] = shape_args(p.control, p.shape);
        args.extend([control, pixels, rows, Arg::Out(self.partials()), self.counters()]);
        args.extend(p.after.forward_args(p.reduce));
        args.extend(p.reduce.args());
        // The weights; one tile each of y and z; two tiles each of x and the shortcut; coefficients.
        let values = REDUCED * EXPANDED + TILE_ROWS * (EXPANDED + REDUCED + ROW_PADDING + 2 * 2 * EXPANDED);
        let shared_bytes = 1024 + values * self.dtype.size() as u32 + 4 * EXPANDED * 4;
        let geometry = Geometry { grid: [blocks, 1, 1], block: [8, 64, 1], cluster: 1, shared_bytes };
        let name = match p.shortcut {
            Shortcut::Norm { .. } => "block_end_add_norm",
            Shortcut::Plain(_) | Shortcut::None => "block_end_add",
        };
        kernel(name, geometry, args)
    }
}
