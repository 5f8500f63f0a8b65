//! The step: what is started on the GPU, in order.
//!
//! What runs as one is decided before (`fuse.rs`), what follows from the network alone is [`StepPlan`]. [`emitter`] goes
//! through both directions and gives a list of commands, knowing only [`Facts`]; the list is checked, and [`execute`] starts
//! it. Emitted twice, a list uses the same memory, so it may be run as it is or captured and replayed.

use super::{
    GpuConfig,
    arena::{Allocation, Arena},
    command::{Command, Content, Kernel, Operand, Part, Region, UPDATING, verify},
    convolution::{Convolution, Direction, Tensors},
    device::{Buffer, Device, Event, OwnedStream, Ptr, Stream},
    dtype::DType,
    error::CudaError,
    groups::Groups,
    kernels::Kernels,
    layout::Layout,
    ops::{self, NormSite, Ops, ScaleTable},
    profile::TimedCall,
    reduce::Reducer,
    rings::{self, Inputs, Results},
    running::Running,
    state::State,
    statistics::Statistics,
    tuner::Tuner,
};
use crate::{
    EngineConfig, EngineError, LayerTime,
    fuse::{Conv, ConvBackward, ConvForward, DeferredNorm, FusedOp, Norm, NormForward, StatisticsIn},
    layers::layer_times,
    net::{Network, TensorId},
};
use emitter::{arena_bytes, emit};
use facts::{Facts, norm_sites};
use lockstep_comm::ProcessGroup;
use lockstep_data::loader::BatchFormat;
use lockstep_host::tensors::NamedTensors;
use std::{collections::HashMap, ops::Range, sync::Arc};

mod build;
mod emitter;
mod execute;
mod facts;
mod step_plan;
mod text;

pub(super) use step_plan::{SplitHead, StepPlan, capabilities, check};

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

impl Phase {
    /// Whether it continues from what a micro-batch before it has left: gradients and totals.
    fn carries_over(self) -> bool {
        matches!(self, Phase::Train(MicroBatch { first: false, .. }))
    }
}

/// Where the pictures of a micro-batch are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Input {
    /// The whole dataset as bytes, on the GPU.
    Dataset {
        pictures: Ptr,
        height: usize,
        width: usize,
        crop_padding: usize,
        training: bool,
        /// Each picture is mixed with the one before it, as the control block says.
        mixes: bool,
    },
    /// The batch, cropped and scaled.
    Staged { at: Ptr, format: BatchFormat },
}

