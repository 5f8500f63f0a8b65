//! The step: what is started on the GPU, in order. Read it from top to bottom and know what a step does.
//!
//! Everything here is deterministic in its calls: emitted twice, it uses the same places in memory, so it
//! may be run as it is or recorded and replayed.

use super::{
    arena::{Arena, Place},
    cudnn::{Convolution, Direction, Tensors},
    device::{Buffer, Device, Event, OwnedStream, Ptr, Stream},
    error::CudaError,
    kernels::{DType, Kernels},
    layout::Layout,
    nodes::{self, Node, NormNode, Shortcut},
    ops::{self, NormSite, Ops, ScaleTable},
    reduce::Reducer,
    rings::{Inputs, Results},
    state::State,
    tuner::Tuner,
};
use crate::{
    comm::ProcessGroup,
    data::loader::Form,
    engine::{EngineConfig, EngineError, GpuConfig},
    net::{Network, TensorId},
};
use std::{collections::HashMap, sync::Arc};
use walk::Walk;

mod walk;

/// Channels of the input as the network's first convolution reads it: a multiple of what cuDNN's
/// tensor-core engines take.
const PADDED_INPUT: usize = 4;
/// The same for the outputs of the linear layer, which runs as a 1x1 convolution.
const PADDED_CLASSES: usize = 8;
/// Weight gradients, which run beside the way back, that it does not wait for where it needs their memory.
const BEHIND: usize = 4;

/// Which part of a step a micro-batch is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Accumulation {
    /// Its gradients replace those of the step before.
    pub(super) first: bool,
    /// The update follows it.
    pub(super) last: bool,
    /// No picture of it is padding, which statistics would have to leave out.
    pub(super) whole: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Phase {
    Train(Accumulation),
    /// With running statistics.
    Evaluate,
}

/// Where the pictures of a micro-batch are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Input {
    /// The whole dataset as bytes, on the GPU.
    Dataset { pictures: Ptr, height: usize, width: usize, crop_padding: usize, training: bool },
    /// The batch, cropped and scaled.
    Staged { at: Ptr, form: Form },
}

/// Gradients of an activation that wait for its producer.
#[derive(Debug, Clone, Copy)]
enum Gradient {
    /// Of every value.
    Whole(Place),
    /// Of the mean over all pixels.
    Pooled(Place),
    /// Still to be taken through a 1x1 convolution with so many outputs and these weights.
    Convolved { dy: Place, weights: Ptr, inner: usize },
    /// Past a ReLU; the sums of the batch norm before it are known.
    Summed(Place),
    /// Of a batch norm's output; the sums are known, and the convolution before it applies them.
    Unapplied { g: Place, x: Place, norm: usize },
}

impl Gradient {
    fn place(self) -> Place {
        match self {
            Gradient::Whole(place)
            | Gradient::Pooled(place)
            | Gradient::Summed(place)
            | Gradient::Convolved { dy: place, .. }
            | Gradient::Unapplied { g: place, .. } => place,
        }
    }
}

/// A table that scales one axis, on both sides.
struct Scaled {
    table: ScaleTable,
    at: Buffer,
}

