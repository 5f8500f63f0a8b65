//! Emits the commands of a step, operation by operation, from the fused graph: a list of [`Command`]s. Nothing is launched, and the
//! same facts give the same list.

use super::*;
use crate::cuda::command::Group;
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

/// Number of newest weight gradients that may still run on the side stream when the backward pass frees the memory of older ones.
const PENDING_WEIGHT_GRADIENTS: usize = 4;

type Result<T = (), E = EngineError> = std::result::Result<T, E>;

/// Messages to or from other ranks, each with the other rank's index in the group and the memory.
type Messages = Vec<(u32, Operand)>;

/// The gradient of an activation from one of its readers. The backward pass of the operation that computes the activation will use it.
#[derive(Debug, Clone, Copy)]
enum Gradient {
    /// The gradient of every value.
    Whole(Operand),
    /// The gradient of the mean over all pixels.
    Pooled(Operand),
    /// The gradient `dy` of the output of a 1x1 convolution with `outputs` channels, which reads the activation. The kernel of the batch
    /// norm before the convolution computes the convolution's dgrad.
    ThroughConv { dy: Operand, weights: Operand, outputs: usize },
    /// The gradient of a ReLU's input. The sums of the batch norm before the ReLU are already computed.
    Summed(Operand),
    /// The gradient `g` of the output of the batch norm with index `norm`, and the batch norm's input `x`. The sums over `g` are already
    /// computed. The backward pass of the convolution before the batch norm computes the gradient of `x` from them.
    Deferred { g: Operand, x: Operand, norm: usize },
}

impl Gradient {
    fn allocation(self) -> Operand {
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
    /// The stream on which weight gradients run: usually the side stream, concurrently with the rest of the backward pass, because kernels
    /// of small tensors leave most of the GPU idle.
    weight_gradient_stream: StreamId,
    /// The weight gradients that may still run, oldest first: the index of each, and the allocations to free after it.
    pending_weight_gradients: VecDeque<(usize, Vec<Operand>)>,
    /// Number of weight gradients on the side stream so far.
    weight_gradient_count: usize,
    /// By tensor: its memory, while operations need it.
    activations: Vec<Option<Operand>>,
    /// By tensor: the number of operations that will still read it. In evaluation, all operations count. In training, only operations whose
    /// backward pass reads the tensor count (a convolution or linear layer, a batch norm, a GELU or a ReLU).
    remaining_readers: Vec<usize>,
    /// By batch norm: the ReLU's mask with a bit per value of the output or, for a pooled batch norm, the argmax with a byte per value.
    masks: Vec<Option<Operand>>,
    /// By tensor: the argmax of the unfused max pooling that computes the tensor.
    argmax: Vec<Option<Operand>>,
    /// By tensor: the gradients that its readers have computed so far.
    gradients: Vec<Vec<Gradient>>,
    /// Allocations with two owners. The first call of `free` removes the entry, and the second call frees the memory.
    shared_allocations: Vec<Operand>,
    /// Number of buckets of gradients whose reduction has started.
    sent_bucket_count: usize,
    /// The operands of the gradient of a split head's weights, if the update computes this gradient.
    features_and_dlogits: Option<[Operand; 2]>,
    /// The sampled classes of a split head, in training.
    sampled_head: Option<sampled_head::SampledHead>,
    /// In training with a margin: the memory of the cosines.
    cosines: Option<margin::HeadCosines>,
    /// The newest convolution output whose channel sums the convolution itself has computed; `None` after a batch norm has used the sums.
    tensor_with_sums: Option<TensorId>,
    /// Number of commands of the forward pass, without the loss.
    forward_command_count: usize,
}

/// A list of commands, and the number of bytes of [`Region::Arena`] that the commands need.
pub(super) struct Emitted {
    pub(super) commands: Vec<Command>,
    forward_command_count: usize,
    pub(super) arena_bytes: usize,
}

impl Emitted {
    /// The commands of one pass, with operands in the pass's part of the memory. `part_bytes` returns the bytes of a part of a region; 0 if
    /// the region is not divided.
    pub(super) fn into_pass(mut self, pass: StagePass, part_bytes: impl Fn(Region) -> usize) -> Vec<Command> {
        let backward = self.commands.split_off(self.forward_command_count);
        let mut commands = if pass.is_backward { backward } else { self.commands };
        commands.iter_mut().for_each(|command| command.shift(|region| pass.memory_part * part_bytes(region)));
        commands
    }
}

/// The commands of a micro-batch. Weight gradients run on `weight_gradient_stream`, the side stream or the main stream.
///
/// # Errors
/// An operation reads a tensor that no earlier operation has computed.
pub(super) fn emit(
    facts: &Facts<'_>,
    phase: Phase,
    input: Input,
    weight_gradient_stream: StreamId,
) -> Result<Emitted> {
    let mut emitter = GraphEmitter::new(facts, weight_gradient_stream);
    emitter.emit_network(phase, input)?;
    let GraphEmitter { arena, commands, forward_command_count, .. } = emitter;
    Ok(Emitted { commands, forward_command_count, arena_bytes: arena.peak })
}

impl<'a> GraphEmitter<'a> {
    fn new(facts: &'a Facts<'a>, weight_gradient_stream: StreamId) -> Self {
        let plan = facts.plan;
        let tensors = plan.network.tensors.len();
        Self {
            facts,
            plan,
            commands: Vec::new(),
            arena: Arena::default(),
            weight_gradient_stream,
            pending_weight_gradients: VecDeque::new(),
            weight_gradient_count: 0,
            activations: vec![None; tensors],
            remaining_readers: vec![0; tensors],
            masks: vec![None; plan.norms().count()],
            argmax: vec![None; tensors],
            gradients: vec![Vec::new(); tensors],
            shared_allocations: Vec::new(),
            sent_bucket_count: 0,
            features_and_dlogits: None,
            sampled_head: None,
            cosines: None,
            tensor_with_sums: None,
            forward_command_count: 0,
        }
    }

