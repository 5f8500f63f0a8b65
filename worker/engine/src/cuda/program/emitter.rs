//! A step's forward and backward pass, operation by operation, as the fused graph decides: a list of [`Command`]s. Nothing is
//! started, and the same facts give the same list.

use super::*;
use crate::cuda::command::{Collective, EventId, Group, Kernel, Part, StreamId};
use std::collections::VecDeque;

mod backward;
mod channels;
mod forward;
mod fused;
mod loss;
mod margin;
mod plain;
mod rows;
mod sampled_head;
mod split_head;
mod stages;
#[cfg(test)]
mod tests;
mod update;

/// Weight gradients on the side stream that the backward pass does not wait for to use their memory again.
const PENDING_WEIGHT_GRADIENTS: usize = 4;

/// Gradients of an activation that wait for its producer.
#[derive(Debug, Clone, Copy)]
enum Gradient {
    /// Of every value.
    Whole(Allocation),
    /// Of the mean over all pixels.
    Pooled(Allocation),
    /// Of the output of a 1x1 convolution with so many outputs and these weights, whose dgrad batch norm computes.
    ThroughConv { dy: Allocation, weights: Operand, outputs: usize },
    /// Past a ReLU; the sums of the batch norm before it are known.
    Summed(Allocation),
    /// Of a batch norm's output; the sums are known, and the convolution before it applies them.
    Deferred { g: Allocation, x: Allocation, norm: usize },
}

impl Gradient {
    fn allocation(self) -> Allocation {
        match self {
            Gradient::Whole(at)
            | Gradient::Pooled(at)
            | Gradient::Summed(at)
            | Gradient::ThroughConv { dy: at, .. }
            | Gradient::Deferred { g: at, .. } => at,
        }
    }
}

struct GraphEmitter<'a> {
    facts: &'a Facts<'a>,
    plan: &'a StepPlan,
    commands: Vec<Command>,
    arena: Arena,
    /// Whether weight gradients run on a side stream, concurrently with the backward pass: kernels of small tensors leave most
    /// of the GPU idle.
    side_stream: bool,
    /// By weight gradient that may still run, oldest first: its number, and what it reads and nothing needs after it.
    pending: VecDeque<(usize, Vec<Allocation>)>,
    /// Weight gradients so far.
    weight_gradients: usize,
    /// By tensor.
    activations: Vec<Option<Allocation>>,
    /// By tensor: operations that still read it. In training those whose backward pass does (a weight gradient, a GELU, a ReLU's or
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
    /// Features and gradient of the logits, where the gradient of a split head's weights is still to come.
    head: Option<[Allocation; 2]>,
    /// The sampled classes of a split head, in training.
    sampled: Option<sampled_head::SampledHead>,
    /// Where logits are cosines, in training.
    cosines: Option<margin::HeadCosines>,
    /// The convolution output whose sums cuDNN has taken along.
    summed: Option<TensorId>,
    /// Number of commands of the forward pass, without the loss.
    forward_commands: usize,
}

/// A list of commands, and the bytes of [`Region::Arena`] that it needs.
pub(super) struct Emitted {
    pub(super) commands: Vec<Command>,
    forward_commands: usize,
    pub(super) arena_bytes: usize,
}

impl Emitted {
    /// The commands of one pass, in the memory of its slot: `slot_bytes` gives the bytes of a slot in each region.
    pub(super) fn of_pass(mut self, pass: StagePass, slot_bytes: impl Fn(Region) -> usize) -> Vec<Command> {
        let backward = self.commands.split_off(self.forward_commands);
        let mut commands = if pass.is_backward { backward } else { self.commands };
        commands.iter_mut().for_each(|command| command.shift(|region| pass.slot * slot_bytes(region)));
        commands
    }
}

/// The commands of a micro-batch. `side_stream`: weight gradients run on a stream of their own.
///
/// # Errors
/// An operation reads what none has made.
pub(super) fn emit(
    facts: &Facts<'_>,
    phase: Phase,
    input: Input,
    side_stream: bool,
) -> Result<Emitted, EngineError> {
    let mut emitter = GraphEmitter::new(facts, side_stream);
    emitter.network(phase, input)?;
    let GraphEmitter { arena, commands, forward_commands, .. } = emitter;
    Ok(Emitted { commands, forward_commands, arena_bytes: arena.peak })
}

impl<'a> GraphEmitter<'a> {
    fn new(facts: &'a Facts<'a>, side_stream: bool) -> Self {
        let plan = facts.plan;
        let tensors = plan.network.tensors.len();
        Self {
            facts,
            plan,
            commands: Vec::new(),
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
            head: None,
            sampled: None,
            cosines: None,
            summed: None,
            forward_commands: 0,
        }
    }

