//! Tests of networks with frozen batch norms, on the CPU engine: gradients are the derivatives of the loss with running
//! statistics, and no tensor of a batch norm changes.

use super::{Engine, EngineConfig, Optimizer, build_cpu, fixtures};
use crate::net::{Network, Role, init, resnet};
use lockstep_comm::SingleRank;
use lockstep_data::loader::Batch;
use lockstep_host::tensors::NamedTensors;
use lockstep_kernels::synthetic::{labels, values};
use lockstep_protocol::spec::{Arch, ModelSpec, OptimizerKind, Stem};
use std::sync::Arc;

pub(super) fn freeze_norms(network: &Network) -> Arc<Network> {
    Arc::new(Network { frozen_norm: true, ..network.clone() })
}

/// Initial weights, with batch norms as they may be after training.
pub(super) fn trained_parameters(network: &Network) -> NamedTensors {
    let mut tensors = init::initial_parameters(network, false, 1);
    for parameter in network.parameters() {
        let drawn = values(&format!("frozen.{}", parameter.name), parameter.len());
        let Some(tensor) = tensors.get_mut(&parameter.name) else { continue };
        let scale: fn(f32) -> f32 = match parameter.role {
            Role::Gamma { .. } => |v| 1.0 + v / 4.0,
            Role::Beta | Role::RunningMean => |v| v / 4.0,
            Role::RunningVar => |v| 1.5 + v / 2.0,
            _ => continue,
        };
        tensor.values = drawn.into_iter().map(scale).collect();
    }
    tensors
}

/// Whether a tensor is a batch norm's weight, bias or running statistic.
pub(super) fn is_of_norm(network: &Network, name: &str) -> bool {
    network.parameters().iter().any(|p| {
        p.name == name && !matches!(p.role, Role::ConvWeight | Role::LinearWeight | Role::LinearBias)
    })
}

fn networks() -> Vec<Arc<Network>> {
    let model = |arch, stem| ModelSpec { arch, stem, freeze_norm: true, ..ModelSpec::default() };
    let mut networks = vec![
        Arc::new(resnet::build(&model(Arch::ResNet20, Stem::Cifar), 8, 3, 10).unwrap()),
        Arc::new(resnet::build(&model(Arch::ResNet18, Stem::Imagenet), 32, 3, 10).unwrap()),
    ];
    networks.extend(fixtures::networks().iter().map(|network| freeze_norms(network)));
    assert!(networks.iter().all(|network| network.frozen_norm));
    networks
}

fn engine(network: &Arc<Network>, optimizer: Optimizer) -> Box<dyn Engine> {
    let config = EngineConfig { optimizer, ..fixtures::config(6) };
    build_cpu(network.clone(), &trained_parameters(network), config, Arc::new(SingleRank)).unwrap()
}

fn batch(network: &Network, seed: usize) -> Batch {
    let name = format!("frozen.{} {seed}", network.arch);
    Batch {
        images: values(&name, 6 * network.tensors[network.input()].len()),
        labels: labels(&name, 6, network.classes),
        indices: (0..6).collect(),
        ..Batch::default()
    }
}

/// The mean loss with running statistics.
fn loss(engine: &mut dyn Engine, batch: &Batch) -> f64 {
    let result = engine.eval_step(batch).unwrap();
    result.loss_sum / result.samples as f64
}

