//! A step as a list of commands: kernels, convolutions, events and collectives, in the order in which they are started.
//!
//! Operands are ranges of [`Region`]s, not addresses, so a list is made, printed and checked without a GPU.
//! `program/emitter.rs` makes it, [`verify`] checks it, and `program/execute.rs` starts it.

use super::{
    convolution::{Convolution, Direction, Tensors},
    dtype::DType,
};
use crate::net::TensorId;

mod text;
pub(super) mod verify;

pub(super) use text::{Names, print};

/// A piece of memory that commands work on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Region {
    /// What stands for "absent".
    Nowhere,
    /// Activations and their gradients.
    Arena,
    /// The batch that the host made, or the dataset.
    Pictures,
    /// Float32 `[channels, 256]`: what each byte of a picture becomes.
    Normalisation,
    /// Tables that scale pictures along one axis.
    ScaleRows,
    ScaleColumns,
    /// What the host says about micro-batches, in its own memory; which is next; the same number where the host reads it.
    InputRing,
    InputCounter,
    InputsTaken,
    /// What it says about the one that is under way.
    Control,
    /// Results for the host, in its own memory; how many there were.
    ResultRing,
    ResultCounter,
    /// What the host says to each rank of the model group about the micro-batch that is under way.
    GroupControls,
    /// Float32, all parameters.
    Weights,
    /// The matrices among them in the type that is computed in.
    LowPrecision,
    /// Of the optimizer's, by number.
    OptimizerSlot(usize),
    MatrixGradients,
    /// Of the vectors, float32.
    VectorGradients,
    /// Float32 sums over micro-batches of the matrices' gradients.
    Accumulated,
    /// Batch norm's.
    RunningStatistics,
    /// The same as the newest finished step has left them, while a step is under way; which step that is, by block.
    KeptStatistics,
    KeptOf,
    /// Moving averages of the weights and of the running statistics.
    AverageWeights,
    AverageStatistics,
    /// What a batch norm's passes leave for each other.
    NormValues,
    /// What a convolution leaves for the batch norm after it.
    ChannelSums,
    /// Sums that NCCL adds over ranks.
    StatisticsSums,
    /// All ranks' exchange buffers; exchanges so far.
    PeerTable,
    PeerSequences,
    /// The loss scale and what follows from the gradients' norm.
    LossScale,
    /// Loss and right answers.
    Totals,
    /// The GPU's clock at four points of the step.
    Stamps,
    /// Logits of an evaluation, for the host.
    EvaluatedLogits,
    /// Where each parameter lies; its own learning rate.
    Segments,
    Rates,
    /// Whether a number that is not finite was found; a checksum of the weights.
    Found,
    /// The kernels' counters and partial sums.
    Scratch,
    /// Of convolutions on the main stream, and on the side stream.
    Workspace,
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
    /// Absent; kernels see address 0.
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

    /// `bytes` of it from `offset` on.
    pub(super) fn part(self, offset: usize, bytes: usize) -> Self {
        debug_assert!(offset.saturating_add(bytes) <= self.bytes, "{bytes} bytes at {offset} of {self:?}");
        Self { offset: self.offset + offset, bytes, ..self }
    }

    pub(super) fn end(self) -> usize {
        self.offset.saturating_add(self.bytes)
    }
}

/// `u32`, of what follows from the gradients' norm: the GPU says there that an update may be under way.
pub(super) const UPDATING: Operand = Operand::new(Region::LossScale, 32, size_of::<u32>());

/// One argument of a kernel: a number, or memory and what the kernel does with it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Arg {
    /// Is read.
    In(Operand),
    /// Is written, whatever was there.
    Out(Operand),
    /// Is read and written.
    InOut(Operand),
    /// Is passed, but not read in this mode of the kernel.
    Unused(Operand),
    U32(u32),
    U64(u64),
    F32(f32),
    F64(f64),
}

impl Arg {
    /// Where it is written whole, or only changed.
    pub(super) fn out(operand: Operand, changed: bool) -> Self {
        if changed { Arg::InOut(operand) } else { Arg::Out(operand) }
    }

    /// The same, where the kernel does not look at it.
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
    /// Blocks of a cluster along x; 1 for none.
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

impl IntoIterator for Kernel {
    type Item = Kernel;
    type IntoIter = std::iter::Once<Kernel>;

    fn into_iter(self) -> Self::IntoIter {
        std::iter::once(self)
    }
}

/// A queue of work on the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum StreamId {
    /// On which a step begins and ends.
    Main,
    /// Weight gradients, concurrently with the backward pass.
    Side,
    /// Gradients on their way over all ranks.
    Collectives,
}

