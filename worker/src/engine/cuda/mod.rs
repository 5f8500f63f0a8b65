//! The CUDA engine: one GPU, NHWC, float32, float16 or bfloat16, with float32 weights and optimizer state.
//!
//! A step is captured once as a CUDA graph and then replayed: what changes from step to step is read by the
//! kernels from [`rings`]. The host starts a step, goes on, and reads its result when it comes. Results
//! are the same bits in every run: every sum has a fixed order.

mod arena;
mod backend;
mod cache;
mod config;
mod cudnn;
mod device;
mod error;
mod jpeg;
mod kernels;
mod layout;
mod ops;
mod pictures;
#[cfg(test)]
mod plans;
mod profile;
mod program;
mod reduce;
mod rings;
mod state;
#[cfg(test)]
mod tests;
mod tuner;

pub use config::GpuConfig;
pub use error::CudaError;
pub use kernels::DType;

use super::{
    Engine, EngineConfig, EngineError, EvalResult, LossScaling, NamedTensors, OptimizerState, StepResult,
    check, finite, unknown_size,
};
use crate::{
    comm::watchdog::Watchdog,
    comm::{CommError, ProcessGroup},
    data::{
        device::DeviceDecoder,
        loader::{Batch, DataSource, Form},
    },
    gpu::libraries::{self, Which},
    net::Network,
};
pub(super) use backend::Cuda;
use device::{Device, Graph};
use lockstep_protocol::spec::{LossScale, Precision};
use pictures::{OnGpu, Staging};
use program::{Input, MicroBatch, Phase, Program};
use reduce::Reducer;
use rings::{Control, Inputs, Record, Results};
use state::State;
use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

/// Steps that the host may be ahead of the GPU.
const AHEAD: usize = 2;

/// Where fp16's loss scale begins, as in PyTorch's `GradScaler`.
const FIRST_LOSS_SCALE: f32 = 65_536.0;

/// Opens GPU `ordinal`'s decoder of JPEG files, for an engine that computes in `precision`.
pub(super) fn build_decoder(ordinal: i32, precision: Precision) -> Result<Arc<dyn DeviceDecoder>, String> {
    libraries::ready(&[Which::Driver, Which::Nvrtc])?;
    jpeg::open(ordinal, dtype_of(precision))
}

/// Builds the engine on the GPU that `gpu` names.
pub(super) fn build(
    network: Arc<Network>,
    initial: &NamedTensors,
    config: EngineConfig,
    comm: Arc<dyn ProcessGroup>,
    gpu: &GpuConfig,
) -> Result<Box<dyn Engine>, EngineError> {
    let dtype = dtype_of(gpu.precision);
    let loss_scale = match (&gpu.loss_scale, dtype) {
        (_, DType::F32 | DType::Bf16) => None,
        (LossScale::Static(scale), DType::F16) => Some((*scale, false)),
        (LossScale::Named(_), DType::F16) => Some((FIRST_LOSS_SCALE, true)),
    };
    let mut needed = vec![Which::Driver, Which::Nvrtc, Which::Cudnn];
    if comm.size() > 1 {
        needed.push(Which::Nccl);
    }
    libraries::ready(&needed).map_err(CudaError::Missing)?;
    let device = Device::open(gpu.ordinal)?;
    let (free_before, total) = device.memory();
    fits(&network, config.batch_size, dtype, (free_before, total))?;
    // The watchdog counts this process's steps, whichever engine does them.
    let counted = gpu.watchdog.as_ref().map_or(0, |watchdog| watchdog.steps_done());
    let mut engine = CudaEngine {
        program: Program::new(&device, network.clone(), &config, dtype, loss_scale, comm.clone(), gpu)?,
        graphs: HashMap::new(),
        on_gpu: None,
        staging: None,
        under_way: VecDeque::new(),
        last_end: None,
        free_before,
        failed: false,
        watchdog: gpu.watchdog.clone(),
        profiled: None,
        steps: (counted, counted),
        config,
        network,
        comm,
        device,
    };
    engine.set_parameters(initial)?;
    Ok(Box::new(engine))
}

/// Whether the GPU has room for what batch norm's backward pass needs, before plans are timed with tensors of that size. Half of
/// it counts, as fused passes may do without some; what is in all is known when plans are, and asked for then.
fn fits(network: &Network, batch: usize, dtype: DType, (free, total): (u64, u64)) -> Result<(), CudaError> {
    let bytes = if dtype == DType::F32 { 4 } else { 2 };
    let needed = network.convolution_values().saturating_mul(batch as u64).saturating_mul(bytes) / 2;
    if total == 0 || needed <= total {
        return Ok(());
    }
    let [needed_mb, free_mb, total_mb] = [needed, free, total].map(|bytes| bytes >> 20);
    Err(CudaError::OutOfMemory { needed_mb, free_mb, total_mb })
}

