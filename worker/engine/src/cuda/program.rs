//! The step as a sequence of launches on the GPU.
//!
//! `fuse.rs` decides which operations are fused, and [`StepPlan`] has everything that follows only from the network.
//! [`emitter`] emits the commands of the forward and the backward pass from [`Facts`], `verify` checks the list, and [`execute`] launches
//! it. Every emission of a list uses the same memory, so a list can be launched directly or captured and replayed.

use super::{
    arena::Arena,
    command::{
        Collective, Command, Content, EventId, Kernel, Operand, Part, Region, StreamId, UPDATING, verify,
    },
    convolution::{Convolution, Direction, Tensors},
    device::{Buffer, Device, Event, OwnedStream, Ptr, Stream},
    dtype::DType,
    error::CudaError,
    groups::Groups,
    kernels::Kernels,
    layout::Layout,
    ops::{self, CONTROL, GatherMode, NormSite, Ops, ScaleTable},
    profile::TimedCall,
    reduce::Reducer,
    rings::{self, Inputs, Results},
    running_statistics::RunningLayout,
    state::State,
    statistics::{NormPass, Statistics},
    tuner::Tuner,
};
use crate::{
    DeviceConfig, EngineConfig, EngineError, LayerTime,
    fuse::{Conv, ConvBackward, ConvForward, DeferredNorm, FusedOp, Norm, NormForward, StatisticsIn},
    layers::layer_times,
    net::{Network, TensorId},
    plan::{Pass, schedule},
    sharding::Share,
};
use emitter::{arena_bytes, emit};
use facts::{Facts, norm_sites};
use lockstep_comm::ProcessGroup;
use lockstep_data::loader::BatchFormat;
use lockstep_host::tensors::{NamedTensors, TensorSource};
use std::{collections::HashMap, ops::Range, sync::Arc};

mod build;
mod emitter;
mod execute;
mod facts;
mod step_plan;
mod text;

pub(super) use step_plan::{SplitHead, StepPlan, capabilities, check, reads_pictures, split_operator};

/// Position of a micro-batch in its step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct MicroBatch {
    /// Whether this is the first micro-batch, whose gradients overwrite the previous step's.
    pub(super) is_first: bool,
    /// Whether this is the last micro-batch, which the update follows.
    pub(super) is_last: bool,
    /// Whether no picture is padding, which statistics would have to ignore.
    pub(super) is_full: bool,
    /// The pass through a pipeline stage; `None` without stages, where both passes run one after the other.
    pub(super) pass: Option<StagePass>,
}

/// One pass of a micro-batch through a pipeline stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct StagePass {
    pub(super) is_backward: bool,
    /// Index of this micro-batch's part of the memory ([`Program::micro_batches_in_flight`]). Micro-batches that are between their passes
    /// at the same time have different parts.
    pub(super) memory_part: usize,
    /// Whether the gradient that the previous pass has computed must still be sent to the preceding stage.
    pub(super) sends_gradient: bool,
}

impl StagePass {
    /// The passes of a step through a stage, in order, each with the index of its micro-batch. `memory_parts` is the number of parts of the
    /// memory.
    pub(super) fn schedule(
        (stage, stages): (usize, usize),
        micro_batches: usize,
        memory_parts: usize,
    ) -> Vec<(usize, Self)> {
        let mut sends_gradient = false;
        let stage_pass = |pass: Pass| {
            let (Pass::Forward(number) | Pass::Backward(number)) = pass;
            let is_backward = pass == Pass::Backward(number);
            let stage_pass = Self { is_backward, memory_part: number % memory_parts, sends_gradient };
            sends_gradient = is_backward && stage > 0;
            (number, stage_pass)
        };
        schedule(stage, stages, micro_batches).into_iter().map(stage_pass).collect()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Phase {
    Train(MicroBatch),
    /// Evaluation, with running statistics.
    Evaluate,
}

impl Phase {
    /// The pass, if this phase is only one pass of a pipeline stage.
    fn pass(self) -> Option<StagePass> {
        match self {
            Phase::Train(micro_batch) => micro_batch.pass,
            Phase::Evaluate => None,
        }
    }

    /// Whether this phase adds to the totals, and in training to the gradients, of an earlier micro-batch.
    fn carries_over(self) -> bool {
        !matches!(self, Phase::Train(MicroBatch { is_first: true, .. }))
    }
}

/// The location of a micro-batch's pictures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Input {
    /// The whole dataset as bytes, on the GPU.
    Dataset { pictures: Ptr, height: usize, width: usize, mode: GatherMode },
    /// The batch, which the host has cropped and scaled.
    Staged { at: Ptr, format: BatchFormat },
}

impl Input {
    /// The input of a pass that reads no pictures, or whose address is not used.
    pub(super) const NONE: Self = Input::Staged { at: 0, format: BatchFormat::Bytes };