/// The numerical derivative of the loss along each tensor's gradient equals the gradient's norm.
#[test]
fn gradients_are_the_derivatives_of_the_loss_with_running_statistics() {
    for network in networks() {
        let batch = batch(&network, 0);
        let mut engine = engine(&network, fixtures::config(6).optimizer);
        let start = engine.parameters().unwrap();
        let evaluated = loss(engine.as_mut(), &batch);
        let step = engine.train_step(std::slice::from_ref(&batch), 0.0).unwrap();
        assert!((f64::from(step.loss) - evaluated).abs() < 1e-6 * evaluated, "{step:?}, {evaluated}");

        let (mut squares, mut checked) = (0.0, 0);
        for (slot, gradient) in engine.optimizer_state().unwrap().slots {
            let name = slot.strip_suffix(".momentum").unwrap();
            let norm = gradient.values.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
            if is_of_norm(&network, name) {
                assert_eq!(norm, 0.0, "{} {name}", network.arch);
                continue;
            }
            squares += norm * norm;
            let mut loss_at = |distance: f64| {
                let mut moved = start.clone();
                for (w, g) in moved.get_mut(name).unwrap().values.iter_mut().zip(&gradient.values) {
                    *w += (distance * f64::from(*g) / norm) as f32;
                }
                engine.set_parameters(&moved).unwrap();
                loss(engine.as_mut(), &batch)
            };
            // The distance is large enough for float32's precision and so small that few ReLUs change sign.
            let slope = (loss_at(4e-4) - loss_at(-4e-4)) / 8e-4;
            assert!(norm > 0.0, "{} {name}", network.arch);
            assert!(
                (slope - norm).abs() < 0.04 * norm + 3e-3,
                "{} {name}: slope {slope}, gradient {norm}",
                network.arch
            );
            checked += 1;
        }
        assert!(checked >= 4, "{}: {checked} tensors", network.arch);
        let norm = f64::from(step.grad_norm);
        assert!(
            (squares.sqrt() - norm).abs() < 1e-5 * norm,
            "{}: norm of all gradients {norm}",
            network.arch
        );
    }
}

/// Neither optimizer state from earlier steps nor weight decay changes the tensors of a frozen batch norm.
#[test]
fn no_optimizer_changes_a_frozen_batch_norm() {
    let network = networks().swap_remove(0);
    for kind in OptimizerKind::ALL {
        let optimizer = Optimizer { kind, weight_decay: 0.1, ..fixtures::config(6).optimizer };
        let mut engine = engine(&network, optimizer);
        let mut earlier = engine.optimizer_state().unwrap();
        for (name, tensor) in &mut earlier.slots {
            tensor.values = values(&format!("kept.{name}"), tensor.values.len());
            tensor.values.iter_mut().for_each(|v| *v = v.abs() + 0.1);
        }
        engine.set_optimizer_state(&earlier).unwrap();
        let start = engine.parameters().unwrap();
        for seed in 0..3 {
            engine.train_step(&[batch(&network, seed)], 0.01).unwrap();
        }
        let (end, state) = (engine.parameters().unwrap(), engine.optimizer_state().unwrap());
        for (tensor, values) in &end {
            let changed = *values != start[tensor];
            assert_eq!(changed, !is_of_norm(&network, tensor), "{kind}: {tensor}");
        }
        for (slot, values) in &state.slots {
            let (tensor, _) = slot.rsplit_once('.').unwrap();
            assert_eq!(*values != earlier.slots[slot], !is_of_norm(&network, tensor), "{kind}: {slot}");
        }
    }
}

/// A step over micro-batches equals a step over all pictures at once, because frozen batch norms take no statistics.
#[test]
fn micro_batches_have_the_gradients_of_one_batch() {
    for network in networks() {
        let whole = batch(&network, 5);
        let picture = whole.images.len() / 6;
        let part = |pictures: std::ops::Range<usize>| Batch {
            images: whole.images[pictures.start * picture..pictures.end * picture].to_vec(),
            labels: whole.labels[pictures.clone()].to_vec(),
            indices: pictures.map(|i| i as u64).collect(),
            ..Batch::default()
        };
        let config = EngineConfig { accumulate: 2, ..fixtures::config(6) };
        let gradients = |step: &[Batch]| {
            let comm = Arc::new(SingleRank);
            let mut engine =
                build_cpu(network.clone(), &trained_parameters(&network), config.clone(), comm).unwrap();
            let found = engine.train_step(step, 0.1).unwrap();
            (found.loss, engine.optimizer_state().unwrap().slots)
        };
        let (one, two) = (gradients(std::slice::from_ref(&whole)), gradients(&[part(0..4), part(4..6)]));
        assert!((one.0 - two.0).abs() < 1e-5 * one.0, "{}", network.arch);
        for (name, tensor) in &one.1 {
            let norm = tensor.values.iter().map(|v| v * v).sum::<f32>().sqrt();
            let distance =
                tensor.values.iter().zip(&two.1[name].values).map(|(a, b)| (a - b).powi(2)).sum::<f32>();
            assert!(distance.sqrt() <= 1e-4 * norm, "{} {name}: {} of {norm}", network.arch, distance.sqrt());
        }
    }
}