    fn network(&mut self, phase: Phase, input: Input) -> Result<(), EngineError> {
        self.count_readers(phase);
        self.part(Part::Begin);
        self.begin(phase, input)?;
        for index in 0..self.plan.ops.len() {
            self.part(Part::Forward(index));
            self.forward(index, phase)?;
        }
        self.send_output()?;
        self.forward_commands = self.commands.len();
        self.part(Part::Loss);
        match phase {
            Phase::Evaluate => self.evaluate(),
            Phase::Train(micro_batch) => {
                self.loss(micro_batch)?;
                self.fork();
                for index in (0..self.plan.ops.len()).rev() {
                    self.part(Part::Backward(index));
                    self.backward(index, micro_batch)?;
                }
                self.keep_input_gradient(micro_batch)?;
                self.part(Part::Update);
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
                (
                    Phase::Train(_),
                    FusedOp::Norm(Norm { input, overwrites_input: false, .. }) | FusedOp::Gelu { input, .. },
                ) => {
                    self.readers[*input] += 1;
                }
                (Phase::Train(_), FusedOp::Relu { output, .. }) => self.readers[*output] += 1,
                (Phase::Train(_), _) => {}
            }
        }
    }

    fn part(&mut self, part: Part) {
        self.commands.push(Command::Part(part));
    }

    fn start(&mut self, stream: StreamId, kernels: impl IntoIterator<Item = Kernel>) {
        self.commands.extend(kernels.into_iter().map(|kernel| Command::Kernel { stream, kernel }));
    }

    /// Most kernels are the main stream's.
    fn main(&mut self, kernels: impl IntoIterator<Item = Kernel>) {
        self.start(StreamId::Main, kernels);
    }

    fn record(&mut self, stream: StreamId, event: EventId) {
        self.commands.push(Command::Record { stream, event });
    }

    fn wait(&mut self, stream: StreamId, event: EventId) {
        self.commands.push(Command::Wait { stream, event });
    }

    fn alloc_bytes(&mut self, bytes: usize, content: Content) -> Allocation {
        let allocation = self.arena.alloc(bytes);
        self.commands.push(Command::Alloc { content, at: allocation.operand() });
        allocation
    }

    /// Frees an allocation with one owner.
    fn free_now(&mut self, allocation: Allocation) {
        self.commands.push(Command::Free { at: allocation.operand() });
        self.arena.free(allocation);
    }

    /// Room for a tensor of the whole batch. Before more memory is taken for it, the backward pass waits for the weight
    /// gradients that are far behind, and uses again what they have read.
    fn alloc(&mut self, tensor: TensorId, content: fn(TensorId) -> Content) -> Allocation {
        let bytes = self.tensor_bytes(tensor);
        if self.pending.len() > PENDING_WEIGHT_GRADIENTS && !self.arena.fits(bytes) {
            let done: Vec<_> = self.pending.drain(..self.pending.len() - PENDING_WEIGHT_GRADIENTS).collect();
            if let Some((number, _)) = done.last() {
                self.wait(StreamId::Main, EventId::WeightGradient(*number));
            }
            for allocation in done.into_iter().flat_map(|(_, read)| read) {
                self.free(allocation);
            }
        }
        self.alloc_bytes(bytes, content(tensor))
    }

    /// Bytes of a tensor of the whole batch.
    fn tensor_bytes(&self, tensor: TensorId) -> usize {
        self.plan.pictures(tensor) * self.plan.values(tensor) * self.plan.dtype.size()
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
pub(super) fn arena_bytes(facts: &Facts<'_>, trains: bool) -> Result<usize, EngineError> {
    let only = MicroBatch { first: true, last: true, whole: true, pass: None };
    let peak = |phase: Phase, side_stream: bool| -> Result<usize, EngineError> {
        let input = Input::Staged { at: 0, format: BatchFormat::Bytes };
        Ok(emit(facts, phase, input, side_stream)?.arena_bytes)
    };
    let evaluated = peak(Phase::Evaluate, true)?;
    if !trains {
        return Ok(evaluated);
    }
    // Without a side stream is how a step is timed call by call.
    Ok(evaluated.max(peak(Phase::Train(only), true)?).max(peak(Phase::Train(only), false)?))
}

/// What the host says about the micro-batch that is under way.
const CONTROL: Operand = Operand::whole(Region::Control);

/// One of four readings of the GPU's clock.
fn stamp(number: usize) -> Operand {
    Operand::new(Region::Stamps, 8 * number, 8)
}

/// Where an allocation is, if there is one.
fn optional(allocation: Option<Allocation>) -> Operand {
    allocation.map_or(Operand::NONE, Allocation::operand)
}
