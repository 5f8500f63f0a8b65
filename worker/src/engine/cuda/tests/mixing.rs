//! Mixed pictures: the loss against two labels, and pictures that the host has mixed as bytes.

use super::*;
use crate::data::loader::Mixing;

/// Pictures that are said to be mixed with those of other labels; what is in them does not matter to the loss.
fn mixed(network: &Network, count: usize, number: usize, lambda: f32) -> Batch {
    let mixed_labels = labels(&format!("others {number}"), count, network.classes);
    Batch { mixed_labels, lambda, ..pictures(network, count, number) }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_a_step_on_mixed_pictures_is_the_cpu_engine_s() {
    let network = network(Arch::ResNet18, Stem::Imagenet, 64);
    for (precision, tolerance) in [(Precision::Fp32, 1e-4), (Precision::Fp16, 2e-2), (Precision::Bf16, 5e-2)]
    {
        for (draw, lambda) in [0.0, 0.3, 0.5, 0.8, 1.0].into_iter().enumerate() {
            // One micro-batch is mixed and the other is not: nothing stays behind from one to the next.
            let config = EngineConfig { accumulate: 2, ..config(16) };
            let step = [mixed(&network, 16, draw, lambda), pictures(&network, 16, 100 + draw)];
            let (mut cpu, mut gpu) = (cpu(&network, &config), cuda(&network, &config, precision));
            let (wanted, ours) = (cpu.train_step(&step, 0.1).unwrap(), gpu.train_step(&step, 0.1).unwrap());
            let apart = ((ours.loss - wanted.loss) / wanted.loss).abs();
            assert!(apart < tolerance, "{precision:?}, lambda {lambda}: {} {}", ours.loss, wanted.loss);
            let norms = ((ours.grad_norm - wanted.grad_norm) / wanted.grad_norm).abs();
            assert!(norms < tolerance.max(1e-3), "{precision:?}, lambda {lambda}: gradient {norms} apart");
            if precision == Precision::Fp32 {
                assert_eq!(ours.correct, wanted.correct, "lambda {lambda}");
                let bias = "fc.bias.momentum";
                let [a, b] = [&gpu, &cpu].map(|e| e.optimizer_state().unwrap().slots[bias].values.clone());
                assert!(difference(&a, &b) < 1e-8 * square(&b).max(1e-6), "lambda {lambda}: {a:?} {b:?}");
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_a_lambda_of_1_is_the_step_without_mixing_bit_for_bit() {
    let network = network(Arch::ResNet20, Stem::Cifar, 32);
    for precision in [Precision::Fp32, Precision::Fp16] {
        let config = config(8);
        let [plain, other] = [pictures(&network, 8, 0), mixed(&network, 8, 0, 1.0)].map(|batch| {
            let mut engine = cuda(&network, &config, precision);
            let result = engine.train_step(&[batch], 0.1).unwrap();
            (result.loss, result.correct, engine.parameters().unwrap())
        });
        assert!(plain == other, "{precision:?}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_mixed_pictures_come_from_the_host_as_bytes() {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/fashion-mnist"));
    let mut data = DataSource::open(&path, &DataSpec { crop_padding: 2, ..DataSpec::default() }, 1).unwrap();
    data.set_mixing(Mixing { mixup: 0.4, cutmix: 1.0 });
    let network =
        resnet::build(&ModelSpec { arch: Arch::ResNet20, ..ModelSpec::default() }, 28, 1, 10).unwrap();
    let (network, config) = (Arc::new(network), config(16));
    let (mut cpu, mut gpu) = (cpu(&network, &config), cuda(&network, &config, Precision::Fp32));
    let plan = EpochPlan {
        epoch: 0,
        first_step: 0,
        rank: 0,
        world_size: 1,
        batch_size: 16,
        accumulate: 1,
        drop_remainder: true,
        threads: 1,
    };
    let wanted: Vec<Batch> = data.epoch(plan).take(4).map(Result::unwrap).collect();
    data.set_form(gpu.take_data(&data).unwrap());
    let ours: Vec<Batch> = data.epoch(plan).take(4).map(Result::unwrap).collect();
    for (ours, wanted) in ours.iter().zip(&wanted) {
        assert!(ours.draws.is_empty() && ours.bytes.len() == 16 * 28 * 28);
        let [a, b] = [(&mut gpu, ours), (&mut cpu, wanted)]
            .map(|(engine, batch)| engine.train_step(std::slice::from_ref(batch), 0.0).unwrap().loss);
        assert!((a - b).abs() < 5e-3 * b, "{a} instead of {b}");
    }
}
