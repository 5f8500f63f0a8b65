//! Tests that compare the CUDA engine with the CPU engine. They need a GPU, so they are ignored by default.
//! `tests/gpu/bundle` packs them for a machine with a GPU.

use crate::{
    DeviceConfig, Engine, EngineConfig, LossConfig, Margin, Optimizer,
    net::{Network, init, resnet},
    plan::Plan,
};
use lockstep_comm::SingleRank;
use lockstep_data::loader::{Batch, BatchFormat, DataSource, EpochPlan};
use lockstep_host::tensors::NamedTensors;
use lockstep_kernels::synthetic::{labels, values};
use lockstep_protocol::spec::{
    Arch, DataSpec, ImageSize, LossKind, LossScale, LossSpec, ModelSpec, Precision, SizeFrom, Stem,
};
use std::{fmt::Display, path::PathBuf, sync::Arc};

mod cifarnet;
mod data;
mod defaults;
mod frozen;
mod layers;
mod mixing;
mod networks;
mod optimizers;
mod recovery;
mod rows;
mod runs;
mod scaling;
mod sharded;
mod sizes;
mod split_head;
mod stages;
mod trajectories;
mod unfused;

use data::fashion_mnist;
pub(super) use networks::operations;
use runs::losses;

fn network(arch: Arch, stem: Stem, side: usize) -> Arc<Network> {
    network_of(arch, stem, side, 3)
}

fn network_of(arch: Arch, stem: Stem, side: usize, channels: usize) -> Arc<Network> {
    Arc::new(resnet::build(&ModelSpec { arch, stem, ..ModelSpec::default() }, side, channels, 10).unwrap())
}

/// One residual block and a linear layer. With the weights of [`initial`], the inputs of ReLUs are far from zero, so rounding
/// does not change whether a gradient passes a ReLU, which would change a gradient by 1e-3.
fn small_network(classes: usize) -> Arc<Network> {
    Arc::new(residual_block(16, classes))
}

fn residual_block(side: usize, classes: usize) -> Network {
    let mut net = Network::new("a residual block", side, 3, classes);
    let x = net.conv("conv1", net.input(), 32, 3, 1);
    let x = net.batch_norm("bn1", x);
    let shortcut = net.relu(x);
    let x = net.conv("conv2", shortcut, 64, 3, 2);
    let x = net.batch_norm("bn2", x);
    let x = net.relu(x);
    let x = net.conv("conv3", x, 64, 3, 1);
    let branch = net.batch_norm("bn3", x);
    let x = net.conv("down.0", shortcut, 64, 1, 2);
    let shortcut = net.batch_norm("down.1", x);
    let x = net.add(branch, shortcut);
    let x = net.relu(x);
    let x = net.global_average_pool(x);
    net.linear("fc", x, classes);
    net
}

fn config(batch_size: usize) -> EngineConfig {
    EngineConfig {
        batch_size,
        optimizer: Optimizer { momentum: 0.9, weight_decay: 1e-4, ..Optimizer::default() },
        loss: LossConfig { label_smoothing: 0.1, ..LossConfig::default() },
        accumulate: 1,
        sync_batch_norm: true,
        gradients_mean: true,
        threads: std::thread::available_parallelism().map_or(2, |n| n.get().min(16)),
    }
}

/// Initial weights. In the networks of [`operations`], batch norm's offsets keep values away from zero,
/// where rounding would decide whether a gradient passes the ReLU.
fn initial(network: &Network) -> NamedTensors {
    let mut all = init::initial_parameters(network, false, 1);
    if network.arch.contains(' ') {
        for (name, tensor) in all.iter_mut().filter(|(name, _)| name.contains("bn") && name.ends_with("bias"))
        {
            let ends_branch = network.ops.iter().any(|op| {
                matches!(op, crate::net::Op::Add { branch, .. }
                    if network.ops.iter().any(|op| matches!(op, crate::net::Op::BatchNorm { name: norm, output, .. }
                        if output == branch && *name == format!("{norm}.bias"))))
            });
            let (size, period) = if ends_branch { (12.0, 3) } else { (4.5, 2) };
            for (channel, value) in tensor.values.iter_mut().enumerate() {
                *value = if channel % period == 0 { -size } else { size };
            }
        }
    }
    all
}

