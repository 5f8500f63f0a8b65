//! Training throughput of named cases on synthetic pictures.

use super::{
    BuildArgs, DeviceChoice, DeviceConfig, Engine, EngineConfig, LossConfig, Optimizer, StepResult,
    plan::{Mesh, Plan},
    registry,
};
use crate::net::{self, init};
use lockstep_comm::{
    ProcessGroup, SingleRank,
    rendezvous::{RendezvousError, Store, loopback::on_joining_ranks},
    ring::Ring,
    shm::ShmProcessGroup,
};
use lockstep_data::{
    DataError,
    loader::{Batch, DataSource, EpochPlan},
};
use lockstep_kernels::synthetic::values;
use lockstep_protocol::spec::{Arch, Device, ModelSpec, Precision, Stem};
use serde::Serialize;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// Number of untimed steps, which fill buffers and wake threads.
const WARM_UP: usize = 3;
/// Number of timed steps, whose median is reported.
const TIMED_STEPS: usize = 10;
/// Number of classes of the synthetic pictures, as in CIFAR-10.
pub const CLASSES: usize = 10;
/// Maximum time that a rank waits for another.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A case to measure, written `resnet20:32:64`: architecture, image size, batch size.
///
/// `resnet18c` is ResNet-18 with the CIFAR stem. Without the `c`, torchvision's networks have their ImageNet stem.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// The case as it was written.
    pub name: String,
    model: ModelSpec,
    image_size: usize,
    /// Pictures per step: of all ranks in [`run`], of each rank in [`run_on_device`].
    batch_size: usize,
}

impl std::str::FromStr for Case {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |what: &str| {
            format!("`{text}`: {what}; a case is ARCH:IMAGE_SIZE:BATCH_SIZE, such as resnet20:32:64")
        };
        let [arch, image_size, batch_size] = text.split(':').collect::<Vec<_>>()[..] else {
            return Err(wrong("not three parts"));
        };
        let number = |part: &str, what: &str| match part.parse::<usize>() {
            Ok(value) if (1..=65_536).contains(&value) => Ok(value),
            _ => Err(wrong(&format!("{what} `{part}` is not a number from 1 to 65536"))),
        };
        let (plain, stem) = match arch.strip_suffix('c') {
            Some(plain) => (plain, Stem::Cifar),
            None => (arch, Stem::Imagenet),
        };
        let arch = plain.parse::<Arch>().map_err(|_| wrong(&format!("unknown architecture `{arch}`")))?;
        let stem = if arch.is_cifar_family() { Stem::Cifar } else { stem };
        Ok(Self {
            name: text.into(),
            model: ModelSpec { arch, stem, ..ModelSpec::default() },
            image_size: number(image_size, "image size")?,
            batch_size: number(batch_size, "batch size")?,
        })
    }
}

/// Results of a benchmark case.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Measurement {
    /// The case as it was written.
    pub case: String,
    /// Device of one rank, e.g. `CPU, 2 threads`.
    pub device: String,
    /// Threads of each rank that compute. 1 on a GPU.
    pub threads: usize,
    /// Number of ranks, which divide the batch and synchronise batch norm's statistics.
    pub ranks: u32,
    /// Pictures per second over all ranks, in the median step.
    pub images_per_second: f64,
    /// Milliseconds of the median step on rank 0.
    pub step_ms: f64,
    /// Milliseconds of rank 0's fastest step.
    pub fastest_step_ms: f64,
    /// Milliseconds that rank 0 waited for other ranks' gradients and statistics in the median step.
    pub all_reduce_ms: f64,
    /// Seconds until the end of the first step: libraries, kernels, plans, memory. 0 on the CPU.
    pub first_step_secs: f64,
    /// GPU memory allocated by rank 0, in MB. 0 on the CPU.
    pub gpu_memory_mb: f64,
}

