//! Losses with a margin (ArcFace, CosFace); `margin.cu`.

use super::{Arg, Kernel, Operand, Ops, SplitLogits, kernel, plain};
use crate::loss::{Margin, MarginTerms};

/// Size in bytes of `LabelLogit` in `loss.cu`.
const LABEL_LOGIT_BYTES: usize = 16;

/// Converts products of features and weights to scaled cosines, or the gradient of scaled cosines to the gradient of the products.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct Cosines {
    /// T, in chunks of classes: each `[rows, chunk_classes]`.
    pub(in crate::cuda) values: Operand,
    /// Result of [`Ops::row_factors`] for features.
    pub(in crate::cuda) row_factors: Operand,
    /// Result of [`Ops::row_factors`] for weights.
    pub(in crate::cuda) class_factors: Operand,
    /// Result of [`Ops::put_margin`], for a gradient; may be absent.
    pub(in crate::cuda) label_logits: Operand,
    pub(in crate::cuda) rows: u32,
    /// Number of classes of a chunk, a multiple of 8.
    pub(in crate::cuda) chunk_classes: u32,
    pub(in crate::cuda) chunk_count: u32,
}

impl SplitLogits {
    /// Bytes of the result of [`Ops::put_margin`].
    pub(in crate::cuda) fn label_logit_bytes(&self) -> usize {
        self.rows() as usize * LABEL_LOGIT_BYTES
    }
}

impl Ops {
    /// factors (float32 `[count]`) = `scale` divided by the L2 norm of each row of `width` values.
    pub(in crate::cuda) fn row_factors(
        &self,
        rows: Operand,
        factors: Operand,
        [count, width]: [u32; 2],
        scale: f32,
    ) -> Kernel {
        let args = [Arg::In(rows), Arg::Out(factors), Arg::U32(count), Arg::U32(width), Arg::F32(scale)];
        kernel("row_factors", self.per_item(32 * u64::from(count), 8), args)
    }

    /// Scales all values by the factors of their row and class.
    pub(in crate::cuda) fn scale_cosines(&self, p: Cosines) -> Kernel {
        let groups = u64::from(p.rows) * u64::from(p.chunk_classes / 8) * u64::from(p.chunk_count);
        let mut args = vec![Arg::InOut(p.values), Arg::In(p.row_factors), Arg::In(p.class_factors)];
        args.extend([Arg::U32(p.rows), Arg::U32(p.chunk_classes), Arg::U64(groups), Arg::In(p.label_logits)]);
        kernel("scale_cosines", self.per_item(groups, 8), args)
    }

    /// Applies the margin to the logit of each row's label, and writes to `label_logits` the derivative and the logit
    /// without margin, which the gradient and the accuracy need.
    pub(in crate::cuda) fn put_margin(
        &self,
        p: SplitLogits,
        margin: &Margin,
        label_logits: Operand,
    ) -> Kernel {
        let MarginTerms { limit, cos, sin, shift } = margin.terms();
        let mut args = vec![Arg::InOut(p.logits), Arg::In(p.controls)];
        let numbers = [p.control_words, p.batch, p.rows(), p.chunk_classes, p.classes, p.first_class];
        args.extend(numbers.map(Arg::U32));
        args.extend([Arg::In(p.sample), Arg::In(p.label_positions), Arg::F32(margin.scale)]);
        args.extend([limit, cos, sin, shift].map(Arg::F64));
        args.push(Arg::Out(label_logits));
        kernel("put_margin", plain([p.rows().div_ceil(256), 1, 1], [256, 1, 1]), args)
    }

    /// Removes from each row of a gradient its component along the same row of `rows`.
    pub(in crate::cuda) fn remove_along(
        &self,
        rows: Operand,
        gradient: Operand,
        [count, width]: [u32; 2],
    ) -> Kernel {
        let args = [Arg::In(rows), Arg::InOut(gradient), Arg::U32(count), Arg::U32(width)];
        kernel("remove_along", self.per_item(32 * u64::from(count), 8), args)
    }
}
