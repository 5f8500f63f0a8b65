//! The loss, and the gradient of the logits, with which the backward pass begins.

use super::*;

/// From this number of classes on, several blocks compute a picture's loss. [`ops::CrossEntropy`] computes the loss of a picture in one
/// warp, which is faster for fewer classes.
const MANY_CLASSES: usize = 4096;

impl GraphEmitter<'_> {
    /// Computes the loss and the gradient of the logits. Stages before the last receive the gradient of their output instead.
    pub(super) fn begin_backward(&mut self, micro_batch: MicroBatch) -> Result {
        let MicroBatch { is_first, pass, .. } = micro_batch;
        if pass.is_some_and(|pass| pass.is_backward && pass.sends_gradient) {
            self.send_input_gradient();
        }
        if !self.plan.network.is_last_stage() {
            self.receive_gradient();
            return Ok(());
        }
        let logits = self.plan.network.logits();
        let allocation = self.activation(logits)?;
        if self.plan.head.is_some() || self.uses_split_loss() {
            self.split_loss(Some(micro_batch))?;
            self.activations[logits] = None;
            self.gradients[logits].push(Gradient::Whole(allocation));
            return Ok(());
        }
        let gradient = self.alloc_gradient(logits);
        let loss = self.cross_entropy(allocation);
        let loss = ops::CrossEntropy {
            dlogits: gradient,
            dbias: self.facts.layout.vector_gradient(self.plan.last_layer(), "bias"),
            accumulate: !is_first,
            class_weights: if self.facts.has_class_weights {
                Operand::whole(Region::ClassWeights)
            } else {
                Operand::NONE
            },
            label_logits: self.put_margin(unsplit_logits(&loss)),
            ..loss
        };
        self.push(self.facts.ops.cross_entropy(loss));
        self.convert_cosine_gradient(gradient);
        self.drop_activation(logits);
        Ok(())
    }

    /// Adds the loss to the totals and, if this rank has all classes, computes the logits for the host.
    pub(super) fn evaluate_loss(&mut self) -> Result {
        if !self.plan.network.is_last_stage() {
            return Ok(());
        }
        if self.plan.head.is_some() {
            return self.split_loss(None);
        }
        let allocation = self.activation(self.plan.network.logits())?;
        let loss = ops::CrossEntropy { smoothing: 0.0, accumulate: true, ..self.cross_entropy(allocation) };
        if self.uses_split_loss() {
            self.split_loss(None)?;
        } else {
            self.push(self.facts.ops.cross_entropy(loss));
        }
        self.push(self.facts.ops.biased_logits(loss, Operand::whole(Region::EvaluatedLogits)));
        Ok(())
    }

    /// Whether [`Self::split_loss`] computes the loss although this rank has all classes.
    fn uses_split_loss(&self) -> bool {
        self.plan.network.classes >= MANY_CLASSES && !self.facts.has_class_weights
    }

    /// The description of the loss without gradients.
    pub(super) fn cross_entropy(&self, logits: Operand) -> ops::CrossEntropy {
        ops::CrossEntropy {
            logits,
            bias: self.facts.head_bias(),
            pictures: self.plan.batch as u32,
            classes: self.plan.network.classes as u32,
            padded: self.plan.padded_classes as u32,
            smoothing: self.facts.label_smoothing,
            class_weights: Operand::NONE,
            dlogits: Operand::NONE,
            dbias: Operand::NONE,
            accumulate: false,
            label_logits: Operand::NONE,
        }
    }
}

/// The logits of a rank that has all classes, as one chunk.
pub(super) fn unsplit_logits(loss: &ops::CrossEntropy) -> ops::SplitLogits {
    ops::SplitLogits {
        logits: loss.logits,
        bias: loss.bias,
        sample: Operand::NONE,
        label_positions: Operand::NONE,
        controls: CONTROL,
        control_words: 0,
        batch: loss.pictures,
        ranks: 1,
        rank: 0,
        all_classes: loss.classes,
        classes: loss.classes,
        first_class: 0,
        chunk_classes: loss.padded,
        chunk_count: 1,
    }
}
