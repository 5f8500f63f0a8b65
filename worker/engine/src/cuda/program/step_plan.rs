//! The part of a step that depends only on the network and the settings: fused operations, their convolutions, sizes of tensors. Planning
//! needs no GPU, so tests can emit a step on any machine.

use super::{Convolution, DType, Direction, ops::MAX_ROW_SUM_CHANNELS};
use crate::{
    cuda::error::CudaError,
    fuse::{Capabilities, Conv, FusedOp, Norm, fuse},
    loss::{LossConfig, Margin},
    net::{Network, Op, Placement, TensorId},
};
use std::{ops::Range, sync::Arc};

/// The input's channels are padded to a multiple of this number, as cuDNN's tensor-core engines require.
const INPUT_MULTIPLE: usize = 4;
/// The classes are padded to a multiple of this number, because kernels read 8 logits at a time, and the last
/// linear layer runs as a 1x1 convolution, whose channels cuDNN's tensor-core engines want in multiples of 8.
const CLASSES_MULTIPLE: usize = 8;
/// Number of channels that a thread of our kernels reads at a time.
const CHANNELS_PER_LOAD: usize = 8;
/// Maximum number of weights in a chunk of a split head: cuDNN's plans support tensors of less than 2^31 values, and most plans only less
/// than 2^31 bytes. Tests use small chunks.
const MAX_CHUNK_WEIGHTS: usize = if cfg!(test) { 1 << 14 } else { 1 << 28 };

/// A last layer whose classes are split over the ranks of a model group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::cuda) struct SplitHead {
    pub(in crate::cuda) ranks: usize,
    pub(in crate::cuda) rank: usize,
    /// Rank `r` has the classes from `bounds[r]` to `bounds[r + 1]`.
    pub(in crate::cuda) bounds: Vec<usize>,
    /// Number of chunks of the logits in memory, each `[pictures, classes of a chunk]`.
    pub(in crate::cuda) chunk_count: usize,
    /// The classes that a training step samples; `None` if training steps compute all classes.
    pub(in crate::cuda) sampled_classes: Option<SampledClasses>,
}

/// The classes of a rank that a training step samples: the classes of the labels, and classes drawn at random.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::cuda) struct SampledClasses {
    /// Number of classes drawn at random.
    pub(in crate::cuda) drawn_count: usize,
    /// Maximum number of sampled classes.
    pub(in crate::cuda) capacity: usize,
    pub(in crate::cuda) chunk_count: usize,
    pub(in crate::cuda) seed: u64,
}

impl SplitHead {
    /// The split head of a network that ranks share.
    fn for_network(network: &Network) -> Option<Self> {
        let Placement::Channels(bounds) = network.placement(network.logits()) else { return None };
        let (bounds, rank) = (bounds.clone(), network.part.as_ref()?.rank);
        let chunk_count = count_chunks(network, max_classes(&bounds));
        Some(Self { ranks: bounds.len() - 1, rank, bounds, chunk_count, sampled_classes: None })
    }

    pub(in crate::cuda) fn own_classes(&self) -> Range<usize> {
        self.bounds[self.rank]..self.bounds[self.rank + 1]
    }

    pub(in crate::cuda) fn max_classes(&self) -> usize {
        max_classes(&self.bounds)
    }
}

/// Number of chunks into which `classes` classes are divided.
fn count_chunks(network: &Network, classes: usize) -> usize {
    let inputs = network.ops.last().map_or(0, |op| network.tensors[op.inputs()[0]].channels);
    (classes * inputs).div_ceil(MAX_CHUNK_WEIGHTS).max(1)
}

/// The largest number of classes of a rank. The first ranks have one more class if the classes cannot be divided evenly.
fn max_classes(bounds: &[usize]) -> usize {
    bounds[1] - bounds[0]
}