fn cpu(network: &Arc<Network>, config: &EngineConfig) -> Box<dyn Engine> {
    cpu_from(&initial(network), network, config)
}

fn cpu_from(initial: &NamedTensors, network: &Arc<Network>, config: &EngineConfig) -> Box<dyn Engine> {
    crate::build_cpu(network.clone(), initial, config.clone(), Arc::new(SingleRank)).unwrap()
}

fn cuda(network: &Arc<Network>, config: &EngineConfig, precision: Precision) -> Box<dyn Engine> {
    cuda_from(&initial(network), network, config, precision)
}

fn cuda_from(
    initial: &NamedTensors,
    network: &Arc<Network>,
    config: &EngineConfig,
    precision: Precision,
) -> Box<dyn Engine> {
    cuda_as(initial, network, config, DeviceConfig { precision, ..deterministic() })
}

/// Settings with which every run computes the same bits; [`defaults`] tests the default settings.
fn deterministic() -> DeviceConfig {
    DeviceConfig {
        loss_scale: LossScale::Static(1024.0),
        deterministic: true,
        ..DeviceConfig::new(0, Precision::Fp32, Plan::data(1))
    }
}

fn cuda_as(
    initial: &NamedTensors,
    network: &Arc<Network>,
    config: &EngineConfig,
    gpu: DeviceConfig,
) -> Box<dyn Engine> {
    Box::new(super::build(network.clone(), initial, config.clone(), Arc::new(SingleRank), &gpu).unwrap())
}

/// Synthetic pictures and labels, which depend only on `number` and the sizes.
fn pictures(network: &Network, count: usize, number: usize) -> Batch {
    let name = format!("pictures {number}");
    Batch {
        images: values(&name, count * network.tensors[0].len()),
        labels: labels(&name, count, network.classes),
        indices: (0..count as u64).collect(),
        ..Batch::default()
    }
}

/// The first `size` pictures of a validation.
fn validation_batch(data: &DataSource, size: usize) -> Batch {
    let (rank, world_size, threads) = (0, 1, 1);
    data.validation(rank, world_size, size, threads).next().unwrap().unwrap()
}

/// Fails unless the difference of `actual` from `expected` is less than `bound` times `expected`, a positive number.
#[track_caller]
fn assert_near(actual: impl Into<f64>, expected: impl Into<f64>, bound: f64, case: impl Display) {
    let (actual, expected) = (actual.into(), expected.into());
    assert!((actual - expected).abs() < bound * expected, "{case}: {actual} instead of {expected}");
}

/// The largest difference of a loss from the expected loss, relative to the expected loss.
fn worst_loss(actual: &[f32], expected: &[f32]) -> f32 {
    actual.iter().zip(expected).map(|(a, b)| (a - b).abs() / b).fold(0.0, f32::max)
}

/// The sum of squares.
fn square(values: &[f32]) -> f64 {
    values.iter().map(|v| f64::from(*v).powi(2)).sum()
}

/// The sum of squared differences.
fn difference(actual: &[f32], expected: &[f32]) -> f64 {
    assert!(actual.iter().all(|v| v.is_finite()));
    actual.iter().zip(expected).map(|(a, b)| f64::from(a - b).powi(2)).sum()
}

/// Root mean square difference of the worst tensor, relative to the tensor's root mean square, or to 1/50 of
/// the root mean square over all tensors if that is larger.
fn worst_difference(actual: &NamedTensors, expected: &NamedTensors) -> (f64, String) {
    let count: usize = expected.values().map(|t| t.values.len()).sum();
    let mean_square = expected.values().map(|t| square(&t.values)).sum::<f64>() / count as f64;
    let mut worst = (0.0, String::new());
    for (name, tensor) in expected {
        let min_size = mean_square * tensor.values.len() as f64 / 2500.0;
        let size = square(&tensor.values).max(min_size).max(1e-20);
        let relative = (difference(&actual[name].values, &tensor.values) / size).sqrt();
        if relative > worst.0 {
            worst = (relative, name.clone());
        }
    }
    worst
}