fn dtype_of(precision: Precision) -> DType {
    match precision {
        Precision::Fp32 => DType::F32,
        Precision::Bf16 => DType::Bf16,
        // With dynamic loss scaling it keeps float32's accuracy, and cuDNN is fastest with it.
        Precision::Fp16 | Precision::Auto => DType::F16,
    }
}

/// What a captured graph is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct GraphKey {
    /// Of the network's input.
    image_size: usize,
    phase: Phase,
    input: Input,
}

/// A step as a CUDA graph, or that it ran once: what runs for the first time loads kernels, which a capture
/// must not.
enum CapturedGraph {
    Once,
    Graph(Graph),
}

/// A step that was started.
enum UnderWay {
    OnGpu,
    /// Without a picture on any rank.
    Empty,
}

struct CudaEngine {
    // Fields are dropped in this order: graphs use the program's memory, all use the device.
    graphs: HashMap<GraphKey, CapturedGraph>,
    program: Program,
    on_gpu: Option<OnGpu>,
    staging: Option<Staging>,
    under_way: VecDeque<UnderWay>,
    /// Of the newest step's result, on the GPU's clock, while steps follow each other.
    last_end: Option<u64>,
    /// Bytes of the GPU's memory, before this engine took some.
    free_before: u64,
    /// Whether an error has left the GPU in the middle of something.
    failed: bool,
    watchdog: Option<Arc<Watchdog>>,
    /// While somebody asks where the time goes.
    profiled: Option<Vec<(String, f64)>>,
    /// Started and done, for the watchdog.
    steps: (u64, u64),
    config: EngineConfig,
    /// For pictures of the current size.
    network: Arc<Network>,
    comm: Arc<dyn ProcessGroup>,
    device: Device,
}

impl CudaEngine {
    /// Sends a micro-batch and runs `phase` on it.
    fn run(&mut self, phase: Phase, control: Control, batch: &Batch) -> Result<(), EngineError> {
        check_batch(&self.network, batch, self.config.batch_size)?;
        let input = self.input(phase, batch)?;
        self.wait_on_gpu(|inputs, _, patience, alive| inputs.send(control, batch, patience, alive))?;
        if let Some(calls) = &mut self.profiled {
            *calls = self.program.profile(phase, input)?;
            return Ok(());
        }
        let key = GraphKey { image_size: self.network.image_size, phase, input };
        let main = self.program.main.0;
        match self.graphs.get(&key) {
            Some(CapturedGraph::Graph(graph)) => graph.launch(main)?,
            Some(CapturedGraph::Once) => {
                main.begin_capture()?;
                let emitted = self.program.emit(phase, input);
                let graph = main.end_capture();
                emitted?;
                let graph = graph?;
                tracing::debug!("captured {key:?}: {} nodes", graph.nodes);
                graph.launch(main)?;
                self.graphs.insert(key, CapturedGraph::Graph(graph));
            }
            None => {
                self.program.emit(phase, input)?;
                self.graphs.insert(key, CapturedGraph::Once);
            }
        }
        Ok(())
    }

    /// Where the pictures of `batch` are, after having them copied if need be.
    fn input(&mut self, phase: Phase, batch: &Batch) -> Result<Input, EngineError> {
        let training = matches!(phase, Phase::Train(_));
        if let (Some(data), false) = (&self.on_gpu, batch.draws.len() != batch.labels.len()) {
            let pictures = data.pictures(training);
            let (height, width, crop_padding) = (data.height, data.width, data.crop_padding);
            return Ok(Input::Dataset { pictures, height, width, crop_padding, training });
        }
        let form = if batch.bytes.is_empty() { Form::Normalised } else { Form::Bytes };
        if self.staging.as_ref().is_none_or(|s| s.form() != form && !batch.labels.is_empty()) {
            let values = self.config.batch_size * self.program.most_values();
            self.device.synchronize()?;
            self.graphs.clear();
            self.staging = Some(Staging::new(&self.device, form, values)?);
        }
        let Some(staging) = &mut self.staging else {
            return Err(CudaError::Unsupported("no room for pictures".into()).into());
        };
        staging.send(self.program.main.0, batch)?;
        Ok(Input::Staged { at: staging.input.ptr, form: staging.form() })
    }