/// What is the same in all steps with one image size.
#[derive(Debug, Clone)]
pub(in crate::cuda) struct StepPlan {
    /// This rank's part of the network for the current image size.
    pub(in crate::cuda) network: Arc<Network>,
    capabilities: Capabilities,
    pub(in crate::cuda) ops: Vec<FusedOp>,
    /// Number of this rank's pictures in a micro-batch, including padding.
    pub(super) batch: usize,
    pub(super) dtype: DType,
    /// Number of channels of the input in memory.
    pub(in crate::cuda) padded_input: usize,
    /// Number of classes in memory, the same on every rank.
    pub(in crate::cuda) padded_classes: usize,
    /// Number of ranks that share this rank's copy of the network.
    pub(super) model_ranks: usize,
    /// This rank's index among the ranks that share its copy.
    pub(super) model_rank: usize,
    /// The split of the classes over ranks; `None` if this rank has all classes.
    pub(super) head: Option<SplitHead>,
    /// Whether the ranks that share a copy also split other operators than the last layer, or split the last layer over its inputs.
    pub(super) splits_operators: bool,
    /// The margin of the labels' logits, if logits are scaled cosines.
    pub(super) margin: Option<Margin>,
    /// Whether the first convolution, a 7x7 convolution with stride 2, runs as a 4x4 convolution over 2x2 pixels, because cuDNN is slow
    /// with few channels (1.9 ms of the 28 ms of ResNet-50's step at batch 256).
    pub(in crate::cuda) has_folded_input: bool,
}

/// The fused kernels of this engine. With `matrix_kernels`, kernels with their own matrix multiplication are included.
pub(in crate::cuda) fn capabilities(matrix_kernels: bool) -> Capabilities {
    Capabilities {
        norm_add_relu: true,
        shortcut_norm: true,
        norm_max_pool: true,
        norm_average_pool: true,
        one_sum_buffer: true,
        wgmma: matrix_kernels,
    }
}

impl StepPlan {
    /// Plans steps whose micro-batches have `batch` pictures of this rank.
    ///
    /// # Errors
    /// The engine does not support the network; the error names the layer.
    pub(in crate::cuda) fn new(
        network: Arc<Network>,
        batch: usize,
        dtype: DType,
        capabilities: Capabilities,
    ) -> Result<Self, CudaError> {
        check(&network)?;
        let splits_operators = split_operator(&network).is_some();
        // With split operators, padding lies between the ranks' pictures and is cleared in the memory of a batch norm's output. Kernels
        // that apply a batch norm inside a convolution do not store this output, so they are not used.
        let capabilities = Capabilities { wgmma: capabilities.wgmma && !splits_operators, ..capabilities };
        let ops = fuse(&network, &capabilities);
        let padded_input = network.channels.next_multiple_of(INPUT_MULTIPLE);
        let redistributes_pictures =
            |op: &Op| matches!(op, Op::Redistribute { input, .. } if network.is_pictures(*input));
        let has_folded_input = padded_input == 4
            && network.image_size.is_multiple_of(2)
            && network.rows(network.input()).is_none()
            && !network.ops.iter().any(redistributes_pictures)
            && ops.iter().any(|op| match op {
                FusedOp::Conv(Conv { shape, needs_input_gradient: false, .. }) => {
                    (shape.kernel, shape.stride, shape.padding) == (7, 2, 3)
                }
                _ => false,
            });
        let head = SplitHead::for_network(&network);
        let (model_ranks, model_rank) = network.part.as_ref().map_or((1, 0), |part| {
            let bounds = part.placements.iter().find_map(bounds_of);
            bounds.map_or((1, 0), |bounds| (bounds.len() - 1, part.rank))
        });
        // The same number on every rank.
        let padded_classes = match &head {
            None => network.classes.next_multiple_of(CLASSES_MULTIPLE),
            Some(head) => head.max_classes().next_multiple_of(CLASSES_MULTIPLE * head.chunk_count),
        };
        Ok(Self {
            network,
            capabilities,
            ops,
            batch,
            dtype,
            padded_input,
            padded_classes,
            model_ranks,
            model_rank,
            head,
            splits_operators,
            margin: None,
            has_folded_input,
        })
    }

    /// The same plan with the margin of `loss`. If `loss` samples classes, training steps sample the classes of a split head.
    pub(in crate::cuda) fn with_loss(mut self, loss: &LossConfig) -> Self {
        self.margin = loss.margin;
        if loss.samples_classes()
            && let Some(head) = &mut self.head
        {
            // In the worst case none of the group's labels, two for each picture, is among the drawn classes. The capacity is the same on
            // every rank.
            let capacity = loss.drawn_count(head.max_classes()) + 2 * head.ranks * self.batch;
            let drawn_count = loss.drawn_count(head.own_classes().len());
            let chunk_count = count_chunks(&self.network, capacity);
            let capacity = capacity.next_multiple_of(CLASSES_MULTIPLE * chunk_count);
            head.sampled_classes =
                Some(SampledClasses { drawn_count, capacity, chunk_count, seed: loss.seed });
        }
        self
    }