    pub(super) fn address(self) -> Ptr {
        match self {
            Input::Dataset { pictures, .. } => pictures,
            Input::Staged { at, .. } => at,
        }
    }
}

/// A resampling table for one axis, on the host and on the GPU.
struct ScalingTable {
    table: ScaleTable,
    on_gpu: Buffer,
}

pub(super) struct Program {
    /// The plan for the current image size.
    plan: StepPlan,
    /// This rank's part of the network for each prepared image size.
    networks: Vec<Arc<Network>>,
    norms: Vec<NormSite>,
    config: EngineConfig,
    /// Whether loss scaling is dynamic; `None` without loss scaling.
    pub(super) dynamic_scale: Option<bool>,
    pub(super) ops: Ops,
    kernels: Kernels,
    /// The regions without a field of their own.
    buffers: HashMap<Region, Buffer>,
    tuner: Tuner,
    pub(super) state: State,
    pub(super) inputs: Inputs,
    pub(super) results: Results,
    pub(super) reducer: Option<Reducer>,
    /// Number of ranks that have the same part of the network.
    data_ranks: usize,
    /// Number of micro-batches that may be between their forward and backward pass at the same time; more than 1 only before the last
    /// stage. Each of these micro-batches has a part of the arena, of the control blocks and of batch norms' values.
    pub(super) micro_batches_in_flight: usize,
    /// Gradients of the matrices, in the activations' format, without the first `unstored_len` values.
    matrix_gradients: Buffer,
    /// Number of values of a split head's gradients, if these are not in `matrix_gradients`: they are computed twice or, for a sample of
    /// classes, are in the arena. Otherwise 0.
    unstored_len: usize,
    /// By image size of the network: resampling tables to this size, for rows and for columns.
    scalings: HashMap<usize, [ScalingTable; 2]>,
    pub(super) main_stream: OwnedStream,
    side_stream: OwnedStream,
    events: HashMap<EventId, Event>,
}

impl Program {
    /// Continues with another image size. Returns the network for this size; `None` if the size was not prepared.
    pub(super) fn set_image_size(&mut self, image_size: usize) -> Option<Arc<Network>> {
        let network = self.networks.iter().find(|network| network.image_size == image_size)?.clone();
        self.plan.set_network(network.clone());
        Some(network)
    }

    /// The memory of a region that every program has.
    fn buffer(&self, region: Region) -> &Buffer {
        &self.buffers[&region]
    }

    /// This rank's part of the network.
    pub(super) fn network(&self) -> &Network {
        &self.plan.network
    }

    /// Number of values of a picture of the largest prepared size.
    pub(super) fn max_picture_values(&self) -> usize {
        // Ranks that share rows receive whole pictures, too.
        let values = |network: &Arc<Network>| network.image_size.pow(2) * network.channels;
        self.networks.iter().map(values).max().unwrap_or(0)
    }

    pub(super) fn dtype(&self) -> DType {
        self.plan.dtype
    }