    /// Waits for the oldest step under way.
    fn result(&mut self) -> Result<Option<StepResult>, EngineError> {
        let Some(step) = self.under_way.pop_front() else { return Ok(None) };
        if matches!(step, UnderWay::Empty) {
            return Ok(Some(StepResult::default()));
        }
        let record: Record = self.wait_on_gpu(|_, results, patience, alive| results.wait(patience, alive))?;
        self.steps.1 += 1;
        if let Some(watchdog) = &self.watchdog {
            watchdog.done(self.steps.1);
        }
        let [begin, backward, reduced, end] = record.stamps;
        // From end to end while steps follow each other: that holds waits for the host, too.
        let from = self.last_end.unwrap_or(begin);
        self.last_end = Some(end);
        Ok(Some(StepResult {
            loss: if record.samples > 0 { record.loss_sum / record.samples as f32 } else { 0.0 },
            correct: record.correct,
            samples: record.samples,
            grad_norm: record.grad_norm,
            step_secs: end.saturating_sub(from) as f64 / 1e9,
            all_reduce_secs: reduced.saturating_sub(backward) as f64 / 1e9,
            loss_scale: self.program.dynamic_scale.map(|_| record.loss_scale),
        }))
    }

    /// Waits for what the GPU does next: that it takes a micro-batch, or gives a result.
    fn wait_on_gpu<T>(
        &mut self,
        wait: impl FnOnce(
            &mut Inputs,
            &mut Results,
            Duration,
            &mut dyn FnMut() -> Result<(), EngineError>,
        ) -> Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        const OPERATION: &str = "a step on the GPU";
        let alone = self.comm.size() == 1;
        let patience = if alone { Duration::from_secs(600) } else { self.comm.timeout() };
        let comm = self.comm.clone();
        let Program { inputs, results, reducer, main, .. } = &mut self.program;
        let main = main.0;
        let mut alive = || -> Result<(), EngineError> {
            main.failure()?;
            // NCCL does not notice on one machine that a rank has died; its end of the ring does, at once.
            comm.check(OPERATION)?;
            reducer.as_ref().map_or(Ok(()), |reducer| Ok(reducer.health()?))
        };
        wait(inputs, results, patience, &mut alive).map_err(|error| {
            self.failed = true;
            match self.watchdog.as_ref().and_then(|w| w.stall_reason()) {
                Some(reason) => CommError::Aborted { operation: OPERATION, reason: reason.into() }.into(),
                None => error,
            }
        })
    }
}

impl Engine for CudaEngine {
    fn take_sizes(&mut self, training: &[usize], evaluation: &[usize]) -> Result<(), EngineError> {
        self.device.bind()?;
        self.device.synchronize()?;
        self.graphs.clear();
        self.program.take_sizes(&self.device, training, evaluation)
    }

    fn set_image_size(&mut self, image_size: usize) -> Result<(), EngineError> {
        if self.network.image_size != image_size {
            self.network = self.program.set_image_size(image_size).ok_or_else(|| unknown_size(image_size))?;
        }
        Ok(())
    }

    fn take_data(&mut self, data: &DataSource) -> Result<Form, EngineError> {
        self.device.bind()?;
        self.program.set_normalisation(&data.shape.mean, &data.shape.std)?;
        if let Some(resident) = data.resident() {
            self.on_gpu = OnGpu::new(&self.device, &resident)?;
            self.program.set_size(&self.device, resident.height, resident.width)?;
        }
        Ok(if self.on_gpu.is_some() { Form::Draws } else { Form::Bytes })
    }

