//! Compares every optimizer with the CPU engine, and AdamW and LAMB with their formulas, value by value.

use super::*;
use crate::{LossScaling, OptimizerState, optimizer::slot_name};
use lockstep_host::tensors::HostTensor;
use lockstep_protocol::spec::OptimizerKind;

/// All of [`OptimizerKind::ALL`] with suitable learning rates, with and without weight decay on all parameters.
fn optimizers() -> Vec<(String, Optimizer, f32)> {
    let settings = |kind: OptimizerKind| {
        [true, false].map(|decay_norm_and_bias| {
            // The sign of a tiny gradient depends on rounding, but would decide Adam's whole step.
            let optimizer = Optimizer {
                kind,
                decay_norm_and_bias,
                weight_decay: 0.01,
                epsilon: 1e-3,
                ..config(1).optimizer
            };
            let lr = match kind {
                OptimizerKind::Momentum | OptimizerKind::Nesterov | OptimizerKind::Muon => 0.02,
                OptimizerKind::Lars => 1.0,
                OptimizerKind::AdamW | OptimizerKind::Lamb => 0.003,
            };
            (format!("{kind}, decay on everything: {decay_norm_and_bias}"), optimizer, lr)
        })
    };
    OptimizerKind::ALL.into_iter().flat_map(settings).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_optimizers_match_the_cpu_engine() {
    for (name, optimizer, lr) in optimizers() {
        let network = operations().swap_remove(0);
        let config = EngineConfig { optimizer, ..config(32) };
        let (mut cpu, mut gpu) = (cpu(&network, &config), cuda(&network, &config, Precision::Fp32));
        let expected = losses(cpu.as_mut(), &network, 32, 5, lr);
        let actual = losses(gpu.as_mut(), &network, 32, 5, lr);
        let start = initial(&network);
        let distance = relative_distance(&gpu.parameters().unwrap(), &cpu.parameters().unwrap(), &start);
        eprintln!(
            "{name}: losses {actual:?} / {expected:?}; weights apart by {distance:.1e} of their change"
        );
        // Muon's matrices are bfloat16.
        let bound = if optimizer.is_muon() { 5e-2 } else { 1e-2 };
        assert!(distance < bound, "{name}: weights differ by {distance}");
        assert_eq!(gpu.optimizer_state().unwrap().updates, 5);
    }
}

/// Float16 skips one step in the middle; the CPU engine does not run that step.
#[test]
#[ignore = "needs a GPU"]
fn gpu_optimizers_in_float16_are_close_to_the_cpu_engine_with_a_skipped_step() {
    for (name, optimizer, lr) in optimizers() {
        let network = operations().swap_remove(0);
        let config = EngineConfig { optimizer, ..config(32) };
        let loss_scale = LossScale::Named("dynamic".into());
        let gpu = DeviceConfig { precision: Precision::Fp16, loss_scale, ..deterministic() };
        let initial = initial(&network);
        let (mut cpu, mut gpu) = (cpu(&network, &config), cuda_as(&initial, &network, &config, gpu));
        gpu.set_loss_scaling(LossScaling { scale: 1024.0, growth_tracker: 0 }).unwrap();
        let mut skipped = 0;
        for step in 0..8 {
            if step == 3 {
                // So large that the gradient of the logits overflows.
                gpu.set_loss_scaling(LossScaling { scale: 8_388_608.0, growth_tracker: 0 }).unwrap();
                assert_eq!(
                    gpu.optimizer_state().unwrap().updates,
                    3,
                    "{name}: setting the scale keeps the updates"
                );
            }
            let batch = [pictures(&network, 32, step)];
            let result = gpu.train_step(&batch, lr).unwrap();
            if result.is_skipped() {
                skipped += 1;
                gpu.set_loss_scaling(LossScaling { scale: 1024.0, growth_tracker: 0 }).unwrap();
            } else {
                cpu.train_step(&batch, lr).unwrap();
            }
        }
        assert_eq!(skipped, 1, "{name}");
        assert_eq!(gpu.optimizer_state().unwrap().updates, 7, "{name}");
        let distance = relative_distance(&gpu.parameters().unwrap(), &cpu.parameters().unwrap(), &initial);
        eprintln!("{name}: weights apart by {distance:.1e} of their change");
        assert!(distance < 0.1, "{name}: weights differ by {distance}");
    }
}

/// One parameter after an update of AdamW or LAMB, in float64, computed from its old value and the new moments.
fn expected_update(
    optimizer: &Optimizer,
    lr: f32,
    before: &HostTensor,
    m: &[f32],
    v: &[f32],
    updates: u64,
) -> Vec<f64> {
    let is_weight = before.shape.len() > 1;
    let is_decayed = is_weight || optimizer.decay_norm_and_bias;
    let decay = if is_decayed { f64::from(optimizer.weight_decay) } else { 0.0 };
    let bias_correction = |beta: f64| 1.0 - beta.powi(updates as i32);
    let [correction1, correction2] = [optimizer.beta1, optimizer.beta2].map(bias_correction);
    let lr = f64::from(lr);
    let w = before.values.iter().map(|w| f64::from(*w));
    let r: Vec<f64> = m
        .iter()
        .zip(v)
        .map(|(m, v)| {
            f64::from(*m) / correction1 / ((f64::from(*v) / correction2).sqrt() + optimizer.epsilon)
        })
        .zip(w.clone())
        .map(|(r, w)| r + decay * w)
        .collect();
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let (of_w, of_r) = (norm(&mut w.clone()), norm(&mut r.iter().copied()));
    let adapted = optimizer.kind == OptimizerKind::Lamb && is_decayed && of_w > 0.0 && of_r > 0.0;
    let rate = if adapted { lr * of_w / of_r } else { lr };
    w.zip(r).map(|(w, r)| w - rate * r).collect()
}

/// Checks an update (or a skipped update) between two states, parameter by parameter.
fn check_update(
    name: &str,
    optimizer: &Optimizer,
    lr: f32,
    [old_weights, new_weights]: [&NamedTensors; 2],
    [before, after]: [&OptimizerState; 2],
) {
    for (parameter, now) in new_weights.iter().filter(|(name, _)| !name.contains("running")) {
        let slot =
            |state: &OptimizerState, slot: &str| state.slots[&slot_name(parameter, slot)].values.clone();
        let (m, v) = (slot(after, "exp_avg"), slot(after, "exp_avg_sq"));
        let (old_m, old_v) = (slot(before, "exp_avg"), slot(before, "exp_avg_sq"));
        let expected = expected_update(optimizer, lr, &old_weights[parameter], &m, &v, after.updates);
        let largest = expected.iter().fold(1e-3f64, |largest, w| largest.max(w.abs()));
        for (w, expected) in now.values.iter().zip(&expected) {
            let difference = (f64::from(*w) - expected).abs();
            assert!(difference < 3e-6 * largest, "{name}: {parameter} is {w} instead of {expected}");
        }
        // The gradient follows from the first moment, and the second moment from the gradient.
        let (beta1, beta2) = (optimizer.beta1, optimizer.beta2);
        let largest = v.iter().fold(1e-30f64, |largest, v| largest.max(f64::from(*v)));
        for i in 0..m.len() {
            let g = (f64::from(m[i]) - beta1 * f64::from(old_m[i])) / (1.0 - beta1);
            let expected = beta2 * f64::from(old_v[i]) + (1.0 - beta2) * g * g;
            let difference = (f64::from(v[i]) - expected).abs();
            assert!(
                difference < 1e-4 * largest,
                "{name}: {parameter}'s square is {} instead of {expected}",
                v[i]
            );
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_adamw_and_lamb_match_their_formulas_and_continue_exactly() {
    let is_adam = |o: &Optimizer| matches!(o.kind, OptimizerKind::AdamW | OptimizerKind::Lamb);
    for (name, optimizer, lr) in optimizers().into_iter().filter(|(_, o, _)| is_adam(o)) {
        // A folded stem, padded channels and classes, parameters of many lengths.
        let network = network(Arch::ResNet18, Stem::Imagenet, 64);
        let config = EngineConfig { optimizer: Optimizer { epsilon: 1e-8, ..optimizer }, ..config(16) };
        let initial = init::initial_parameters(&network, false, 1);
        for precision in [Precision::Fp32, Precision::Fp16, Precision::Bf16] {
            let name = format!("{name}, {precision:?}");
            let loss_scale = LossScale::Named("dynamic".into());
            let gpu = DeviceConfig { precision, loss_scale, ..deterministic() };
            let mut engine = cuda_as(&initial, &network, &config, gpu.clone());
            let (mut old_weights, mut before) =
                (engine.parameters().unwrap(), engine.optimizer_state().unwrap());
            assert_eq!(before.updates, 0);
            let mut skipped = 0;
            for step in 0..10 {
                if step == 4 {
                    // As after a restart.
                    let mut next = cuda_as(&initial, &network, &config, gpu.clone());
                    next.set_parameters(&old_weights).unwrap();
                    next.set_optimizer_state(&before).unwrap();
                    if let Some(scaling) = engine.loss_scaling().unwrap() {
                        next.set_loss_scaling(scaling).unwrap();
                    }
                    let batch = [pictures(&network, 16, step)];
                    let results = [&mut engine, &mut next].map(|e| e.train_step(&batch, lr).unwrap());
                    assert_eq!(results[0].grad_norm, results[1].grad_norm, "{name}");
                    assert!(engine.parameters().unwrap() == next.parameters().unwrap(), "{name}");
                    assert!(engine.optimizer_state().unwrap() == next.optimizer_state().unwrap(), "{name}");
                    skipped += u64::from(results[0].is_skipped());
                } else {
                    if step == 6 && precision == Precision::Fp16 {
                        let scale = LossScaling { scale: 8_388_608.0, growth_tracker: 0 };
                        engine.set_loss_scaling(scale).unwrap();
                    }
                    let result = engine.train_step(&[pictures(&network, 16, step)], lr).unwrap();
                    assert!(result.is_finite() || result.is_skipped(), "{name}");
                    skipped += u64::from(result.is_skipped());
                }
                let (weights, after) = (engine.parameters().unwrap(), engine.optimizer_state().unwrap());
                assert_eq!(after.updates, step as u64 + 1 - skipped, "{name}");
                if after.updates == before.updates {
                    assert!(after == before, "{name}: a skipped step changes nothing");
                    let is_same = weights.iter().all(|(n, t)| n.contains("running") || *t == old_weights[n]);
                    assert!(is_same, "{name}");
                } else {
                    let (weights, state) = ([&old_weights, &weights], [&before, &after]);
                    check_update(&name, &config.optimizer, lr, weights, state);
                }
                (old_weights, before) = (weights, after);
            }
            assert_eq!(skipped > 0, precision == Precision::Fp16, "{name}: {skipped} skipped");
            assert_eq!(engine.first_invalid().unwrap(), None);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_the_average_follows_weights_and_running_statistics_while_the_host_runs_ahead() {
    for precision in [Precision::Fp32, Precision::Fp16] {
        let network = network(Arch::ResNet18, Stem::Imagenet, 64);
        let config = config(8);
        let average = |expected: &mut NamedTensors, now: &NamedTensors| {
            for (name, average) in expected.iter_mut() {
                let values = average.values.iter_mut().zip(&now[name].values);
                values.for_each(|(a, v)| *a = 0.75 * *a + 0.25 * v);
            }
        };
        let (mut stepwise, mut ahead) =
            (cuda(&network, &config, precision), cuda(&network, &config, precision));
        let mut expected: Option<NamedTensors> = None;
        for step in 0..6 {
            let batch = [pictures(&network, 8, step)];
            stepwise.train_step(&batch, 0.02).unwrap();
            stepwise.update_average(0.75).unwrap();
            let now = stepwise.parameters().unwrap();
            average(expected.get_or_insert_with(|| now.clone()), &now);
            ahead.start_step(&batch, 0.02).unwrap();
            ahead.update_average(0.75).unwrap();
        }
        ahead.finish_steps().unwrap();
        let (expected, actual) = (expected.unwrap(), stepwise.averaged().unwrap().unwrap());
        let (worst, name) = worst_difference(&actual, &expected);
        assert!(worst < 1e-6, "{precision:?}: {name} differs by {worst}");
        assert!(ahead.averaged().unwrap().as_ref() == Some(&actual), "{precision:?}");
        let mut restored = cuda(&network, &config, precision);
        assert!(!restored.has_average());
        restored.set_averaged(&actual).unwrap();
        assert!(restored.averaged().unwrap() == Some(actual), "{precision:?}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_checksums_cover_every_weight_and_match_across_engines() {
    let network = network(Arch::ResNet20, Stem::Cifar, 16);
    let config = config(8);
    for precision in [Precision::Fp32, Precision::Fp16] {
        let mut engines = [cuda(&network, &config, precision), cuda(&network, &config, precision)];
        let before = engines[0].checksum().unwrap();
        for engine in &mut engines {
            engine.train_step(&[pictures(&network, 8, 0)], 0.02).unwrap();
        }
        let [one, other] = engines.each_ref().map(|engine| engine.checksum().unwrap());
        assert!(one == other && one != before, "{before:?} {one:?} {other:?}");
        let weights = engines[0].parameters().unwrap();
        for (name, index) in [("conv1.weight", 0), ("layer2.0.conv1.weight", 77), ("fc.bias", 9)] {
            let mut changed = weights.clone();
            let value = &mut changed.get_mut(name).unwrap().values[index];
            *value = f32::from_bits(value.to_bits() ^ 1);
            engines[1].set_parameters(&changed).unwrap();
            assert_ne!(engines[1].checksum().unwrap(), one, "{name}");
        }
        engines[1].set_parameters(&weights).unwrap();
        assert_eq!(engines[1].checksum().unwrap(), one);
    }
}

/// The average goes from zeros to constant weights, over twice the averaging window.
#[test]
#[ignore = "needs a GPU"]
fn gpu_the_average_is_unbiased_for_any_decay() {
    const DECAY: f64 = 0.99998;
    const STEPS: i32 = 100_000;
    let network = network(Arch::ResNet20, Stem::Cifar, 16);
    let mut engine = cuda(&network, &config(8), Precision::Fp32);
    let mut expected = engine.parameters().unwrap();
    let mut zeros = expected.clone();
    zeros.values_mut().for_each(|tensor| tensor.values.fill(0.0));
    engine.set_averaged(&zeros).unwrap();
    for _ in 0..STEPS {
        engine.update_average(DECAY).unwrap();
    }
    let weight = 1.0 - DECAY.powi(STEPS);
    for value in expected.values_mut().flat_map(|tensor| &mut tensor.values) {
        *value = (f64::from(*value) * weight) as f32;
    }
    let (worst, name) = worst_difference(&engine.averaged().unwrap().unwrap(), &expected);
    assert!(worst < 5e-5, "{name} differs by {worst}");
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_a_non_finite_second_moment_is_found() {
    let network = network(Arch::ResNet20, Stem::Cifar, 16);
    let optimizer = Optimizer { kind: OptimizerKind::AdamW, ..Optimizer::default() };
    let mut engine = cuda(&network, &EngineConfig { optimizer, ..config(8) }, Precision::Fp32);
    assert_eq!(engine.first_invalid().unwrap(), None);
    let mut state = engine.optimizer_state().unwrap();
    state.slots.get_mut("fc.bias.exp_avg_sq").unwrap().values[9] = f32::INFINITY;
    engine.set_optimizer_state(&state).unwrap();
    let report = engine.first_invalid().unwrap().unwrap();
    assert!(report.starts_with("fc.bias.exp_avg_sq contains inf at index 9"), "{report}");
}