    /// The classes that a training step samples; `None` if it computes all classes.
    pub(super) fn sampled_classes(&self) -> Option<&SampledClasses> {
        self.head.as_ref()?.sampled_classes.as_ref()
    }

    /// Continues with pictures of another size.
    pub(super) fn set_network(&mut self, network: Arc<Network>) {
        self.ops = fuse(&network, &self.capabilities);
        self.network = network;
    }

    /// The batch norms, in forward order.
    pub(super) fn norms(&self) -> impl Iterator<Item = &Norm> {
        self.ops.iter().filter_map(|op| match op {
            FusedOp::Norm(norm) => Some(norm),
            _ => None,
        })
    }

    /// The batch norm with this index, which must come from an operation of this plan.
    pub(super) fn norm(&self, index: usize) -> &Norm {
        self.norms().find(|node| node.norm == index).unwrap_or_else(|| unreachable!("no batch norm {index}"))
    }

    pub(super) fn is_read_once(&self, tensor: TensorId) -> bool {
        self.ops.iter().flat_map(FusedOp::reads).filter(|read| *read == tensor).count() == 1
    }

    /// Number of pictures per micro-batch that this rank has of `tensor`: this rank's pictures, or the model group's pictures.
    pub(super) fn picture_count(&self, tensor: TensorId) -> usize {
        match self.network.placement(tensor) {
            Placement::Batch => self.batch,
            _ => self.model_ranks * self.batch,
        }
    }

    /// Whether each rank has a part of some parameters.
    pub(super) fn is_split(&self) -> bool {
        self.model_ranks > 1
    }

    /// Name of the layer that computes the logits, also if each rank computes only a partial sum of the logits.
    pub(super) fn last_layer(&self) -> &str {
        last_layer(&self.network)
    }

    pub(super) fn shares_rows(&self) -> bool {
        self.network.rows(self.network.input()).is_some()
    }

    pub(super) fn chunk_count(&self) -> usize {
        self.head.as_ref().map_or(1, |head| head.chunk_count)
    }

    pub(super) fn chunk_classes(&self) -> usize {
        self.padded_classes / self.chunk_count()
    }

    /// Whether split weights are stored in two planes of 16 bits; see [`crate::cuda::planes`].
    pub(super) fn is_planar(&self) -> bool {
        self.is_split() && self.dtype == DType::Bf16
    }

    /// Whether the gradient of a split head's weights is never stored whole, but computed twice, one chunk at a time: once for the norm,
    /// and once for the update. This adds a third of the head's multiplications and saves a sixth of its memory. False if gradients are
    /// summed over micro-batches or ranks, if classes are sampled, or if other weights are split.
    pub(super) fn recomputes_head_gradient(&self, accumulates: bool, data_ranks: usize) -> bool {
        self.chunk_count() > 1
            && !self.splits_operators
            && !accumulates
            && data_ranks == 1
            && self.sampled_classes().is_none()
    }

    /// The forward convolution of a chunk of sampled classes.
    pub(super) fn sampled_convolution(&self) -> Option<Convolution> {
        let (sampled, convolution) = (self.sampled_classes()?, self.convolution(self.ops.last()?)?);
        Some(Convolution { out_c: sampled.capacity / sampled.chunk_count, ..convolution })
    }

    /// Number of values of a tensor of the whole batch in memory, including padding.
    pub(super) fn values(&self, tensor: TensorId) -> usize {
        self.picture_count(tensor) * self.values_per_picture(tensor)
    }

    /// Number of values per picture in memory, including padding.
    pub(super) fn values_per_picture(&self, tensor: TensorId) -> usize {
        let shape = self.network.tensors[tensor];
        if self.has_folded_input && tensor == self.network.input() {
            // In units of 2x2 pixels, the padding of 3 pixels on each side adds 3 to the side.
            return (shape.height / 2 + 3) * (shape.width / 2 + 3) * 4 * self.padded_input;
        }
        let channels = if self.network.is_pictures(tensor) {
            self.padded_input
        } else if self.network.has_logits(tensor) {
            self.padded_classes
        } else {
            shape.channels
        };
        shape.pixels() * channels
    }