pub(super) struct Program {
    /// For pictures of the current size; what else follows from the size is looked up by it.
    network: Arc<Network>,
    /// For each size that there is memory and a plan for.
    sizes: Vec<Arc<Network>>,
    nodes: Vec<Node>,
    norms: Vec<NormSite>,
    config: EngineConfig,
    dtype: DType,
    /// Whether the loss scale moves by itself; `None` where nothing is scaled.
    pub(super) dynamic_scale: Option<bool>,
    deterministic: bool,
    padded_input: usize,
    padded_classes: usize,
    /// Whether the stem, a 7x7 convolution with stride 2, runs as a 4x4 one over 2x2 pixels: of a handful of channels
    /// cuDNN makes a slow one (1.9 ms of ResNet-50's 28 at batch 256).
    folded: bool,
    pub(super) ops: Ops,
    /// Partial sums of the kernels.
    #[allow(dead_code)] // Its address is with `ops`.
    scratch: Buffer,
    /// For LARS and LAMB: where each parameter lies, and its rate.
    segments: Buffer,
    rates: Buffer,
    tuner: Tuner,
    pub(super) state: State,
    pub(super) inputs: Inputs,
    pub(super) results: Results,
    pub(super) reducer: Option<Reducer>,
    /// Of the wide part, in the type that is computed in.
    wide_gradients: Buffer,
    /// Float32: of the narrow part, as if it followed the wide one.
    narrow_gradients: Buffer,
    /// Float32 sums over micro-batches of the wide part.
    accumulated: Option<Buffer>,
    #[allow(dead_code)] // Their addresses are with `norms`.
    norm_values: Buffer,
    /// Float32 `[2, channels]`: what a convolution leaves for the batch norm after it.
    channel_sums: Buffer,
    /// What each byte of each channel becomes, float32.
    normalisation: Buffer,
    /// By the size of the network's input, tables that scale pictures of other sizes to it.
    scalings: HashMap<usize, [Scaled; 2]>,
    /// `u32`: whether a look for numbers that are not finite found one.
    found: Buffer,
    /// Loss and right answers of the step.
    totals: Buffer,
    stamps: Buffer,
    arena: Buffer,
    workspace: Buffer,
    side_workspace: Buffer,
    pub(super) main: OwnedStream,
    side: OwnedStream,
    side_begin: Event,
    side_end: Event,
    /// After each weight gradient.
    side_done: Vec<Event>,
    /// Where evaluation leaves its logits.
    evaluated_logits: Buffer,
}

