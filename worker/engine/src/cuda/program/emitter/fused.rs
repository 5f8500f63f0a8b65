//! Convolutions that are fused with neighbouring batch norms, in the forward and the backward pass. `fuse/across_convolutions.rs` selects
//! them.

use super::*;

impl<'a> GraphEmitter<'a> {
    /// A convolution that applies the batch norm before it, and computes the statistics of the batch norm after it.
    pub(super) fn bottleneck_forward(&mut self, conv: &Conv, norm_before: Option<usize>) -> Result {
        let plan = self.plan;
        let before = norm_before.map(|norm| plan.norm(norm));
        let from = self.activation(before.map_or(conv.input, |node| node.input))?;
        let y = self.alloc_activation(conv.output);
        let (facts, after) = (self.facts, self.norm_after(conv)?);
        let bottleneck = ops::BottleneckForward {
            input: from,
            before: before.map(|node| facts.norms[node.norm]),
            weights: facts.matrix(&conv.name),
            y,
            shape: self.shape(conv.input),
            after: facts.norms[after.norm],
            reduce: facts.reduction(after, NormPass::Forward),
        };
        self.push(facts.ops.bottleneck_forward(bottleneck));
        self.finish_statistics(self.norm_without_fusion(after)?, after);
        Ok(())
    }

    /// A convolution that computes the end of the preceding block, and the statistics of the batch norm after the convolution.
    pub(super) fn block_end_forward(&mut self, conv: &Conv, norm_at_end: usize) -> Result {
        let end = self.plan.norm(norm_at_end);
        let (x, y) = (self.activation(end.input)?, self.activation(conv.input)?);
        let z = self.alloc_activation(conv.output);
        let (facts, after) = (self.facts, self.norm_after(conv)?);
        let mask = self.masks[end.norm].unwrap_or(Operand::NONE);
        let norm = self.norm(end, x, y, mask)?;
        let (weights, reduce) = (facts.matrix(&conv.name), facts.reduction(after, NormPass::Forward));
        self.push(facts.ops.block_end(norm, weights, z, facts.norms[after.norm], reduce));
        self.finish_statistics(self.norm_without_fusion(after)?, after);
        Ok(())
    }

    /// The batch norm of a convolution's output.
    pub(super) fn norm_after(&self, conv: &Conv) -> Result<&'a Norm> {
        let plan = self.plan;
        let norm = conv.norm_after.map(|norm| plan.norm(norm));
        norm.ok_or_else(|| EngineError::Parameters(format!("no batch norm follows {}", conv.name)))
    }

    /// A convolution's dgrad and wgrad, fused with the last part of the backward pass of the batch norm after the convolution, and with the
    /// backward sums of the batch norm before it.
    pub(super) fn bottleneck_backward(
        &mut self,
        conv: &Conv,
        norm_before: Option<usize>,
        micro_batch: MicroBatch,
    ) -> Result {
        let &Conv { input, output, .. } = conv;
        let Some(Gradient::Deferred { g, x, norm }) = self.gradients[output].pop() else {
            return Err(EngineError::Parameters(format!("{} has no gradient", conv.name)));
        };
        let plan = self.plan;
        let before = norm_before.map(|norm| plan.norm(norm));
        let from = self.activation(before.map_or(input, |node| node.input))?;
        let dinput = self.alloc(input, Content::Gradient);
        let facts = self.facts;
        let bottleneck = ops::Bottleneck {
            x,
            g,
            after: facts.norms[norm],
            weights: facts.matrix(&conv.name),
            input: from,
            dinput,
            dweights: facts.matrix_gradient(&conv.name),
            shape: self.shape(input),
            before: before.map(|node| ops::NormBefore {
                norm: facts.norms[node.norm],
                accumulate: !micro_batch.is_first,
                reduce: facts.reduction(node, NormPass::Backward),
            }),
        };
        self.push(facts.ops.bottleneck_backward(bottleneck));
        let has_other_ranks = facts.statistics.is_some();
        if has_other_ranks {
            // This weight gradient is on the main stream. Buckets are sent after the side stream's commands, so the side stream waits.
            self.fork();
            self.send_completed_bucket(&conv.name, micro_batch);
        }
        self.gradients[input].push(match before {
            Some(_) => Gradient::Summed(dinput),
            None => Gradient::Whole(dinput),
        });
        self.free(g);
        self.free(x);
        self.note_read_in_backward(input);
        Ok(())
    }
}
