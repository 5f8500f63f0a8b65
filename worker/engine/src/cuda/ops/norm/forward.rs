//! Batch norm forward: computes the statistics of x, then applies them to x, in one launch or in two.

use super::{
    Arg, Kernel, NormSite, Operand, Ops, Reduce, Shape, Shortcut, kernel, per_channel, plain, shape_args,
};

/// y = relu(batch_norm(x) + shortcut).
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct NormForward {
    pub(in crate::cuda) x: Operand,
    pub(in crate::cuda) y: Operand,
    pub(in crate::cuda) shortcut: Shortcut,
    pub(in crate::cuda) has_relu: bool,
    /// One bit per value: bit k of byte `[row, group]` is set if `y` of channel 8 * group + k is positive. May be absent.
    pub(in crate::cuda) mask: Operand,
    pub(in crate::cuda) control: Operand,
    pub(in crate::cuda) shape: Shape,
    pub(in crate::cuda) site: NormSite,
    pub(in crate::cuda) reduce: Reduce,
}

impl Ops {
    /// Batch norm forward in the variant that suits the shape. With [`Reduce::StoreSums`], computes only the sums.
    ///
    /// Traffic: in two launches, x twice.
    pub(in crate::cuda) fn norm_forward(&self, p: NormForward) -> Vec<Kernel> {
        if p.reduce.stores_sums() {
            return vec![self.norm_statistics(p)];
        }
        let Some(geometry) = self.one_launch_geometry(p.shape, p.reduce.waits_for_ranks()) else {
            return vec![self.norm_statistics(p), self.norm_apply(p)];
        };
        let name = match p.shortcut {
            Shortcut::None => "norm_forward_small",
            Shortcut::Plain(_) => "norm_forward_small_add",
            Shortcut::Norm { .. } => "norm_forward_small_add_norm",
        };
        let mut args = vec![Arg::In(p.x)];
        args.extend(p.shortcut.args());
        args.extend([Arg::Out(p.y), Arg::Out(p.mask), Arg::U32(p.has_relu.into())]);
        args.extend(shape_args(p.control, p.shape));
        args.extend(p.site.forward_args(p.reduce));
        args.extend(p.reduce.args());
        vec![kernel(name, geometry, args)]
    }

    /// The first pass: computes the statistics of x, reduced over ranks as `reduce` says. Uses only `x`, `control`, `shape`, `site` and
    /// `reduce`. Used for a projection's batch norm, which [`Shortcut::Norm`] applies, and for batch norms that are applied later.
    pub(in crate::cuda) fn norm_statistics(&self, p: NormForward) -> Kernel {
        let mut args = vec![Arg::In(p.x)];
        args.extend(shape_args(p.control, p.shape));
        args.extend([Arg::Out(self.partials()), self.counters()]);
        args.extend(p.site.forward_args(p.reduce));
        args.extend(p.reduce.args());
        kernel("norm_statistics", self.sum_over_rows(p.shape.rows(), p.shape.channels), args)
    }

    /// Computes the statistics from the sums of x (`sum`) and of x * x (`square`) over the real pictures, float32 `[C]` each, which an
    /// all-reduce or a convolution has computed.
    pub(in crate::cuda) fn norm_finish(&self, sum: Operand, square: Operand, p: NormForward) -> Kernel {
        let mut args = vec![Arg::In(sum), Arg::In(square)];
        args.extend(shape_args(p.control, p.shape));
        args.extend(p.site.forward_args(p.reduce));
        args.extend(p.reduce.args());
        kernel("norm_finish", per_channel(p.shape.channels), args)
    }

    /// [`Ops::norm_finish`] and [`Ops::norm_apply`] in one kernel, which waits for no other rank.
    pub(in crate::cuda) fn norm_finish_apply(&self, sum: Operand, square: Operand, p: NormForward) -> Kernel {
        let (name, per_multiprocessor) = match p.shortcut {
            Shortcut::None => ("norm_finish_apply", 3),
            Shortcut::Plain(_) => ("norm_finish_apply_add", 3),
            Shortcut::Norm { .. } => ("norm_finish_apply_add_norm", 2),
        };
        let mut args = [p.x, sum, square].map(Arg::In).to_vec();
        args.extend(p.shortcut.args());
        args.extend([Arg::Out(p.y), Arg::Out(p.mask), Arg::U32(p.has_relu.into())]);
        args.extend(shape_args(p.control, p.shape));
        args.extend(p.site.forward_args(p.reduce));
        let geometry = self.grid_stride(p.shape.rows(), p.shape.channels, 256, per_multiprocessor);
        kernel(name, geometry, args)
    }

    /// The second pass, and inference: applies the scale and bias of `site`.
    pub(in crate::cuda) fn norm_apply(&self, p: NormForward) -> Kernel {
        let (name, per_multiprocessor) = match p.shortcut {
            Shortcut::None => ("norm_apply", 3),
            Shortcut::Plain(_) => ("norm_apply_add", 3),
            Shortcut::Norm { .. } => ("norm_apply_add_norm", 2),
        };
        let mut args = [p.x, p.site.scale, p.site.bias].map(Arg::In).to_vec();
        args.extend(p.shortcut.args());
        args.extend([p.y, p.mask].map(Arg::Out));
        args.extend([p.has_relu.into(), p.shape.rows(), p.shape.channels].map(Arg::U32));
        let geometry = self.grid_stride(p.shape.rows(), p.shape.channels, 256, per_multiprocessor);
        kernel(name, geometry, args)
    }

    /// Computes scale and bias from running statistics.
    pub(in crate::cuda) fn norm_to_scale_and_bias(&self, site: &NormSite) -> Kernel {
        let channels = site.channels() as u32;
        let mut args = [site.gamma, site.beta, site.running_mean, site.running_var].map(Arg::In).to_vec();
        args.extend([Arg::Out(site.scale), Arg::Out(site.bias), Arg::U32(channels)]);
        kernel("norm_to_scale_and_bias", plain([channels.div_ceil(256), 1, 1], [256, 1, 1]), args)
    }
}
