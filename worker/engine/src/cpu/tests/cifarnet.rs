//! Tests of Muon, and of a network with GELUs, a separate bias, and parameters that are not trained.

use crate::{
    Engine, EngineConfig, Optimizer, build_cpu, fixtures,
    net::{self, Network, init},
};
use lockstep_comm::SingleRank;
use lockstep_host::tensors::NamedTensors;
use lockstep_protocol::spec::{Arch, ModelSpec, OptimizerKind};
use std::sync::Arc;

fn network() -> Arc<Network> {
    let model = ModelSpec { arch: Arch::CifarNet, ..ModelSpec::default() };
    Arc::new(net::build(&model, 9, 1, 10).unwrap())
}

fn engine(network: &Arc<Network>, initial: &NamedTensors, optimizer: Optimizer) -> Box<dyn Engine> {
    let config = EngineConfig { optimizer, ..fixtures::config(8) };
    build_cpu(network.clone(), initial, config, Arc::new(SingleRank)).unwrap()
}

#[test]
fn optimizers_change_only_trained_parameters_of_a_cifarnet() {
    let network = network();
    let initial = init::initial_parameters(&network, false, 1);
    for kind in [OptimizerKind::Muon, OptimizerKind::Nesterov] {
        let optimizer = Optimizer { kind, weight_decay: 0.1, ..Optimizer::default() };
        let mut engine = engine(&network, &initial, optimizer);
        for _ in 0..2 {
            assert!(engine.train_step(&[fixtures::batch(&network, 8)], 0.05).unwrap().is_finite());
        }
        let end = engine.parameters().unwrap();
        for parameter in network.parameters().iter().filter(|p| p.role.is_trained()) {
            let changed = end[&parameter.name] != initial[&parameter.name];
            assert_eq!(changed, network.trains(parameter), "{kind:?}: {}", parameter.name);
        }
    }
}

/// The gradient of the first convolution's bias passes through GELUs, poolings and batch norms. The numerical derivative of
/// the loss along the gradient's signs equals the gradient's L1 norm.
#[test]
fn the_gradient_of_a_gelu_s_bias_is_the_slope_of_the_loss() {
    let network = network();
    let initial = init::initial_parameters(&network, false, 1);
    let batch = [fixtures::batch(&network, 8)];
    let loss = |initial: &NamedTensors| {
        engine(&network, initial, Optimizer::default()).train_step(&batch, 0.0).unwrap().loss
    };
    let mut engine = engine(&network, &initial, Optimizer::default());
    engine.keep_gradients().unwrap();
    engine.train_step(&batch, 0.0).unwrap();
    let gradients = engine.gradients().unwrap();
    assert!(!gradients.contains_key("whiten.weight") && !gradients.contains_key("group1.norm1.weight"));
    let gradient = &gradients["whiten.bias"].values;
    let step = 3e-3;
    let [below, above] = [-step, step].map(|step| {
        let mut moved = initial.clone();
        let bias = &mut moved.get_mut("whiten.bias").unwrap().values;
        bias.iter_mut().zip(gradient).for_each(|(b, g)| *b += step * g.signum());
        loss(&moved)
    });
    let (slope, l1_norm) = ((above - below) / (2.0 * step), gradient.iter().map(|g| g.abs()).sum::<f32>());
    assert!(l1_norm > 0.0 && (slope / l1_norm - 1.0).abs() < 0.05, "{slope} instead of {l1_norm}");
}