impl Program {
    #[allow(clippy::too_many_arguments)] // What an engine is built from.
    pub(super) fn new(
        device: &Device,
        network: Arc<Network>,
        config: &EngineConfig,
        dtype: DType,
        loss_scale: Option<(f32, bool)>,
        comm: Arc<dyn ProcessGroup>,
        gpu: &GpuConfig,
    ) -> Result<Self, EngineError> {
        let (steps, nodes) = nodes::compile(&network)?;
        if let Some(shape) = network.tensors.iter().skip(1).find(|s| s.channels % 8 != 0 && s.pixels() > 1) {
            return Err(CudaError::Unsupported(format!(
                "{} channels, which is not a multiple of 8",
                shape.channels
            ))
            .into());
        }
        let padded_input = network.channels.next_multiple_of(PADDED_INPUT);
        let padded_classes = network.classes.next_multiple_of(PADDED_CLASSES);
        let folded = padded_input == 4
            && network.image_size.is_multiple_of(2)
            && nodes
                .iter()
                .any(|node| matches!(node, Node::Conv { kernel: 7, stride: 2, padding: 3, first: true, .. }));
        let layout = Layout::new(&network, &steps, padded_input, padded_classes, folded);
        let kernels = Kernels::load(device, dtype)?;
        let first_scale = loss_scale.map_or(1.0, |(scale, _)| scale);
        let state =
            State::new(device, &network, &steps, layout.clone(), dtype, first_scale, config.optimizer)?;
        let narrow_gradients = device.zeros(4 * (layout.len - layout.wide).max(1))?;
        let wide_gradients = device.zeros(dtype.size() * layout.wide)?;

        // Mean, 1/std, scale, bias, slope and offset.
        let values_of = |channels: usize| 4 * 6 * channels;
        let norm_nodes: Vec<&NormNode> = nodes
            .iter()
            .filter_map(|node| match node {
                Node::Norm(norm) => Some(norm),
                _ => None,
            })
            .collect();
        let channels_of = |norm: &NormNode| network.tensors[norm.input].channels;
        let norm_values =
            device.zeros(norm_nodes.iter().map(|n| values_of(channels_of(n))).sum::<usize>().max(4))?;
        let narrow_at = |name: &str, suffix: &str| {
            narrow_gradients.ptr + 4 * (layout.slot(name, suffix).range.start - layout.wide) as u64
        };
        let mut values = norm_values.ptr;
        let mut norms: Vec<(usize, NormSite)> = norm_nodes
            .iter()
            .map(|node| {
                let shape = network.tensors[node.input];
                let (running_mean, running_var) = state.running(node.norm);
                let run = |number: usize| values + (4 * number * shape.channels) as u64;
                let norm = NormSite {
                    gamma: state.narrow(&node.name, "weight"),
                    beta: state.narrow(&node.name, "bias"),
                    running_mean,
                    running_var,
                    mean: run(0),
                    inv_std: run(1),
                    scale: run(2),
                    bias: run(3),
                    dgamma: narrow_at(&node.name, "weight"),
                    dbeta: narrow_at(&node.name, "bias"),
                    slope: run(4),
                    offset: run(5),
                };
                values += values_of(shape.channels) as u64;
                (node.norm, norm)
            })
            .collect();
        norms.sort_by_key(|(number, _)| *number);
        let norms: Vec<NormSite> = norms.into_iter().map(|(_, norm)| norm).collect();

        let sync = config.sync_batch_norm && comm.size() > 1;
        let reducer = match comm.size() {
            1 => None,
            _ => {
                let mut channels: Vec<(usize, usize)> =
                    norm_nodes.iter().map(|n| (n.norm, channels_of(n))).collect();
                channels.sort_unstable();
                let channels: Vec<usize> = channels.into_iter().map(|(_, c)| c).collect();
                Some(Reducer::new(
                    device,
                    gpu,
                    comm.as_ref(),
                    layout.buckets.len(),
                    sync.then_some(&channels[..]),
                )?)
            }
        };
        let accumulated = match config.accumulate {
            0 | 1 => None,
            _ => Some(device.zeros(4 * layout.wide)?),
        };
        let segments: Vec<u64> = layout
            .slots
            .iter()
            .flat_map(|s| {
                let adapted = config.optimizer.treatment(s.is_weight).adapted;
                [s.range.start as u64, s.range.len() as u64, u64::from(adapted)]
            })
            .collect();
        let count = layout.slots.len();
        let (segments, rates) = (device.upload(&segments)?, device.zeros(8 * count)?);
        let (pictures, classes) = (config.batch_size as u32, padded_classes as u32);
        let scratch =
            device
                .zeros(Ops::scratch_bytes(device.multiprocessors, pictures, classes, count as u32) as usize)?;
        let mut program = Self {
            ops: Ops::new(kernels, scratch.ptr, device.capability >= 90),
            scratch,
            segments,
            rates,
            tuner: Tuner::new(device, gpu.deterministic)?,
            inputs: Inputs::new(device, config.batch_size)?,
            results: Results::new(device)?,
            normalisation: device.zeros(4 * 256 * network.channels)?,
            scalings: HashMap::new(),
            found: device.zeros(256)?,
            totals: device.zeros(256)?,
            stamps: device.zeros(256)?,
            arena: device.alloc(256)?,
            workspace: device.alloc(256)?,
            side_workspace: device.alloc(256)?,
            main: OwnedStream::new(false)?,
            side: OwnedStream::new(false)?,
            side_begin: Event::new(false)?,
            side_end: Event::new(false)?,
            side_done: nodes.iter().map(|_| Event::new(false)).collect::<Result<_, _>>()?,
            evaluated_logits: device.zeros(4 * config.batch_size * network.classes)?,
            deterministic: gpu.deterministic,
            dynamic_scale: loss_scale.map(|(_, dynamic)| dynamic),
            config: config.clone(),
            dtype,
            padded_input,
            padded_classes,
            folded,
            state,
            reducer,
            wide_gradients,
            narrow_gradients,
            accumulated,
            norm_values,
            channel_sums: device.zeros(8 * network.tensors.iter().map(|t| t.channels).max().unwrap_or(1))?,
            nodes,
            norms,
            sizes: vec![network.clone()],
            network,
        };
        program.reserve(device)?;
        Ok(program)
    }

    /// Prepares for more sizes of pictures, some of which are never trained on. Nothing may be recorded yet, as memory
    /// moves.
    pub(super) fn take_sizes(
        &mut self,
        device: &Device,
        training: &[usize],
        evaluation: &[usize],
    ) -> Result<(), EngineError> {
        let own = self.network.clone();
        if let Some(odd) =
            training.iter().chain(evaluation).find(|size| self.folded && !size.is_multiple_of(2))
        {
            let text = format!(
                "pictures of {odd} pixels beside those of {}: sizes of one run are even",
                own.image_size
            );
            return Err(CudaError::Unsupported(text).into());
        }
        // The memory is that of the largest.
        let mut bytes = self.arena.bytes;
        for (sizes, trains) in [(training, true), (evaluation, false)] {
            for size in sizes {
                self.network = Arc::new(own.resized(*size));
                self.sizes.push(self.network.clone());
                self.prepare_plans(device, trains)?;
                bytes = bytes.max(self.arena_bytes(trains)?);
            }
        }
        self.network = own;
        self.allocate(device, bytes)
    }

