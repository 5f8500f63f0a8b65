//! Compares networks whose operations cannot be fused (`unfused.rs`) with the CPU engine and with PyTorch.

use super::*;
use crate::fixtures::{self, Tolerance, check_against_pytorch};

fn compare(precision: Precision, micro_batches: usize) -> Vec<(String, f64, f64)> {
    let mut differences = Vec::new();
    for network in fixtures::networks() {
        let initial = fixtures::initial(&network);
        let config = EngineConfig { accumulate: micro_batches, ..fixtures::config(16) };
        // The last micro-batch is ragged, so the engine pads it.
        let step: Vec<Batch> = (0..micro_batches)
            .map(|number| fixtures::batch(&network, if number + 1 == micro_batches { 11 } else { 16 }))
            .collect();
        let mut cpu = cpu_from(&initial, &network, &config);
        let gpu = DeviceConfig { precision, ..deterministic() };
        let mut cuda = cuda_as(&initial, &network, &config, gpu);
        let (actual, expected) = (cuda.predict(&step[0]).unwrap(), cpu.predict(&step[0]).unwrap());
        let logits = (difference(&actual, &expected) / square(&expected)).sqrt();
        cuda.train_step(&step, 0.1).unwrap();
        cpu.train_step(&step, 0.1).unwrap();
        // After the first step, the momentum is the gradient.
        let (actual, expected) =
            (cuda.optimizer_state().unwrap().slots, cpu.optimizer_state().unwrap().slots);
        let (gradient, name) = worst_difference(&actual, &expected);
        eprintln!(
            "{} {precision:?}: logits {logits:.1e}, gradient {gradient:.1e} ({name}) apart",
            network.arch
        );
        differences.push((network.arch.clone(), logits, gradient));
    }
    differences
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_unfused_operations_in_float32_match_pytorch() {
    // cuDNN may use other algorithms than the float64 sums of the fixtures.
    check_against_pytorch(
        &Tolerance { loss: 1e-4, gradient: 1e-3, running: 1e-4 },
        |network, initial, config| cuda_as(initial, &network, &config, deterministic()),
    );
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_unfused_operations_in_float32_match_the_cpu_engine() {
    for micro_batches in [1, 3] {
        for (arch, logits, gradient) in compare(Precision::Fp32, micro_batches) {
            assert!(logits < 1e-4 && gradient < 1e-3, "{arch}: logits {logits}, gradient {gradient}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_unfused_operations_in_16_bits_are_close_to_the_cpu_engine() {
    for (precision, bound) in [(Precision::Fp16, 1e-2), (Precision::Bf16, 5e-2)] {
        for (arch, logits, gradient) in compare(precision, 1) {
            // After rounding, values of a window are often equal, so the pooling may choose another maximum.
            assert!(
                logits < bound && gradient < 0.3,
                "{arch} {precision:?}: logits {logits}, gradient {gradient}"
            );
        }
    }
}
