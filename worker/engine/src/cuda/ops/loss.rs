//! Softmax cross-entropy; `loss.cu`.

use super::{Arg, CONTROL, Kernel, LOSS_COUNTER, Operand, Ops, SCALER, TOTALS, kernel, plain};

/// Computes the loss of `logits` + `bias`, its gradient, and the totals of the real pictures: `f64 loss_sum; u64 correct; u64 samples`. The
/// gradient is multiplied by the loss scale in addition to the control block's grad_scale.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct CrossEntropy {
    /// T `[pictures, padded]`, without the bias.
    pub(in crate::cuda) logits: Operand,
    /// float32 `[classes]`; may be absent.
    pub(in crate::cuda) bias: Operand,
    pub(in crate::cuda) pictures: u32,
    pub(in crate::cuda) classes: u32,
    /// Length of a row: classes rounded up to a multiple of 8.
    pub(in crate::cuda) padded: u32,
    pub(in crate::cuda) smoothing: f32,
    /// float32 `[classes]`; if absent, all weights are 1.
    pub(in crate::cuda) class_weights: Operand,
    /// T `[pictures, padded]`, zero in the padding; absent in evaluation, which computes no gradients.
    pub(in crate::cuda) dlogits: Operand,
    /// float32 `[classes]`; may be absent.
    pub(in crate::cuda) dbias: Operand,
    /// Whether to add to the totals and to dbias instead of replacing them, as for later micro-batches of a step.
    pub(in crate::cuda) accumulate: bool,
    /// Result of [`Ops::put_margin`]; may be absent.
    pub(in crate::cuda) label_logits: Operand,
}

/// Number of rows per block: one per warp.
pub(in crate::cuda) const LOSS_ROWS: u32 = 8;

/// Number of blocks of [`Ops::cross_entropy`].
pub(super) fn blocks(pictures: u32) -> u32 {
    pictures.div_ceil(LOSS_ROWS).max(1)
}

impl Ops {
    /// Softmax cross-entropy. Traffic: logits once from memory, three times from the cache.
    pub(in crate::cuda) fn cross_entropy(&self, p: CrossEntropy) -> Kernel {
        let mut args = [p.logits, p.bias, CONTROL].map(Arg::In).to_vec();
        args.extend([p.pictures, p.classes, p.padded].map(Arg::U32));
        args.extend([Arg::F32(p.smoothing), Arg::In(p.class_weights), Arg::In(SCALER), Arg::Out(p.dlogits)]);
        args.extend([p.dbias, TOTALS].map(|sums| Arg::out(sums, p.accumulate)));
        args.extend([Arg::U32(p.accumulate.into()), Arg::Out(self.partials()), self.counter(LOSS_COUNTER)]);
        args.push(Arg::In(p.label_logits));
        kernel("cross_entropy", plain([blocks(p.pictures), 1, 1], [32 * LOSS_ROWS, 1, 1]), args)
    }

    /// Writes the logits for the host, float32 `[pictures, classes]`: adds the bias and drops the padding.
    pub(in crate::cuda) fn biased_logits(&self, p: CrossEntropy, to: Operand) -> Kernel {
        let mut args = vec![Arg::In(p.logits), Arg::In(p.bias), Arg::Out(to)];
        args.extend([p.pictures, p.classes, p.padded].map(Arg::U32));
        let grid = [p.classes.div_ceil(256), p.pictures.max(1), 1];
        kernel("biased_logits", plain(grid, [256, 1, 1]), args)
    }
}