    /// Goes on with pictures of another size; gives its network.
    pub(super) fn set_image_size(&mut self, image_size: usize) -> Option<Arc<Network>> {
        self.network = self.sizes.iter().find(|network| network.image_size == image_size)?.clone();
        Some(self.network.clone())
    }

    /// Values of a picture of the largest size.
    pub(super) fn most_values(&self) -> usize {
        self.sizes.iter().map(|network| network.tensors[network.input()].len()).max().unwrap_or(0)
    }

    /// Prepares plans and memory: goes through the steps once without starting anything.
    fn reserve(&mut self, device: &Device) -> Result<(), EngineError> {
        self.prepare_plans(device, true)?;
        let bytes = self.arena_bytes(true)?;
        self.allocate(device, bytes)
    }

    /// Finds a plan for each convolution of the current size; of all passes where it `trains`.
    fn prepare_plans(&mut self, device: &Device, trains: bool) -> Result<(), EngineError> {
        let mut wanted = Vec::new();
        for node in &self.nodes {
            let Some((convolution, first)) = self.convolution(node) else { continue };
            wanted.push(Convolution { direction: Direction::Forward, ..convolution });
            if !trains {
                continue;
            }
            if matches!(node, Node::Conv { .. }) && self.takes_sums(&convolution) {
                wanted.push(Convolution { sums: true, ..convolution });
            }
            wanted.push(Convolution { direction: Direction::Weight, ..convolution });
            if !first {
                wanted.push(Convolution { direction: Direction::Input, ..convolution });
            }
        }
        Ok(self.tuner.prepare(device, &wanted)?)
    }

    /// What activations of the current size take at most.
    fn arena_bytes(&self, trains: bool) -> Result<usize, EngineError> {
        let both = Accumulation { first: true, last: true, whole: true };
        let peak = |phase: Phase, beside: bool| -> Result<usize, EngineError> {
            let mut walk = Walk::new(self, None, beside);
            walk.network(phase, Input::Staged { at: 0, form: Form::Bytes })?;
            Ok(walk.arena.peak)
        };
        let evaluated = peak(Phase::Evaluate, true)?;
        if !trains {
            return Ok(evaluated);
        }
        // Without any beside is how a step is timed call by call.
        Ok(evaluated.max(peak(Phase::Train(both), true)?).max(peak(Phase::Train(both), false)?))
    }

    /// Room for activations and for all plans.
    fn allocate(&mut self, device: &Device, bytes: usize) -> Result<(), EngineError> {
        let own = self.tuner.workspace_bytes(false).max(self.ops.bottleneck_bytes());
        self.workspace = device.alloc(own)?;
        self.side_workspace = device.alloc(self.tuner.workspace_bytes(true))?;
        // The old one first: both may not fit.
        self.arena = device.alloc(256)?;
        self.arena = device.zeros(bytes)?;
        let (own, side) = (self.workspace.bytes >> 20, self.side_workspace.bytes >> 20);
        tracing::debug!("activations take {} MB, workspaces {own} and {side} MB", bytes >> 20);
        Ok(())
    }

    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    /// What bytes become, by the mean and standard deviation of each channel, of bytes scaled to 0..1.
    pub(super) fn set_normalisation(&mut self, mean: &[f32], std: &[f32]) -> Result<(), CudaError> {
        let table: Vec<f32> = mean
            .iter()
            .zip(std)
            .flat_map(|(m, s)| (0..256).map(move |v| (v as f32 / 255.0 - m) / s))
            .take(256 * self.network.channels)
            .collect();
        self.normalisation.write(&table)
    }

