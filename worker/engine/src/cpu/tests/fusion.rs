//! A test that fusion changes only the order of roundings.

use super::resnet20;
use crate::{
    cpu::{capabilities, executor::Executor},
    fixtures,
    fuse::Capabilities,
    net::Network,
    plan::Plan,
};
use lockstep_comm::{ProcessGroup, SingleRank};
use std::sync::Arc;

/// The loss of a step and the gradients of all weights.
fn step(network: &Arc<Network>, capabilities: Capabilities) -> (f32, Vec<(String, Vec<f32>)>) {
    let (initial, batch) = (fixtures::initial(network), fixtures::batch(network, 8));
    let comm: Arc<dyn ProcessGroup> = Arc::new(SingleRank);
    let (network, plan) = (network.clone(), Plan::data(1));
    let mut executor = Executor::new(network, &plan, fixtures::config(8), &comm, capabilities).unwrap();
    executor.layout.import(None, &initial, &mut executor.state.weights);
    let result = executor.train_step(&[batch], 0.1).unwrap();
    let mut momentum = lockstep_host::tensors::NamedTensors::new();
    executor.layout.export(Some("momentum"), &executor.state.optimizer_slots[0], &mut momentum);
    (result.loss, momentum.into_iter().map(|(name, tensor)| (name, tensor.values)).collect())
}

#[test]
fn unfused_and_fused_graphs_have_the_same_gradients() {
    for network in fixtures::networks().into_iter().chain([resnet20(12)]) {
        let [(fused_loss, fused), (loss, plain)] =
            [capabilities(), Capabilities::default()].map(|capabilities| step(&network, capabilities));
        assert!((fused_loss - loss).abs() < 1e-5 * loss, "{}: loss {fused_loss}, not {loss}", network.arch);
        for ((name, fused), (_, plain)) in fused.iter().zip(&plain) {
            let norm = fused.iter().map(|v| v * v).sum::<f32>().sqrt();
            let distance = fused.iter().zip(plain).map(|(a, b)| (a - b).powi(2)).sum::<f32>().sqrt();
            assert!(norm > 0.0 && distance < 1e-3 * norm, "{} {name}: {distance} of {norm}", network.arch);
        }
    }
}