impl Input {
    pub(super) fn address(self) -> Ptr {
        match self {
            Input::Dataset { pictures, .. } => pictures,
            Input::Staged { at, .. } => at,
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
    kernels: Kernels,
    /// Counters and partial sums of the kernels.
    scratch: Buffer,
    /// For LARS and LAMB: where each parameter lies, and its rate.
    segments: Buffer,
    rates: Buffer,
    tuner: Tuner,
    pub(super) state: State,
    pub(super) inputs: Inputs,
    pub(super) results: Results,
    pub(super) reducer: Option<Reducer>,
    /// Ranks that have the same part of the network.
    data_ranks: usize,
    /// Where ranks share the network: what the host says to each of a model group.
    group_controls: Option<Buffer>,
    /// Of the matrices, in the type that is computed in, but for the first ones, of so many values: those of a split head that are
    /// computed twice instead.
    matrix_gradients: Buffer,
    recomputed: usize,
    /// Float32: of the vectors, as if they followed the matrices.
    vector_gradients: Buffer,
    /// Float32 sums over micro-batches of the matrices' gradients.
    accumulated: Option<Buffer>,
    norm_values: Buffer,
    /// Float32 `[2, channels]`: what a convolution leaves for the batch norm after it.
    channel_sums: Buffer,
    /// What each byte of each channel becomes, float32.
    normalisation: Buffer,
    /// By the size of the network's input, tables that scale pictures of other sizes to it.
    scalings: HashMap<usize, [Scaled; 2]>,
    /// `u32`: whether a look for numbers that are not finite found one; `u64`: a checksum.
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
    /// Continues with pictures of another size; gives its network.
    pub(super) fn set_image_size(&mut self, image_size: usize) -> Option<Arc<Network>> {
        let network = self.sizes.iter().find(|network| network.image_size == image_size)?.clone();
        self.plan.set_network(network.clone());
        Some(network)
    }

    /// What this rank has of the network.
    pub(super) fn network(&self) -> &Network {
        &self.plan.network
    }

    /// Values of a picture of the largest size.
    pub(super) fn most_values(&self) -> usize {
        // Ranks that share rows are given whole pictures, too.
        let values = |network: &Arc<Network>| network.image_size.pow(2) * network.channels;
        self.sizes.iter().map(values).max().unwrap_or(0)
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

    /// What a step's commands depend on.
    fn with_facts<T>(&self, look: impl FnOnce(&Facts<'_>) -> T) -> T {
        let scaling = self.scalings.get(&self.plan.network.image_size);
        look(&Facts {
            plan: &self.plan,
            layout: &self.state.layout,
            norms: &self.norms,
            ops: self.ops,
            optimizer: self.config.optimizer,
            label_smoothing: self.config.label_smoothing,
            accumulates: self.accumulated.is_some(),
            dynamic_scale: self.dynamic_scale.unwrap_or(false),
            ranks: self.reducer.as_ref().map(|reducer| &reducer.statistics),
            data_ranks: self.data_ranks,
            takes_sums: &|convolution| self.tuner.has(convolution),
            scaling: scaling.map(|[rows, columns]| [&rows.table, &columns.table]),
        })
    }

    fn arena_bytes(&self, trains: bool) -> Result<usize, EngineError> {
        self.with_facts(|facts| arena_bytes(facts, trains))
    }

    /// The commands of a micro-batch, checked.
    pub(super) fn commands(
        &self,
        phase: Phase,
        input: Input,
        side_stream: bool,
    ) -> Result<Vec<Command>, EngineError> {
        self.with_facts(|facts| {
            let commands = emit(facts, phase, input, side_stream)?.commands;
            tracing::trace!("{phase:?}, {input:?}:\n{}", text::text(facts, &commands));
            verify::verify(&commands, phase.carries_over()).map_err(CudaError::Commands)?;
            Ok(commands)
        })
    }

    /// [`Program::run`] with each call timed, one after another.
    pub(super) fn profile(&self, phase: Phase, input: Input) -> Result<Vec<TimedCall>, EngineError> {
        let commands = self.commands(phase, input, false)?;
        self.kernels.profile.begin();
        let result = self.start(&commands, input.address());
        let calls = self.kernels.profile.end()?;
        result.map(|()| calls)
    }

    /// What calls of such steps took, by operation.
    pub(super) fn layer_times(&self, calls: &[TimedCall]) -> Vec<LayerTime> {
        let of_op = |call: &TimedCall| match call.part {
            Part::Forward(op) | Part::Backward(op) => Some((op, call.millis * 1e3)),
            Part::Begin | Part::Loss | Part::Update => None,
        };
        layer_times(&self.plan.ops, calls.iter().filter_map(of_op))
    }

    /// The gradients of the step that was done last, as the update used them.
    pub(super) fn gradients(&self) -> Result<NamedTensors, EngineError> {
        let Layout { matrices, trained, len, .. } = self.state.layout;
        let mut flat = vec![0f32; len];
        match &self.accumulated {
            Some(sums) => sums.read(0, &mut flat[..matrices])?,
            None => {
                let stored = &mut flat[self.recomputed..matrices];
                read_as_float(&self.matrix_gradients, 0, self.dtype, stored)?;
            }
        }
        self.vector_gradients.read(0, &mut flat[matrices..trained])?;
        // They carry the loss scale.
        let inverse = self.state.inverse_scale()?;
        if inverse != 1.0 {
            flat.iter_mut().for_each(|value| *value *= inverse);
        }
        let mut all = NamedTensors::new();
        self.state.layout.export(None, &flat, &mut all);
        for frozen in &self.state.layout.slots[self.state.layout.trained_slots().len()..] {
            all.remove(&frozen.name);
        }
        Ok(all)
    }

    /// Starts the work of a micro-batch on [`Program::main`].
    pub(super) fn run(&self, phase: Phase, input: Input) -> Result<(), EngineError> {
        self.start(&self.commands(phase, input, true)?, input.address())
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
        self.found.write(&[0u32])?;
        self.launch(self.state.find_not_finite(&self.ops))?;
        self.main.0.synchronize()?;
        let mut spoilt = [0u32];
        self.found.read(0, &mut spoilt)?;
        Ok(spoilt == [0])
    }

    /// Checksums of the weights that every rank has, and of this rank's parts of split ones.
    pub(super) fn checksum(&self) -> Result<[u64; 2], CudaError> {
        let [split, whole] = self.state.layout.split_and_whole();
        let sum_of = |ranges: [Range<usize>; 2]| -> Result<u64, CudaError> {
            self.found.write(&[0u64])?;
            self.launch(ranges.map(|range| self.state.checksum(&self.ops, range)))?;
            self.main.0.synchronize()?;
            let mut sum = [0u64];
            self.found.read(0, &mut sum)?;
            Ok(sum[0])
        };
        Ok([sum_of(whole)?, sum_of(split)?])
    }

    /// Replaces weights and running statistics, which are known to be whole.
    pub(super) fn set_parameters(&mut self, values: &NamedTensors) -> Result<(), EngineError> {
        let left = self.state.set_parameters(&self.ops, values)?;
        self.complete(left)
    }

    /// The same, one after another in the order of [`State::read_flat`].
    pub(super) fn write_flat(&mut self, flat: &[f32]) -> Result<(), EngineError> {
        let left = self.state.write_flat(&self.ops, flat)?;
        self.complete(left)
    }

    /// Runs what is left of a change of the state.
    fn complete(&self, left: Option<Kernel>) -> Result<(), EngineError> {
        if let Some(kernel) = left {
            self.launch(kernel)?;
            self.main.0.synchronize()?;
        }
        Ok(())
    }

    /// After the steps that were started, so many: see [`crate::Engine::average`].
    pub(super) fn average(&mut self, device: &Device, decay: f64, steps: u32) -> Result<(), CudaError> {
        let kernels = self.state.average(device, &self.ops, decay, steps)?;
        self.launch(kernels)
    }

    /// What a split head has left of the micro-batch that was evaluated last: the logits `[pictures, classes]` of all pictures of the
    /// model group, and of this rank's classes.
    pub(super) fn own_logits(&mut self, head: &SplitHead) -> Result<Vec<f32>, EngineError> {
        self.main.0.synchronize()?;
        let (tensor, input) =
            (self.plan.network.logits(), Input::Staged { at: 0, format: BatchFormat::Bytes });
        let commands = self.commands(Phase::Evaluate, input, true)?;
        let place = commands.iter().find_map(|command| match command {
            Command::Alloc { content: Content::Activation(of), at } if *of == tensor => Some(at.offset),
            _ => None,
        });
        let (rows, (chunks, chunk), own) = (self.plan.pictures(tensor), self.plan.chunks(), head.own().len());
        let mut values = vec![0f32; rows * chunks * chunk];
        read_as_float(&self.arena, place.unwrap_or(0), self.dtype, &mut values)?;
        let bias = self.with_facts(|facts| facts.vector(self.plan.network.head(), "bias"));
        let mut biases = vec![0f32; own];
        self.state.weights.read(bias.offset, &mut biases)?;
        let value = |row: usize, class: usize| {
            values[(class / chunk * rows + row) * chunk + class % chunk] + biases[class]
        };
        Ok((0..rows * own).map(|number| value(number / own, number % own)).collect())
    }

    /// How the classes are divided, where ranks share the network.
    pub(super) fn head(&self) -> Option<&SplitHead> {
        self.plan.head.as_ref()
    }

    /// The logits of its first `pictures` pictures.
    pub(super) fn logits(&mut self, pictures: usize) -> Result<Vec<f32>, CudaError> {
        self.main.0.synchronize()?;
        let mut logits = vec![0f32; pictures * self.plan.network.classes];
        self.evaluated_logits.read(0, &mut logits)?;
        Ok(logits)
    }
}

/// Copies numbers of `dtype` from `offset` bytes on to the host, as float32.
fn read_as_float(from: &Buffer, offset: usize, dtype: DType, values: &mut [f32]) -> Result<(), CudaError> {
    let to_float: fn(u16) -> f32 = match dtype {
        DType::F32 => return from.read(offset, values),
        DType::F16 => |bits| half::f16::from_bits(bits).to_f32(),
        DType::Bf16 => |bits| half::bf16::from_bits(bits).to_f32(),
    };
    let mut halves = vec![0u16; values.len()];
    from.read(offset, &mut halves)?;
    values.iter_mut().zip(halves).for_each(|(value, bits)| *value = to_float(bits));
    Ok(())
}
