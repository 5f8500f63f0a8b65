//! A step as a list of commands: kernels, convolutions, events and collectives, in launch order.
//!
//! Operands are ranges of [`Region`]s, not addresses, so a list can be created, printed and checked without a GPU.
//! `program/emitter.rs` creates a list, [`verify`] checks it, and `program/execute.rs` launches it.

use super::{
    convolution::{Convolution, Direction, Tensors},
    dtype::DType,
};
use crate::{net::TensorId, sharding::Share};
use lockstep_comm::DataType;

mod text;
pub(super) mod verify;

pub(super) use text::{Names, to_text};

/// A memory region that commands access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Region {
    /// The region of an absent operand.
    Nowhere,
    /// Activations and their gradients.
    Arena,
    /// The batch copied from the host, or the dataset.
    Pictures,
    /// Float32 `[channels, 256]`: the normalised value of each byte of a picture.
    Normalisation,
    /// Float32 weights of the classes in the loss.
    ClassWeights,
    /// Resampling table for the rows of a picture.
    ScaleRows,
    /// Resampling table for the columns of a picture.
    ScaleColumns,
    /// Control blocks of coming micro-batches, in host memory.
    InputRing,
    /// Number of control blocks that the GPU has read.
    InputCounter,
    /// The same number as [`Region::InputCounter`], in host memory.
    HostInputCounter,
    /// Control block of the current micro-batch.
    Control,
    /// Results of steps, in host memory.
    ResultRing,
    /// Number of results so far.
    ResultCounter,
    /// The current micro-batch's control blocks of all ranks of the model group. If operators are split, a control block for all pictures
    /// of the group follows.
    GroupControls,
    /// Float32, all parameters.
    Weights,
    /// Copy of the matrices in the format in which convolutions are computed.
    LowPrecision,
    OptimizerSlot(usize),
    /// Gradients of the matrices, in the format in which convolutions are computed.
    MatrixGradients,
    /// Gradient of a stage's input, until it is sent to the preceding stage.
    InputGradient,
    /// Gradients of the vectors, float32.
    VectorGradients,
    /// Float32 sums over micro-batches of the matrices' gradients.
    Accumulated,
    /// Running mean and variance of batch norms, float32.
    RunningStatistics,
    /// During a step: the running statistics after the newest finished step.
    KeptStatistics,
    /// For each block of the kernel that copies [`Region::KeptStatistics`]: the number of finished steps at the time of the copy.
    KeptSteps,
    /// Moving average of the weights.
    AverageWeights,
    /// Moving average of the running statistics.
    AverageStatistics,
    /// Values that one pass of a batch norm computes for a later pass.
    NormValues,
    /// Sums that a convolution computes for the following batch norm.
    ChannelSums,
    /// Batch norm's sums, if NCCL reduces them over ranks.
    StatisticsSums,
    /// If ranks divide the optimizer's state: the sum of squares of each bucket's gradients, float64.
    BucketSquares,
    /// If ranks divide the optimizer's state: the sums of squares for the norms of each parameter, float64.
    SegmentSquares,
    /// Addresses of all ranks' exchange buffers.
    PeerTable,
    /// For each value that ranks exchange: the number of exchanges so far.
    PeerSequences,
    /// Loss scale, and the state of the latest gradients and update ([`super::state::Scaler`]).
    Scaler,
    /// Loss, number of correct predictions, and number of pictures.
    Totals,
    /// The GPU's clock at four points of the step, in nanoseconds.
    Stamps,
    /// Logits of an evaluation, for the host.
    EvaluatedLogits,
    /// Range of each parameter with a gradient, and whether LARS and LAMB scale its rate by norms.
    Segments,
    /// Learning rate and weight decay of each parameter with LARS and LAMB; with Muon, the norms of each filter.
    Rates,
    /// For Muon: the matrix of each convolution, then the learning rate and weight decay of each parameter.
    Policies,
    /// The result of a check: whether a value is not finite, or a checksum of weights.
    CheckResult,
    /// The kernels' counters and partial sums.
    Scratch,
    /// cuDNN's workspace on the main stream.
    Workspace,
    /// cuDNN's workspace on the side stream.
    SideWorkspace,
}