    /// The forward convolution of an operation; `None` if the operation is neither a convolution nor a linear layer. For a split head: the
    /// convolution of one chunk.
    pub(super) fn convolution(&self, op: &FusedOp) -> Option<Convolution> {
        let (input, output, kernel, stride, [row_padding, padding], groups) = match *op {
            FusedOp::Conv(Conv { input, output, shape, .. }) => {
                let (kernel, stride, paddings) =
                    (shape.kernel, shape.stride, [shape.row_padding, shape.padding]);
                (input, output, kernel, stride, paddings, shape.groups)
            }
            FusedOp::Linear { input, output, .. } => (input, output, 1, 1, [0, 0], 1),
            _ => return None,
        };
        let (from, to) = (self.network.tensors[input], self.network.tensors[output]);
        let convolution = Convolution {
            direction: Direction::Forward,
            dtype: self.dtype,
            batch: self.picture_count(input),
            in_h: from.height,
            in_w: from.width,
            in_c: if reads_pictures(op) { self.padded_input } else { from.channels },
            out_h: to.height,
            out_w: to.width,
            out_c: if self.network.has_logits(output) { self.chunk_classes() } else { to.channels },
            kernel,
            stride,
            padding,
            row_padding,
            groups,
            sums: false,
        };
        if reads_pictures(op) && self.has_folded_input {
            let (side, in_c) = (from.height / 2 + 3, 4 * self.padded_input);
            return Some(Convolution {
                in_h: side,
                in_w: side,
                in_c,
                kernel: 4,
                stride: 1,
                padding: 0,
                row_padding: 0,
                ..convolution
            });
        }
        Some(convolution)
    }
}

/// Whether an operation is a convolution of the pictures.
pub(in crate::cuda) fn reads_pictures(op: &FusedOp) -> bool {
    matches!(op, FusedOp::Conv(Conv { needs_input_gradient: false, .. }))
}

/// Checks that this engine supports `network`.
///
/// # Errors
/// The engine does not support the network; the error names the layer.
pub(in crate::cuda) fn check(network: &Network) -> Result<(), CudaError> {
    let refuse = |what: String| Err(CudaError::Unsupported(what));
    check_splits(network)?;
    if network.is_last_stage() && last_layer(network).is_empty() {
        return refuse(format!(
            "on GPUs, a network must end in a linear layer, which {} does not",
            network.arch
        ));
    }
    for op in &network.ops {
        match op {
            Op::Linear { name, input, .. } if network.tensors[*input].pixels() != 1 => {
                return refuse(format!(
                    "on GPUs, the input of the linear layer {name} must have one pixel: pool its pixels first"
                ));
            }
            Op::Conv { .. } | Op::Halo { .. } | Op::Redistribute { .. } => {}
            _ if op.inputs().iter().any(|input| network.is_pictures(*input)) => {
                return refuse(format!(
                    "on GPUs, only convolutions may read the pictures, but another operation of {} reads them",
                    network.arch
                ));
            }
            Op::Gelu { bias: Some(name), output, .. }
                if network.tensors[*output].channels > MAX_ROW_SUM_CHANNELS =>
            {
                return refuse(format!(
                    "on GPUs, a GELU with biases must have at most {MAX_ROW_SUM_CHANNELS} channels, but {name} has more"
                ));
            }
            Op::MaxPool { kernel, .. } if kernel * kernel > 255 => {
                return refuse(format!(
                    "on GPUs, the windows of a max pooling must not be larger than 15x15, but one has {kernel}x{kernel}"
                ));
            }
            _ => {}
        }
    }
    check_rows(network)?;
    for (tensor, shape) in network.tensors.iter().enumerate() {
        let padded = network.is_pictures(tensor) || network.has_logits(tensor);
        if !padded && !shape.channels.is_multiple_of(CHANNELS_PER_LOAD) {
            return refuse(format!(
                "on GPUs, the number of channels must be a multiple of {CHANNELS_PER_LOAD}, but a tensor has {}",
                shape.channels
            ));
        }
    }
    Ok(())
}

