//! Tests of the gradients that a step keeps on request, and of the times of layers.

use super::*;
use crate::frozen_norm::{freeze_norms, is_of_norm, trained_parameters};

/// The kept gradients equal the CPU engine's, without the loss scale, and have the norm that the step reports.
#[test]
#[ignore = "needs a GPU"]
fn gpu_kept_gradients_match_the_cpu_engine() {
    for (precision, bound) in [(Precision::Fp32, 1e-2), (Precision::Fp16, 0.15), (Precision::Bf16, 0.4)] {
        for (network, accumulate) in operations()
            .into_iter()
            .filter(|net| net.arch.contains("stem 3x3") && !net.arch.contains("256"))
            .flat_map(|net| [(net.clone(), 1), (net.clone(), 2), (freeze_norms(&net), 1)])
        {
            let config = EngineConfig { accumulate, ..config(16) };
            let initial = if network.frozen_norm { trained_parameters(&network) } else { initial(&network) };
            let step: Vec<Batch> = (0..accumulate).map(|i| pictures(&network, 16, i)).collect();
            let [expected, actual] = [false, true].map(|on_gpu| {
                let mut engine = match on_gpu {
                    true => cuda_from(&initial, &network, &config, precision),
                    false => cpu_from(&initial, &network, &config),
                };
                // An earlier step, whose gradients are not kept.
                engine.train_step(&step, 0.0).unwrap();
                engine.keep_gradients().unwrap();
                let result = engine.train_step(&step, 0.0).unwrap();
                let gradients = engine.gradients().unwrap();
                let norm = gradients.values().map(|t| square(&t.values)).sum::<f64>().sqrt();
                assert_near(result.grad_norm, norm, 1e-4, format_args!("reported norm of {}", network.arch));
                gradients
            });
            assert!(actual.keys().eq(expected.keys()), "{}", network.arch);
            assert_eq!(actual.keys().any(|name| is_of_norm(&network, name)), !network.frozen_norm);
            let (gradient, name) = worst_difference(&actual, &expected);
            eprintln!("{} {precision:?}: {gradient:.1e} ({name}) apart", network.arch);
            assert!(gradient < bound, "{} {precision:?}: gradient of {name}: {gradient}", network.arch);
        }
    }
}

/// Timing layers does not change the results of steps. The steps are captured, replayed, timed and replayed.
#[test]
#[ignore = "needs a GPU"]
fn gpu_timing_a_step_does_not_change_its_bits() {
    for precision in [Precision::Fp32, Precision::Fp16] {
        for accumulate in [1, 2] {
            let network = network(Arch::ResNet50, Stem::Imagenet, 64);
            let config = EngineConfig { accumulate, ..config(16) };
            let step: Vec<Batch> = (0..accumulate).map(|i| pictures(&network, 16, i)).collect();
            let run = |is_timed: bool| {
                let mut engine = cuda(&network, &config, precision);
                let (mut results, mut times) = (Vec::new(), Vec::new());
                for number in 0..6 {
                    if is_timed && number == 3 {
                        engine.time_layers();
                    }
                    results.extend(engine.start_step(&step, 0.01).unwrap());
                    times.extend(engine.layer_times());
                }
                results.extend(engine.finish_steps().unwrap());
                let losses: Vec<f32> = results.iter().map(|result| result.loss).collect();
                (losses, engine.parameters().unwrap(), engine.optimizer_state().unwrap(), times)
            };
            let (losses, weights, state, times) = run(false);
            let (timed_losses, timed_weights, timed_state, timed) = run(true);
            assert_eq!(losses, timed_losses, "{precision:?}");
            assert!(weights == timed_weights && state == timed_state, "{precision:?}");
            assert!(times.is_empty());
            let convolutions: Vec<_> =
                timed.iter().filter(|t| t.name.as_ref().is_some_and(|n| n.contains("conv"))).collect();
            assert_eq!(convolutions.len(), 49);
            assert!(convolutions.iter().all(|t| t.micros > 0.0 && t.micros < 1e6), "{convolutions:?}");
        }
    }
}