/// A range of a region, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Operand {
    pub(super) region: Region,
    pub(super) offset: usize,
    pub(super) bytes: usize,
}

impl Operand {
    /// An absent operand. Kernels get address 0.
    pub(super) const NONE: Self = Self { region: Region::Nowhere, offset: 0, bytes: 0 };

    pub(super) const fn new(region: Region, offset: usize, bytes: usize) -> Self {
        Self { region, offset, bytes }
    }

    /// All of a region.
    pub(super) const fn whole(region: Region) -> Self {
        Self::new(region, 0, usize::MAX)
    }

    pub(super) fn is_none(self) -> bool {
        self.region == Region::Nowhere
    }

    /// `bytes` bytes of this operand from `offset` on.
    pub(super) fn part(self, offset: usize, bytes: usize) -> Self {
        debug_assert!(offset.saturating_add(bytes) <= self.bytes, "{bytes} bytes at {offset} of {self:?}");
        Self { offset: self.offset + offset, bytes, ..self }
    }

    pub(super) fn end(self) -> usize {
        self.offset.saturating_add(self.bytes)
    }
}

/// `Scaler::updating`, a `u32` that the GPU sets while an update may be under way.
pub(super) const UPDATING: Operand = Operand::new(Region::Scaler, 32, size_of::<u32>());

/// One argument of a kernel: a number, or memory and how the kernel accesses it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Arg {
    /// Read.
    In(Operand),
    /// Overwritten.
    Out(Operand),
    /// Read and written.
    InOut(Operand),
    /// Passed, but not accessed in this mode of the kernel.
    Unused(Operand),
    U32(u32),
    U64(u64),
    F32(f32),
    F64(f64),
}

impl Arg {
    /// `InOut` if the kernel also reads the old values, else `Out`.
    pub(super) fn out(operand: Operand, reads_old: bool) -> Self {
        if reads_old { Arg::InOut(operand) } else { Arg::Out(operand) }
    }

    /// The same memory as [`Arg::Unused`]. Numbers stay unchanged.
    pub(super) fn unused(self) -> Self {
        match self {
            Arg::In(operand) | Arg::Out(operand) | Arg::InOut(operand) => Arg::Unused(operand),
            number => number,
        }
    }
}

/// Blocks and threads of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Geometry {
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    /// Blocks per cluster along x; 1 without clusters.
    pub(super) cluster: u32,
    pub(super) shared_bytes: u32,
}

/// One of our kernels with its arguments.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Kernel {
    pub(super) name: &'static str,
    pub(super) geometry: Geometry,
    pub(super) args: Vec<Arg>,
}

/// Functions that launch several kernels also take a single kernel.
impl IntoIterator for Kernel {
    type Item = Kernel;
    type IntoIter = std::iter::Once<Kernel>;

    fn into_iter(self) -> Self::IntoIter {
        std::iter::once(self)
    }
}

/// A CUDA stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum StreamId {
    /// The stream on which a step begins and ends.
    Main,
    /// Weight gradients, concurrently with the backward pass.
    Side,
    /// Reduction of gradients over ranks.
    Collectives,
}

impl StreamId {
    pub(super) const ALL: [Self; 3] = [Self::Main, Self::Side, Self::Collectives];
}

/// The ranks that take part in a collective or an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Group {
    /// All ranks of this rank's stage.
    World,
    /// The ranks that share this rank's copy of the network.
    Model,
    /// The ranks that share the rows of this rank's pictures.
    Height,
    /// The ranks that have the same part of the network as this rank.
    Data,
    /// The ranks with the same coordinates in the other stages, in the order of the stages.
    Stage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Collective {
    /// Sums values over the ranks of a group, in place.
    AllReduce,
    /// Every rank of a group receives the values of all its ranks, in rank order.
    AllGather,
    /// Sums values over the ranks of a group. Each rank receives its part of the sum. Parts are in rank order.
    ReduceScatter,
}

