//! Tests of [`Engine::keep_gradients`] and [`Engine::time_layers`].

use super::resnet20;
use crate::{Engine, EngineConfig, Optimizer, build_cpu, fixtures, net::Network};
use lockstep_comm::SingleRank;
use lockstep_protocol::spec::OptimizerKind;
use std::sync::Arc;

fn engine(kind: OptimizerKind, accumulate: usize) -> (Box<dyn Engine>, Arc<Network>) {
    let network = resnet20(12);
    let optimizer = Optimizer { kind, momentum: 0.0, weight_decay: 0.1, ..Optimizer::default() };
    let config = EngineConfig { optimizer, accumulate, ..fixtures::config(8) };
    let initial = fixtures::initial(&network);
    (build_cpu(network.clone(), &initial, config, Arc::new(SingleRank)).unwrap(), network)
}

#[test]
fn kept_gradients_exclude_weight_decay_for_every_optimizer() {
    let mut first = None;
    for kind in OptimizerKind::ALL {
        for accumulate in [1, 2] {
            let (mut engine, network) = engine(kind, accumulate);
            assert!(engine.gradients().unwrap().is_empty(), "{kind}: not requested");
            engine.keep_gradients().unwrap();
            let batch = fixtures::batch(&network, 8);
            let result = engine.train_step(&vec![batch.clone(); accumulate], 0.01).unwrap();
            let gradients = engine.gradients().unwrap();
            let square: f64 = gradients.values().flat_map(|t| &t.values).map(|v| f64::from(*v).powi(2)).sum();
            assert!((square.sqrt() - f64::from(result.grad_norm)).abs() < 1e-5 * square.sqrt(), "{kind}");
            let trained = network.parameters().into_iter().filter(|p| p.role.is_trained());
            assert_eq!(gradients.len(), trained.count());
            // With the same batch twice, the mean gradient is the same, except for rounding.
            let first = first.get_or_insert_with(|| gradients.clone());
            for (tensor, gradient) in &gradients {
                let pairs = gradient.values.iter().zip(&first[tensor].values);
                let difference = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                let size = gradient.values.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                assert!(difference <= 1e-5 * size, "{kind}, {accumulate}: {tensor} {difference} of {size}");
            }
            // Later steps do not change the kept gradients.
            engine.train_step(&[batch], 0.01).unwrap();
            assert!(engine.gradients().unwrap() == gradients, "{kind}");
        }
    }
}

#[test]
fn each_layer_of_a_timed_step_has_a_time() {
    let (mut engine, network) = engine(OptimizerKind::Momentum, 1);
    let step = [fixtures::batch(&network, 8)];
    engine.train_step(&step, 0.0).unwrap();
    assert!(engine.layer_times().is_empty(), "not requested");
    engine.time_layers();
    let began = std::time::Instant::now();
    engine.train_step(&step, 0.0).unwrap();
    let step_micros = began.elapsed().as_secs_f64() * 1e6;
    let times = engine.layer_times();
    assert!(times.iter().all(|time| time.micros > 0.0), "{times:?}");
    let sum: f64 = times.iter().map(|time| time.micros).sum();
    assert!(sum <= step_micros, "{sum} of {step_micros}");
    let named = |name: &str| times.iter().filter(|time| time.name.as_deref() == Some(name)).count();
    assert_eq!((named("conv1"), named("layer3.2.bn2"), named("fc")), (1, 1, 1));
    assert!(engine.layer_times().is_empty(), "times are returned once");
}