impl StreamId {
    pub(super) const ALL: [Self; 3] = [Self::Main, Self::Side, Self::Collectives];
}

/// The ranks that take part in a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Group {
    /// All of them.
    World,
    /// Those that share this one's copy of the network.
    Model,
    /// Those that share the rows of this one's pictures.
    Height,
    /// Those that have the same part of the network as this one.
    Data,
}

/// What ranks do with each other's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Collective {
    /// Values are added over all ranks, in place.
    AllReduce,
    /// Each rank gets the values of all, in the order of ranks.
    AllGather,
    /// Values are added over all ranks, and each gets its part of the sum, in the order of ranks.
    ReduceScatter,
}

/// A point in a stream that other streams wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum EventId {
    /// The main stream has come to where the side stream continues.
    SideBegin,
    /// The side stream has done all that it was given.
    SideEnd,
    /// It has computed this weight gradient, counted from 0.
    WeightGradient(usize),
    /// A bucket's gradients are there.
    BucketReady(usize),
    /// All buckets are added up.
    CollectivesDone,
}

/// What an allocation of the arena holds at first. A batch norm's backward pass leaves the gradient of its input where that was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    Activation(TensorId),
    Gradient(TensorId),
    /// By batch norm: a bit a value.
    ReluMask(usize),
    /// By batch norm or by tensor: a byte a value.
    Argmax(usize),
    /// What a split head needs beside its logits and their gradient.
    OfHead,
    /// Whole pictures, of which this rank takes its rows, or the gradient of its rows that another rank gives.
    OfRows,
}

/// A part of the step, for readers of the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Begin,
    /// Of a fused operation, by its number.
    Forward(usize),
    Loss,
    Backward(usize),
    Update,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Command {
    /// What comes next belongs to this part. Nothing is started.
    Part(Part),
    /// From here on a range of the arena holds this. Nothing is started.
    Alloc {
        content: Content,
        at: Operand,
    },
    /// From here on nobody looks at it. Nothing is started.
    Free {
        at: Operand,
    },
    Kernel {
        stream: StreamId,
        kernel: Kernel,
    },
    /// By cuDNN.
    Convolution {
        stream: StreamId,
        convolution: Convolution,
        tensors: Tensors<Operand>,
        workspace: Operand,
    },
    /// `event` is the end of what `stream` was given so far.
    Record {
        stream: StreamId,
        event: EventId,
    },
    /// What `stream` is given from now on begins after `event`.
    Wait {
        stream: StreamId,
        event: EventId,
    },
    /// By NCCL. `count`: the values of an all-reduce, where `from` is `to`; else those that one rank gives or gets.
    Collective {
        stream: StreamId,
        kind: Collective,
        group: Group,
        from: Operand,
        to: Operand,
        count: usize,
        dtype: DType,
    },
    /// By NCCL: what this rank gives to others of a group and takes from them, all at once. By number of the rank in the group.
    Exchange {
        stream: StreamId,
        group: Group,
        gives: Vec<(u32, Operand)>,
        takes: Vec<(u32, Operand)>,
        dtype: DType,
    },
}

impl Command {
    /// Adds values over the ranks of a group, in place.
    pub(super) fn all_reduce(stream: StreamId, group: Group, at: Operand, dtype: DType) -> Self {
        let (kind, count) = (Collective::AllReduce, at.bytes / dtype.size());
        Command::Collective { stream, kind, group, from: at, to: at, count, dtype }
    }

    /// Where it is queued; `None` for what starts nothing.
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

    /// Whether NCCL waits for other ranks in it.
    pub(super) fn meets_ranks(&self) -> bool {
        matches!(self, Command::Collective { .. } | Command::Exchange { .. })
    }

    /// The memory that it works on: read, written.
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
                    all.push((tensors.sums, Access::Write));
                }
                all.push((*workspace, Access::Write));
                all
            }
            Command::Collective { kind: Collective::AllReduce, to, .. } => vec![(*to, Access::Change)],
            Command::Collective { from, to, .. } => vec![(*from, Access::Read), (*to, Access::Write)],
            Command::Exchange { gives, takes, .. } => {
                let read = gives.iter().map(|(_, at)| (*at, Access::Read));
                read.chain(takes.iter().map(|(_, at)| (*at, Access::Write))).collect()
            }
        };
        all.into_iter().filter(|(operand, _)| !operand.is_none()).collect()
    }
}

/// What a command does with an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    /// Whatever was there.
    Write,
    /// Both.
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