/// How a case's network and pictures are divided over ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Division {
    pub plan: Plan,
    /// Number of classes of the network's head. The pictures have only the first ten classes.
    pub classes: usize,
    /// Number of micro-batches of a step.
    pub accumulate: usize,
    /// The fraction of the classes that a step samples; 1 for all.
    pub sample_share: f64,
}

/// Trains `case` for 13 steps on the CPU with `threads` threads per rank and times the last ten. `precision` is the format of
/// the convolutions.
///
/// All ranks run in this process, connected like the ranks of a job on one machine.
///
/// # Errors
/// The case does not divide over the ranks or fit its network, the processor does not support the precision, or ranks cannot connect.
pub fn run(
    case: &Case,
    threads: usize,
    ranks: u32,
    division: &Division,
    precision: Precision,
) -> Result<Measurement, String> {
    let mesh = division.plan.mesh;
    if ranks == 0 || mesh.ranks() != ranks as usize || !case.batch_size.is_multiple_of(mesh.readers()) {
        return Err(format!("a batch of {} cannot be divided over {ranks} ranks", case.batch_size));
    }
    if ranks == 1 {
        return run_rank(case, threads, division, precision, Arc::new(SingleRank));
    }
    let results = on_joining_ranks(ranks, TIMEOUT, |store| {
        let text = |error: RendezvousError| error.to_string();
        let store = store.map_err(text)?;
        let ring = Ring::connect(&store, TIMEOUT).map_err(text)?;
        store.barrier("connected").map_err(text)?;
        let comm = ShmProcessGroup::upgrade(ring).map_err(|error| error.to_string())?;
        run_rank(case, threads, division, precision, comm)
    });
    Ok(results.into_iter().collect::<Result<Vec<_>, String>>()?.swap_remove(0))
}

fn run_rank(
    case: &Case,
    threads: usize,
    division: &Division,
    precision: Precision,
    comm: Arc<dyn ProcessGroup>,
) -> Result<Measurement, String> {
    let Division { classes, accumulate, .. } = *division;
    let (ranks, mesh) = (comm.size(), division.plan.mesh);
    let batch_size = case.batch_size / mesh.readers();
    let reader = mesh.reader(comm.rank() as usize);
    // Speed does not depend on the content of pictures.
    let batch = Batch {
        images: values(&format!("bench.{reader}"), batch_size * case.image_size * case.image_size * 3),
        labels: (0..batch_size).map(|i| (i % classes.min(CLASSES)) as u32).collect(),
        indices: (0..batch_size as u64).collect(),
        global_samples: case.batch_size,
        ..Batch::default()
    };
    let micro_batches = vec![batch; accumulate];
    let setup = DeviceSetup {
        device: registry::device_of(None, Device::Cpu),
        precision,
        deterministic: true,
        sync_batch_norm: true,
        division: division.clone(),
        store: None,
    };
    let weight_decay = 0.0;
    let mut engine = build(case, comm, setup, batch_size, weight_decay, threads)?;
    let mut steps = Vec::with_capacity(TIMED_STEPS);
    for step in 0..WARM_UP + TIMED_STEPS {
        let start = Instant::now();
        let result = engine.train_step(&micro_batches, 0.01).map_err(|e| e.to_string())?;
        if step >= WARM_UP {
            steps.push((start.elapsed().as_secs_f64(), result.all_reduce_secs));
        }
    }
    Ok(measurement(case, engine.as_ref(), (threads, ranks), case.batch_size * accumulate, steps))
}

/// The results of a case. `steps` has for each step its seconds, and the seconds that rank 0 waited for other ranks.
/// `pictures` is the number of pictures of a step.
fn measurement(
    case: &Case,
    engine: &dyn Engine,
    (threads, ranks): (usize, u32),
    pictures: usize,
    mut steps: Vec<(f64, f64)>,
) -> Measurement {
    steps.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (median, waited) = steps[steps.len() / 2];
    Measurement {
        case: case.name.clone(),
        device: engine.device_name(),
        threads,
        ranks,
        images_per_second: pictures as f64 / median,
        step_ms: 1e3 * median,
        fastest_step_ms: 1e3 * steps[0].0,
        all_reduce_ms: 1e3 * waited,
        first_step_secs: 0.0,
        gpu_memory_mb: engine.memory_bytes() as f64 / 1e6,
    }
}

