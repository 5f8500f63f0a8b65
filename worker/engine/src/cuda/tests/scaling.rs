//! Tests of float16: loss scaling, and steps with non-finite values.

use super::*;
use crate::LossScaling;

/// Float16 with dynamic loss scaling, which is the default of float16.
fn dynamic() -> DeviceConfig {
    let loss_scale = LossScale::Named("dynamic".into());
    DeviceConfig { precision: Precision::Fp16, loss_scale, ..deterministic() }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_an_overflow_halves_the_loss_scale_and_skips_the_step() {
    let (network, config) = (network(Arch::ResNet20, Stem::Cifar, 16), config(16));
    let initial = init::initial_parameters(&network, false, 1);
    let mut engine = cuda_as(&initial, &network, &config, dynamic());
    let first = engine.loss_scaling().unwrap().unwrap();
    assert_eq!(first, LossScaling { scale: 65_536.0, growth_tracker: 0 });
    let batch = pictures(&network, 16, 0);
    let before = engine.parameters().unwrap();
    let mut skipped = 0;
    for _ in 0..20 {
        let before_step = engine.parameters().unwrap();
        let result = engine.train_step(std::slice::from_ref(&batch), 0.05).unwrap();
        assert!(result.loss.is_finite());
        if result.is_skipped() {
            skipped += 1;
            let weights = |all: &NamedTensors| -> NamedTensors {
                all.iter()
                    .filter(|(name, _)| !name.contains("running"))
                    .map(|(n, t)| (n.clone(), t.clone()))
                    .collect()
            };
            assert!(
                weights(&before_step) == weights(&engine.parameters().unwrap()),
                "a skipped step changes nothing"
            );
        }
    }
    let scaling = engine.loss_scaling().unwrap().unwrap();
    assert_eq!(scaling.scale, 65_536.0 / f32::powi(2.0, skipped), "halved by each skipped step");
    let change = difference(&engine.parameters().unwrap()["fc.weight"].values, &before["fc.weight"].values);
    eprintln!("{skipped} of 20 steps were skipped, then {scaling:?}");
    assert!(skipped <= 10 && change > 0.0);
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_a_continued_run_keeps_its_loss_scale() {
    let (network, config) = (network(Arch::ResNet20, Stem::Cifar, 16), config(16));
    let initial = init::initial_parameters(&network, false, 1);
    let batches: Vec<Batch> = (0..8).map(|n| pictures(&network, 16, n)).collect();
    let mut whole = cuda_as(&initial, &network, &config, dynamic());
    let mut first = cuda_as(&initial, &network, &config, dynamic());
    for batch in &batches[..4] {
        whole.train_step(std::slice::from_ref(batch), 0.05).unwrap();
        first.train_step(std::slice::from_ref(batch), 0.05).unwrap();
    }
    let mut second = cuda_as(&initial, &network, &config, dynamic());
    second.set_parameters(&first.parameters().unwrap()).unwrap();
    second.set_optimizer_state(&first.optimizer_state().unwrap()).unwrap();
    let scaling = first.loss_scaling().unwrap().unwrap();
    second.set_loss_scaling(scaling).unwrap();
    assert_eq!(second.loss_scaling().unwrap(), Some(scaling));
    for batch in &batches[4..] {
        let step = std::slice::from_ref(batch);
        let (a, b) = (whole.train_step(step, 0.05).unwrap(), second.train_step(step, 0.05).unwrap());
        assert_eq!((a.loss, a.grad_norm, a.loss_scale), (b.loss, b.grad_norm, b.loss_scale));
    }
    assert!(whole.parameters().unwrap() == second.parameters().unwrap());
    assert_eq!(whole.loss_scaling().unwrap(), second.loss_scaling().unwrap());
}

/// A non-finite weight makes the whole step non-finite. The step must be skipped without changing other state.
#[test]
#[ignore = "needs a GPU"]
fn gpu_non_finite_values_are_reported_and_change_nothing() {
    for precision in [Precision::Fp32, Precision::Bf16, Precision::Fp16] {
        for value in [f32::NAN, f32::INFINITY] {
            let (network, config) = (network(Arch::ResNet18, Stem::Cifar, 32), config(16));
            let mut invalid = init::initial_parameters(&network, false, 1);
            let name = "layer2.0.conv1.weight";
            invalid.get_mut(name).unwrap().values[7] = value;
            let mut engine = cuda_as(&invalid, &network, &config, DeviceConfig { precision, ..dynamic() });
            let report = engine.first_invalid().unwrap().unwrap();
            assert!(report.starts_with(name), "{report}");
            let before = engine.parameters().unwrap();
            let batch = pictures(&network, 16, 0);
            let result = engine.train_step(std::slice::from_ref(&batch), 0.1).unwrap();
            assert!(!result.is_finite(), "{precision:?}, {value}: {result:?}");
            assert_eq!(result.is_skipped(), precision == Precision::Fp16);
            let after = engine.parameters().unwrap();
            let same = |name: &str| {
                let bits =
                    |all: &NamedTensors| all[name].values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                bits(&before) == bits(&after)
            };
            assert!(before.keys().filter(|name| !name.contains("running")).all(|name| same(name)));
            if precision == Precision::Fp16 {
                // The whole step is skipped: batch norms before and after the weight keep finite statistics.
                let running = after.iter().filter(|(name, _)| name.contains("running"));
                assert!(running.into_iter().all(|(_, tensor)| tensor.values.iter().all(|v| v.is_finite())));
            }
            let evaluated = engine.eval_step(&batch).unwrap();
            assert!(!evaluated.loss_sum.is_finite(), "{precision:?}, {value}: {evaluated:?}");
            assert!(engine.predict(&batch).unwrap().iter().any(|v| !v.is_finite()));
        }
    }
}
