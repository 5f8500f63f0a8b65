//! What is fused across a convolution, in both directions: `engine/fuse/across_convolutions.rs` says which.

use super::{
    forward::{reduction, statistics_left},
    *,
};

impl<'a> GraphEmitter<'a> {
    /// A convolution that applies the batch norm before it, and takes the statistics of the one after it.
    pub(super) fn bottleneck_forward(
        &mut self,
        conv: &Conv,
        norm_before: Option<usize>,
    ) -> Result<(), EngineError> {
        let plan = self.plan;
        let before = norm_before.map(|norm| plan.norm(norm));
        let from = self.activation(before.map_or(conv.input, |n| n.input))?;
        let y = self.alloc(conv.output, Content::Activation)?;
        self.activations[conv.output] = Some(y);
        let behind = self.norm_after(conv)?;
        if let Some(p) = self.program {
            let bottleneck = ops::BottleneckForward {
                from: self.at(from),
                before: before.map(|n| p.norms[n.norm]),
                weights: p.state.matrix(&conv.name),
                y: self.at(y),
                control: p.inputs.control.ptr,
                shape: self.shape(conv.input),
                behind: p.norms[behind.norm],
                reduce: reduction(p, behind, false),
            };
            p.ops.bottleneck_forward(p.main.0, bottleneck)?;
            statistics_left(p, self.norm_alone(p, behind)?)?;
        }
        Ok(())
    }

    /// A convolution that makes the end of the block before it, and takes the statistics of the batch norm after it.
    pub(super) fn block_end(&mut self, conv: &Conv, block_end: usize) -> Result<(), EngineError> {
        let end = self.plan.norm(block_end);
        let (x, y) = (self.activation(end.input)?, self.activation(conv.input)?);
        let z = self.alloc(conv.output, Content::Activation)?;
        self.activations[conv.output] = Some(z);
        let behind = self.norm_after(conv)?;
        if let Some(p) = self.program {
            let mask = self.masks[end.norm].map_or(0, |m| self.at(m));
            let norm = self.norm(p, end, x, self.at(y), mask)?;
            let block_end = ops::BlockEnd {
                x: norm.x,
                site: norm.site,
                shortcut: norm.shortcut,
                y: norm.y,
                mask,
                weights: p.state.matrix(&conv.name),
                z: self.at(z),
                control: p.inputs.control.ptr,
                shape: self.shape(conv.input),
                behind: p.norms[behind.norm],
                reduce: reduction(p, behind, false),
            };
            p.ops.block_end(p.main.0, block_end)?;
            statistics_left(p, self.norm_alone(p, behind)?)?;
        }
        Ok(())
    }

    /// The batch norm of a convolution's output.
    pub(super) fn norm_after(&self, conv: &Conv) -> Result<&'a Norm, EngineError> {
        let plan = self.plan;
        let norm = conv.norm_after.map(|norm| plan.norm(norm));
        norm.ok_or_else(|| EngineError::Parameters(format!("no batch norm follows {}", conv.name)))
    }

    /// A convolution's dgrad and wgrad with the application of the batch norm after it, whose backward pass was left to it,
    /// and the sums of the one before it.
    pub(super) fn bottleneck_backward(
        &mut self,
        conv: &Conv,
        norm_before: Option<usize>,
        micro_batch: MicroBatch,
    ) -> Result<(), EngineError> {
        let &Conv { input, output, .. } = conv;
        let Some(Gradient::Deferred { g, x, norm }) = self.gradients[output].pop() else {
            return Err(EngineError::Parameters(format!("{} has no gradient", conv.name)));
        };
        let plan = self.plan;
        let before = norm_before.map(|norm| plan.norm(norm));
        let from = self.activation(before.map_or(input, |n| n.input))?;
        let dfrom = self.alloc(input, Content::Gradient)?;
        if let Some(p) = self.program {
            let bottleneck = ops::Bottleneck {
                x: self.at(x),
                g: self.at(g),
                behind: p.norms[norm],
                weights: p.state.matrix(&conv.name),
                from: self.at(from),
                dfrom: self.at(dfrom),
                dweights: p.matrix_gradient(&conv.name),
                control: p.inputs.control.ptr,
                shape: self.shape(input),
                before: before.map(|n| ops::Before {
                    site: p.norms[n.norm],
                    accumulate: !micro_batch.first,
                    reduce: reduction(p, n, true),
                }),
                room: p.workspace.ptr,
            };
            p.ops.bottleneck_backward(p.main.0, bottleneck)?;
            if p.reducer.is_some() {
                // Gradients are sent from where the others are made.
                self.fork()?;
                self.send_buckets(p, &conv.name, micro_batch)?;
            }
        }
        self.gradients[input].push(match before {
            Some(_) => Gradient::Summed(dfrom),
            None => Gradient::Whole(dfrom),
        });
        self.free(g);
        self.free(x);
        self.readers[input] -= 1;
        if self.readers[input] == 0
            && let Some(allocation) = self.activations[input].take()
        {
            self.free_with_newest(allocation);
        }
        Ok(())
    }
}