    fn start_step(&mut self, micro_batches: &[Batch], lr: f32) -> Result<Option<StepResult>, EngineError> {
        self.device.bind()?;
        let slots = self.config.accumulate.max(1);
        if micro_batches.len() > slots {
            let text = format!("{} micro-batches in a step of {slots}", micro_batches.len());
            return Err(EngineError::Parameters(text));
        }
        // An epoch's end may leave this rank no pictures: it still takes part.
        let nothing = Batch::default();
        let batches: Vec<&Batch> =
            (0..slots).map(|slot| micro_batches.get(slot).unwrap_or(&nothing)).collect();
        let world_size = self.comm.size();
        let counts = batches.iter().map(|b| b.of_all_ranks(world_size)).collect::<Result<Vec<_>, _>>();
        let counts: Vec<f64> =
            counts.map_err(EngineError::Parameters)?.into_iter().map(|count| count as f64).collect();
        let total: f64 = counts.iter().sum();
        let Some(last) = counts.iter().rposition(|&n| n > 0.0) else {
            self.under_way.push_back(UnderWay::Empty);
            return if self.under_way.len() > AHEAD { self.result() } else { Ok(None) };
        };
        let sum_of = if self.config.gradients_mean { 1.0 } else { f64::from(self.comm.size()) };
        let mut first = true;
        for (slot, batch) in batches.iter().enumerate().filter(|(slot, _)| counts[*slot] > 0.0) {
            let of = if self.config.sync_batch_norm { counts[slot] } else { batch.labels.len() as f64 };
            let control = Control {
                valid: batch.labels.len() as u32,
                stat_pictures: of as f32,
                grad_scale: (sum_of / total) as f32,
                lr,
                mixed: batch.mixed().is_some().into(),
                lambda: batch.lambda,
                ..Control::default()
            };
            let whole = batch.labels.len() == self.config.batch_size;
            let micro_batch = MicroBatch { first: std::mem::take(&mut first), last: slot == last, whole };
            self.run(Phase::Train(micro_batch), control, batch)?;
        }
        self.under_way.push_back(UnderWay::OnGpu);
        self.steps.0 += 1;
        if let Some(watchdog) = &self.watchdog {
            watchdog.submitted(self.steps.0);
        }
        if self.under_way.len() > AHEAD { self.result() } else { Ok(None) }
    }

    fn finish_steps(&mut self) -> Result<Vec<StepResult>, EngineError> {
        self.device.bind()?;
        let mut results = Vec::new();
        while let Some(result) = self.result()? {
            results.push(result);
        }
        self.last_end = None;
        Ok(results)
    }

    fn profile_step(&mut self, batch: &Batch) -> Result<Vec<(String, f64)>, EngineError> {
        self.profiled = Some(Vec::new());
        let done = self.train_step(std::slice::from_ref(batch), 0.0);
        let calls = self.profiled.take().unwrap_or_default();
        done.map(|_| calls)
    }

    fn eval_step(&mut self, batch: &Batch) -> Result<EvalResult, EngineError> {
        self.device.bind()?;
        let mut result = EvalResult { samples: batch.labels.len() as u64, ..EvalResult::default() };
        for part in parts(batch, self.config.batch_size, &self.network) {
            let control = Control { valid: part.labels.len() as u32, ..Control::default() };
            self.run(Phase::Evaluate, control, &part)?;
            let (loss, correct) = self.program.evaluated()?;
            result.loss_sum += loss;
            result.correct += correct;
        }
        Ok(result)
    }

    fn predict(&mut self, batch: &Batch) -> Result<Vec<f32>, EngineError> {
        self.device.bind()?;
        let mut logits = Vec::new();
        for part in parts(batch, self.config.batch_size, &self.network) {
            let control = Control { valid: part.labels.len() as u32, ..Control::default() };
            self.run(Phase::Evaluate, control, &part)?;
            logits.extend(self.program.logits(part.labels.len())?);
        }
        Ok(logits)
    }

    fn parameters(&self) -> Result<NamedTensors, EngineError> {
        self.read(State::parameters)
    }

    fn set_parameters(&mut self, values: &NamedTensors) -> Result<(), EngineError> {
        check::check(&self.network, values)?;
        self.device.bind()?;
        self.device.synchronize()?;
        self.program.state.set_parameters(&self.program.ops, self.program.main.0, values)?;
        Ok(())
    }

    fn average(&mut self, decay: f64) -> Result<(), EngineError> {
        self.device.bind()?;
        let Program { state, ops, main, .. } = &mut self.program;
        Ok(state.average(&self.device, ops, main.0, decay)?)
    }

    fn has_average(&self) -> bool {
        self.program.state.has_average()
    }

    fn averaged(&self) -> Result<Option<NamedTensors>, EngineError> {
        self.read(State::averaged)
    }

    fn set_averaged(&mut self, values: &NamedTensors) -> Result<(), EngineError> {
        check::check(&self.network, values)?;
        self.device.bind()?;
        self.device.synchronize()?;
        self.program.state.set_averaged(&self.device, values)
    }

    fn optimizer_state(&self) -> Result<OptimizerState, EngineError> {
        self.read(State::optimizer_state)
    }

    fn set_optimizer_state(&mut self, to: &OptimizerState) -> Result<(), EngineError> {
        let wanted = self.config.optimizer.state_shapes(&self.network);
        check::check_shapes(&self.network, &to.slots, wanted)?;
        self.device.bind()?;
        self.device.synchronize()?;
        self.program.state.set_optimizer_state(to)
    }