    fn emit_network(&mut self, phase: Phase, input: Input) -> Result {
        self.count_readers(phase);
        self.begin_part(Part::Begin);
        self.begin(phase, input)?;
        for index in 0..self.plan.ops.len() {
            self.begin_part(Part::Forward(index));
            self.forward(index, phase)?;
        }
        self.send_output()?;
        self.forward_command_count = self.commands.len();
        self.begin_part(Part::Loss);
        match phase {
            Phase::Evaluate => self.evaluate_loss(),
            Phase::Train(micro_batch) => {
                self.begin_backward(micro_batch)?;
                self.fork();
                for index in (0..self.plan.ops.len()).rev() {
                    self.begin_part(Part::Backward(index));
                    self.backward(index, micro_batch)?;
                }
                self.keep_input_gradient(micro_batch)?;
                self.begin_part(Part::Update);
                self.finish_micro_batch(micro_batch)
            }
        }
    }

    fn count_readers(&mut self, phase: Phase) {
        for op in &self.plan.ops {
            let read_in_backward = match op {
                FusedOp::Conv(Conv { input, .. })
                | FusedOp::Linear { input, .. }
                | FusedOp::Norm(Norm { input, overwrites_input: false, .. })
                | FusedOp::Gelu { input, .. } => Some(*input),
                FusedOp::Relu { output, .. } => Some(*output),
                _ => None,
            };
            let read = match phase {
                Phase::Evaluate => op.reads(),
                Phase::Train(_) => read_in_backward.into_iter().collect(),
            };
            read.into_iter().for_each(|tensor| self.remaining_readers[tensor] += 1);
        }
    }

    fn begin_part(&mut self, part: Part) {
        self.commands.push(Command::Part(part));
    }

    fn push_on(&mut self, stream: StreamId, kernels: impl IntoIterator<Item = Kernel>) {
        self.commands.extend(kernels.into_iter().map(|kernel| Command::Kernel { stream, kernel }));
    }

    /// Appends kernels on the main stream.
    fn push(&mut self, kernels: impl IntoIterator<Item = Kernel>) {
        self.push_on(StreamId::Main, kernels);
    }

    fn record(&mut self, stream: StreamId, event: EventId) {
        self.commands.push(Command::Record { stream, event });
    }

    fn wait(&mut self, stream: StreamId, event: EventId) {
        self.commands.push(Command::Wait { stream, event });
    }

    fn alloc_bytes(&mut self, bytes: usize, content: Content) -> Operand {
        let allocation = self.arena.alloc(bytes);
        self.commands.push(Command::Alloc { content, at: allocation });
        allocation
    }

    /// Frees an allocation with one owner.
    fn free_now(&mut self, allocation: Operand) {
        self.commands.push(Command::Free { at: allocation });
        self.arena.free(allocation);
    }

    /// Allocates memory for a tensor of the whole batch. Before the arena grows, the backward pass waits for all weight gradients except
    /// the newest [`PENDING_WEIGHT_GRADIENTS`], and frees the memory that they have read.
    fn alloc(&mut self, tensor: TensorId, content: fn(TensorId) -> Content) -> Operand {
        let bytes = self.tensor_bytes(tensor);
        if self.pending_weight_gradients.len() > PENDING_WEIGHT_GRADIENTS && !self.arena.fits(bytes) {
            let done: Vec<_> = self
                .pending_weight_gradients
                .drain(..self.pending_weight_gradients.len() - PENDING_WEIGHT_GRADIENTS)
                .collect();
            if let Some((index, _)) = done.last() {
                self.wait(StreamId::Main, EventId::WeightGradient(*index));
            }
            for allocation in done.into_iter().flat_map(|(_, allocations)| allocations) {
                self.free(allocation);
            }
        }
        self.alloc_bytes(bytes, content(tensor))
    }