/// An event: a point in a stream for which other streams wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum EventId {
    /// The side stream may continue.
    SideBegin,
    /// All work of the side stream is done.
    SideEnd,
    /// The weight gradient with this index is computed.
    WeightGradient(usize),
    /// A bucket's gradients are complete.
    BucketReady(usize),
    /// All buckets are reduced.
    CollectivesDone,
}

/// Initial content of an allocation. A batch norm's backward pass may overwrite the norm's input with the input's gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    Activation(TensorId),
    Gradient(TensorId),
    /// The mask of the ReLU that is fused with the batch norm with this index: one bit per value.
    ReluMask(usize),
    /// The argmax of a pooling, one byte per value. The number is the index of the batch norm with which the pooling is fused, or else of
    /// the tensor that the pooling computes.
    Argmax(usize),
    /// Memory of a split head or of a margin's cosines, except the logits (an [`Content::Activation`]) and their gradient (a
    /// [`Content::Gradient`]).
    Head,
    /// If ranks share the rows of pictures: whole pictures, or the part of the gradient of this rank's rows that another rank has computed.
    Rows,
    /// Channels of an activation, or of its gradient, that ranks exchange.
    Channels,
    /// Sums of squares of gradients that stages exchange.
    Stages,
    /// Matrices that Muon orthogonalises.
    Update,
}

/// A part of the step, by which commands are grouped in printed lists and in profiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Begin,
    /// Forward pass of the fused operation with this index.
    Forward(usize),
    Loss,
    /// Backward pass of the fused operation with this index.
    Backward(usize),
    Update,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Command {
    /// The following commands belong to this part of the step. Launches nothing.
    Part(Part),
    /// Allocates a range of the arena. Launches nothing.
    Alloc {
        content: Content,
        at: Operand,
    },
    /// Frees a range of the arena. Launches nothing.
    Free {
        at: Operand,
    },
    Kernel {
        stream: StreamId,
        kernel: Kernel,
    },
    Convolution {
        stream: StreamId,
        convolution: Convolution,
        tensors: Tensors<Operand>,
        workspace: Operand,
    },
    /// Records `event` on `stream`, after all of the stream's work so far.
    Record {
        stream: StreamId,
        event: EventId,
    },
    /// Later work on `stream` waits for `event`.
    Wait {
        stream: StreamId,
        event: EventId,
    },
    /// A collective by NCCL. In an all-reduce, `from` is `to`, and `count` is the number of all values. Otherwise `count` is the number of
    /// values in one rank's part.
    Collective {
        stream: StreamId,
        kind: Collective,
        group: Group,
        from: Operand,
        to: Operand,
        count: usize,
        dtype: DataType,
    },
    /// Concurrent sends to and receives from other ranks, by NCCL. Ranks are counted within the group.
    Exchange {
        stream: StreamId,
        group: Group,
        sends: Vec<(u32, Operand)>,
        receives: Vec<(u32, Operand)>,
        dtype: DType,
    },
}

impl Command {
    pub(super) fn all_reduce(
        stream: StreamId,
        group: Group,
        at: Operand,
        dtype: impl Into<DataType>,
    ) -> Self {
        let (kind, dtype) = (Collective::AllReduce, dtype.into());
        let count = at.bytes / dtype.size_bytes();
        Command::Collective { stream, kind, group, from: at, to: at, count, dtype }
    }

    /// A collective among the ranks that divide the optimizer's state, in place: `at` has one part for each of them.
    pub(super) fn sharded(
        stream: StreamId,
        kind: Collective,
        share: Share,
        at: Operand,
        dtype: impl Into<DataType>,
    ) -> Self {
        let (dtype, bytes) = (dtype.into(), at.bytes / share.ranks);
        let own = at.part(share.rank * bytes, bytes);
        let [from, to] = if kind == Collective::AllGather { [own, at] } else { [at, own] };
        let (group, count) = (Group::World, bytes / dtype.size_bytes());
        Command::Collective { stream, kind, group, from, to, count, dtype }
    }

