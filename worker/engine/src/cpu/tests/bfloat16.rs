//! Test of training in bfloat16.

use super::resnet20;
use crate::{cpu::build, fixtures, net::init, plan::Plan};
use lockstep_comm::SingleRank;
use lockstep_kernels::conv::Format;
use lockstep_protocol::spec::Precision;
use std::sync::Arc;

/// The engine itself needs no instructions for bfloat16, so every machine runs this test.
#[test]
fn losses_in_bfloat16_stay_near_those_in_float32() {
    let network = resnet20(8);
    let initial = init::initial_parameters(&network, false, 1);
    let batch = [fixtures::batch(&network, 16)];
    let losses = |format, precision| -> Vec<f32> {
        let (config, plan) = (fixtures::config(16), Plan::data(1));
        let comm = Arc::new(SingleRank);
        let mut engine = build(network.clone(), &initial, config, comm, &plan, format).unwrap();
        assert_eq!(engine.precision(), precision);
        (0..20).map(|_| engine.train_step(&batch, 0.01).unwrap().loss).collect()
    };
    let exact = losses(Format::Float32, Precision::Fp32);
    let rounded = losses(Format::Bfloat16, Precision::Bf16);
    assert!(exact[0] > 2.0 && exact[19] < 0.5, "{exact:?}");
    // Rounding changes the loss at once, and by at most 0.05 in all 20 steps.
    assert!(exact[0] != rounded[0]);
    for (exact, rounded) in exact.iter().zip(&rounded) {
        assert!((exact - rounded).abs() < 0.05, "{rounded} instead of {exact}");
    }
}