/// Checks a rank's part of a network whose ranks share the rows of pictures.
fn check_rows(network: &Network) -> Result<(), CudaError> {
    let Some(pictures) = network.rows(network.input()) else { return Ok(()) };
    let ranks = pictures.of_rank.len();
    for op in &network.ops {
        let name = match op {
            Op::Conv { name, .. } | Op::BatchNorm { name, .. } => name.as_str(),
            _ => "a pooling",
        };
        match network.rows(op.output()) {
            Some(rows) if rows.whole < ranks => {
                return Err(CudaError::Unsupported(format!(
                    "parallel.height: {ranks} GPUs cannot share the {} rows that {name} makes of a picture, since each GPU needs a row. \
                     Set parallel.height to {} or less, train on larger pictures, or set parallel.device = \"cpu\"",
                    rows.whole, rows.whole
                )));
            }
            None if matches!(op, Op::BatchNorm { .. }) => {
                return Err(CudaError::Unsupported(format!(
                    "parallel.height: GPUs that share rows do not compute {name}, a batch norm after the global pooling. Leave the key \
                     out, or set parallel.device = \"cpu\""
                )));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Checks a rank's part of a network whose ranks split operators.
fn check_splits(network: &Network) -> Result<(), CudaError> {
    let Some(name) = split_operator(network) else { return Ok(()) };
    let refuse = |what: String| {
        Err(CudaError::Unsupported(format!("parallel: {what}, or set parallel.device = \"cpu\"")))
    };
    if network.rows(network.input()).is_some() || network.stage().1 > 1 {
        return refuse(format!(
            "{name} is split, and GPUs combine that with data parallelism only. Leave parallel.height and parallel.pipeline out"
        ));
    }
    if network.frozen_norm {
        return refuse(format!(
            "{name} is split, and GPUs cannot combine that with frozen batch norms. Leave model.freeze_norm or the strategy out"
        ));
    }
    for op in &network.ops {
        match op {
            Op::Linear { name, output, .. }
                if *network.placement(*output) != Placement::Batch && !network.has_logits(*output) =>
            {
                return refuse(format!(
                    "{name} is split, and GPUs split convolutions and the last linear layer. Leave its strategy out"
                ));
            }
            Op::Conv { name, input, output, .. } | Op::Linear { name, input, output } => {
                let is_uneven = |tensor: &TensorId| {
                    let bounds = bounds_of(network.placement(*tensor)).unwrap_or_default();
                    bounds.iter().any(|bound| !bound.is_multiple_of(CHANNELS_PER_LOAD))
                        && !network.has_logits(*tensor)
                };
                if let Some(uneven) = [*input, *output].into_iter().find(is_uneven) {
                    let part = network.tensors[uneven].channels;
                    return refuse(format!(
                        "{name} is split, and GPUs compute multiples of {CHANNELS_PER_LOAD} channels, while a rank has {part}. Split it \
                         over fewer ranks (parallel.model) or leave its strategy out"
                    ));
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// The channels of each rank, if ranks have different channels.
fn bounds_of(placement: &Placement) -> Option<&[usize]> {
    match placement {
        Placement::Channels(bounds) => Some(bounds),
        Placement::Batch | Placement::Whole | Placement::Partial => None,
    }
}

/// See [`StepPlan::last_layer`]; empty if the network does not end in a linear layer.
fn last_layer(network: &Network) -> &str {
    let layer = network.ops.iter().rev().find(|op| !matches!(op, Op::Redistribute { .. }));
    match layer {
        Some(Op::Linear { name, .. }) => name,
        _ => "",
    }
}

/// The name of the first split operator, if there is one. The last layer does not count if only its classes are split.
pub(in crate::cuda) fn split_operator(network: &Network) -> Option<&str> {
    let head = network.ops.last()?;
    let is_of_head = |tensor: TensorId| {
        let placement = network.placement(tensor);
        tensor == head.output() && matches!(placement, Placement::Channels(_))
            || head.inputs() == [tensor] && *placement == Placement::Whole
    };
    let is_whole = |op: &Op| *network.placement(op.output()) == Placement::Batch || is_of_head(op.output());
    let mut names = network.ops.iter().filter(|op| !is_whole(op)).filter_map(|op| match op {
        Op::Conv { name, .. } | Op::BatchNorm { name, .. } | Op::Linear { name, .. } => Some(name.as_str()),
        _ => None,
    });
    names.next()
}
