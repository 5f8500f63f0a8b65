//! Compares frozen batch norms with the CPU engine, whose gradients `frozen_norm.rs` compares with the loss's derivatives.

use super::*;
use crate::frozen_norm::{freeze_norms, is_of_norm, trained_parameters};

/// Compares loss and gradient of a step over micro-batches of `counts` pictures with the CPU engine's step. No tensor of a batch norm
/// may change in this step and in two more, which are captured and replayed.
fn compare(
    network: &Arc<Network>,
    counts: &[usize],
    precision: Precision,
    draw: usize,
    [loss_bound, gradient_bound]: [f64; 2],
) {
    let config = EngineConfig { accumulate: counts.len(), ..config(32) };
    let initial = trained_parameters(network);
    let step: Vec<Batch> =
        counts.iter().enumerate().map(|(i, n)| pictures(network, *n, draw + 100 * i)).collect();
    let mut cpu = cpu_from(&initial, network, &config);
    let mut gpu = cuda_from(&initial, network, &config, precision);
    let (expected, actual) = (cpu.train_step(&step, 0.01).unwrap(), gpu.train_step(&step, 0.01).unwrap());
    let loss = f64::from((actual.loss - expected.loss).abs() / expected.loss);
    // Momentum after the first step is the gradient plus weight decay, but frozen parameters do not decay.
    let (gradient, name) =
        worst_difference(&gpu.optimizer_state().unwrap().slots, &cpu.optimizer_state().unwrap().slots);
    eprintln!(
        "{} at {} px, pictures {counts:?}, {precision:?}: loss {loss:.1e}, gradient {gradient:.1e} ({name}) apart",
        network.arch, network.image_size
    );
    assert!(
        loss < loss_bound && gradient < gradient_bound,
        "{}, {precision:?}: loss {loss}, gradient of {name} {gradient}",
        network.arch
    );
    for _ in 0..2 {
        gpu.train_step(&step, 0.01).unwrap();
    }
    let state = gpu.optimizer_state().unwrap().slots;
    for (name, tensor) in gpu.parameters().unwrap() {
        assert_eq!(tensor != initial[&name], !is_of_norm(network, &name), "{}: {name}", network.arch);
        if let Some(momentum) = state.get(&format!("{name}.momentum")) {
            let is_zero = momentum.values.iter().all(|v| *v == 0.0);
            assert_eq!(is_zero, is_of_norm(network, &name), "{}: momentum of {name}", network.arch);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_frozen_batch_norms_in_float32_match_the_cpu_engine() {
    for network in operations() {
        let network = freeze_norms(&network);
        for draw in 0..2 {
            // A ReLU whose sign changes by rounding is visible in a small tensor.
            compare(&network, &[32], Precision::Fp32, draw, [1e-4, 1e-2]);
        }
    }
    for network in crate::fixtures::networks() {
        let network = freeze_norms(&network);
        compare(&network, &[16], Precision::Fp32, 0, [1e-4, 1e-2]);
    }
    for (arch, stem, side, batch) in
        [(Arch::ResNet20, Stem::Cifar, 32, 32), (Arch::ResNet50, Stem::Imagenet, 64, 16)]
    {
        let network = freeze_norms(&network(arch, stem, side));
        compare(&network, &[batch], Precision::Fp32, 0, [1e-3, 4e-2]);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_frozen_batch_norms_in_ragged_micro_batches_match_the_cpu_engine() {
    for network in operations().into_iter().filter(|net| !net.arch.contains("256")) {
        let network = freeze_norms(&network);
        compare(&network, &[32, 32, 5], Precision::Fp32, 0, [1e-4, 1e-2]);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_frozen_batch_norms_in_16_bits_are_close_to_the_cpu_engine() {
    for (precision, loss_bound, gradient_bound) in
        [(Precision::Fp16, 2e-2, 0.15), (Precision::Bf16, 8e-2, 0.4)]
    {
        for network in operations() {
            // Rounding changes signs of ReLUs. Values of a window are often equal, so the pooling may choose another maximum.
            let gradient_bound = if network.arch.contains("pooling") { 0.6 } else { gradient_bound };
            let network = freeze_norms(&network);
            compare(&network, &[32], precision, 0, [loss_bound, gradient_bound]);
        }
    }
}

/// Every optimizer leaves frozen parameters and their state unchanged, even if earlier steps have left optimizer state.
#[test]
#[ignore = "needs a GPU"]
fn gpu_no_optimizer_changes_a_frozen_batch_norm() {
    use lockstep_protocol::spec::OptimizerKind;
    let network = freeze_norms(&network(Arch::ResNet20, Stem::Cifar, 16));
    let initial = trained_parameters(&network);
    for kind in OptimizerKind::ALL {
        let optimizer = Optimizer { kind, weight_decay: 0.1, ..Optimizer::default() };
        let config = EngineConfig { optimizer, ..config(8) };
        let [(expected, _), (actual, state)] = [false, true].map(|on_gpu| {
            let mut engine = match on_gpu {
                true => cuda_from(&initial, &network, &config, Precision::Fp32),
                false => cpu_from(&initial, &network, &config),
            };
            let mut state = engine.optimizer_state().unwrap();
            for tensor in state.slots.values_mut() {
                tensor.values.fill(0.25);
            }
            engine.set_optimizer_state(&state).unwrap();
            for number in 0..3 {
                engine.train_step(&[pictures(&network, 8, number)], 0.01).unwrap();
            }
            (engine.parameters().unwrap(), engine.optimizer_state().unwrap().slots)
        });
        for (name, tensor) in &actual {
            assert_eq!(*tensor != initial[name], !is_of_norm(&network, name), "{kind:?}: {name}");
        }
        for (slot, tensor) in &state {
            let (name, _) = slot.rsplit_once('.').unwrap();
            let is_unchanged = tensor.values.iter().all(|v| *v == 0.25);
            assert_eq!(is_unchanged, is_of_norm(&network, name), "{kind:?}: {slot}");
        }
        let distance = relative_distance(&actual, &expected, &initial);
        let bound = if kind == OptimizerKind::Muon { 5e-2 } else { 1e-2 };
        assert!(distance < bound, "{kind:?}: weights differ by {distance} of their change");
    }
}