    /// Sets the normalisation table. `mean` and `std` of each channel refer to bytes scaled to 0..1.
    pub(super) fn set_normalisation(&mut self, mean: &[f32], std: &[f32]) -> Result<(), CudaError> {
        let table: Vec<f32> = mean
            .iter()
            .zip(std)
            .flat_map(|(m, s)| (0..256).map(move |v| (v as f32 / 255.0 - m) / s))
            .take(256 * self.plan.network.channels)
            .collect();
        self.buffer(Region::Normalisation).write(&table)
    }

    /// Prepares for a dataset on the GPU with pictures of `height` x `width` pixels.
    pub(super) fn prepare_scaling(
        &mut self,
        device: &Device,
        height: usize,
        width: usize,
    ) -> Result<(), CudaError> {
        self.scalings.clear();
        for side in self.networks.iter().map(|network| network.image_size) {
            if (height, width) == (side, side) {
                continue;
            }
            let table_from = |from: usize| -> Result<ScalingTable, CudaError> {
                let table = ScaleTable::new(from as u32, side as u32);
                Ok(ScalingTable { on_gpu: device.upload(&table.entries)?, table })
            };
            self.scalings.insert(side, [table_from(height)?, table_from(width)?]);
        }
        Ok(())
    }

    /// The facts that determine a step's commands.
    fn facts(&self) -> Facts<'_> {
        let scaling = self.scalings.get(&self.plan.network.image_size);
        let reducer = self.reducer.as_ref().filter(|reducer| reducer.reduces_gradients());
        Facts {
            plan: &self.plan,
            layout: &self.state.layout,
            norms: &self.norms,
            ops: self.ops,
            optimizer: self.config.optimizer,
            label_smoothing: self.config.loss.label_smoothing,
            has_class_weights: self.config.loss.class_weights.is_some(),
            accumulates: self.config.accumulate > 1,
            has_dynamic_scale: self.dynamic_scale.unwrap_or(false),
            statistics: reducer.map(|reducer| &reducer.statistics),
            data_ranks: self.data_ranks,
            share: self.state.share,
            computes_sums: Box::new(move |convolution| self.tuner.has_plan(convolution)),
            scaling: scaling.map(|[rows, columns]| [&rows.table, &columns.table]),
        }
    }

    /// Emits and checks the commands of a micro-batch. Weight gradients run on `weight_gradient_stream`.
    pub(super) fn commands(
        &self,
        phase: Phase,
        input: Input,
        weight_gradient_stream: StreamId,
    ) -> Result<Vec<Command>, EngineError> {
        let facts = self.facts();
        let emitted = emit(&facts, phase, input, weight_gradient_stream)?;
        tracing::trace!("{phase:?}, {input:?}:\n{}", text::text(&facts, &emitted.commands));
        verify::verify(&emitted.commands, phase.carries_over()).map_err(CudaError::Commands)?;
        let Some(pass) = phase.pass() else { return Ok(emitted.commands) };
        Ok(emitted.into_pass(pass, |region| match region {
            Region::Arena | Region::NormValues => self.buffer(region).bytes / self.micro_batches_in_flight,
            Region::Control => self.inputs.control.bytes / self.micro_batches_in_flight,
            _ => 0,
        }))
    }

    /// Runs a micro-batch like [`Program::run`], but one call after another, and times each call.
    pub(super) fn profile(&self, phase: Phase, input: Input) -> Result<Vec<TimedCall>, EngineError> {
        let commands = self.commands(phase, input, StreamId::Main)?;
        self.kernels.profile.begin();
        let result = self.start(&commands, input.address());
        let calls = self.kernels.profile.end()?;
        result.map(|()| calls)
    }

    /// The time of each operation, from the calls that [`Program::profile`] has timed.
    pub(super) fn layer_times(&self, calls: &[TimedCall]) -> Vec<LayerTime> {
        let micros_of_op = |call: &TimedCall| match call.part {
            Part::Forward(op) | Part::Backward(op) => Some((op, call.millis * 1e3)),
            Part::Begin | Part::Loss | Part::Update => None,
        };
        layer_times(&self.plan.ops, calls.iter().filter_map(micros_of_op))
    }

