//! Batch norm backward: sums over rows, then dx from these sums, in one launch or in two.

use super::{Arg, Kernel, NormSite, Operand, Ops, Reduce, Shape, kernel, per_channel, shape_args};

/// The gradient of y, T `[rows, C]` unless documented otherwise, and how the ReLU masks it.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) enum Gradient {
    /// The gradient of all values, without a ReLU.
    All { dy: Operand },
    /// A ReLU right after the batch norm, whose mask is recomputed. `added` is added to dy; may be absent.
    Relu { dy: Operand, added: Operand },
    /// A ReLU after an addition, with the forward pass's mask. `added` is added to dy; may be absent.
    Mask { dy: Operand, added: Operand, mask: Operand },
    /// As `Mask`, before a global average pooling: `dy` is T `[pictures, C]`.
    MaskPooled { dy: Operand, mask: Operand },
}

/// Backward of [`NormForward`].
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct NormBackward {
    /// The forward pass's input.
    pub(in crate::cuda) x: Operand,
    pub(in crate::cuda) gradient: Gradient,
    /// The gradient of the ReLU's input, which is also the shortcut's gradient; may be absent, may alias dy.
    pub(in crate::cuda) dz: Operand,
    /// The gradient of x; may alias dy.
    pub(in crate::cuda) dx: Operand,
    pub(in crate::cuda) control: Operand,
    pub(in crate::cuda) shape: Shape,
    pub(in crate::cuda) site: NormSite,
    /// Whether to add to dgamma and dbeta instead of replacing them.
    pub(in crate::cuda) accumulate: bool,
    pub(in crate::cuda) reduce: Reduce,
}

impl Gradient {
    /// Names of the kernels: sums, apply, one launch, frozen batch norm.
    fn names(self) -> [&'static str; 4] {
        macro_rules! names {
            ($gradient:literal) => {
                [
                    concat!("norm_backward_sums_", $gradient),
                    concat!("norm_backward_apply_", $gradient),
                    concat!("norm_backward_small_", $gradient),
                    concat!("norm_backward_frozen_", $gradient),
                ]
            };
        }
        match self {
            Gradient::All { .. } => names!("all"),
            Gradient::Relu { added: Operand::NONE, .. } => names!("recompute"),
            Gradient::Relu { .. } => names!("recompute_added"),
            Gradient::Mask { added: Operand::NONE, .. } => names!("bits"),
            Gradient::Mask { .. } => names!("bits_added"),
            Gradient::MaskPooled { .. } => names!("bits_pooled"),
        }
    }

    pub(in crate::cuda::ops) fn args(self) -> [Arg; 3] {
        let (dy, added, mask) = match self {
            Gradient::All { dy } => (dy, Operand::NONE, Operand::NONE),
            Gradient::Relu { dy, added } => (dy, added, Operand::NONE),
            Gradient::Mask { dy, added, mask } => (dy, added, mask),
            Gradient::MaskPooled { dy, mask } => (dy, Operand::NONE, mask),
        };
        [Arg::In(dy), Arg::In(added), Arg::In(mask)]
    }
}

impl Ops {
    /// Batch norm backward in the variant that suits the shape. With [`Reduce::StoreSums`], computes only the sums (and dz).
    ///
    /// Traffic: in two launches, x twice. The second launch reads dz, which the first has written, as the gradient; without dz it reads dy
    /// and `added` again.
    pub(in crate::cuda) fn norm_backward(&self, p: NormBackward) -> Vec<Kernel> {
        if p.reduce.stores_sums() {
            return vec![self.norm_backward_sums(p)];
        }
        let Some(geometry) = self.one_launch_geometry(p.shape, p.reduce.waits_for_ranks()) else {
            return vec![self.norm_backward_sums(p), self.norm_backward_apply(p)];
        };
        let [_, _, name, _] = p.gradient.names();
        let mut args = vec![Arg::In(p.x)];
        args.extend(p.gradient.args());
        args.extend([Arg::Out(p.dz), Arg::Out(p.dx)]);
        args.extend(shape_args(p.control, p.shape));
        args.extend(p.site.backward_args(p.accumulate, p.reduce));
        args.extend(p.reduce.args());
        vec![kernel(name, geometry, args)]
    }

    /// The first pass: computes dz, the sums, dgamma and dbeta, then reduces the sums over ranks as `reduce` says.
    pub(in crate::cuda) fn norm_backward_sums(&self, p: NormBackward) -> Kernel {
        let [name, ..] = p.gradient.names();
        let mut args = vec![Arg::In(p.x)];
        args.extend(p.gradient.args());
        args.push(Arg::Out(p.dz));
        args.extend(shape_args(p.control, p.shape));
        args.extend([Arg::Out(self.partials()), self.counters()]);
        args.extend(p.site.backward_args(p.accumulate, p.reduce));
        args.extend(p.reduce.args());
        kernel(name, self.sum_over_rows(p.shape.rows(), p.shape.channels), args)
    }

    /// Computes each channel's slope and offset for [`Ops::norm_backward_apply`], from the all-reduced sums of [`Reduce::StoreSums`]
    /// (float32 `[2, C]`).
    pub(in crate::cuda) fn norm_backward_finish(&self, sums: Operand, p: NormBackward) -> Kernel {
        let mut args = vec![Arg::In(sums)];
        args.extend(shape_args(p.control, p.shape));
        // dgamma and dbeta are unused, because the kernel that computed the sums has written them.
        let [mean, inv_std, scale, bias, dgamma, dbeta, rest @ ..] =
            p.site.backward_args(p.accumulate, p.reduce);
        args.extend([mean, inv_std, scale, bias, dgamma.unused(), dbeta.unused()]);
        args.extend(rest);
        args.extend(p.reduce.args());
        kernel("norm_backward_finish", per_channel(p.shape.channels), args)
    }

    /// The second pass: computes dx.
    pub(in crate::cuda) fn norm_backward_apply(&self, p: NormBackward) -> Kernel {
        let gradient = if p.dz.is_none() { p.gradient } else { Gradient::All { dy: p.dz } };
        let [_, name, ..] = gradient.names();
        let mut args = vec![Arg::In(p.x)];
        args.extend(gradient.args());
        args.extend([p.site.scale, p.site.bias, p.site.slope, p.site.offset].map(Arg::In));
        args.push(Arg::Out(p.dx));
        args.extend(shape_args(p.control, p.shape));
        kernel(name, self.grid_stride(p.shape.rows(), p.shape.channels, 256, 2), args)
    }

    /// Backward of a frozen batch norm, whose statistics do not depend on the input: dx is scale times the gradient. Parameters
    /// have no gradients, and nothing is reduced over ranks.
    pub(in crate::cuda) fn norm_backward_frozen(&self, p: NormBackward) -> Kernel {
        let [_, _, _, name] = p.gradient.names();
        let mut args = vec![Arg::In(p.x)];
        args.extend(p.gradient.args());
        args.extend([p.site.scale, p.site.bias].map(Arg::In));
        args.extend([Arg::Out(p.dz), Arg::Out(p.dx)]);
        args.extend(shape_args(p.control, p.shape));
        kernel(name, self.grid_stride(p.shape.rows(), p.shape.channels, 256, 2), args)
    }
}
