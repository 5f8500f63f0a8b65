//! Whole networks against PyTorch (`tests/pytorch/fixtures`, written by `make_fixtures.py` there).

use lockstep_protocol::spec::{Arch, ModelSpec, OptimizerKind, Stem};
use lockstep_worker::{
    comm::Alone,
    data::loader::Batch,
    engine::{Engine, EngineConfig, HostTensor, NamedTensors, Optimizer, build_cpu},
    made_up::{labels, values},
    net::{Network, resnet},
};
use serde::Deserialize;
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
    /// The first ten classes of each of two pictures.
    logits: Vec<Vec<f32>>,
    parameters: Vec<(String, Vec<usize>)>,
}

fn network(arch: &str, stem: &str, image_size: usize, channels: usize, classes: usize) -> Network {
    let arch = Arch::ALL.iter().find(|(_, name)| *name == arch).unwrap().0;
    let stem = if stem == "imagenet" { Stem::Imagenet } else { Stem::Cifar };
    resnet::build(&ModelSpec { arch, stem, ..ModelSpec::default() }, image_size, channels, classes).unwrap()
}

/// `fill` of `make_fixtures.py`.
fn weights(network: &Network) -> NamedTensors {
    let fan_in = network.tensors[network.logits() - 1].len();
    network
        .parameters()
        .into_iter()
        .map(|p| {
            let mut values = values(&format!("{}.{}", network.arch, p.name), p.len());
            let (scale, offset) = if p.shape.len() == 4 {
                ((6.0 / (p.shape[0] * p.shape[2] * p.shape[3]) as f64).sqrt() as f32, 0.0)
            } else if p.name.starts_with("fc.") {
                ((1.0 / (fan_in as f64).sqrt()) as f32, 0.0)
            } else if p.name.ends_with("running_var") {
                (0.5, 1.5)
            } else if p.name.ends_with("weight") {
                (0.25, 0.5)
            } else {
                (0.125, 0.0)
            };
            values.iter_mut().for_each(|v| *v = *v * scale + offset);
            (p.name, HostTensor { shape: p.shape, values })
        })
        .collect()
}

fn sgd(weight_decay: f32) -> Optimizer {
    Optimizer { momentum: 0.9, weight_decay, ..Optimizer::default() }
}

fn engine(network: Network, batch_size: usize, optimizer: Optimizer) -> Box<dyn Engine> {
    let config = EngineConfig {
        batch_size,
        optimizer,
        label_smoothing: 0.0,
        accumulate: 1,
        sync_batch_norm: true,
        gradients_mean: true,
        threads: 2,
    };
    let weights = weights(&network);
    build_cpu(Arc::new(network), &weights, config, Arc::new(Alone)).unwrap()
}

#[test]
fn names_shapes_and_logits_of_every_architecture() {
    let all: BTreeMap<String, BTreeMap<String, Architecture>> = fixture("architectures.json");
    assert_eq!(all.len(), 10);
    for (arch, stems) in all {
        for (stem, expected) in stems {
            let Architecture { image_size, channels, classes, .. } = expected;
            let network = network(&arch, &stem, image_size, channels, classes);
            let ours: Vec<_> = network.parameters().into_iter().map(|p| (p.name, p.shape)).collect();
            assert_eq!(ours, expected.parameters, "{arch}, {stem} stem");

            let images = values(&format!("{arch}.{stem}.images"), 2 * image_size * image_size * channels);
            let batch = Batch { images, labels: vec![0; 2], indices: vec![0, 1], ..Batch::default() };
            let logits = engine(network, 2, sgd(0.0)).predict(&batch).unwrap();
            let largest = expected.logits.iter().flatten().fold(0.0f32, |m, v| m.max(v.abs()));
            for (ours, theirs) in logits.chunks(classes).zip(&expected.logits) {
                for (a, b) in ours.iter().zip(theirs) {
                    assert!((a - b).abs() <= 1e-4 * largest, "{arch}, {stem} stem: {ours:?} {theirs:?}");
                }
            }
        }
    }
}

#[derive(Deserialize)]
struct Run {
    batch_size: usize,
    image_size: usize,
    lr: f32,
    losses: Vec<f32>,
}

/// A run's own settings beside what all have.
#[derive(Deserialize)]
struct OptimizerRun {
    #[serde(flatten)]
    run: Run,
    optimizer: OptimizerKind,
    weight_decay: f32,
    decay_norm_and_bias: bool,
}

/// Trains `arch` as the fixture's script did, and compares every loss.
fn follow(arch: &str, name: &str, run: &Run, optimizer: Optimizer, tolerance: f32) {
    let picture = run.image_size * run.image_size * 3;
    let mut engine = engine(network(arch, "cifar", run.image_size, 3, 10), run.batch_size, optimizer);
    let patterns = values(&format!("{arch}.patterns"), 10 * picture);
    assert_eq!(run.losses.len(), 20);
    for (step, expected) in run.losses.iter().enumerate() {
        let labels = labels(&format!("{arch}.labels.{step}"), run.batch_size, 10);
        let noise = values(&format!("{arch}.images.{step}"), run.batch_size * picture);
        let images = noise
            .chunks(picture)
            .zip(&labels)
            .flat_map(|(noise, &label)| {
                noise.iter().zip(&patterns[label as usize * picture..]).map(|(n, p)| n * 0.5 + p)
            })
            .collect();
        let batch = Batch { images, labels, ..Batch::default() };
        let loss = engine.train_step(&[batch], run.lr).unwrap().loss;
        assert!(
            (loss - expected).abs() <= tolerance * expected,
            "{name}, step {}: loss {loss} instead of {expected}",
            step + 1
        );
    }
}

#[test]
fn twenty_training_steps_follow_pytorch_s_losses() {
    let runs: BTreeMap<String, Run> = fixture("training.json");
    assert_eq!(runs.len(), 2);
    for (arch, run) in runs {
        follow(&arch, &arch, &run, sgd(5e-4), 1e-3);
    }
}

#[test]
fn twenty_training_steps_of_adamw_and_lamb_follow_pytorch_s_losses() {
    let mut fixture: BTreeMap<String, serde_json::Value> = fixture("optimizers.json");
    let runs: BTreeMap<String, OptimizerRun> =
        serde_json::from_value(fixture.remove("runs").unwrap()).unwrap();
    assert_eq!(runs.len(), 4);
    for (name, of) in runs {
        let OptimizerRun { run, optimizer: kind, weight_decay, decay_norm_and_bias } = of;
        let optimizer = Optimizer { kind, weight_decay, decay_norm_and_bias, ..Optimizer::default() };
        follow("resnet20", &name, &run, optimizer, 1e-4);
    }
}
