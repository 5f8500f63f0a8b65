//! AdamW and LAMB over flat buffers; `adam.cu`.

use super::{Arg, CudaError, Flat, Ops, Ptr, Rates, Stream, plain};

/// Adam's running means of the gradient and of its square, and how they decay. How many updates there were is the
/// scaler's `updates`.
#[derive(Debug, Clone, Copy)]
pub(in crate::engine::cuda) struct Moments {
    /// float32, as long as the weights.
    pub(in crate::engine::cuda) first: Ptr,
    pub(in crate::engine::cuda) second: Ptr,
    pub(in crate::engine::cuda) beta1: f64,
    pub(in crate::engine::cuda) beta2: f64,
    pub(in crate::engine::cuda) epsilon: f32,
}

impl Moments {
    fn args(self) -> [Arg; 5] {
        [
            Arg::Ptr(self.first),
            Arg::Ptr(self.second),
            Arg::F64(self.beta1),
            Arg::F64(self.beta2),
            Arg::F32(self.epsilon),
        ]
    }
}

/// One step of all weights by AdamW.
#[derive(Debug, Clone, Copy)]
pub(in crate::engine::cuda) struct AdamW {
    pub(in crate::engine::cuda) flat: Flat,
    pub(in crate::engine::cuda) moments: Moments,
}

/// One step of all weights by LAMB.
#[derive(Debug, Clone, Copy)]
pub(in crate::engine::cuda) struct Lamb {
    pub(in crate::engine::cuda) flat: Flat,
    pub(in crate::engine::cuda) moments: Moments,
    /// Its rates are written here.
    pub(in crate::engine::cuda) rates: Rates,
}

impl Ops {
    /// After [`Ops::gradient_norm`]. Moves: weights and moments twice, gradients and low_precision once: 28 bytes a value in the
    /// 16-bit formats.
    pub(in crate::engine::cuda) fn adamw(&self, stream: Stream, p: AdamW) -> Result<(), CudaError> {
        let AdamW { flat, moments } = p;
        let mut args = vec![Arg::Ptr(flat.weights), Arg::Ptr(flat.low_precision)];
        args.extend(moments.args());
        args.extend(flat.gradients.args());
        args.extend([Arg::Ptr(flat.control), Arg::Ptr(flat.scaler)]);
        args.extend(flat.decay.map(Arg::F32));
        self.launch(stream, "adamw", self.items(flat.gradients.length / 8, 6), &args)
    }

    /// After [`Ops::gradient_norm`]. Moves: weights and moments three times, gradients and low_precision once.
    pub(in crate::engine::cuda) fn lamb(&self, stream: Stream, p: Lamb) -> Result<(), CudaError> {
        let Lamb { flat, moments, rates } = p;
        let [segments, decay] = [Arg::Ptr(rates.segments), Arg::F32(flat.decay[0])];
        let mut args = vec![Arg::Ptr(flat.weights)];
        args.extend(moments.args());
        args.extend(flat.gradients.args());
        args.extend([Arg::Ptr(flat.scaler), decay, segments, Arg::Ptr(self.partials())]);
        self.launch(stream, "lamb_moments", plain(rates.norm_blocks(), [256, 1, 1]), &args)?;

        let count = Arg::U32(rates.count);
        let args = [Arg::Ptr(self.partials()), segments, count, decay, Arg::Ptr(rates.rates)];
        self.launch(stream, "lamb_rates", plain([rates.count.div_ceil(128), 1, 1], [128, 1, 1]), &args)?;

        let mut args = vec![Arg::Ptr(flat.weights), Arg::Ptr(flat.low_precision)];
        args.extend(moments.args());
        args.extend([Arg::U64(flat.gradients.first_length), Arg::U64(flat.gradients.length)]);
        args.extend([Arg::Ptr(flat.control), Arg::Ptr(flat.scaler), segments, Arg::Ptr(rates.rates), count]);
        self.launch(stream, "lamb", self.items(flat.gradients.length / 8, 6), &args)
    }
}
