//! The step: what is started on the GPU, in order. Read it from top to bottom and know what a step does.
//!
//! What runs as one is decided before (`engine/fuse.rs`), what follows from the network alone is [`StepPlan`], and
//! [`GraphEmitter`] goes through both directions. Everything here is deterministic in its calls: emitted twice, it uses the
//! same memory, so it may be run as it is or captured and replayed.

use super::{
    arena::{Allocation, Arena},
    cudnn::{Convolution, Direction, Tensors},
    device::{Buffer, Device, Event, OwnedStream, Ptr, Stream},
    error::CudaError,
    kernels::{DType, Kernels},
    layout::Layout,
    ops::{self, NormSite, Ops, ScaleTable},
    reduce::Reducer,
    rings::{Inputs, Results},
    state::State,
    tuner::Tuner,
};
use crate::{
    comm::ProcessGroup,
    data::loader::Form,
    engine::{
        EngineConfig, EngineError, GpuConfig,
        fuse::{Conv, ConvBackward, ConvForward, DeferredNorm, FusedOp, Norm, NormForward, StatisticsIn},
    },
    net::{Network, TensorId},
};
use emitter::{GraphEmitter, arena_bytes};
use std::{collections::HashMap, sync::Arc};

mod emitter;
mod step_plan;

pub(super) use step_plan::{StepPlan, capabilities};

/// Weight gradients on the side stream that the backward pass does not wait for to use their memory again.
const PENDING_WEIGHT_GRADIENTS: usize = 4;

