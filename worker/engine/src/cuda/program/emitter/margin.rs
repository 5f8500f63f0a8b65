//! Losses with a margin (ArcFace, CosFace): logits are replaced by scaled cosines in place, and the components of gradients along the
//! features and weights are removed.

use super::*;

/// The cosines of a training step. [`GraphEmitter::convert_cosine_gradient`] uses them and frees `memory`.
#[derive(Debug)]
pub(super) struct HeadCosines {
    cosines: ops::Cosines,
    memory: Vec<Operand>,
}

impl GraphEmitter<'_> {
    /// With a margin: converts the products of features and weights of the last layer to scaled cosines.
    pub(super) fn scale_to_cosines(&mut self, input: TensorId, output: TensorId, trains: bool) -> Result {
        let (Some(margin), Some(part)) = (self.plan.margin, self.head_part()) else { return Ok(()) };
        let (x, values) = (self.activation(input)?, self.activation(output)?);
        let (ops, Convolution { batch, in_c, out_c, .. }) = (self.facts.ops, part.convolution);
        let mut memory = Vec::new();
        let mut row_factors_of = |rows: Operand, count: usize, scale: f32| {
            let factors = self.alloc_bytes(4 * count, Content::Head);
            memory.push(factors);
            self.push(ops.row_factors(rows, factors, [count as u32, in_c as u32], scale));
            factors
        };
        let row_factors = row_factors_of(x, batch, 1.0);
        let class_factors = row_factors_of(part.w, part.chunk_count * out_c, margin.scale);
        let cosines = ops::Cosines {
            values,
            row_factors,
            class_factors,
            label_logits: Operand::NONE,
            rows: batch as u32,
            chunk_classes: out_c as u32,
            chunk_count: part.chunk_count as u32,
        };
        self.push(ops.scale_cosines(cosines));
        if trains {
            self.cosines = Some(HeadCosines { cosines, memory });
        } else {
            memory.into_iter().for_each(|at| self.free_now(at));
        }
        Ok(())
    }

    /// In training: applies the margin to the labels' logits. Returns the memory of the labels' logits as they were
    /// without the margin; [`Operand::NONE`] if the loss has no margin.
    pub(super) fn put_margin(&mut self, logits: ops::SplitLogits) -> Operand {
        let (Some(margin), Some(mut head)) = (self.plan.margin, self.cosines.take()) else {
            return Operand::NONE;
        };
        let label_logits = self.alloc_bytes(logits.label_logit_bytes(), Content::Head);
        self.push(self.facts.ops.put_margin(logits, &margin, label_logits));
        head.cosines.label_logits = label_logits;
        head.memory.push(label_logits);
        self.cosines = Some(head);
        label_logits
    }

    /// With a margin: converts the gradient of the logits to the gradient of the products of features and weights.
    pub(super) fn convert_cosine_gradient(&mut self, values: Operand) {
        let Some(HeadCosines { cosines, memory }) = self.cosines.take() else { return };
        self.push(self.facts.ops.scale_cosines(ops::Cosines { values, ..cosines }));
        memory.into_iter().for_each(|at| self.free_now(at));
    }

    /// With a margin: removes from each row of a gradient the component along the same row of features or weights.
    pub(super) fn remove_along(
        &mut self,
        stream: StreamId,
        rows: Operand,
        gradient: Operand,
        [count, width]: [usize; 2],
    ) {
        if self.plan.margin.is_some() {
            let kernel = self.facts.ops.remove_along(rows, gradient, [count as u32, width as u32]);
            self.push_on(stream, kernel);
        }
    }
}
