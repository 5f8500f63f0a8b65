//! The CUDA engine: one GPU, NHWC, float32, float16 or bfloat16, with float32 weights and optimizer state.
//!
//! A step is captured once as a CUDA graph and then replayed, so kernels read a step's inputs from [`rings`]. The host launches a step
//! asynchronously and reads the result later. Our kernels compute the same bits in every run: every sum has a fixed order.

mod arena;
mod backend;
mod command;
mod convolution;
mod cudnn;
mod device;
mod dtype;
mod engine;
mod error;
mod groups;
mod jpeg;
mod kernels;
mod layout;
mod ops;
mod pictures;
mod planes;
mod profile;
mod program;
mod recovery;
mod reduce;
mod rings;
mod running_statistics;
mod state;
mod statistics;
mod steps;
#[cfg(test)]
mod tests;
mod tuner;
mod warm;

use dtype::DType;
use error::CudaError;
use groups::Groups;

use super::{
    DeviceConfig, Engine, EngineConfig, EngineError, EvalResult, LayerTime, LossScaling, NamedTensors,
    OptimizerState, StepResult, check, finite, plan,
    prepared_step::{PreparedStep, StepPart},
    thread_pool, unknown_size,
};
use crate::{check::PartOf, net::Network, plan::Plan};
pub(super) use backend::Cuda;
use device::{Device, Graph};
pub use kernels::compile_all as compile_kernels;
use lockstep_comm::{CommError, ProcessGroup, watchdog::Watchdog};
use lockstep_data::loader::{Batch, BatchFormat, DataSource};
use lockstep_host::{
    gpu::libraries::{self, Library},
    tensors::TensorSource,
};
use lockstep_protocol::spec::Precision;
use pictures::{GpuDataset, Staging};
use profile::TimedCall;
use program::{Input, MicroBatch, Phase, Program, StagePass};
use recovery::RecoveryStream;
use rings::Control;
use state::State;
use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

/// Maximum number of steps by which the host may be ahead of the GPU.
const MAX_STEPS_AHEAD: usize = 2;

/// Checks that GPUs support the plan of a job that samples classes (`loss.sample_share`).
///
/// # Errors
/// There is one rank, the ranks do not all share one copy of the network, or a step has several micro-batches. A sample includes only the
/// labels of one model group and of one micro-batch.
fn check_sample(ranks: u32, model: u32, accumulate: u32) -> Result<(), String> {
    if ranks > 1 && model == ranks && accumulate == 1 {
        return Ok(());
    }
    Err("loss.sample_share: GPUs sample classes where all ranks share one copy of the network, in steps of one micro-batch. Set \
         parallel.mode = \"hybrid\", parallel.model to parallel.ranks (2 or more) and train.accumulate = 1, or parallel.device = \"cpu\""
        .into())
}

fn build(
    network: Arc<Network>,
    initial: &dyn TensorSource,
    config: EngineConfig,
    comm: Arc<dyn ProcessGroup>,
    gpu: &DeviceConfig,
) -> Result<CudaEngine, EngineError> {
    let dtype = dtype_of(gpu.precision);
    let mut needed = vec![Library::Driver, Library::Cudnn];
    if comm.size() > 1 {
        needed.push(Library::Nccl);
    }
    libraries::check_loadable(&needed).map_err(CudaError::Missing)?;
    let mut plan = gpu.plan.clone();
    if plan.cuts.is_empty() {
        // These cuts also apply to the network at other image sizes. If there are no valid cuts, `part_of` below reports the error.
        plan.cuts = plan::cuts(&network, plan.mesh.stage).unwrap_or_default();
    }
    let groups = Groups::split(plan.mesh, comm.as_ref())?;
    if config.loss.samples_classes() {
        let model = plan.mesh.model as u32;
        check_sample(comm.size(), model, config.accumulate as u32).map_err(CudaError::Unsupported)?;
    }
    let part = plan::part_of(&network, &plan, comm.rank())?;
    config.loss.check_part(&part).map_err(EngineError::Parameters)?;
    let initial = PartOf::new(initial, &network, &part)?;
    // The ranks of this rank's stage, over which gradients and statistics are reduced. Stages are combined with data parallelism only.
    let stage_ranks = match &groups {
        Some(groups) if plan.mesh.stage > 1 => groups.data.clone(),
        _ => comm.clone(),
    };
    let warm::GpuParts { device, kernels, cudnn, free_before, .. } = warm::open(gpu.ordinal, dtype)?;
    // The watchdog also counts the steps of earlier engines of this process.
    let steps_done = gpu.watchdog.as_ref().map_or(0, |watchdog| watchdog.steps_done());
    let program =
        Program::new(&device, part, &config, dtype, stage_ranks, groups.as_ref(), gpu, kernels, cudnn)?;
    let mut engine = CudaEngine {
        recovery_stream: RecoveryStream::new(program.state.kept_steps.bytes)?,
        program,
        graphs: HashMap::new(),
        dataset: None,
        staging: None,
        pending_steps: VecDeque::new(),
        unreturned: Vec::new(),
        has_old_weights: false,
        started_steps: 0,
        evaluated_pictures: 0,
        first_average_step: None,
        last_end: None,
        free_before,
        has_failed: false,
        watchdog: gpu.watchdog.clone(),
        timed_calls: None,
        submitted_steps: steps_done,
        done_steps: steps_done,
        config,
        network,
        plan,
        comm,
        groups,
        device,
    };
    // The threads of this pool draw the initial values.
    thread_pool(engine.config.threads)?.install(|| engine.set_parameters(&initial))?;
    Ok(engine)
}

