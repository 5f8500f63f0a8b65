//! A split head in steps that sample its classes. The sampled rows of the weights are gathered for the forward and backward pass. For the
//! update, the optimizer's state of these rows is gathered too. The updated rows and state are written back.

use super::{
    split_head::{CONTROLS, HeadPart},
    *,
};
use crate::cuda::program::facts::UpdatedRange;

/// Memory of a step for the sampled classes.
#[derive(Debug, Clone, Copy)]
pub(super) struct SampledHead {
    /// The sampled classes.
    sample: Operand,
    /// Positions of the labels in the sample.
    label_positions: Operand,
    /// The sampled rows of the weights, in the activations' format.
    weights: Operand,
    /// The sampled biases, float32.
    bias: Operand,
    /// Gradient of `weights`; `None` before the backward pass.
    gradient: Option<Operand>,
    /// Gradient of `bias`; `None` before the loss.
    bias_gradient: Option<Operand>,
}

impl GraphEmitter<'_> {
    /// Number of values of a row of the head's weights.
    fn row_values(&self) -> usize {
        self.plan.sampled_convolution().map_or(0, |convolution| convolution.in_c)
    }

    /// If steps sample classes: gathers the labels of the group, samples classes of the last layer, and gathers their weights and biases.
    pub(super) fn sample_classes(&mut self) {
        let (facts, plan, name) = (self.facts, self.plan, self.plan.network.head());
        let Some((head, sampled)) = plan.head.as_ref().zip(plan.sampled_classes()) else { return };
        self.gather_controls();
        let (capacity, label_count) = (sampled.capacity, 2 * head.ranks * plan.batch);
        let sample = self.alloc_bytes(ops::SampleClasses::bytes(capacity), Content::Head);
        let [label_positions, scratch] =
            [1, 2].map(|words| self.alloc_bytes(4 * words * label_count, Content::Head));
        let own = head.own_classes();
        self.push(facts.ops.sample_classes(ops::SampleClasses {
            controls: CONTROLS,
            control_words: self.control_words(),
            batch: plan.batch as u32,
            ranks: head.ranks as u32,
            classes: own.len() as u32,
            first_class: own.start as u32,
            drawn_count: sampled.drawn_count as u32,
            seed: sampled.seed,
            sample,
            label_positions,
            scratch,
        }));
        self.free_now(scratch);
        let row_bytes = plan.dtype.size() * self.row_values();
        let weights = self.gather_rows(sample, facts.matrix(name), row_bytes).sampled;
        let bias = self.gather_rows(sample, facts.layout.vector(name, "bias"), 4).sampled;
        let (gradient, bias_gradient) = (None, None);
        self.sampled_head =
            Some(SampledHead { sample, label_positions, weights, bias, gradient, bias_gradient });
    }

    /// The sampled classes, for a pass over only these classes; `None` if classes are not sampled.
    pub(super) fn sampled_part(&self) -> Option<HeadPart> {
        let (plan, memory) = (self.plan, self.sampled_head.as_ref()?);
        Some(HeadPart {
            convolution: plan.sampled_convolution()?,
            chunk_count: plan.sampled_classes()?.chunk_count,
            w: memory.weights,
            bias: if plan.margin.is_some() { Operand::NONE } else { memory.bias },
            sample: memory.sample,
            label_positions: memory.label_positions,
        })
    }

    pub(super) fn alloc_sampled_gradient(&mut self) -> Option<Operand> {
        let bytes = self.sampled_head.as_ref()?.weights.bytes;
        let at = self.alloc_bytes(bytes, Content::Head);
        self.sampled_head.as_mut()?.gradient = Some(at);
        Some(at)
    }

    pub(super) fn alloc_sampled_bias_gradient(&mut self) -> Option<Operand> {
        let bytes = self.sampled_head.as_ref()?.bias.bytes;
        let at = self.alloc_bytes(bytes, Content::Head);
        self.sampled_head.as_mut()?.bias_gradient = Some(at);
        Some(at)
    }

    /// The gradients of the sampled rows: of weights, then of biases.
    pub(super) fn sampled_gradients(&self) -> Option<ops::Gradients> {
        let (memory, capacity) = (self.sampled_head.as_ref()?, self.plan.sampled_classes()?.capacity as u64);
        let matrix_length = capacity * self.row_values() as u64;
        Some(ops::Gradients {
            matrices: memory.gradient?,
            vectors: memory.bias_gradient?,
            matrix_length,
            length: matrix_length + capacity,
            is_float32: self.plan.dtype == DType::F32,
        })
    }

    /// Updates the weights and biases of the sampled classes.
    pub(super) fn update_sampled(&mut self, memory: SampledHead) {
        let (facts, plan) = (self.facts, self.plan);
        let (Some(sampled), [Some(gradient), Some(bias_gradient)]) =
            (plan.sampled_classes(), [memory.gradient, memory.bias_gradient])
        else {
            return;
        };
        let name = plan.network.head();
        // The parameter's values in the flat layout.
        let range = |suffix: &str| facts.layout.parameter(name, suffix).range.clone();
        let [weight, bias] = ["weight", "bias"].map(range);
        for (range, is_matrix, own, gradient) in
            [(weight, true, memory.weights, gradient), (bias, false, memory.bias, bias_gradient)]
        {
            let width = if is_matrix { self.row_values() } else { 1 };
            let all_rows = |operand: Operand| operand.part(4 * range.start, 4 * range.len());
            // Rows of the trained weights first, then of their copy in the activations' format, then of the optimizer's slots.
            let mut rows = Vec::new();
            let is_planar = is_matrix && plan.is_planar();
            let has_copy = is_matrix && plan.dtype != DType::F32;
            if has_copy {
                let (trained, row_bytes) = if is_planar {
                    (facts.layout.planes(range.clone())[1], 2 * width)
                } else {
                    (all_rows(Operand::whole(Region::Weights)), 4 * width)
                };
                rows.push(self.gather_rows(memory.sample, trained, row_bytes));
            }
            let (all, row_bytes) = if is_matrix {
                (facts.matrix(name), plan.dtype.size() * width)
            } else {
                (facts.layout.vector(name, "bias"), 4)
            };
            rows.push(ops::ParameterRows { all, sampled: own, row_bytes, capacity: sampled.capacity });
            let weights = rows[0].sampled;
            let mut optimizer_slots = [Operand::NONE; 2];
            let slot_count = facts.optimizer.slots().len();
            for (slot, operand) in optimizer_slots.iter_mut().enumerate().take(slot_count) {
                let all = all_rows(Operand::whole(Region::OptimizerSlot(slot)));
                let gathered = self.gather_rows(memory.sample, all, 4 * width);
                *operand = gathered.sampled;
                rows.push(gathered);
            }
            let length = (sampled.capacity * width) as u64;
            let gradients = ops::Gradients {
                matrices: if is_matrix { gradient } else { Operand::NONE },
                vectors: if is_matrix { Operand::NONE } else { gradient },
                matrix_length: if is_matrix { length } else { 0 },
                length,
                is_float32: plan.dtype == DType::F32,
            };
            let low_precision = if has_copy { own } else { Operand::NONE };
            let whole_range = facts.updated_range(gradients, range.start, range.start);
            let flat = ops::FlatParameters { weights, low_precision, is_planar, ..whole_range.flat };
            self.update_weights(&[UpdatedRange { flat, optimizer_slots, ..whole_range }]);
            for gathered in rows {
                self.push(facts.ops.scatter_rows(gathered, memory.sample));
                self.free_now(gathered.sampled);
            }
            self.free_now(gradient);
        }
        self.free_now(memory.label_positions);
        self.free_now(memory.sample);
    }

    /// Gathers the sampled rows of a parameter or of an optimizer slot.
    fn gather_rows(&mut self, sample: Operand, all: Operand, row_bytes: usize) -> ops::ParameterRows {
        let capacity = self.plan.sampled_classes().map_or(0, |sampled| sampled.capacity);
        let sampled = self.alloc_bytes(capacity * row_bytes, Content::Head);
        let rows = ops::ParameterRows { all, sampled, row_bytes, capacity };
        self.push(self.facts.ops.gather_rows(rows, sample));
        rows
    }
}
