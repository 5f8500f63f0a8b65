//! Networks, batches and settings for tests of engines. A step of [`network`], whose operations cannot be fused, is compared with
//! PyTorch's.

use super::{Engine, EngineConfig, Optimizer, build_cpu};
use crate::net::{Network, Role};
use lockstep_comm::SingleRank;
use lockstep_data::loader::Batch;
use lockstep_host::tensors::{HostTensor, NamedTensors};
use lockstep_kernels::synthetic::{labels, values};
use serde::Deserialize;
use std::{collections::BTreeMap, sync::Arc};

/// `Unfused` of `tests/pytorch/make_fixtures.py`: an unfused ReLU, addition, poolings and hidden linear layer.
pub(super) fn network(image_size: usize) -> Network {
    let mut net = Network::new("unfused", image_size, 3, 10);
    let x = net.conv("conv1", net.input(), 16, 3, 1);
    let shortcut = net.relu(x);
    let branch = net.conv("conv2", shortcut, 16, 3, 1);
    let sum = net.add(branch, shortcut);
    let x = net.relu(sum);
    let x = net.max_pool(x, 3, 2);
    let x = net.conv("conv3", x, 32, 3, 2);
    let x = net.batch_norm("bn3", x);
    let x = net.relu(x);
    let x = net.global_average_pool(x);
    let x = net.linear("hidden", x, 24);
    let x = net.relu(x);
    net.linear("fc", x, 10);
    net
}

/// A network whose tensors have several readers: a batch norm after a ReLU whose output is also the shortcut, a sum of a tensor
/// with itself, a pooling with a shortcut around it, an addition of linear layers.
fn many_readers() -> Network {
    let mut net = Network::new("many readers", 12, 3, 10);
    let x = net.conv("conv1", net.input(), 16, 3, 1);
    let x = net.relu(x);
    let normed = net.batch_norm("bn1", x);
    let sum = net.add(normed, x);
    let pooled = net.max_pool(sum, 3, 1);
    let sum = net.add(pooled, sum);
    let twice = net.add(sum, sum);
    let x = net.conv("conv2", twice, 16, 3, 1);
    let normed = net.batch_norm("bn2", x);
    let branch = net.relu(normed);
    let other = net.conv("conv3", normed, 16, 1, 1);
    let sum = net.add(branch, other);
    let mean = net.global_average_pool(sum);
    let hidden = net.linear("hidden", mean, 16);
    let sum = net.add(hidden, mean);
    let x = net.relu(sum);
    net.linear("fc", x, 10);
    net
}

pub(super) fn networks() -> Vec<Arc<Network>> {
    vec![Arc::new(network(12)), Arc::new(many_readers())]
}

/// The initial values that `unfused` in `make_fixtures.py` gives its model.
pub(super) fn initial(network: &Network) -> NamedTensors {
    let parameters = network.parameters().into_iter();
    parameters
        .map(|p| {
            let drawn = |mean: f32| -> Vec<f32> {
                values(&format!("unfused.{}", p.name), p.len()).into_iter().map(|v| v / 4.0 + mean).collect()
            };
            let values = match p.role {
                Role::RunningMean => vec![0.0; p.len()],
                Role::RunningVar => vec![1.0; p.len()],
                Role::Gamma { .. } => drawn(1.0),
                _ => drawn(0.0),
            };
            (p.name, HostTensor { shape: p.shape, values })
        })
        .collect()
}

pub(super) fn batch(network: &Network, size: usize) -> Batch {
    Batch {
        images: values("unfused.images", size * network.tensors[network.input()].len()),
        labels: labels("unfused.labels", size, network.classes),
        indices: (0..size as u64).collect(),
        ..Batch::default()
    }
}

/// A configuration in which the momentum after the first step is the gradient.
pub(super) fn config(batch_size: usize) -> EngineConfig {
    let optimizer = Optimizer { momentum: 0.9, weight_decay: 0.0, ..Optimizer::default() };
    EngineConfig { threads: 2, ..EngineConfig::new(batch_size, optimizer) }
}

#[derive(Deserialize)]
struct Gradient {
    norm: f32,
    /// The values at 16 evenly spaced positions.
    values: Vec<f32>,
}

/// PyTorch's results of one step of [`network`].
#[derive(Deserialize)]
struct Fixture {
    batch_size: usize,
    image_size: usize,
    loss: f32,
    gradients: BTreeMap<String, Gradient>,
    running: BTreeMap<String, Vec<f32>>,
}

/// Maximum differences between an engine and PyTorch.
pub(super) struct Tolerance {
    pub(super) loss: f32,
    /// Difference of a gradient's value, relative to the norm of its tensor.
    pub(super) gradient: f32,
    /// Absolute difference of a running statistic.
    pub(super) running: f32,
}

/// Compares one step of [`network`] with PyTorch's, on the engine that `build` returns for a network, initial values and a
/// configuration.
pub(super) fn check_against_pytorch(
    tolerance: &Tolerance,
    build: impl FnOnce(Arc<Network>, &NamedTensors, EngineConfig) -> Box<dyn Engine>,
) {
    // The fixture is embedded, because the test program also runs on machines without the source tree.
    let fixture: Fixture =
        serde_json::from_slice(include_bytes!("../../../tests/pytorch/fixtures/unfused.json")).unwrap();
    let network = Arc::new(network(fixture.image_size));
    let mut engine = build(network.clone(), &initial(&network), config(fixture.batch_size));
    let step = engine.train_step(&[batch(&network, fixture.batch_size)], 0.1).unwrap();
    let near = |ours: f32, theirs: f32, within: f32| (ours - theirs).abs() < within;
    assert!(near(step.loss, fixture.loss, tolerance.loss * fixture.loss), "{} {}", step.loss, fixture.loss);
    let gradients = engine.optimizer_state().unwrap().slots;
    assert_eq!(gradients.len(), fixture.gradients.len());
    for (name, expected) in &fixture.gradients {
        let ours = &gradients[&format!("{name}.momentum")].values;
        for (index, theirs) in expected.values.iter().enumerate() {
            let ours = ours[index * (ours.len() - 1) / 15];
            let within = tolerance.gradient * expected.norm;
            assert!(near(ours, *theirs, within), "{name}: {ours} instead of {theirs}");
        }
    }
    let parameters = engine.parameters().unwrap();
    for (name, expected) in &fixture.running {
        for (ours, theirs) in parameters[name].values.iter().zip(expected) {
            assert!(near(*ours, *theirs, tolerance.running), "{name}: {ours} instead of {theirs}");
        }
    }
}

#[test]
fn a_step_of_unfused_operations_matches_pytorch() {
    check_against_pytorch(
        &Tolerance { loss: 1e-6, gradient: 1e-5, running: 1e-5 },
        |network, initial, config| build_cpu(network, initial, config, Arc::new(SingleRank)).unwrap(),
    );
}