    /// Moves each operand by the number of bytes that `distance` returns for its region.
    pub(super) fn shift(&mut self, distance: impl Fn(Region) -> usize) {
        let shift = |operand: &mut Operand| operand.offset += distance(operand.region);
        match self {
            Command::Part(_) | Command::Record { .. } | Command::Wait { .. } => {}
            Command::Alloc { at, .. } | Command::Free { at } => shift(at),
            Command::Kernel { kernel, .. } => kernel.args.iter_mut().for_each(|arg| match arg {
                Arg::In(operand) | Arg::Out(operand) | Arg::InOut(operand) | Arg::Unused(operand) => {
                    shift(operand);
                }
                Arg::U32(_) | Arg::U64(_) | Arg::F32(_) | Arg::F64(_) => {}
            }),
            Command::Convolution { tensors: Tensors { x, w, y, channel_sums }, workspace, .. } => {
                [x, w, y, channel_sums, workspace].into_iter().for_each(shift);
            }
            Command::Collective { from, to, .. } => [from, to].into_iter().for_each(shift),
            Command::Exchange { sends, receives, .. } => {
                sends.iter_mut().chain(receives).for_each(|(_, operand)| shift(operand));
            }
        }
    }

    /// The stream on which the command is launched; `None` if it launches nothing.
    pub(super) fn stream(&self) -> Option<StreamId> {
        match self {
            Command::Part(_) | Command::Alloc { .. } | Command::Free { .. } => None,
            Command::Kernel { stream, .. }
            | Command::Convolution { stream, .. }
            | Command::Record { stream, .. }
            | Command::Wait { stream, .. }
            | Command::Collective { stream, .. }
            | Command::Exchange { stream, .. } => Some(*stream),
        }
    }

    /// Whether this command is a collective or an exchange by NCCL, which waits for other ranks.
    pub(super) fn waits_for_ranks(&self) -> bool {
        matches!(self, Command::Collective { .. } | Command::Exchange { .. })
    }

    /// The operands that the command accesses, and how.
    pub(super) fn accesses(&self) -> Vec<(Operand, Access)> {
        let all = match self {
            Command::Part(_)
            | Command::Alloc { .. }
            | Command::Free { .. }
            | Command::Record { .. }
            | Command::Wait { .. } => Vec::new(),
            Command::Kernel { kernel, .. } => kernel.args.iter().filter_map(Access::of).collect(),
            Command::Convolution { convolution, tensors, workspace, .. } => {
                let [x, w, y] = match convolution.direction {
                    Direction::Forward => [Access::Read, Access::Read, Access::Write],
                    Direction::Input => [Access::Write, Access::Read, Access::Read],
                    Direction::Weight => [Access::Read, Access::Write, Access::Read],
                };
                let mut all = vec![(tensors.x, x), (tensors.w, w), (tensors.y, y)];
                if convolution.sums {
                    all.push((tensors.channel_sums, Access::Write));
                }
                all.push((*workspace, Access::Write));
                all
            }
            Command::Collective { kind: Collective::AllReduce, to, .. } => vec![(*to, Access::Change)],
            Command::Collective { from, to, .. } => vec![(*from, Access::Read), (*to, Access::Write)],
            Command::Exchange { sends, receives, .. } => {
                let read = sends.iter().map(|(_, at)| (*at, Access::Read));
                read.chain(receives.iter().map(|(_, at)| (*at, Access::Write))).collect()
            }
        };
        all.into_iter().filter(|(operand, _)| !operand.is_none()).collect()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    /// Overwrites all of the operand.
    Write,
    /// Reads and writes.
    Change,
}

impl Access {
    fn of(arg: &Arg) -> Option<(Operand, Self)> {
        match *arg {
            Arg::In(operand) => Some((operand, Access::Read)),
            Arg::Out(operand) => Some((operand, Access::Write)),
            Arg::InOut(operand) => Some((operand, Access::Change)),
            Arg::Unused(_) | Arg::U32(_) | Arg::U64(_) | Arg::F32(_) | Arg::F64(_) => None,
        }
    }
}