    /// Allocates the memory of an activation that the current operation computes.
    fn alloc_activation(&mut self, tensor: TensorId) -> Operand {
        let y = self.alloc(tensor, Content::Activation);
        self.activations[tensor] = Some(y);
        y
    }

    /// Allocates the memory of a gradient of `tensor` that the current operation computes.
    fn alloc_gradient(&mut self, tensor: TensorId) -> Operand {
        let dx = self.alloc(tensor, Content::Gradient);
        self.gradients[tensor].push(Gradient::Whole(dx));
        dx
    }

    fn exchange(&mut self, group: Group, sends: Messages, receives: Messages, dtype: DType) {
        self.commands.push(Command::Exchange { stream: StreamId::Main, group, sends, receives, dtype });
    }

    fn tensor_bytes(&self, tensor: TensorId) -> usize {
        self.plan.values(tensor) * self.plan.dtype.size()
    }

    /// Frees an allocation. If it has two owners, each of them must call this function.
    fn free(&mut self, allocation: Operand) {
        match self.shared_allocations.iter().position(|shared| *shared == allocation) {
            Some(index) => drop(self.shared_allocations.swap_remove(index)),
            None => self.free_now(allocation),
        }
    }

    /// Frees an allocation that a weight gradient on the side stream may still read: together with the allocations of the newest weight
    /// gradient, if one may still run, otherwise at once.
    fn free_with_newest(&mut self, allocation: Operand) {
        match self.pending_weight_gradients.back_mut() {
            Some((_, allocations)) => allocations.push(allocation),
            None => self.free(allocation),
        }
    }

    /// The memory of an activation, which an earlier operation must have computed.
    fn activation(&self, tensor: TensorId) -> Result<Operand> {
        self.activations[tensor]
            .ok_or_else(|| EngineError::Parameters(format!("tensor {tensor} is read before it is computed")))
    }

    /// Frees an activation, unless it is already freed.
    fn drop_activation(&mut self, tensor: TensorId) {
        if let Some(allocation) = self.activations[tensor].take() {
            self.free_now(allocation);
        }
    }

    /// In the backward pass: notes that an operation has read `tensor`, and frees the tensor after the last operation, when no weight
    /// gradient on the side stream reads it any more.
    fn note_read_in_backward(&mut self, tensor: TensorId) {
        self.remaining_readers[tensor] -= 1;
        if self.remaining_readers[tensor] == 0
            && let Some(allocation) = self.activations[tensor].take()
        {
            self.free_with_newest(allocation);
        }
    }

    /// In evaluation: notes that an operation has read `tensor`, and frees the tensor after the last operation.
    fn note_read_in_evaluation(&mut self, tensor: TensorId) {
        self.remaining_readers[tensor] -= 1;
        if self.remaining_readers[tensor] == 0 {
            self.drop_activation(tensor);
        }
    }
}

/// Number of bytes of [`Region::Arena`] that every phase fits in: evaluation and, if `trains`, training.
///
/// # Errors
/// An operation reads a tensor that no earlier operation has computed.
pub(super) fn arena_bytes(facts: &Facts<'_>, trains: bool) -> Result<usize> {
    let only_micro_batch = MicroBatch { is_first: true, is_last: true, is_full: true, pass: None };
    let bytes_of = |phase: Phase, weight_gradient_stream: StreamId| -> Result<usize> {
        Ok(emit(facts, phase, Input::NONE, weight_gradient_stream)?.arena_bytes)
    };
    let evaluation = bytes_of(Phase::Evaluate, StreamId::Side)?;
    if !trains {
        return Ok(evaluation);
    }
    let training = Phase::Train(only_micro_batch);
    // A step whose calls are timed one by one uses only the main stream.
    Ok(evaluation.max(bytes_of(training, StreamId::Side)?).max(bytes_of(training, StreamId::Main)?))
}

/// The points of a step at which the GPU records its clock, in the order of [`rings::Record::stamps`].
#[derive(Debug, Clone, Copy)]
enum Stamp {
    Begin,
    BackwardDone,
    Reduced,
    End,
}

impl Stamp {
    fn operand(self) -> Operand {
        Operand::new(Region::Stamps, 8 * self as usize, 8)
    }
}