    /// The latest step's gradients, as the update used them, without those of parameters that are not trained.
    pub(super) fn gradients(&self) -> Result<NamedTensors, EngineError> {
        let Layout { matrix_len, trained_len, len, .. } = self.state.layout;
        let mut flat = vec![0f32; len];
        match self.buffers.get(&Region::Accumulated) {
            Some(sums) => sums.read(0, &mut flat[..matrix_len])?,
            None => {
                let stored = &mut flat[self.unstored_len..matrix_len];
                read_as_float(&self.matrix_gradients, 0, self.plan.dtype, stored)?;
            }
        }
        self.buffer(Region::VectorGradients).read(0, &mut flat[matrix_len..trained_len])?;
        // The gradients are multiplied by the loss scale.
        let inverse = self.state.read_scaler()?.inverse;
        if inverse != 1.0 {
            flat.iter_mut().for_each(|value| *value *= inverse);
        }
        let mut all = NamedTensors::new();
        self.state.layout.export(None, &flat, &mut all);
        for fixed in self.state.layout.parameters.iter().filter(|parameter| parameter.is_fixed) {
            all.remove(&fixed.name);
        }
        Ok(all)
    }

    /// Collective: where ranks divide the optimizer's state, starts to give each rank the float32 weights of the other ranks.
    pub(super) fn gather_weights(&self) -> Result<(), EngineError> {
        let Some(share) = self.state.share else { return Ok(()) };
        let gather = |range: &Range<usize>| {
            let at = Operand::new(Region::Weights, 4 * range.start, 4 * range.len());
            Command::sharded(StreamId::Main, Collective::AllGather, share, at, DType::F32)
        };
        let commands: Vec<_> = self.state.layout.buckets.iter().map(gather).collect();
        self.start(&commands, 0)
    }

    /// Starts the work of a micro-batch on [`Program::main_stream`].
    pub(super) fn run(&self, phase: Phase, input: Input) -> Result<(), EngineError> {
        self.start(&self.commands(phase, input, StreamId::Side)?, input.address())
    }

    /// Sets the totals, to which evaluated micro-batches add their results, to zero.
    pub(super) fn clear_totals(&self) -> Result<(), CudaError> {
        let totals = self.buffer(Region::Totals);
        self.main_stream.0.fill(totals, totals.bytes, 0)
    }

    /// Loss and number of correct predictions of the micro-batches that were evaluated since [`Program::clear_totals`].
    pub(super) fn read_totals(&self) -> Result<(f64, u64), CudaError> {
        self.main_stream.0.synchronize()?;
        let (mut loss, mut correct) = ([0f64], [0u64]);
        self.buffer(Region::Totals).read(0, &mut loss)?;
        self.buffer(Region::Totals).read(8, &mut correct)?;
        Ok((loss[0], correct[0]))
    }

    /// Whether all weights, biases, running statistics and optimizer slots are finite.
    pub(super) fn is_finite(&self) -> Result<bool, CudaError> {
        self.buffer(Region::CheckResult).write(&[0u32])?;
        self.launch(self.state.finite_check_kernels(&self.ops))?;
        self.main_stream.0.synchronize()?;
        let mut found = [0u32];
        self.buffer(Region::CheckResult).read(0, &mut found)?;
        Ok(found == [0])
    }

    /// Checksums of the weights that every rank has, and of this rank's parts of split weights.
    pub(super) fn checksum(&self) -> Result<[u64; 2], CudaError> {
        let [split, whole] = self.state.layout.split_and_whole();
        let sum_of = |ranges: [Range<usize>; 2]| -> Result<u64, CudaError> {
            self.buffer(Region::CheckResult).write(&[0u64])?;
            self.launch(ranges.map(|range| self.state.checksum_kernel(&self.ops, range)))?;
            self.main_stream.0.synchronize()?;
            let mut sum = [0u64];
            self.buffer(Region::CheckResult).read(0, &mut sum)?;
            Ok(sum[0])
        };
        Ok([sum_of(whole)?, sum_of(split)?])
    }