/// Number of untimed steps on a device, which load kernels and capture the step's graph.
const DEVICE_WARM_UP: u64 = 15;
/// Number of timed steps on a device.
const DEVICE_MEASURED: u64 = 60;
/// Number of pictures in the synthetic dataset, as in CIFAR-10.
const PICTURES: usize = 50_000;

/// The device of a rank, and how it computes.
pub struct DeviceSetup {
    pub device: DeviceChoice,
    pub precision: Precision,
    /// Whether every run must compute the same bits.
    pub deterministic: bool,
    pub sync_batch_norm: bool,
    pub division: Division,
    /// The rendezvous store. `None` for a single rank.
    pub store: Option<Arc<Store>>,
}

/// Trains `case` as one rank of `comm` on its device. Pictures are in device memory, where
/// they are cropped, flipped, scaled and normalised.
///
/// # Errors
/// The engine cannot be built or a step fails.
pub fn run_on_device(
    case: &Case,
    comm: Arc<dyn ProcessGroup>,
    setup: DeviceSetup,
) -> Result<Measurement, String> {
    let (began, mesh, accumulate) = (Instant::now(), setup.division.plan.mesh, setup.division.accumulate);
    if case.batch_size * mesh.readers() * accumulate > PICTURES {
        return Err(format!(
            "a step of the benchmark has at most {PICTURES} pictures; give a smaller batch or --accumulate"
        ));
    }
    let threads = (lockstep_host::cores() / comm.size()).max(1) as usize;
    let weight_decay = 5e-4;
    let mut engine = build(case, comm.clone(), setup, case.batch_size, weight_decay, threads)?;
    let mut data = DataSource::synthetic(PICTURES, case.image_size, 0);
    data.set_format(engine.take_data(&data).map_err(|e| e.to_string())?);
    let mut batches = batches(&data, case, mesh, accumulate, comm.as_ref());
    let mut run = |steps: u64| -> Result<Vec<StepResult>, String> {
        let mut results = Vec::new();
        for _ in 0..steps {
            let step: Result<Vec<_>, _> = batches.by_ref().take(accumulate).collect();
            let step = step.map_err(|e| e.to_string())?;
            results.extend(engine.start_step(&step, 0.01).map_err(|e| e.to_string())?);
        }
        results.extend(engine.finish_steps().map_err(|e| e.to_string())?);
        Ok(results)
    };
    run(1)?;
    let first_step_secs = began.elapsed().as_secs_f64();
    run(DEVICE_WARM_UP)?;
    comm.barrier().map_err(|e| e.to_string())?;
    let clock = Instant::now();
    let results = run(DEVICE_MEASURED)?;
    let secs = clock.elapsed().as_secs_f64() / DEVICE_MEASURED as f64;
    // If a rank left now, ranks that still wait for their last step would consider it dead.
    comm.barrier().map_err(|e| e.to_string())?;
    // Leaves out the first step, whose time may include the wait at the barrier.
    let steps = results.iter().skip(1).map(|r| (r.step_secs, r.all_reduce_secs)).collect();
    let pictures = mesh.readers() * case.batch_size * accumulate;
    let measured = measurement(case, engine.as_ref(), (1, comm.size()), pictures, steps);
    Ok(Measurement { images_per_second: pictures as f64 / secs, first_step_secs, ..measured })
}