/// Distance of the trained parameters `actual` from `expected`, relative to the distance of `expected` from `start`.
fn relative_distance(actual: &NamedTensors, expected: &NamedTensors, start: &NamedTensors) -> f64 {
    let (mut distance, mut change) = (0.0, 0.0);
    for (name, tensor) in expected.iter().filter(|(name, _)| !name.contains("running")) {
        distance += difference(&actual[name].values, &tensor.values);
        change += difference(&tensor.values, &start[name].values);
    }
    (distance / change).sqrt()
}

/// Relative differences between one step of the CUDA engine and of the CPU engine.
struct Differences {
    /// Logits before the step.
    logits: f64,
    loss: f64,
    /// Gradient (momentum after the first step) of the parameter with the largest difference.
    gradient: f64,
    /// Running statistics after the step.
    statistics: f64,
    /// The parameter with the largest difference.
    name: String,
}

impl Differences {
    /// Fails unless the gradient differs by less than `gradient_bound`, and all other values by less than `bound`.
    #[track_caller]
    fn check(&self, case: &str, bound: f64, gradient_bound: f64) {
        let Self { logits, loss, gradient, statistics, name } = self;
        assert!(
            *logits < bound && *loss < bound && *statistics < bound && *gradient < gradient_bound,
            "{case}: logits {logits:.1e}, loss {loss:.1e}, statistics {statistics:.1e}, gradient of {name} {gradient:.1e}"
        );
    }
}

fn compare_one_step(
    network: &Arc<Network>,
    batch_size: usize,
    precision: Precision,
    draw: usize,
) -> Differences {
    compare_step(network, batch_size, &[batch_size], &DeviceConfig { precision, ..deterministic() }, draw)
}

/// Compares a step over micro-batches of `counts` pictures, in engines for at most `batch_size` pictures per micro-batch. `draw`
/// selects the pictures.
fn compare_step(
    network: &Arc<Network>,
    batch_size: usize,
    counts: &[usize],
    gpu: &DeviceConfig,
    draw: usize,
) -> Differences {
    CpuStep::compute(network, batch_size, counts, draw).compare_with(gpu)
}

/// The CPU engine's results of a step. Computing them is slow, so several comparisons share them.
struct CpuStep {
    network: Arc<Network>,
    config: EngineConfig,
    counts: Vec<usize>,
    step: Vec<Batch>,
    logits: Vec<f32>,
    loss: f32,
    momentum: NamedTensors,
    running: NamedTensors,
}

fn running_statistics(engine: &dyn Engine) -> NamedTensors {
    engine.parameters().unwrap().into_iter().filter(|(name, _)| name.contains("running")).collect()
}

impl CpuStep {
    fn compute(network: &Arc<Network>, batch_size: usize, counts: &[usize], draw: usize) -> CpuStep {
        let config = EngineConfig { accumulate: counts.len(), ..config(batch_size) };
        let step: Vec<Batch> =
            counts.iter().enumerate().map(|(i, count)| pictures(network, *count, draw + 100 * i)).collect();
        let mut engine = cpu(network, &config);
        CpuStep {
            network: network.clone(),
            counts: counts.to_vec(),
            logits: engine.predict(&step[0]).unwrap(),
            loss: engine.train_step(&step, 0.1).unwrap().loss,
            momentum: engine.optimizer_state().unwrap().slots,
            running: running_statistics(engine.as_ref()),
            config,
            step,
        }
    }

