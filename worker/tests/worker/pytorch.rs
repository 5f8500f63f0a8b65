//! Compares whole networks with PyTorch, whose results `tests/pytorch/make_fixtures.py` has written to `tests/pytorch/fixtures`.

use lockstep_comm::SingleRank;
use lockstep_data::loader::{Batch, Mix};
use lockstep_engine::{
    Engine, EngineConfig, LossConfig, Optimizer, build_cpu,
    net::{self, Network},
};
use lockstep_host::tensors::{HostTensor, NamedTensors};
use lockstep_kernels::synthetic::{labels, values};
use lockstep_protocol::spec::{Arch, ModelSpec, OptimizerKind, Stem};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::{collections::BTreeMap, sync::Arc};

fn fixture<T: serde::de::DeserializeOwned>(name: &str) -> T {
    let path = format!("{}/../tests/pytorch/fixtures/{name}", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[derive(Deserialize)]
struct Architecture {
    image_size: usize,
    channels: usize,
    classes: usize,
    /// Logits of the first ten classes for each of two pictures.
    logits: Vec<Vec<f32>>,
    #[serde(flatten)]
    parameters: Parameters,
}

/// Names and shapes of the parameters in order, or a hash of them.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Parameters {
    Parameters(Vec<(String, Vec<usize>)>),
    ParametersSha256(String),
}

impl Parameters {
    fn check(&self, network: &Network, name: &str) {
        let computed: Vec<_> = network.parameters().into_iter().map(|p| (p.name, p.shape)).collect();
        match self {
            Parameters::Parameters(pytorch) => assert_eq!(computed, *pytorch, "{name}"),
            Parameters::ParametersSha256(pytorch) => {
                let line = |(parameter, shape): &(String, Vec<usize>)| {
                    let shape: Vec<_> = shape.iter().map(usize::to_string).collect();
                    format!("{parameter} {}\n", shape.join("x"))
                };
                let text: String = computed.iter().map(line).collect();
                assert_eq!(hex::encode(Sha256::digest(&text)), *pytorch, "{name}:\n{text}");
            }
        }
    }
}

pub(crate) fn network(arch: &str, stem: &str, image_size: usize, channels: usize, classes: usize) -> Network {
    let arch = arch.parse::<Arch>().unwrap();
    let stem = if stem == "imagenet" { Stem::Imagenet } else { Stem::Cifar };
    net::build(&ModelSpec { arch, stem, ..ModelSpec::default() }, image_size, channels, classes).unwrap()
}

/// The weights of `fill` in `make_fixtures.py`. A `cifarnet`, which has no shortcuts, has larger weights, because its logits would
/// otherwise hardly depend on the pictures.
pub(crate) fn weights(network: &Network) -> NamedTensors {
    let is_cifarnet = network.arch == "cifarnet";
    // Shapes are [out, in, height, width].
    let scales_by_fan_in = is_cifarnet || network.arch.contains("resnext") || network.arch.contains("wide");
    let fan_in = network.tensors[network.logits() - 1].len();
    let head = format!("{}.", network.head());
    network
        .parameters()
        .into_iter()
        .map(|p| {
            let mut values = values(&format!("{}.{}", network.arch, p.name), p.len());
            let (scale, offset) = if p.shape.len() == 4 {
                let fan = p.shape[usize::from(scales_by_fan_in)];
                ((6.0 / (fan * p.shape[2] * p.shape[3]) as f64).sqrt() as f32, 0.0)
            } else if p.name.starts_with(&head) {
                ((1.0 / (fan_in as f64).sqrt()) as f32, 0.0)
            } else if p.name.ends_with("running_var") {
                (0.5, 1.5)
            } else if p.name.ends_with("weight") {
                (0.25, if is_cifarnet { 1.0 } else { 0.5 })
            } else {
                (0.125, 0.0)
            };
            values.iter_mut().for_each(|v| *v = *v * scale + offset);
            (p.name, HostTensor { shape: p.shape, values })
        })
        .collect()
}

pub(crate) fn sgd(weight_decay: f32) -> Optimizer {
    Optimizer { momentum: 0.9, weight_decay, ..Optimizer::default() }
}

/// An engine with the weights of [`weights`].
fn engine(network: Network, config: EngineConfig) -> Box<dyn Engine> {
    let weights = weights(&network);
    build_cpu(Arc::new(network), &weights, config, Arc::new(SingleRank)).unwrap()
}

pub(crate) fn config(batch_size: usize, optimizer: Optimizer) -> EngineConfig {
    EngineConfig { threads: 2, ..EngineConfig::new(batch_size, optimizer) }
}

#[test]
fn names_shapes_and_logits_of_plain_resnets_match_pytorch() {
    compare_architectures("architectures.json", 10);
}

#[test]
fn names_shapes_and_logits_of_resnexts_and_wide_resnets_match_pytorch() {
    compare_architectures("resnexts.json", 5);
}

fn compare_architectures(file: &str, count: usize) {
    let all: BTreeMap<String, BTreeMap<String, Architecture>> = fixture(file);
    assert_eq!(all.len(), count);
    for (arch, stems) in all {
        for (stem, expected) in stems {
            let Architecture { image_size, channels, classes, .. } = expected;
            let network = network(&arch, &stem, image_size, channels, classes);
            expected.parameters.check(&network, &format!("{arch}, {stem} stem"));

            let images = values(&format!("{arch}.{stem}.images"), 2 * image_size * image_size * channels);
            let batch = Batch { images, labels: vec![0; 2], indices: vec![0, 1], ..Batch::default() };
            let logits = engine(network, config(2, sgd(0.0))).predict(&batch).unwrap();
            let largest = expected.logits.iter().flatten().fold(0.0f32, |m, v| m.max(v.abs()));
            for (computed, pytorch) in logits.chunks(classes).zip(&expected.logits) {
                for (a, b) in computed.iter().zip(pytorch) {
                    assert!((a - b).abs() <= 1e-4 * largest, "{arch}, {stem} stem: {computed:?} {pytorch:?}");
                }
            }
        }
    }
}

/// The settings of a training run, and PyTorch's loss of each step.
#[derive(Deserialize)]
struct Run {
    batch_size: usize,
    image_size: usize,
    lr: f32,
    losses: Vec<f32>,
}

impl Run {
    /// Trains a step, and compares its loss with PyTorch's. `case` is for the message.
    fn check_step(&self, engine: &mut dyn Engine, step: usize, batch: Batch, tolerance: f32, case: &str) {
        let (loss, pytorch) = (engine.train_step(&[batch], self.lr).unwrap().loss, self.losses[step]);
        assert!(
            (loss - pytorch).abs() <= tolerance * pytorch,
            "{case}, step {}: loss {loss} instead of {pytorch}",
            step + 1
        );
    }
}

/// A run with its own optimizer settings.
#[derive(Deserialize)]
struct OptimizerRun {
    #[serde(flatten)]
    run: Run,
    optimizer: OptimizerKind,
    weight_decay: f32,
    decay_norm_and_bias: bool,
}

/// Trains `arch` as `make_fixtures.py` did, and compares every loss.
fn compare_losses(arch: &str, name: &str, run: &Run, optimizer: Optimizer, tolerance: f32) {
    let network = network(arch, "cifar", run.image_size, 3, 10);
    let mut engine = engine(network, config(run.batch_size, optimizer));
    assert_eq!(run.losses.len(), 20);
    for step in 0..20 {
        run.check_step(&mut *engine, step, batch(arch, run, step), tolerance, name);
    }
}

#[test]
fn twenty_training_steps_follow_pytorch_s_losses() {
    let runs: BTreeMap<String, Run> = fixture("training.json");
    assert_eq!(runs.len(), 2);
    for (arch, run) in runs {
        compare_losses(&arch, &arch, &run, sgd(5e-4), 1e-3);
    }
}

#[test]
fn twenty_training_steps_of_adamw_and_lamb_follow_pytorch_s_losses() {
    let mut fixture: BTreeMap<String, serde_json::Value> = fixture("optimizers.json");
    let runs: BTreeMap<String, OptimizerRun> =
        serde_json::from_value(fixture.remove("runs").unwrap()).unwrap();
    assert_eq!(runs.len(), 4);
    for (name, settings) in runs {
        let OptimizerRun { run, optimizer: kind, weight_decay, decay_norm_and_bias } = settings;
        let optimizer = Optimizer { kind, weight_decay, decay_norm_and_bias, ..Optimizer::default() };
        compare_losses("resnet20", &name, &run, optimizer, 1e-4);
    }
}

/// A run of `mixing_and_average` in `make_fixtures.py`.
#[derive(Deserialize)]
struct SmoothedRun {
    #[serde(flatten)]
    run: Run,
    label_smoothing: f32,
    #[serde(default)]
    mixes: Vec<Mixed>,
    /// Values of each step's mixed pictures, evenly spaced from the first to the last.
    #[serde(default)]
    pixels: Vec<Vec<f32>>,
    decay: Option<f64>,
    every: Option<usize>,
    /// Values of the average after the last step.
    #[serde(default)]
    tensors: BTreeMap<String, TensorValues>,
}

/// Torchvision's random numbers for a batch, with cutmix also the cut.
#[derive(Deserialize)]
struct Mixed {
    lambda: f32,
    rows: Option<[usize; 2]>,
    columns: Option<[usize; 2]>,
    /// Lambda before the borders clip the cut.
    drawn: Option<f64>,
    centre: Option<[usize; 2]>,
}

impl SmoothedRun {
    fn engine(&self) -> Box<dyn Engine> {
        let network = network("resnet20", "cifar", self.run.image_size, 3, 10);
        let config = EngineConfig {
            loss: LossConfig { label_smoothing: self.label_smoothing, ..LossConfig::default() },
            ..config(32, sgd(5e-4))
        };
        engine(network, config)
    }
}

#[test]
fn twenty_training_steps_on_mixed_pictures_follow_pytorch_s_losses() {
    let runs: BTreeMap<String, SmoothedRun> = fixture("mixing.json");
    for name in ["mixup", "cutmix"] {
        let expected = &runs[name];
        let (side, mut engine) = (expected.run.image_size, expected.engine());
        assert_eq!((expected.mixes.len(), expected.pixels.len(), expected.run.losses.len()), (20, 20, 20));
        for (step, mixed) in expected.mixes.iter().enumerate() {
            let cut = mixed.rows.zip(mixed.columns).map(|(rows, columns)| [rows, columns].map(|[a, b]| a..b));
            let mix = Mix { lambda: mixed.lambda, cut };
            if let (Some(drawn), Some(centre)) = (mixed.drawn, mixed.centre) {
                assert_eq!(Mix::cutmix(drawn, centre, side), mix, "step {step}: lambda {drawn}, {centre:?}");
            }
            assert_eq!(mix.cut.is_some(), name == "cutmix");
            // The first picture is mixed with the last one.
            let mut batch = batch("resnet20", &expected.run, step);
            let last = batch.images[batch.images.len() - side * side * 3..].to_vec();
            batch.images.extend(last);
            batch.labels.extend(batch.labels.last().copied());
            batch.indices = vec![0; batch.labels.len()];
            let batch = mix.apply(batch, side, 3);
            for (i, pytorch) in expected.pixels[step].iter().enumerate() {
                let computed = batch.images[i * (batch.images.len() - 1) / 15];
                assert!(
                    (computed - pytorch).abs() < 1e-6,
                    "{name}, step {step}, value {i}: {computed}, not {pytorch}"
                );
            }
            expected.run.check_step(&mut *engine, step, batch, 1e-4, name);
        }
    }
}

#[test]
fn averaged_weights_of_twenty_steps_match_pytorch() {
    let runs: BTreeMap<String, SmoothedRun> = fixture("mixing.json");
    let expected = &runs["average"];
    let (mut engine, every) = (expected.engine(), expected.every.unwrap());
    for step in 0..expected.run.losses.len() {
        let batch = batch("resnet20", &expected.run, step);
        expected.run.check_step(&mut *engine, step, batch, 1e-4, "average");
        if (step + 1) % every == 0 {
            engine.update_average(expected.decay.unwrap()).unwrap();
        }
    }
    let average = engine.averaged().unwrap().unwrap();
    assert!(expected.tensors.len() > 40, "{} tensors", expected.tensors.len());
    for (name, pytorch) in &expected.tensors {
        pytorch.check(name, &average[name].values, 1e-4);
    }
}

/// A batch of `training` in `make_fixtures.py`. All pictures of a class have one pattern, with noise.
fn batch(arch: &str, run: &Run, step: usize) -> Batch {
    let picture = run.image_size * run.image_size * 3;
    let patterns = values(&format!("{arch}.patterns"), 10 * picture);
    let labels = labels(&format!("{arch}.labels.{step}"), run.batch_size, 10);
    let noise = values(&format!("{arch}.images.{step}"), run.batch_size * picture);
    let images = noise
        .chunks(picture)
        .zip(&labels)
        .flat_map(|(noise, &label)| {
            noise.iter().zip(&patterns[label as usize * picture..]).map(|(n, p)| n * 0.5 + p)
        })
        .collect();
    Batch { images, labels, ..Batch::default() }
}

/// The first steps of a grouped network, computed by PyTorch.
#[derive(Deserialize)]
struct GroupedSteps {
    arch: String,
    #[serde(flatten)]
    run: Run,
    /// Momentum after the first step, which is the gradient plus weight decay.
    momentum: BTreeMap<String, TensorValues>,
}

#[derive(Deserialize)]
struct TensorValues {
    norm: f64,
    /// Values of the tensor, evenly spaced from the first to the last.
    values: Vec<f64>,
}

impl TensorValues {
    /// Compares a tensor with PyTorch's. Values may differ by `tolerance` times the tensor's norm.
    fn check(&self, name: &str, computed: &[f32], tolerance: f64) {
        for (i, value) in self.values.iter().enumerate() {
            let found = f64::from(computed[i * (computed.len() - 1) / (self.values.len() - 1)]);
            let difference = (found - value).abs();
            assert!(difference <= tolerance * self.norm, "{name}, value {i}: {found} instead of {value}");
        }
    }
}

#[test]
fn a_step_of_a_grouped_network_matches_pytorch() {
    let GroupedSteps { arch, run, momentum: expected } = fixture("grouped_step.json");
    let network = network(&arch, "cifar", run.image_size, 3, 10);
    let mut weights = weights(&network);
    for (_, tensor) in weights.iter_mut().filter(|(name, _)| name.ends_with("bn3.weight")) {
        tensor.values.iter_mut().for_each(|v| *v *= 0.125);
    }
    let config = config(run.batch_size, sgd(5e-4));
    let mut engine = build_cpu(Arc::new(network), &weights, config, Arc::new(SingleRank)).unwrap();
    assert!(run.losses.len() == 3 && expected.len() == 8);
    let train = |engine: &mut dyn Engine, step: usize| {
        run.check_step(engine, step, batch(&arch, &run, step), 1e-5, &arch);
    };
    train(&mut *engine, 0);
    let momentum = engine.optimizer_state().unwrap().slots;
    for (name, pytorch) in &expected {
        let computed = &momentum[&format!("{name}.momentum")].values;
        let norm = computed.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt();
        assert!((norm / pytorch.norm - 1.0).abs() <= 1e-3, "{name}: norm {norm}, not {}", pytorch.norm);
        pytorch.check(name, computed, 3e-4);
    }
    train(&mut *engine, 1);
    train(&mut *engine, 2);
}
