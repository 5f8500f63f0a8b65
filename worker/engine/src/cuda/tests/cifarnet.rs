//! The network of the recipe `cifar-94`, with its optimizer, and the views of an evaluation.

use super::*;
use lockstep_data::loader::View;
use lockstep_protocol::spec::OptimizerKind;

fn cifarnet(side: usize, channels: usize) -> Arc<Network> {
    let model = ModelSpec { arch: Arch::CifarNet, ..ModelSpec::default() };
    Arc::new(crate::net::build(&model, side, channels, 10).unwrap())
}

/// With SGD, weights change as on the CPU engine, and approximately with Muon, whose matrices are bfloat16. Fixed parameters do not change.
#[test]
#[ignore = "needs a GPU"]
fn gpu_a_cifarnet_matches_the_cpu_engine() {
    // GELUs are smooth, but rounding may change which pixel of a pooling's window is the maximum.
    for (kind, lr, bound) in [(OptimizerKind::Nesterov, 0.01, 1e-2), (OptimizerKind::Muon, 0.05, 0.1)] {
        let network = cifarnet(24, 3);
        let optimizer = Optimizer { kind, momentum: 0.85, ..Optimizer::default() };
        let config = EngineConfig { optimizer, ..config(32) };
        let (mut cpu, mut gpu) = (cpu(&network, &config), cuda(&network, &config, Precision::Fp32));
        let expected = losses(cpu.as_mut(), &network, 32, 4, lr);
        let actual = losses(gpu.as_mut(), &network, 32, 4, lr);
        let (start, end) = (initial(&network), gpu.parameters().unwrap());
        let distance = relative_distance(&end, &cpu.parameters().unwrap(), &start);
        eprintln!(
            "{kind:?}: losses {actual:?} / {expected:?}; weights apart by {distance:.1e} of their change"
        );
        assert!(distance < bound, "{kind:?}: weights differ by {distance}");
        for parameter in network.parameters().iter().filter(|p| p.role.is_trained()) {
            let changed = end[&parameter.name] != start[&parameter.name];
            assert_eq!(changed, network.trains(parameter), "{kind:?}: {}", parameter.name);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_six_views_have_the_cpu_engine_s_logits() {
    let network = cifarnet(32, 1);
    let config = config(6);
    let (mut cpu, mut gpu) = (cpu(&network, &config), cuda(&network, &config, Precision::Fp32));
    let batch = pictures(&network, 6, 0);
    for view in View::of(6) {
        let of_view = view.apply(&batch, 32, 1);
        let [expected, actual] = [cpu.predict(&of_view), gpu.predict(&of_view)].map(Result::unwrap);
        let logits_difference = difference(&actual, &expected) / square(&expected);
        assert!(logits_difference < 1e-8, "{view:?}: {logits_difference}");
    }
}