    fn compare_with(&self, gpu: &DeviceConfig) -> Differences {
        let (precision, mode) = (gpu.precision, if gpu.deterministic { "deterministic" } else { "default" });
        let network = &self.network;
        let mut engine = cuda_as(&initial(network), network, &self.config, gpu.clone());
        let actual = engine.predict(&self.step[0]).unwrap();
        let logits = (difference(&actual, &self.logits) / square(&self.logits)).sqrt();
        let result = engine.train_step(&self.step, 0.1).unwrap();
        let (gradient, name) = worst_difference(&engine.optimizer_state().unwrap().slots, &self.momentum);
        let (statistics, _) = worst_difference(&running_statistics(engine.as_ref()), &self.running);
        let loss = f64::from((result.loss - self.loss).abs() / self.loss);
        eprintln!(
            "{} at {} px, pictures {:?}, {precision:?}, {mode}: logits {logits:.1e}, loss {loss:.1e}, gradient {gradient:.1e} \
             ({name}), running statistics {statistics:.1e} apart",
            network.arch, network.image_size, self.counts
        );
        Differences { logits, loss, gradient, statistics, name }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_operations_in_float32_match_the_cpu_engine() {
    for network in operations() {
        for draw in 0..3 {
            compare_one_step(&network, 32, Precision::Fp32, draw).check(&network.arch, 1e-4, 1e-4);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_operations_in_16_bits_are_close_to_the_cpu_engine() {
    for (precision, forward, gradient) in [(Precision::Fp16, 1e-2, 1e-2), (Precision::Bf16, 1e-2, 5e-2)] {
        for network in operations() {
            // After rounding, values of a window are often equal, so the pooling may choose another maximum.
            let gradient = if network.arch.contains("pooling") { 0.3 } else { gradient };
            for draw in 0..10 {
                let differences = compare_one_step(&network, 32, precision, draw);
                differences.check(&format!("{precision:?} {}", network.arch), forward, gradient);
            }
        }
    }
}

/// Runs a step's kernels in every kind of block; short enough for compute-sanitizer.
#[test]
#[ignore = "needs a GPU"]
fn gpu_a_step_of_every_kind_has_a_loss() {
    for precision in [Precision::Fp32, Precision::Fp16, Precision::Bf16] {
        for network in operations().into_iter().filter(|net| !net.arch.contains("256")) {
            let (config, batch) = (config(8), pictures(&network, 8, 0));
            let mut engine = cuda(&network, &config, precision);
            let step = engine.train_step(std::slice::from_ref(&batch), 0.1).unwrap();
            let evaluated = engine.eval_step(&batch).unwrap();
            let is_finite = step.loss.is_finite() && evaluated.loss_sum.is_finite();
            assert!(is_finite, "{precision:?} {}", network.arch);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_a_step_in_float32_matches_the_cpu_engine() {
    for (arch, stem, side, batch) in [
        (Arch::ResNet20, Stem::Cifar, 8, 4),
        (Arch::ResNet20, Stem::Cifar, 32, 64),
        (Arch::ResNet18, Stem::Cifar, 16, 32),
        (Arch::ResNet18, Stem::Imagenet, 64, 16),
        (Arch::ResNet50, Stem::Imagenet, 64, 16),
        (Arch::ResNet50, Stem::Cifar, 32, 16),
        (Arch::ResNeXt50_32x4d, Stem::Imagenet, 64, 16),
        (Arch::ResNeXt50_32x4d, Stem::Cifar, 32, 16),
        (Arch::WideResNet50_2, Stem::Imagenet, 64, 16),
    ] {
        let differences = compare_one_step(&network(arch, stem, side), batch, Precision::Fp32, 0);
        // A single ReLU of millions with another sign is visible in a small tensor. With ResNet-50's default initialisation
        // there are many: PyTorch's float32 gradients differ from its float64 gradients by up to 3e-2.
        differences.check(&format!("{arch:?}"), 1e-4, 4e-2);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_ragged_batches_and_micro_batches_match_the_cpu_engine() {
    let network = operations().swap_remove(0);
    let config = EngineConfig { accumulate: 3, ..config(16) };
    let batches: Vec<Batch> =
        [16, 16, 5].iter().enumerate().map(|(i, n)| pictures(&network, *n, i)).collect();
    let (mut cpu, mut gpu) = (cpu(&network, &config), cuda(&network, &config, Precision::Fp32));
    for step in 0..4 {
        // Two full micro-batches; two full and a ragged micro-batch; only the ragged micro-batch; again two full and a ragged one.
        let part = [&batches[..2], &batches[..], &batches[2..], &batches[..]][step];
        let (expected, actual) = (cpu.train_step(part, 0.02).unwrap(), gpu.train_step(part, 0.02).unwrap());
        assert_eq!((actual.samples, actual.correct), (expected.samples, expected.correct), "step {step}");
        assert_near(actual.loss, expected.loss, 1e-3, format_args!("loss of step {step}"));
        assert_near(actual.grad_norm, expected.grad_norm, 1e-2, format_args!("gradient of step {step}"));
    }
    let start = initial(&network);
    let distance = relative_distance(&gpu.parameters().unwrap(), &cpu.parameters().unwrap(), &start);
    assert!(distance < 1e-2, "weights differ by {distance} of their change");
    let validation = pictures(&network, 40, 9);
    let (expected, actual) = (cpu.eval_step(&validation).unwrap(), gpu.eval_step(&validation).unwrap());
    let case = format!("evaluation {actual:?} / {expected:?}");
    eprintln!("{case}");
    assert!(actual.samples == 40 && actual.correct.abs_diff(expected.correct) <= 1, "{case}");
    assert_near(actual.loss_sum, expected.loss_sum, 1e-2, case);
}

/// ArcFace and CosFace: logits, losses, correct predictions without the margin, and weights.
#[test]
#[ignore = "needs a GPU"]
fn gpu_a_margin_matches_the_cpu_engine() {
    let network = small_network(10);
    for (kind, precision) in [
        (LossKind::ArcFace, Precision::Fp32),
        (LossKind::CosFace, Precision::Fp32),
        (LossKind::ArcFace, Precision::Fp16),
        (LossKind::ArcFace, Precision::Bf16),
    ] {
        let margin = Margin::of(&LossSpec { kind, scale: 8.0, ..LossSpec::default() });
        let config = EngineConfig {
            loss: LossConfig { margin, ..LossConfig::default() },
            accumulate: 2,
            ..config(16)
        };
        let batches: Vec<Batch> =
            [16, 5].iter().enumerate().map(|(i, n)| pictures(&network, *n, i)).collect();
        let (mut cpu, mut gpu) = (cpu(&network, &config), cuda(&network, &config, precision));
        let is_exact = precision == Precision::Fp32;
        let (loss_bound, bound) = if is_exact { (1e-5, 1e-3) } else { (2e-2, 0.5) };
        for step in 0..4 {
            let [expected, actual] =
                [&mut cpu, &mut gpu].map(|engine| engine.train_step(&batches, 0.002).unwrap());
            let case = format!("{kind:?} {step}: {actual:?} / {expected:?}");
            assert!(!is_exact || actual.correct == expected.correct, "{case}");
            assert_near(actual.loss, expected.loss, loss_bound, case);
        }
        let distance =
            relative_distance(&gpu.parameters().unwrap(), &cpu.parameters().unwrap(), &initial(&network));
        assert!(distance < bound, "{kind:?} {precision:?}: weights differ by {distance} of their change");
        let (expected, actual) = (cpu.predict(&batches[0]).unwrap(), gpu.predict(&batches[0]).unwrap());
        let logits = (difference(&actual, &expected) / square(&expected)).sqrt();
        assert!(
            logits < bound && expected.iter().all(|v| v.abs() <= 8.001),
            "{kind:?} {precision:?}: logits differ by {logits}"
        );
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_state_goes_to_the_cpu_engine_and_back() {
    let (network, config) = (network(Arch::ResNet18, Stem::Imagenet, 64), config(8));
    let mut gpu = cuda(&network, &config, Precision::Fp32);
    losses(gpu.as_mut(), &network, 8, 3, 0.05);
    let (weights, momentum) = (gpu.parameters().unwrap(), gpu.optimizer_state().unwrap());
    let mut cpu = cpu(&network, &config);
    cpu.set_parameters(&weights).unwrap();
    cpu.set_optimizer_state(&momentum).unwrap();
    assert!(cpu.parameters().unwrap() == weights && cpu.optimizer_state().unwrap() == momentum);
    let mut restored = cuda(&network, &config, Precision::Fp32);
    restored.set_parameters(&weights).unwrap();
    restored.set_optimizer_state(&momentum).unwrap();
    let batch = pictures(&network, 8, 7);
    let [continued, resumed] = [&mut gpu, &mut restored]
        .map(|engine| engine.train_step(std::slice::from_ref(&batch), 0.05).unwrap());
    assert_eq!(continued.loss, resumed.loss);
    assert!(gpu.parameters().unwrap() == restored.parameters().unwrap(), "continuing is exact");
}