/// Where a micro-batch stands in its step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct MicroBatch {
    /// Its gradients replace those of the step before.
    pub(super) first: bool,
    /// The update follows it.
    pub(super) last: bool,
    /// No picture of it is padding, which statistics would have to leave out.
    pub(super) whole: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Phase {
    Train(MicroBatch),
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
    Whole(Allocation),
    /// Of the mean over all pixels.
    Pooled(Allocation),
    /// Of the output of a 1x1 convolution with so many outputs and these weights, whose dgrad batch norm computes.
    ThroughConv { dy: Allocation, weights: Ptr, outputs: usize },
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

/// A table that scales one axis, on both sides.
struct Scaled {
    table: ScaleTable,
    at: Buffer,
}

pub(super) struct Program {
    /// For pictures of the current size.
    plan: StepPlan,
    /// For each size that there is memory and a plan for.
    sizes: Vec<Arc<Network>>,
    norms: Vec<NormSite>,
    config: EngineConfig,
    dtype: DType,
    /// Whether the loss scale moves by itself; `None` where nothing is scaled.
    pub(super) dynamic_scale: Option<bool>,
    deterministic: bool,
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
    /// Of the matrices, in the type that is computed in.
    matrix_gradients: Buffer,
    /// Float32: of the vectors, as if they followed the matrices.
    vector_gradients: Buffer,
    /// Float32 sums over micro-batches of the matrices' gradients.
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
        let plan = StepPlan::new(
            network.clone(),
            config.batch_size,
            dtype,
            capabilities(Ops::multiplies_matrices(device.capability, dtype)),
        )?;
        let layout = Layout::new(&network, &plan.ops, plan.padded_input, plan.padded_classes, plan.folded);
        let kernels = Kernels::load(device, dtype)?;
        let first_scale = loss_scale.map_or(1.0, |(scale, _)| scale);
        let state =
            State::new(device, &network, plan.norms(), layout.clone(), dtype, first_scale, config.optimizer)?;
        let vector_gradients = device.zeros(4 * (layout.len - layout.matrices).max(1))?;
        let matrix_gradients = device.zeros(dtype.size() * layout.matrices)?;

        // Mean, 1/std, scale, bias, slope and offset.
        let values_of = |channels: usize| 4 * 6 * channels;
        let norm_ops: Vec<&Norm> = plan.norms().collect();
        let channels_of = |norm: &Norm| network.tensors[norm.input].channels;
        let norm_values =
            device.zeros(norm_ops.iter().map(|n| values_of(channels_of(n))).sum::<usize>().max(4))?;
        let vector_at = |name: &str, suffix: &str| {
            vector_gradients.ptr + 4 * (layout.slot(name, suffix).range.start - layout.matrices) as u64
        };
        let mut values = norm_values.ptr;
        let mut norms: Vec<(usize, NormSite)> = norm_ops
            .iter()
            .map(|node| {
                let shape = network.tensors[node.input];
                let (running_mean, running_var) = state.running(node.norm);
                let run = |number: usize| values + (4 * number * shape.channels) as u64;
                let norm = NormSite {
                    gamma: state.vector(&node.name, "weight"),
                    beta: state.vector(&node.name, "bias"),
                    running_mean,
                    running_var,
                    mean: run(0),
                    inv_std: run(1),
                    scale: run(2),
                    bias: run(3),
                    dgamma: vector_at(&node.name, "weight"),
                    dbeta: vector_at(&node.name, "bias"),
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
                    norm_ops.iter().map(|n| (n.norm, channels_of(n))).collect();
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
            _ => Some(device.zeros(4 * layout.matrices)?),
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
        let (pictures, classes) = (config.batch_size as u32, plan.padded_classes as u32);
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
            side_done: plan.ops.iter().map(|_| Event::new(false)).collect::<Result<_, _>>()?,
            evaluated_logits: device.zeros(4 * config.batch_size * network.classes)?,
            deterministic: gpu.deterministic,
            dynamic_scale: loss_scale.map(|(_, dynamic)| dynamic),
            config: config.clone(),
            dtype,
            state,
            reducer,
            matrix_gradients,
            vector_gradients,
            accumulated,
            norm_values,
            channel_sums: device.zeros(8 * network.tensors.iter().map(|t| t.channels).max().unwrap_or(1))?,
            norms,
            sizes: vec![network],
            plan,
        };
        program.reserve(device)?;
        Ok(program)
    }

    /// Prepares for more sizes of pictures, some of which are never trained on. No graph may be captured yet, as memory
    /// moves.
    pub(super) fn take_sizes(
        &mut self,
        device: &Device,
        training: &[usize],
        evaluation: &[usize],
    ) -> Result<(), EngineError> {
        let own = self.plan.network.clone();
        if let Some(odd) =
            training.iter().chain(evaluation).find(|size| self.plan.folded && !size.is_multiple_of(2))
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
                let network = Arc::new(own.resized(*size));
                self.sizes.push(network.clone());
                self.plan.set_network(network);
                self.prepare_plans(device, trains)?;
                bytes = bytes.max(arena_bytes(&self.plan, trains)?);
            }
        }
        self.plan.set_network(own);
        self.allocate(device, bytes)
    }

    /// Continues with pictures of another size; gives its network.
    pub(super) fn set_image_size(&mut self, image_size: usize) -> Option<Arc<Network>> {
        let network = self.sizes.iter().find(|network| network.image_size == image_size)?.clone();
        self.plan.set_network(network.clone());
        Some(network)
    }

    /// Values of a picture of the largest size.
    pub(super) fn most_values(&self) -> usize {
        self.sizes.iter().map(|network| network.tensors[network.input()].len()).max().unwrap_or(0)
    }

    /// Prepares plans and memory.
    fn reserve(&mut self, device: &Device) -> Result<(), EngineError> {
        self.prepare_plans(device, true)?;
        let bytes = arena_bytes(&self.plan, true)?;
        self.allocate(device, bytes)
    }

    /// Finds a plan for each convolution of the current size; of all passes where it `trains`.
    fn prepare_plans(&mut self, device: &Device, trains: bool) -> Result<(), EngineError> {
        let mut wanted = Vec::new();
        for op in &self.plan.ops {
            let Some((convolution, first)) = self.plan.convolution(op) else { continue };
            wanted.push(Convolution { direction: Direction::Forward, ..convolution });
            if !trains {
                continue;
            }
            if matches!(op, FusedOp::Conv(Conv { norm_after: Some(_), .. })) && self.takes_sums(&convolution)
            {
                wanted.push(Convolution { sums: true, ..convolution });
            }
            wanted.push(Convolution { direction: Direction::Weight, ..convolution });
            if !first {
                wanted.push(Convolution { direction: Direction::Input, ..convolution });
            }
        }
        Ok(self.tuner.prepare(device, &wanted)?)
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
            .take(256 * self.plan.network.channels)
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
        let result = GraphEmitter::new(&self.plan, Some(self), false).network(phase, input);
        let calls = self.ops.profile().end()?;
        result.map(|()| calls)
    }

    /// Starts the work of a micro-batch on [`Program::main`].
    pub(super) fn emit(&self, phase: Phase, input: Input) -> Result<(), EngineError> {
        GraphEmitter::new(&self.plan, Some(self), true).network(phase, input)
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
        let mut logits = vec![0f32; pictures * self.plan.network.classes];
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

    /// Starts a convolution that stays on the main stream.
    fn convolve(
        &self,
        stream: Stream,
        convolution: Convolution,
        tensors: Tensors,
    ) -> Result<(), EngineError> {
        self.convolve_with(stream, convolution, tensors, self.workspace.ptr)
    }

    fn convolve_with(
        &self,
        stream: Stream,
        convolution: Convolution,
        tensors: Tensors,
        workspace: Ptr,
    ) -> Result<(), EngineError> {
        let plan = self.tuner.plan(&convolution)?;
        let run = || Ok(self.tuner.cudnn().run(stream, plan, tensors, workspace)?);
        self.ops.profile().around(stream, || convolution.to_string(), run)
    }
}
