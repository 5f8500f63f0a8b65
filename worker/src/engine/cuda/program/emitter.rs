//! A step's forward and backward pass, operation by operation, as the fused graph decides. Without a program nothing is
//! started: that pass tells how much memory there must be, and tests what lies where.

use super::*;
use std::collections::VecDeque;
use trace::{Content, Trace};

mod backward;
mod forward;
mod fused;
mod plain;
#[cfg(test)]
mod tests;
mod trace;
mod update;

pub(super) struct GraphEmitter<'a> {
    plan: &'a StepPlan,
    /// What is started on; `None` where only memory is planned.
    program: Option<&'a Program>,
    pub(super) arena: Arena,
    /// Whether weight gradients run on a side stream, concurrently with the backward pass: kernels of small tensors leave most
    /// of the GPU idle.
    side_stream: bool,
    /// By weight gradient that may still run, oldest first: its number, and what it reads and nothing needs after it.
    pending: VecDeque<(usize, Vec<Allocation>)>,
    /// Weight gradients so far.
    weight_gradients: usize,
    /// By tensor.
    activations: Vec<Option<Allocation>>,
    /// By tensor: operations that still read it. In training those whose backward pass does (a weight gradient, a ReLU's or
    /// max pooling's mask), in evaluation all.
    readers: Vec<usize>,
    /// By batch norm: `relu_mask`, a bit a value of its output, or of a pooled one `argmax`, a byte a value.
    masks: Vec<Option<Allocation>>,
    /// By tensor: the argmax of the max pooling that makes it by itself.
    argmax: Vec<Option<Allocation>>,
    /// By tensor: gradients from its readers.
    gradients: Vec<Vec<Gradient>>,
    /// Allocations with two owners: freed once before they are free.
    shared: Vec<Allocation>,
    /// Buckets of gradients that are complete.
    sent: usize,
    /// The convolution output whose sums cuDNN has taken along.
    summed: Option<TensorId>,
    pub(super) trace: Option<Trace>,
}

impl<'a> GraphEmitter<'a> {
    /// Starts what it emits on `program`, or only plans memory.
    pub(super) fn new(plan: &'a StepPlan, program: Option<&'a Program>, side_stream: bool) -> Self {
        let tensors = plan.network.tensors.len();
        Self {
            plan,
            program,
            arena: Arena::default(),
            side_stream,
            pending: VecDeque::new(),
            weight_gradients: 0,
            activations: vec![None; tensors],
            readers: vec![0; tensors],
            masks: vec![None; plan.norms().count()],
            argmax: vec![None; tensors],
            gradients: vec![Vec::new(); tensors],
            shared: Vec::new(),
            sent: 0,
            summed: None,
            trace: None,
        }
    }

    pub(super) fn network(&mut self, phase: Phase, input: Input) -> Result<(), EngineError> {
        self.count_readers(phase);
        self.note(|_| "begin".into());
        self.begin(input)?;
        for index in 0..self.plan.ops.len() {
            self.note(|plan| format!("forward {index} {}", plan.ops[index]));
            self.forward(index, phase)?;
        }
        self.note(|_| "loss".into());
        match phase {
            Phase::Evaluate => self.evaluate(),
            Phase::Train(micro_batch) => {
                self.loss(micro_batch)?;
                self.fork()?;
                for index in (0..self.plan.ops.len()).rev() {
                    self.note(|plan| format!("backward {index} {}", plan.ops[index]));
                    self.backward(index, micro_batch)?;
                }
                self.note(|_| "update".into());
                self.finish(micro_batch)
            }
        }
    }

    fn count_readers(&mut self, phase: Phase) {
        for op in &self.plan.ops {
            match (phase, op) {
                (Phase::Evaluate, _) => op.reads().into_iter().for_each(|tensor| self.readers[tensor] += 1),
                (Phase::Train(_), FusedOp::Conv(Conv { input, .. }) | FusedOp::Linear { input, .. }) => {
                    self.readers[*input] += 1;
                }
                (Phase::Train(_), FusedOp::Norm(Norm { input, overwrites_input: false, .. })) => {
                    self.readers[*input] += 1;
                }
                (Phase::Train(_), FusedOp::Relu { output, .. }) => self.readers[*output] += 1,
                (Phase::Train(_), _) => {}
            }
        }
    }