    fn loss_scaling(&self) -> Result<Option<LossScaling>, EngineError> {
        if self.program.dynamic_scale.is_none() {
            return Ok(None);
        }
        self.device.bind()?;
        self.device.synchronize()?;
        Ok(Some(self.program.state.loss_scaling()?))
    }

    fn set_loss_scaling(&mut self, scaling: LossScaling) -> Result<(), EngineError> {
        if self.program.dynamic_scale != Some(true) {
            return Ok(());
        }
        self.device.bind()?;
        self.device.synchronize()?;
        Ok(self.program.state.set_loss_scaling(scaling)?)
    }

    fn precision(&self) -> Precision {
        match self.program.dtype() {
            DType::F32 => Precision::Fp32,
            DType::F16 => Precision::Fp16,
            DType::Bf16 => Precision::Bf16,
        }
    }

    fn replica(&self) -> u32 {
        self.comm.rank()
    }

    fn first_not_finite(&self) -> Result<Option<String>, EngineError> {
        self.device.bind()?;
        self.device.synchronize()?;
        if self.program.is_finite()? {
            return Ok(None);
        }
        finite::first_of_engine(self)
    }

    fn exchange(&self) -> String {
        self.program.reducer.as_ref().map(Reducer::exchange).unwrap_or_default()
    }

    fn broadcast_parameters(&mut self) -> Result<(), EngineError> {
        self.device.bind()?;
        self.device.synchronize()?;
        let state = &mut self.program.state;
        let mut flat = state.read_flat()?;
        self.comm.broadcast((&mut flat).into(), 0)?;
        state.write_flat(&self.program.ops, self.program.main.0, &flat)?;
        Ok(())
    }

    fn abandon(self: Box<Self>) {
        if let Some(reducer) = &self.program.reducer {
            reducer.abort("this rank has failed");
        }
        // An orderly end waits for the GPU, for NCCL and for each piece of memory; the driver takes all of it back at
        // once when the process ends.
        std::mem::forget(self);
    }

    fn memory_bytes(&self) -> u64 {
        if self.device.bind().is_err() {
            return 0;
        }
        self.free_before.saturating_sub(self.device.memory().0)
    }

    fn device_name(&self) -> String {
        format!("{}, {}", self.device.name, self.program.dtype().name())
    }
}

impl CudaEngine {
    /// The state, when everything that was started is done.
    fn read<T>(&self, what: impl FnOnce(&State) -> Result<T, EngineError>) -> Result<T, EngineError> {
        self.device.bind()?;
        self.device.synchronize()?;
        what(&self.program.state)
    }
}

impl Drop for CudaEngine {
    fn drop(&mut self) {
        if let (true, Some(reducer)) = (self.failed, &self.program.reducer) {
            reducer.abort("this rank has failed");
        }
        let _ = self.device.bind().and_then(|()| self.device.synchronize());
    }
}

/// A batch in parts that the engine has room for.
fn parts(batch: &Batch, room: usize, network: &Network) -> Vec<Batch> {
    if batch.labels.len() <= room {
        return vec![batch.clone()];
    }
    let size = network.tensors[network.input()].len();
    let part = |from: usize| {
        let to = (from + room).min(batch.labels.len());
        let cut = |values: usize, size: usize| if values == 0 { 0..0 } else { from * size..to * size };
        Batch {
            images: batch.images[cut(batch.images.len(), size)].to_vec(),
            bytes: batch.bytes[cut(batch.bytes.len(), size)].to_vec(),
            draws: batch.draws[cut(batch.draws.len(), 1)].to_vec(),
            labels: batch.labels[from..to].to_vec(),
            indices: batch.indices[cut(batch.indices.len(), 1)].to_vec(),
            global_samples: to - from,
            ..Batch::default()
        }
    };
    (0..batch.labels.len()).step_by(room).map(part).collect()
}

/// Whether a batch fits the network: the kernels rely on it.
fn check_batch(network: &Network, batch: &Batch, room: usize) -> Result<(), EngineError> {
    let picture = network.tensors[network.input()].len();
    let (pictures, values) = (batch.labels.len(), batch.images.len().max(batch.bytes.len()));
    if pictures > room {
        return Err(EngineError::Parameters(format!(
            "a batch of {pictures} pictures where there is room for {room}"
        )));
    }
    if batch.draws.len() != pictures && values != pictures * picture {
        return Err(EngineError::Parameters(format!(
            "a batch of {pictures} labels has {values} values where {picture} a picture are needed"
        )));
    }
    batch.check_labels(network.classes).map_err(EngineError::Parameters)
}
