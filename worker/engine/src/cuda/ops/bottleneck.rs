//! A bottleneck's expanding convolution fused with the batch norms on both sides; see `bottleneck.cu` and `bottleneck_forward.cu`.

use super::{
    Arg, CONTROL, Geometry, Kernel, NormSite, Operand, Ops, Reduce, Region, Shape, kernel,
    norm::shape_args,
    plain,
    through::{ROW_PADDING, TILE_ROWS},
};
use crate::fuse::{EXPANDED, REDUCED};

const WORKSPACE: Operand = Operand::whole(Region::Workspace);

/// The batch norm and ReLU before the convolution.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct NormBefore {
    pub(in crate::cuda) norm: NormSite,
    /// Whether to add to dgamma and dbeta instead of replacing them.
    pub(in crate::cuda) accumulate: bool,
    pub(in crate::cuda) reduce: Reduce,
}

/// A 1x1 convolution from 64 to 256 channels, backward. Needs a workspace of [`Ops::bottleneck_bytes`] bytes.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct Bottleneck {
    /// T `[rows, 256]`: the convolution's output, which the batch norm `after` reads.
    pub(in crate::cuda) x: Operand,
    /// T `[rows, 256]`: the gradient of the output of `after`, masked by the ReLU if one follows. The sums of `after` must have been
    /// computed.
    pub(in crate::cuda) g: Operand,
    pub(in crate::cuda) after: NormSite,
    /// T `[256, 64]`.
    pub(in crate::cuda) weights: Operand,
    /// T `[rows, 64]`: the convolution's input or, with `before`, the input of that batch norm.
    pub(in crate::cuda) input: Operand,
    /// T `[rows, 64]`: the gradient of the convolution's input, not masked by a ReLU.
    pub(in crate::cuda) dinput: Operand,
    /// T `[256, 64]`.
    pub(in crate::cuda) dweights: Operand,
    pub(in crate::cuda) shape: Shape,
    pub(in crate::cuda) before: Option<NormBefore>,
}

/// A 1x1 convolution from 64 to 256 channels, forward.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct BottleneckForward {
    /// T `[rows, 64]`: the convolution's input or, with `before`, the input of that batch norm.
    pub(in crate::cuda) input: Operand,
    /// The batch norm whose output, after a ReLU, the convolution reads; its scale and bias must have been computed.
    pub(in crate::cuda) before: Option<NormSite>,
    /// T `[256, 64]`.
    pub(in crate::cuda) weights: Operand,
    /// T `[rows, 256]`.
    pub(in crate::cuda) y: Operand,
    pub(in crate::cuda) shape: Shape,
    /// The batch norm that reads y, and how its sums are reduced.
    pub(in crate::cuda) after: NormSite,
    pub(in crate::cuda) reduce: Reduce,
}

impl Ops {
    /// Computes the convolution's output, and statistics of `after` as [`Ops::norm_statistics`] does.
    pub(in crate::cuda) fn bottleneck_forward(&self, p: BottleneckForward) -> Kernel {
        let blocks = p.shape.rows().div_ceil(TILE_ROWS).clamp(1, self.multiprocessors);
        let (scale, bias) = p.before.map_or((Operand::NONE, Operand::NONE), |site| (site.scale, site.bias));
        let mut args = [p.input, scale, bias, p.weights].map(Arg::In).to_vec();
        args.push(Arg::Out(p.y));
        let [control, pixels, rows, _] = shape_args(CONTROL, p.shape);
        args.extend([control, pixels, rows, Arg::Out(self.partials()), self.counters()]);
        args.extend(p.after.forward_args(p.reduce));
        args.extend(p.reduce.args());
        // The weights, two tiles of the input, one tile of the output, and 1024 bytes to align the tiles.
        let values = REDUCED * EXPANDED + TILE_ROWS * (2 * REDUCED + EXPANDED + ROW_PADDING);
        let shared_bytes = 1024 + values * self.dtype.size() as u32;
        let geometry = Geometry { grid: [blocks, 1, 1], block: [32, 16, 1], cluster: 1, shared_bytes };
        let name = if p.before.is_some() { "bottleneck_forward" } else { "projection_forward" };
        kernel(name, geometry, args)
    }

    /// Bytes for all thread blocks' weight gradients.
    pub(in crate::cuda) fn bottleneck_bytes(&self) -> usize {
        (self.multiprocessors * EXPANDED * REDUCED * 4) as usize
    }

    /// Computes the gradients of the convolution's input and weights and, with `before`, that batch norm's sums as
    /// [`Ops::norm_backward_sums`] does.
    pub(in crate::cuda) fn bottleneck_backward(&self, p: Bottleneck) -> [Kernel; 2] {
        let blocks = p.shape.rows().div_ceil(TILE_ROWS).clamp(1, self.multiprocessors);
        let mut args = [p.x, p.g, p.after.scale, p.after.slope, p.after.offset, p.weights, p.input]
            .map(Arg::In)
            .to_vec();
        args.extend([p.dinput, WORKSPACE].map(Arg::Out));
        let [control, pixels, rows, _] = shape_args(CONTROL, p.shape);
        args.extend([control, pixels, rows, Arg::Out(self.partials()), self.counters()]);
        match p.before {
            Some(before) => {
                args.extend(before.norm.backward_args(before.accumulate, before.reduce));
                args.extend(before.reduce.args());
            }
            // No batch norm precedes the convolution, so the kernel does not use these arguments.
            None => {
                args.extend(p.after.backward_args(false, Reduce::Local).map(Arg::unused));
                args.extend(Reduce::Local.args());
            }
        }
        // The weights; one tile each of dy, the input and the product; two tiles each of x and g; coefficients; alignment.
        let values =
            REDUCED * EXPANDED + TILE_ROWS * (EXPANDED + REDUCED + REDUCED + ROW_PADDING + 2 * 2 * EXPANDED);
        let coefficients = 3 * (EXPANDED + REDUCED);
        let shared_bytes = 1024 + values * self.dtype.size() as u32 + coefficients * 4;
        let geometry = Geometry { grid: [blocks, 1, 1], block: [8, 64, 1], cluster: 1, shared_bytes };
        let name = if p.before.is_some() { "bottleneck_backward" } else { "projection_backward" };
        let gradients = kernel(name, geometry, args);
        let length = EXPANDED * REDUCED;
        let args = [Arg::In(WORKSPACE), Arg::Out(p.dweights), Arg::U32(blocks), Arg::U32(length)];
        [gradients, kernel("sum_weight_gradients", plain([length / 128, 1, 1], [32, 8, 1]), args)]
    }
}
