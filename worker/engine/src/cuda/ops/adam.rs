//! AdamW and LAMB over flat buffers; `adam.cu`.

use super::{Arg, CONTROL, FlatParameters, Kernel, Operand, Ops, Rates, SCALER, kernel, plain};

/// Adam's running means of the gradient and of its square, and the decay rates of the means. Kernels correct the
/// means' bias by the number of updates, `Scaler::updates`.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct Moments {
    /// The mean of the gradient: float32, with the length of the weights.
    pub(in crate::cuda) first: Operand,
    /// The mean of the gradient's square: float32, with the length of the weights.
    pub(in crate::cuda) second: Operand,
    pub(in crate::cuda) beta1: f64,
    pub(in crate::cuda) beta2: f64,
    pub(in crate::cuda) epsilon: f32,
}

impl Moments {
    /// The kernel arguments. `moment` is `Arg::InOut` if the kernel also writes the moments, otherwise `Arg::In`.
    fn args(self, moment: fn(Operand) -> Arg) -> [Arg; 5] {
        [
            moment(self.first),
            moment(self.second),
            Arg::F64(self.beta1),
            Arg::F64(self.beta2),
            Arg::F32(self.epsilon),
        ]
    }
}

impl Ops {
    /// One step of all weights by AdamW. Runs after [`Ops::gradient_norm`]. Traffic: 28 bytes per value in the 16-bit formats.
    pub(in crate::cuda) fn adamw(&self, flat: FlatParameters, moments: Moments) -> Kernel {
        let mut args = flat.weights_args().to_vec();
        args.extend(moments.args(Arg::InOut));
        args.extend(flat.gradients.args());
        args.extend([Arg::In(CONTROL), Arg::In(SCALER)]);
        args.extend(flat.decay.map(Arg::F32));
        kernel(
            if flat.is_planar { "adamw_planes" } else { "adamw" },
            self.per_item(flat.gradients.length / 8, 6),
            args,
        )
    }

    /// Updates the moments, and sums the squares of each parameter's weights and of its update into `rates.squares`. Runs after
    /// [`Ops::gradient_norm`].
    pub(in crate::cuda) fn lamb_moments(
        &self,
        flat: FlatParameters,
        moments: Moments,
        rates: Rates,
    ) -> Kernel {
        let mut args = vec![Arg::In(flat.weights)];
        args.extend(moments.args(Arg::InOut));
        args.extend(flat.gradients.args());
        args.extend([Arg::In(SCALER), Arg::F32(flat.decay[0])]);
        args.extend([Arg::In(rates.segments), Arg::Out(rates.squares)]);
        kernel("lamb_moments", plain(rates.norm_blocks(), [256, 1, 1]), args)
    }

    /// Computes the rate of each parameter. Runs after [`Ops::lamb_moments`]. `decay` is the weight decay of the parameters whose rate LAMB
    /// scales by norm(weights) / norm(update).
    pub(in crate::cuda) fn lamb_rates(&self, rates: Rates, decay: f32) -> Kernel {
        let (segments, count) = (Arg::In(rates.segments), Arg::U32(rates.count));
        let args = [Arg::In(rates.squares), segments, count, Arg::F32(decay), Arg::Out(rates.per_parameter)];
        kernel("lamb_rates", plain([rates.count.div_ceil(128), 1, 1], [128, 1, 1]), args)
    }

    /// One step of all weights by LAMB. Runs after [`Ops::lamb_rates`].
    pub(in crate::cuda) fn lamb(&self, flat: FlatParameters, moments: Moments, rates: Rates) -> Kernel {
        let mut args = flat.weights_args().to_vec();
        args.extend(moments.args(Arg::In));
        args.extend([Arg::U64(flat.gradients.matrix_length), Arg::U64(flat.gradients.length)]);
        args.extend([Arg::In(CONTROL), Arg::In(SCALER), Arg::In(rates.segments)]);
        args.extend([Arg::In(rates.per_parameter), Arg::U32(rates.count)]);
        kernel("lamb", self.per_item(flat.gradients.length / 8, 6), args)
    }
}
