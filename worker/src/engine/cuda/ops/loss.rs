//! Softmax cross-entropy; `loss.cu`.

use super::{Arg, CudaError, LOSS_COUNTER, Ops, Ptr, Stream, plain};

/// Loss of `logits` + `bias`, its gradient, and totals.
#[derive(Debug, Clone, Copy)]
pub(in crate::engine::cuda) struct CrossEntropy {
    /// T `[pictures, padded]`, without the bias.
    pub(in crate::engine::cuda) logits: Ptr,
    /// float32 `[classes]`.
    pub(in crate::engine::cuda) bias: Ptr,
    pub(in crate::engine::cuda) control: Ptr,
    pub(in crate::engine::cuda) pictures: u32,
    pub(in crate::engine::cuda) classes: u32,
    /// A row's length: classes rounded up to a multiple of 8.
    pub(in crate::engine::cuda) padded: u32,
    pub(in crate::engine::cuda) smoothing: f32,
    /// float32: what the gradients are multiplied by besides the control block's grad_scale (the scaler's
    /// first field).
    pub(in crate::engine::cuda) loss_scale: Ptr,
    /// T `[pictures, padded]`, zeros where padded; 0: no gradients (evaluation).
    pub(in crate::engine::cuda) dlogits: Ptr,
    /// float32 `[classes]`; may be 0.
    pub(in crate::engine::cuda) dbias: Ptr,
    /// `f64 loss_sum; u64 correct; u64 samples`, of the real pictures.
    pub(in crate::engine::cuda) totals: Ptr,
    /// Adds to the totals and to dbias instead of replacing them: later micro-batches, evaluation.
    pub(in crate::engine::cuda) accumulate: bool,
}

/// Logits for the host.
#[derive(Debug, Clone, Copy)]
pub(in crate::engine::cuda) struct BiasedLogits {
    /// T `[pictures, padded]`.
    pub(in crate::engine::cuda) logits: Ptr,
    pub(in crate::engine::cuda) bias: Ptr,
    /// float32 `[pictures, classes]`.
    pub(in crate::engine::cuda) to: Ptr,
    pub(in crate::engine::cuda) pictures: u32,
    pub(in crate::engine::cuda) classes: u32,
    pub(in crate::engine::cuda) padded: u32,
}

/// Eight rows a block, one a warp.
pub(super) fn blocks(pictures: u32) -> u32 {
    pictures.div_ceil(8).max(1)
}

impl Ops {
    /// Moves: logits once from memory (three times from the cache), dlogits once.
    pub(in crate::engine::cuda) fn cross_entropy(
        &self,
        stream: Stream,
        p: CrossEntropy,
    ) -> Result<(), CudaError> {
        let args = [
            Arg::Ptr(p.logits),
            Arg::Ptr(p.bias),
            Arg::Ptr(p.control),
            Arg::U32(p.pictures),
            Arg::U32(p.classes),
            Arg::U32(p.padded),
            Arg::F32(p.smoothing),
            Arg::Ptr(p.loss_scale),
            Arg::Ptr(p.dlogits),
            Arg::Ptr(p.dbias),
            Arg::Ptr(p.totals),
            Arg::U32(p.accumulate.into()),
            Arg::Ptr(self.partials()),
            self.counter(LOSS_COUNTER),
        ];
        self.launch(stream, "cross_entropy", plain([blocks(p.pictures), 1, 1], [256, 1, 1]), &args)
    }

    /// Adds the bias and drops the padding.
    pub(in crate::engine::cuda) fn biased_logits(
        &self,
        stream: Stream,
        p: BiasedLogits,
    ) -> Result<(), CudaError> {
        let args = [
            Arg::Ptr(p.logits),
            Arg::Ptr(p.bias),
            Arg::Ptr(p.to),
            Arg::U32(p.pictures),
            Arg::U32(p.classes),
            Arg::U32(p.padded),
        ];
        let grid = [p.classes.div_ceil(256), p.pictures.max(1), 1];
        self.launch(stream, "biased_logits", plain(grid, [256, 1, 1]), &args)
    }
}