    /// Replaces weights and running statistics by `values`, which must have been checked.
    pub(super) fn set_parameters(&mut self, values: &dyn TensorSource) -> Result<(), EngineError> {
        let kernel = self.state.set_parameters(&self.ops, values)?;
        self.launch_and_wait(kernel)
    }

    /// Replaces weights and running statistics by values in the order of [`State::read_flat`].
    pub(super) fn write_flat(&mut self, flat: &[f32]) -> Result<(), EngineError> {
        let kernel = self.state.write_flat(&self.ops, flat)?;
        self.launch_and_wait(kernel)
    }

    fn launch_and_wait(&self, kernel: Option<Kernel>) -> Result<(), EngineError> {
        if let Some(kernel) = kernel {
            self.launch(kernel)?;
            self.main_stream.0.synchronize()?;
        }
        Ok(())
    }

    /// Updates the average after step `step`, the newest started step; see [`crate::Engine::average`].
    pub(super) fn average(&mut self, device: &Device, decay: f64, step: u32) -> Result<(), CudaError> {
        let kernels = self.state.average_kernels(device, &self.ops, decay, step)?;
        self.launch(kernels)
    }

    /// With a split head: reads the latest evaluated micro-batch's logits `[pictures, classes]`, of all pictures of the model group and of
    /// this rank's classes.
    pub(super) fn read_own_logits(&self, head: &SplitHead) -> Result<Vec<f32>, EngineError> {
        self.main_stream.0.synchronize()?;
        let tensor = self.plan.network.logits();
        // Emitting the commands again gives the offset at which the logits are in the arena.
        let commands = self.commands(Phase::Evaluate, Input::NONE, StreamId::Side)?;
        let offset = commands.iter().find_map(|command| match command {
            Command::Alloc { content: Content::Activation(stored), at } if *stored == tensor => {
                Some(at.offset)
            }
            _ => None,
        });
        let (rows, classes) = (self.plan.picture_count(tensor), head.own_classes().len());
        let chunk_classes = self.plan.chunk_classes();
        let mut values = vec![0f32; rows * self.plan.chunk_count() * chunk_classes];
        read_as_float(self.buffer(Region::Arena), offset.unwrap_or(0), self.plan.dtype, &mut values)?;
        let bias = self.facts().head_bias();
        let mut biases = vec![0f32; classes];
        if !bias.is_none() {
            self.state.weights.read(bias.offset, &mut biases)?;
        }
        let value = |row: usize, class: usize| {
            values[(class / chunk_classes * rows + row) * chunk_classes + class % chunk_classes]
                + biases[class]
        };
        Ok((0..rows * classes).map(|index| value(index / classes, index % classes)).collect())
    }

    /// The split of the head's classes, if ranks share the network.
    pub(super) fn head(&self) -> Option<&SplitHead> {
        self.plan.head.as_ref()
    }

    /// Reads the logits of the first `pictures` pictures of the latest evaluated micro-batch.
    pub(super) fn read_logits(&self, pictures: usize) -> Result<Vec<f32>, CudaError> {
        self.main_stream.0.synchronize()?;
        let mut logits = vec![0f32; pictures * self.plan.network.classes];
        self.buffer(Region::EvaluatedLogits).read(0, &mut logits)?;
        Ok(logits)
    }
}

/// Copies numbers of `dtype` from byte offset `offset` to the host, converted to float32.
fn read_as_float(from: &Buffer, offset: usize, dtype: DType, values: &mut [f32]) -> Result<(), CudaError> {
    let to_float: fn(u16) -> f32 = match dtype {
        DType::F32 => return from.read(offset, values),
        DType::F16 => |bits| half::f16::from_bits(bits).to_f32(),
        DType::Bf16 => |bits| half::bf16::from_bits(bits).to_f32(),
    };
    let mut stored = vec![0u16; values.len()];
    from.read(offset, &mut stored)?;
    values.iter_mut().zip(stored).for_each(|(value, bits)| *value = to_float(bits));
    Ok(())
}
