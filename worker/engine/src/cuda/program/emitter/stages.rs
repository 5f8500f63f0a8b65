//! Exchange between pipeline stages: an activation is sent to the next stage, and its gradient is sent back.
//!
//! A send may block until the other stage receives the message, so neighbouring stages send and receive their messages in the same order. A
//! stage sends the gradient of a backward pass only after it has received the input of its next forward pass, because the preceding stage
//! sends that input before it receives the gradient.

use super::{split_head::Squares, *};

impl GraphEmitter<'_> {
    /// Receives the input of a forward pass from the preceding stage.
    pub(super) fn receive_input(&mut self, phase: Phase) {
        self.fetch(phase);
        let input = self.plan.network.input();
        let x = self.alloc_activation(input);
        let from = self.plan.network.stage().0 - 1;
        let receives = vec![(from as u32, self.values_at(input, x))];
        self.exchange(Group::Stage, Vec::new(), receives, self.plan.dtype);
        let sends_gradient = phase.pass().is_some_and(|pass| !pass.is_backward && pass.sends_gradient);
        if sends_gradient {
            self.send_input_gradient();
        }
    }

    /// Sends the output of a forward pass to the next stage, if there is one.
    pub(super) fn send_output(&mut self) -> Result {
        if self.plan.network.is_last_stage() {
            return Ok(());
        }
        let (output, to) = (self.stage_output(), self.plan.network.stage().0 + 1);
        let y = self.activation(output)?;
        let sends = vec![(to as u32, self.values_at(output, y))];
        self.exchange(Group::Stage, sends, Vec::new(), self.plan.dtype);
        // The backward pass reads this output only if an unfused ReLU computes it.
        if self.remaining_readers[output] == 0 {
            self.drop_activation(output);
        }
        Ok(())
    }

    /// Receives the gradient of the stage's output from the next stage.
    pub(super) fn receive_gradient(&mut self) {
        let (output, from) = (self.stage_output(), self.plan.network.stage().0 + 1);
        let dy = self.alloc_gradient(output);
        let receives = vec![(from as u32, self.values_at(output, dy))];
        self.exchange(Group::Stage, Vec::new(), receives, self.plan.dtype);
    }

    /// Keeps the gradient of the stage's input for the preceding stage, if there is one. Copies it into
    /// [`Region::InputGradient`], so that the memory of the micro-batch can be reused.
    pub(super) fn keep_input_gradient(&mut self, MicroBatch { is_last, .. }: MicroBatch) -> Result {
        if self.plan.network.stage().0 == 0 {
            return Ok(());
        }
        let dx = self.gradient(self.plan.network.input())?;
        let to = self.input_gradient();
        let values = (to.bytes / self.plan.dtype.size()) as u64;
        // Scaling by 1 copies the values.
        self.push(self.facts.ops.scale_values([dx, to], values, 1.0));
        self.free(dx);
        if is_last {
            self.send_input_gradient();
        }
        Ok(())
    }

    /// Sends the gradient of the newest backward pass to the preceding stage.
    pub(super) fn send_input_gradient(&mut self) {
        let to = self.plan.network.stage().0 - 1;
        self.exchange(Group::Stage, vec![(to as u32, self.input_gradient())], Vec::new(), self.plan.dtype);
    }

    /// Before the update: gives every stage the sum of squares (f64) of each stage's gradients, and the loss of the last stage. Returns the
    /// sums; `None` if there is only one stage.
    pub(super) fn exchange_squares_and_loss(&mut self, gradients: ops::Gradients) -> Option<Squares> {
        let (stage, stages) = self.plan.network.stage();
        if stages == 1 {
            return None;
        }
        let at = self.alloc_bytes(8 * stages, Content::Stages);
        let square_of = |stage: usize| at.part(8 * stage, 8);
        self.push(self.facts.ops.gradient_squares(gradients, square_of(stage)));
        let others = || (0..stages).filter(move |other| *other != stage);
        let mut sends: Vec<_> = others().map(|other| (other as u32, square_of(stage))).collect();
        let mut receives: Vec<_> = others().map(|other| (other as u32, square_of(other))).collect();
        if self.plan.network.is_last_stage() {
            sends.extend(others().map(|other| (other as u32, rings::TOTALS)));
        } else {
            receives.push((stages as u32 - 1, rings::TOTALS));
        }
        self.exchange(Group::Stage, sends, receives, DType::F32);
        Some(Squares { at, count: stages })
    }

    /// The activation that a stage sends to the next stage. In the network of a stage, `logits` returns it.
    fn stage_output(&self) -> TensorId {
        self.plan.network.logits()
    }

    fn input_gradient(&self) -> Operand {
        Operand::new(Region::InputGradient, 0, self.tensor_bytes(self.plan.network.input()))
    }

    /// The values of an allocation for `tensor`, without the padding of the allocation: the same bytes on both stages.
    fn values_at(&self, tensor: TensorId, at: Operand) -> Operand {
        at.part(0, self.tensor_bytes(tensor))
    }
}