    /// Adds a line to the trace, if there is one.
    fn note(&mut self, line: impl FnOnce(&StepPlan) -> String) {
        if let Some(trace) = &mut self.trace {
            trace.step(line(self.plan));
        }
    }

    /// Where an allocation is on the GPU; 0 where only memory is planned.
    fn at(&self, allocation: Allocation) -> Ptr {
        self.program.map_or(0, |p| p.arena.ptr + allocation.offset as u64)
    }

    fn alloc_bytes(&mut self, bytes: usize, content: Content) -> Allocation {
        let allocation = self.arena.alloc(bytes);
        if let Some(trace) = &mut self.trace {
            trace.alloc(content, allocation);
        }
        allocation
    }

    /// Frees an allocation with one owner.
    fn free_now(&mut self, allocation: Allocation) {
        if let Some(trace) = &mut self.trace {
            trace.free(allocation);
        }
        self.arena.free(allocation);
    }

    /// Room for a tensor of the whole batch. Before more memory is taken for it, the backward pass waits for the weight
    /// gradients that are far behind, and uses again what they have read.
    fn alloc(
        &mut self,
        tensor: TensorId,
        content: fn(TensorId) -> Content,
    ) -> Result<Allocation, EngineError> {
        let bytes = self.plan.batch * self.plan.values(tensor) * self.plan.dtype.size();
        if self.pending.len() > PENDING_WEIGHT_GRADIENTS && !self.arena.fits(bytes) {
            let done: Vec<_> = self.pending.drain(..self.pending.len() - PENDING_WEIGHT_GRADIENTS).collect();
            if let Some((number, _)) = done.last() {
                if let Some(p) = self.program {
                    p.main.0.wait(&p.side_done[*number])?;
                }
                let number = *number;
                if let Some(trace) = &mut self.trace {
                    trace.wait(number);
                }
            }
            for allocation in done.into_iter().flat_map(|(_, read)| read) {
                self.free(allocation);
            }
        }
        Ok(self.alloc_bytes(bytes, content(tensor)))
    }

    /// Frees an allocation, which may have two owners that do so.
    fn free(&mut self, allocation: Allocation) {
        match self.shared.iter().position(|shared| *shared == allocation) {
            Some(index) => drop(self.shared.swap_remove(index)),
            None => self.free_now(allocation),
        }
    }

    /// Frees what a weight gradient on the side stream may still read: with what the newest one reads.
    fn free_with_newest(&mut self, allocation: Allocation) {
        match self.pending.back_mut() {
            Some((_, read)) => read.push(allocation),
            None => self.free(allocation),
        }
    }

    fn activation(&self, tensor: TensorId) -> Result<Allocation, EngineError> {
        self.activations[tensor]
            .ok_or_else(|| EngineError::Parameters(format!("tensor {tensor} is read before it is made")))
    }

    /// Frees an activation that nothing needs any more.
    fn drop_activation(&mut self, tensor: TensorId) {
        if let Some(allocation) = self.activations[tensor].take() {
            self.free_now(allocation);
        }
    }

    /// In evaluation: `tensor` has been read once more.
    fn evaluated(&mut self, tensor: TensorId) {
        self.readers[tensor] -= 1;
        if self.readers[tensor] == 0 {
            self.drop_activation(tensor);
        }
    }
}

/// Bytes that activations and their gradients take at most.
///
/// # Errors
/// An operation reads what none has made.
pub(super) fn arena_bytes(plan: &StepPlan, trains: bool) -> Result<usize, EngineError> {
    let only = MicroBatch { first: true, last: true, whole: true };
    let peak = |phase: Phase, side_stream: bool| -> Result<usize, EngineError> {
        let mut emitter = GraphEmitter::new(plan, None, side_stream);
        emitter.network(phase, Input::Staged { at: 0, form: Form::Bytes })?;
        Ok(emitter.arena.peak)
    };
    let evaluated = peak(Phase::Evaluate, true)?;
    if !trains {
        return Ok(evaluated);
    }
    // Without a side stream is how a step is timed call by call.
    Ok(evaluated.max(peak(Phase::Train(only), true)?).max(peak(Phase::Train(only), false)?))
}