/// Builds the engine of one rank of `comm`.
fn build(
    case: &Case,
    comm: Arc<dyn ProcessGroup>,
    setup: DeviceSetup,
    batch_size: usize,
    weight_decay: f32,
    threads: usize,
) -> Result<Box<dyn Engine>, String> {
    let Division { plan, classes, accumulate, sample_share } = setup.division;
    let network = Arc::new(net::build(&case.model, case.image_size, 3, classes)?);
    let initial = init::InitialParameters::new(&network, false, 0);
    let optimizer = Optimizer { momentum: 0.9, weight_decay, ..Optimizer::default() };
    let config = EngineConfig {
        loss: LossConfig { sample_share, ..LossConfig::default() },
        accumulate,
        sync_batch_norm: setup.sync_batch_norm,
        threads,
        ..EngineConfig::new(batch_size, optimizer)
    };
    let built = setup.device.backend.build(BuildArgs {
        network,
        initial: &initial,
        config,
        device: DeviceConfig {
            deterministic: setup.deterministic,
            store: setup.store,
            ..DeviceConfig::new(setup.device.ordinal, setup.precision, plan)
        },
        comm,
    });
    built.map_err(|e| e.to_string())
}

/// This rank's batches of all epochs.
fn batches<'a>(
    data: &'a DataSource,
    case: &Case,
    mesh: Mesh,
    accumulate: usize,
    comm: &dyn ProcessGroup,
) -> impl Iterator<Item = Result<Batch, DataError>> + 'a {
    let plan = EpochPlan {
        rank: mesh.reader(comm.rank() as usize) as u32,
        world_size: mesh.readers() as u32,
        accumulate,
        drop_remainder: true,
        threads: 2,
        ..EpochPlan::of(case.batch_size)
    };
    (0..).flat_map(move |epoch| data.epoch(EpochPlan { epoch, ..plan }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_are_parsed_or_refused_with_the_expected_format() {
        let case: Case = "resnet18c:32:64".parse().unwrap();
        assert_eq!((case.model.arch, case.model.stem, case.batch_size), (Arch::ResNet18, Stem::Cifar, 64));
        assert_eq!("resnet50:32:32".parse::<Case>().unwrap().model.stem, Stem::Imagenet);
        // Every network with its own stem, and with the CIFAR stem.
        for arch in Arch::ALL {
            let case: Case = format!("{arch}:224:256").parse().unwrap();
            let stem = if arch.is_cifar_family() { Stem::Cifar } else { Stem::Imagenet };
            assert_eq!((case.model.arch, case.model.stem, case.image_size), (arch, stem, 224));
            let case: Case = format!("{arch}c:32:8").parse().unwrap();
            assert_eq!((case.model.arch, case.model.stem), (arch, Stem::Cifar));
        }
        for wrong in ["", "resnet20", "resnet21:32:64", "resnet20:0:64", "resnet20:32:x"] {
            let error = wrong.parse::<Case>().unwrap_err();
            assert!(error.contains("resnet20:32:64"), "{error}");
        }
    }

    #[test]
    fn two_ranks_over_loopback_are_measured() {
        let data_parallel =
            Division { plan: Plan::data(2), classes: CLASSES, accumulate: 1, sample_share: 1.0 };
        let measured = run(&"resnet20:8:4".parse().unwrap(), 1, 2, &data_parallel, Precision::Fp32).unwrap();
        assert!(measured.images_per_second > 0.0 && measured.ranks == 2, "{measured:?}");
        assert!(run(&"resnet20:8:3".parse().unwrap(), 1, 2, &data_parallel, Precision::Fp32).is_err());
        // Ranks that share rows do not divide the batch, so it may be odd.
        let plan = Plan::on(Mesh { stage: 1, data: 1, height: 2, model: 1 }, Vec::new());
        let rows = Division { plan, accumulate: 2, ..data_parallel };
        assert!(run(&"resnet20:8:3".parse().unwrap(), 1, 2, &rows, Precision::Fp32).unwrap().step_ms > 0.0);
    }
}
