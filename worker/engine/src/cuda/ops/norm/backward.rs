//! Backward: sums over rows and what follows from them, apart or at once.

use super::{Arg, Kernel, NormSite, Operand, Ops, Reduce, Shape, kernel, per_channel, shape_args};

/// The gradient of y, all T `[rows, C]` unless said otherwise, and what the ReLU does to it.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) enum Gradient {
    /// No ReLU.
    All { dy: Operand },
    /// A ReLU right after the batch norm: what passed is computed again. `more` is added; may be 0.
    Relu { dy: Operand, more: Operand },
    /// A ReLU behind an addition: its mask. `more` is added; may be 0.
    Mask { dy: Operand, more: Operand, mask: Operand },
    /// The same, from a global average pooling's gradient: `dy` is T `[pictures, C]`.
    MaskPooled { dy: Operand, mask: Operand },
}

/// Backward of [`NormForward`].
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct NormBackward {
    /// The forward pass's input.
    pub(in crate::cuda) x: Operand,
    pub(in crate::cuda) gradient: Gradient,
    /// The gradient before the ReLU, which the shortcut needs too; may be 0, may be dy's memory.
    pub(in crate::cuda) dz: Operand,
    /// The gradient of x; may be dy's memory.
    pub(in crate::cuda) dx: Operand,
    pub(in crate::cuda) control: Operand,
    pub(in crate::cuda) shape: Shape,
    pub(in crate::cuda) site: NormSite,
    /// Adds to dgamma and dbeta instead of replacing them.
    pub(in crate::cuda) accumulate: bool,
    pub(in crate::cuda) reduce: Reduce,
}

/// Kernel names by kind of gradient: (sums, apply, both at once, all of a frozen one).
impl Gradient {
    fn names(self) -> [&'static str; 4] {
        match self {
            Gradient::All { .. } => [
                "norm_backward_sums_all",
                "norm_backward_apply_all",
                "norm_backward_small_all",
                "norm_backward_frozen_all",
            ],
            Gradient::Relu { more: Operand::NONE, .. } => [
                "norm_backward_sums_recompute",
                "norm_backward_apply_recompute",
                "norm_backward_small_recompute",
                "norm_backward_frozen_recompute",
            ],
            Gradient::Relu { .. } => [
                "norm_backward_sums_recompute_added",
                "norm_backward_apply_recompute_added",
                "norm_backward_small_recompute_added",
                "norm_backward_frozen_recompute_added",
            ],
            Gradient::Mask { more: Operand::NONE, .. } => [
                "norm_backward_sums_bits",
                "norm_backward_apply_bits",
                "norm_backward_small_bits",
                "norm_backward_frozen_bits",
            ],
            Gradient::Mask { .. } => [
                "norm_backward_sums_bits_added",
                "norm_backward_apply_bits_added",
                "norm_backward_small_bits_added",
                "norm_backward_frozen_bits_added",
            ],
            Gradient::MaskPooled { .. } => [
                "norm_backward_sums_bits_pooled",
                "norm_backward_apply_bits_pooled",
                "norm_backward_small_bits_pooled",
                "norm_backward_frozen_bits_pooled",
            ],
        }
    }

    fn args(self) -> [Arg; 3] {
        let (dy, more, mask) = match self {
            Gradient::All { dy } => (dy, Operand::NONE, Operand::NONE),
            Gradient::Relu { dy, more } => (dy, more, Operand::NONE),
            Gradient::Mask { dy, more, mask } => (dy, more, mask),
            Gradient::MaskPooled { dy, mask } => (dy, Operand::NONE, mask),
        };
        [Arg::In(dy), Arg::In(more), Arg::In(mask)]
    }
}

impl Ops {
    /// Batch norm backward by whichever way suits the shape; with [`Reduce::Leave`] only its sums (and dz).
    ///
    /// Moves: small, x, dy and more once, dx (and dz) once. Otherwise x and the gradient twice; with dz, the
    /// second time dz alone.
    pub(in crate::cuda) fn norm_backward(&self, p: NormBackward) -> Vec<Kernel> {
        let leaves = p.reduce.leaves();
        let Some(geometry) = self.small(p.shape, p.reduce.waits()).filter(|_| !leaves) else {
            let mut both = vec![self.norm_backward_sums(p)];
            if !leaves {
                both.push(self.norm_backward_apply(p));
            }
            return both;
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

    /// The first pass alone: the sums, dgamma and dbeta, dz, then what `reduce` says. Moves: x, dy and more
    /// once, dz once if it is wanted.
    pub(in crate::cuda) fn norm_backward_sums(&self, p: NormBackward) -> Kernel {
        let [name, ..] = p.gradient.names();
        let mut args = vec![Arg::In(p.x)];
        args.extend(p.gradient.args());
        args.push(Arg::Out(p.dz));
        args.extend(shape_args(p.control, p.shape));
        args.extend([Arg::Out(self.partials()), self.counters()]);
        args.extend(p.site.backward_args(p.accumulate, p.reduce));
        args.extend(p.reduce.args());
        kernel(name, self.sums(p.shape.rows(), p.shape.channels), args)
    }

    /// Continues from the sums that [`Reduce::Leave`] left, float32 `[2, C]`, after an all-reduce.
    pub(in crate::cuda) fn norm_backward_finish(&self, sums: Operand, p: NormBackward) -> Kernel {
        let mut args = vec![Arg::In(sums)];
        args.extend(shape_args(p.control, p.shape));
        // The parameters' gradients are there since the sums are.
        let [mean, inv_std, scale, bias, dgamma, dbeta, rest @ ..] =
            p.site.backward_args(p.accumulate, p.reduce);
        args.extend([mean, inv_std, scale, bias, dgamma.unused(), dbeta.unused()]);
        args.extend(rest);
        args.extend(p.reduce.args());
        kernel("norm_backward_finish", per_channel(p.shape.channels), args)
    }

    /// The second pass alone. Moves: x and the gradient (dz, if there is one) once, dx once.
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

    /// Backward of a batch norm whose statistics do not depend on its input: dx is scale times the gradient. No parameter has a
    /// gradient, and ranks have nothing to add up. Moves: dy, more and the mask once (without a mask behind a ReLU x, too), dx
    /// once, dz once if it is wanted.
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
