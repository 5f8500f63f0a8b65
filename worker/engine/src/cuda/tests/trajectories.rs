//! The job `across` of `tests/gpu/e2e.py`, step by step: ResNet-20 on the bundled pictures with default settings. The training loss of its
//! first epoch ends between 1.15 and 1.19 for any rounding. The validation loss varies much more: on CPUs it was 1.12 to 1.85 with learning
//! rates that differed by up to 1 % (n = 42). So the tests compare values in which rounding errors cannot grow (running statistics of the
//! same weights), and distributions over many runs.

use super::*;
use lockstep_kernels::batch_norm::EPSILON;
use lockstep_protocol::spec::TrainSpec;
use std::{
    slice::from_ref,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

const BATCH: usize = 128;
const LR: f32 = 0.01;
/// Steps of an epoch.
const EPOCH: usize = 62;
/// Range of the runs' learning rates, relative to their mean.
const SPREAD: f32 = 0.01;
/// CPU runs with which each format's runs are compared.
const CPU_RUNS: usize = 100;
/// Maximum distance of the rank sum of two samples from its mean, in standard deviations: exceeded by chance once in two thousand tests.
const LARGEST_Z: f64 = 3.5;

struct Job {
    network: Arc<Network>,
    config: EngineConfig,
    initial: NamedTensors,
}

/// Batches in the format of an engine.
struct Pictures {
    training: Vec<Batch>,
    validation: Vec<Batch>,
}

impl Job {
    fn new() -> Self {
        let model = ModelSpec { arch: Arch::ResNet20, stem: Stem::Cifar, ..ModelSpec::default() };
        let network = Arc::new(resnet::build(&model, 28, 1, 10).unwrap());
        let train = TrainSpec::default();
        let config = EngineConfig {
            optimizer: Optimizer::from(&train),
            loss: LossConfig { label_smoothing: train.label_smoothing, ..LossConfig::default() },
            ..config(BATCH)
        };
        let initial = init::initial_parameters(&network, model.zero_init_residual, train.seed);
        Self { network, config, initial }
    }

    fn gpu(&self, precision: Precision, deterministic: bool) -> Box<dyn Engine> {
        let loss_scale = LossScale::Named("dynamic".into());
        let gpu = DeviceConfig { precision, deterministic, loss_scale, ..super::deterministic() };
        cuda_as(&self.initial, &self.network, &self.config, gpu)
    }

    fn cpu(&self, threads: usize) -> Box<dyn Engine> {
        cpu_from(&self.initial, &self.network, &EngineConfig { threads, ..self.config.clone() })
    }
}

/// The pictures of the first `steps` steps, and of validation.
fn pictures_for(engine: &mut dyn Engine, steps: usize) -> Pictures {
    let mut data = DataSource::open(&fashion_mnist(), &DataSpec::default(), 0).unwrap();
    let format = engine.take_data(&data).unwrap();
    data.set_format(format);
    let plan = |epoch| EpochPlan { epoch, drop_remainder: true, threads: 4, ..EpochPlan::of(BATCH) };
    let training = (0..).flat_map(|epoch| data.epoch(plan(epoch))).take(steps);
    Pictures {
        training: training.map(Result::unwrap).collect(),
        validation: data.validation(0, 1, BATCH, 4).map(Result::unwrap).collect(),
    }
}

/// Validation loss and accuracy.
fn validate(engine: &mut dyn Engine, batches: &[Batch]) -> (f64, f64) {
    let (mut loss, mut correct, mut samples) = (0.0, 0, 0);
    for batch in batches {
        let result = engine.eval_step(batch).unwrap();
        loss += result.loss_sum;
        correct += result.correct;
        samples += result.samples;
    }
    (loss / samples as f64, correct as f64 / samples as f64)
}

/// Difference of running statistics in the worst layer: root mean square over channels, of means relative to the standard deviation, and of
/// variances relative to the variance.
fn statistics_difference(actual: &NamedTensors, expected: &NamedTensors) -> (f64, String) {
    let mut worst = (0.0, String::new());
    for mean in expected.keys().filter(|name| name.ends_with("running_mean")) {
        let var = mean.replace("running_mean", "running_var");
        let sizes: Vec<f64> = expected[&var].values.iter().map(|v| f64::from(*v) + EPSILON).collect();
        let differences = |name: &str| -> Vec<f64> {
            let pairs = actual[name].values.iter().zip(&expected[name].values);
            pairs.map(|(a, b)| f64::from(a - b)).collect()
        };
        let of_means: f64 = differences(mean).iter().zip(&sizes).map(|(d, var)| d * d / var).sum();
        let of_variances: f64 = differences(&var).iter().zip(&sizes).map(|(d, var)| (d / var).powi(2)).sum();
        for (sum, name) in [(of_means, mean), (of_variances, &var)] {
            let difference = (sum / sizes.len() as f64).sqrt();
            assert!(difference.is_finite(), "{name}");
            if difference > worst.0 {
                worst = (difference, name.clone());
            }
        }
    }
    worst
}

/// Before each step, the CPU engine gets the GPU's weights, but keeps its own running statistics. So systematic errors in the update of
/// statistics accumulate, and rounding errors do not.
#[test]
#[ignore = "needs a GPU"]
fn gpu_running_statistics_follow_the_cpu_engine_for_a_hundred_steps() {
    let job = Job::new();
    let mut cpu = job.cpu(job.config.threads);
    let on_cores = pictures_for(cpu.as_mut(), 100);
    let mut failures = Vec::new();
    for (precision, bound) in [(Precision::Fp32, 1e-4), (Precision::Fp16, 1e-2), (Precision::Bf16, 8e-2)] {
        for deterministic in [true, false] {
            let mut gpu = job.gpu(precision, deterministic);
            let on_gpu = pictures_for(gpu.as_mut(), 100);
            cpu.set_parameters(&job.initial).unwrap();
            let mut expected = running_statistics(cpu.as_ref());
            let mut worst = (0.0, String::new());
            for (step, (gpu_batch, cpu_batch)) in on_gpu.training.iter().zip(&on_cores.training).enumerate() {
                let mut before = gpu.parameters().unwrap();
                before.extend(expected);
                cpu.set_parameters(&before).unwrap();
                cpu.train_step(from_ref(cpu_batch), 0.0).unwrap();
                gpu.train_step(from_ref(gpu_batch), LR).unwrap();
                expected = running_statistics(cpu.as_ref());
                let (difference, name) = statistics_difference(&running_statistics(gpu.as_ref()), &expected);
                if difference > worst.0 {
                    worst = (difference, format!("{name} after step {}", step + 1));
                }
            }
            cpu.set_parameters(&gpu.parameters().unwrap()).unwrap();
            let gpu_loss = validate(gpu.as_mut(), &on_gpu.validation).0;
            let cpu_loss = validate(cpu.as_mut(), &on_cores.validation).0;
            let (difference, statistic) = worst;
            let line = format!(
                "{precision:?}, deterministic {deterministic}: running statistics at most {difference:.1e} apart ({statistic}); \
                 validation loss of the same weights {gpu_loss:.5}, on cores {cpu_loss:.5}"
            );
            eprintln!("{line}");
            if difference > bound || (gpu_loss - cpu_loss).abs() > bound * cpu_loss {
                failures.push(line);
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Results of a run of one epoch: the training loss of the last step, and the validation.
#[derive(Debug, Clone, Copy)]
struct RunResult {
    training_loss: f64,
    validation_loss: f64,
    accuracy: f64,
}

fn train(engine: &mut dyn Engine, pictures: &Pictures, lr: f32) -> RunResult {
    let mut results = Vec::new();
    for batch in &pictures.training {
        results.extend(engine.start_step(from_ref(batch), lr).unwrap());
    }
    results.extend(engine.finish_steps().unwrap());
    let (validation_loss, accuracy) = validate(engine, &pictures.validation);
    RunResult { training_loss: results.last().unwrap().loss.into(), validation_loss, accuracy }
}

/// A summary of runs in one line: number of different results, and quantiles.
fn summary(name: &str, runs: &[RunResult]) -> String {
    let quantiles = |value: fn(&RunResult) -> f64| {
        let mut values: Vec<f64> = runs.iter().map(value).collect();
        values.sort_by(f64::total_cmp);
        let quantile = |part: f64| values[((values.len() - 1) as f64 * part).round() as usize];
        [0.0, 0.25, 0.5, 0.75, 0.9, 1.0].map(|part| format!("{:.3}", quantile(part))).join(" ")
    };
    let mut bits: Vec<u64> = runs.iter().map(|run| run.validation_loss.to_bits()).collect();
    bits.sort_unstable();
    bits.dedup();
    format!(
        "{name}: {} runs, {} differ; minimum, quartiles, nine tenths, maximum: training loss {}; validation loss {}; accuracy {}",
        runs.len(),
        bits.len(),
        quantiles(|run| run.training_loss),
        quantiles(|run| run.validation_loss),
        quantiles(|run| run.accuracy)
    )
}

/// The rank sum of validation losses (Mann and Whitney 1947), as a distance in standard deviations from the mean for two samples of the
/// same distribution.
fn rank_sum(first: &[RunResult], second: &[RunResult]) -> f64 {
    let (m, n) = (first.len() as f64, second.len() as f64);
    let pairs = first.iter().flat_map(|a| second.iter().map(move |b| (a.validation_loss, b.validation_loss)));
    let larger: f64 = pairs.map(|(a, b)| if a == b { 0.5 } else { f64::from(u8::from(a > b)) }).sum();
    (larger - m * n / 2.0) / (m * n * (m + n + 1.0) / 12.0).sqrt()
}

/// As many runs in each format as the environment variable `RUNS` says (30 by default), and `CPU_RUNS` runs on the CPU, with slightly
/// different learning rates.
#[test]
#[ignore = "needs a GPU"]
fn gpu_early_validation_has_the_cpu_engine_s_distribution() {
    let runs: usize = std::env::var("RUNS").map_or(30, |runs| runs.parse().unwrap());
    let lr = |run: usize, runs: usize| LR * (1.0 + SPREAD * (2.0 * run as f32 / (runs - 1) as f32 - 1.0));
    let job = Job::new();
    let (next_run, results) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let pictures = pictures_for(job.cpu(1).as_mut(), EPOCH);
    std::thread::scope(|scope| {
        // One run per core: small steps do not become faster with more threads.
        for _ in 0..job.config.threads {
            scope.spawn(|| {
                loop {
                    let run = next_run.fetch_add(1, Ordering::Relaxed);
                    if run >= CPU_RUNS {
                        break;
                    }
                    let result = train(job.cpu(1).as_mut(), &pictures, lr(run, CPU_RUNS));
                    results.lock().unwrap().push(result);
                }
            });
        }
    });
    let on_cores = results.into_inner().unwrap();
    eprintln!("{}", summary("cores", &on_cores));
    let mut failures = Vec::new();
    for (precision, deterministic) in [
        (Precision::Fp16, false),
        (Precision::Fp16, true),
        (Precision::Bf16, false),
        (Precision::Fp32, false),
    ] {
        let on_gpu: Vec<RunResult> = (0..runs)
            .map(|run| {
                let mut engine = job.gpu(precision, deterministic);
                let pictures = pictures_for(engine.as_mut(), EPOCH);
                train(engine.as_mut(), &pictures, lr(run, runs))
            })
            .collect();
        let z = rank_sum(&on_gpu, &on_cores);
        let name = format!("{precision:?}, deterministic {deterministic}, {z:.2} deviations from cores");
        let line = summary(&name, &on_gpu);
        eprintln!("{line}");
        if z.abs() > LARGEST_Z {
            failures.push(line);
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