fn dtype_of(precision: Precision) -> DType {
    match precision {
        Precision::Fp32 => DType::F32,
        Precision::Bf16 => DType::Bf16,
        // fp16 with dynamic loss scaling keeps float32's accuracy, and cuDNN is fastest in fp16.
        Precision::Fp16 | Precision::Auto => DType::F16,
    }
}

/// The kind of step that a captured graph runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct GraphKey {
    image_size: usize,
    phase: Phase,
    input: Input,
}

/// A step's CUDA graph, or a note that the step ran once without capture. The first run is not captured, because it loads kernels, which
/// is not allowed during capture.
enum CapturedGraph {
    RunOnce,
    Graph(Graph),
}

/// A started step, whose result is not yet read.
enum PendingStep {
    OnGpu {
        /// With class weights: the divisor of the sum of this rank's losses. `None` without class weights, where the divisor is the
        /// number of pictures.
        divisor: Option<f64>,
    },
    /// No rank has a picture.
    Empty,
}

struct CudaEngine {
    // Fields are dropped in this order: graphs use the program's memory, and everything uses the device.
    graphs: HashMap<GraphKey, CapturedGraph>,
    program: Program,
    dataset: Option<GpuDataset>,
    staging: Option<Staging>,
    pending_steps: VecDeque<PendingStep>,
    /// Results that a failed call had already read from the GPU; the next successful call returns them.
    unreturned: Vec<StepResult>,
    /// Whether the float32 weights that other ranks update (optimizer sharding) are, on this GPU, the weights of an earlier step.
    has_old_weights: bool,
    /// Number of steps started on the GPU, modulo 2^32 as in the GPU's count of finished steps.
    started_steps: u32,
    /// Number of pictures whose results are in the totals since the last [`Engine::finish_evaluation`].
    evaluated_pictures: u64,
    /// The step after which the first average of the weights was created; `None` without an average, and if the average was set
    /// from a checkpoint.
    first_average_step: Option<u32>,
    recovery_stream: RecoveryStream,
    /// End of the newest finished step on the GPU's clock, in nanoseconds; `None` if the next step does not directly follow it.
    last_end: Option<u64>,
    /// Free GPU memory in bytes before this process loaded its kernels and allocated any.
    free_before: u64,
    /// Whether a step has failed, so that there may be unfinished work on the GPU.
    has_failed: bool,
    watchdog: Option<Arc<Watchdog>>,
    /// The calls that were timed so far; `None` while profiling is off.
    timed_calls: Option<Vec<TimedCall>>,
    /// Number of steps that this process has submitted, for the watchdog.
    submitted_steps: u64,
    /// Number of steps that this process has completed, for the watchdog.
    done_steps: u64,
    config: EngineConfig,
    /// The whole network (not this rank's part) for the current image size.
    network: Arc<Network>,
    plan: Plan,
    comm: Arc<dyn ProcessGroup>,
    groups: Option<Groups>,
    device: Device,
}