    /// Prepares for pictures of `height` x `width` pixels on the GPU.
    pub(super) fn set_size(&mut self, device: &Device, height: usize, width: usize) -> Result<(), CudaError> {
        self.scalings.clear();
        for side in self.sizes.iter().map(|network| network.image_size) {
            if (height, width) == (side, side) {
                continue;
            }
            let scaled = |from: usize| -> Result<Scaled, CudaError> {
                let table = ScaleTable::new(from as u32, side as u32);
                Ok(Scaled { at: device.upload(&table.entries)?, table })
            };
            self.scalings.insert(side, [scaled(height)?, scaled(width)?]);
        }
        Ok(())
    }

    /// [`Program::emit`] with each call timed, one after another.
    pub(super) fn profile(&self, phase: Phase, input: Input) -> Result<Vec<(String, f64)>, EngineError> {
        self.ops.profile().begin();
        let result = Walk::new(self, Some(self.arena.ptr), false).network(phase, input);
        let calls = self.ops.profile().end()?;
        result.map(|()| calls)
    }

    /// Starts the work of a micro-batch on [`Program::main`].
    pub(super) fn emit(&self, phase: Phase, input: Input) -> Result<(), EngineError> {
        Walk::new(self, Some(self.arena.ptr), true).network(phase, input)
    }

    /// Loss and right answers of the micro-batch that was evaluated last.
    pub(super) fn evaluated(&mut self) -> Result<(f64, u64), CudaError> {
        self.main.0.synchronize()?;
        let (mut loss, mut correct) = ([0f64], [0u64]);
        self.totals.read(0, &mut loss)?;
        self.totals.read(8, &mut correct)?;
        Ok((loss[0], correct[0]))
    }

    /// Whether all weights, biases, running statistics and what the optimizer keeps are finite.
    pub(super) fn is_finite(&self) -> Result<bool, CudaError> {
        self.state.is_finite(&self.ops, self.main.0, &self.found)
    }

    /// The logits of its first `pictures` pictures.
    pub(super) fn logits(&mut self, pictures: usize) -> Result<Vec<f32>, CudaError> {
        self.main.0.synchronize()?;
        let mut logits = vec![0f32; pictures * self.network.classes];
        self.evaluated_logits.read(0, &mut logits)?;
        Ok(logits)
    }

    /// Whether statistics may come with a convolution, one without groups. cuDNN adds them up as its blocks come to an end, so not where the
    /// same bits are wanted every time; small ones are taken by the kernel that uses them.
    fn takes_sums(&self, convolution: &Convolution) -> bool {
        let shape = ops::Shape {
            pictures: convolution.batch as u32,
            pixels: (convolution.out_h * convolution.out_w) as u32,
            channels: convolution.out_c as u32,
        };
        let waits = self.reducer.as_ref().is_some_and(|r| r.meeting(0, false).is_some());
        let plain = convolution.groups == 1;
        plain && self.dtype == DType::F16 && !self.deterministic && !self.ops.norm_is_small(shape, waits)
    }

    /// The convolution that a node is, and whether nothing before it is trained.
    fn convolution(&self, node: &Node) -> Option<(Convolution, bool)> {
        let (input, output, kernel, stride, padding, groups, first) = match *node {
            Node::Conv { input, output, kernel, stride, padding, groups, first, .. } => {
                (input, output, kernel, stride, padding, groups, first)
            }
            Node::Linear { input, output, .. } => (input, output, 1, 1, 0, 1, false),
            _ => return None,
        };
        let (from, to) = (self.network.tensors[input], self.network.tensors[output]);
        let convolution = Convolution {
            direction: Direction::Forward,
            dtype: self.dtype,
            batch: self.config.batch_size,
            in_h: from.height,
            in_w: from.width,
            in_c: if first { self.padded_input } else { from.channels },
            out_h: to.height,
            out_w: to.width,
            out_c: if matches!(node, Node::Linear { .. }) { self.padded_classes } else { to.channels },
            kernel,
            stride,
            padding,
            groups,
            sums: false,
        };
        if first && self.folded {
            let (side, in_c) = (from.height / 2 + 3, 4 * self.padded_input);
            let folded =
                Convolution { in_h: side, in_w: side, in_c, kernel: 4, stride: 1, padding: 0, ..convolution };
            return Some((folded, first));
        }
        Some((convolution, first))
    }
}
