//! Tests of progressive resizing: after a change of size, an engine computes the same as an engine built for that size.

use super::*;
use crate::EvalResult;

/// Steps per size: the first runs directly, the second is captured, the third replayed.
const STEPS: usize = 4;

fn state(engine: &dyn Engine) -> (NamedTensors, NamedTensors) {
    (engine.parameters().unwrap(), engine.optimizer_state().unwrap().slots)
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_changing_sizes_gives_the_bits_of_new_engines() {
    for (arch, stem, sides, evaluation_side) in [
        (Arch::ResNet20, Stem::Cifar, [16, 32], 40),
        // The folded stem, max pooling, and fusion across 1x1 convolutions.
        (Arch::ResNet50, Stem::Imagenet, [64, 96], 128),
    ] {
        for precision in [Precision::Fp32, Precision::Fp16, Precision::Bf16] {
            let config = config(16);
            let [small, large] = sides.map(|side| network(arch, stem, side));
            let evaluation_network = network(arch, stem, evaluation_side);
            let mut resized = cuda(&large, &config, precision);
            resized.add_image_sizes(&sides[..1], &[evaluation_side]).unwrap();
            for (visit, sized) in [&small, &large, &small, &large].into_iter().enumerate() {
                let side = sized.image_size;
                let mut fresh = cuda(sized, &config, precision);
                fresh.set_parameters(&resized.parameters().unwrap()).unwrap();
                fresh.set_optimizer_state(&resized.optimizer_state().unwrap()).unwrap();
                resized.set_image_size(side).unwrap();
                for step in 0..STEPS {
                    // The last batch is smaller, as at the end of an epoch.
                    let count = if step + 1 == STEPS { 11 } else { 16 };
                    let batch = [pictures(sized, count, 10 * visit + step)];
                    let (a, b) =
                        (resized.train_step(&batch, 0.01).unwrap(), fresh.train_step(&batch, 0.01).unwrap());
                    assert_eq!((a.loss, a.grad_norm), (b.loss, b.grad_norm), "{arch:?} {precision:?} {side}");
                }
                assert!(
                    state(resized.as_ref()) == state(fresh.as_ref()),
                    "{arch:?} {precision:?} {side}, visit {visit}"
                );
                let mut evaluator = cuda(&evaluation_network, &config, precision);
                evaluator.set_parameters(&resized.parameters().unwrap()).unwrap();
                resized.set_image_size(evaluation_side).unwrap();
                for number in 0..3 {
                    let batch = pictures(&evaluation_network, 16, 90 + number);
                    let (a, b) = (resized.eval_step(&batch).unwrap(), evaluator.eval_step(&batch).unwrap());
                    let bits =
                        |result: &EvalResult| (result.loss_sum.to_bits(), result.correct, result.samples);
                    assert_eq!(bits(&a), bits(&b), "{arch:?} {precision:?} {side}, visit {visit}");
                    // After few steps, running statistics are inexact: values overflow float16 within fifty layers.
                    let is_checked = precision != Precision::Fp16 || arch != Arch::ResNet50;
                    assert!(a.loss_sum.is_finite() || !is_checked, "{arch:?} {precision:?} {side}: {a:?}");
                }
            }
            assert!(resized.set_image_size(48).is_err());
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_resident_pictures_are_scaled_to_each_size() {
    let spec = DataSpec {
        crop_padding: 3,
        image_size: Some(ImageSize::Schedule(
            [(1, 16), (2, 28)].map(|(epoch, size)| SizeFrom { epoch, size }).to_vec(),
        )),
        validation_size: Some(40),
        ..DataSpec::default()
    };
    let network = network_of(Arch::ResNet20, Stem::Cifar, 28, 1);
    let config = config(64);
    let mut results = Vec::new();
    for (format, on_gpu) in
        [(BatchFormat::Normalised, false), (BatchFormat::AugmentParams, true), (BatchFormat::Bytes, true)]
    {
        let mut data = DataSource::open(&fashion_mnist(), &spec, 3).unwrap();
        let mut engine =
            if on_gpu { cuda(&network, &config, Precision::Fp32) } else { cpu(&network, &config) };
        engine.add_image_sizes(&[16], &[40]).unwrap();
        engine.take_data(&data).unwrap();
        data.set_format(format);
        let mut reported = Vec::new();
        for epoch in 0..2 {
            engine.set_image_size(data.shape.training_size(epoch)).unwrap();
            let plan = EpochPlan { epoch, drop_remainder: true, threads: 2, ..EpochPlan::of(64) };
            for batch in data.epoch(plan).take(STEPS) {
                reported.push(engine.train_step(&[batch.unwrap()], 0.01).unwrap().loss);
            }
            engine.set_image_size(data.shape.image_size).unwrap();
            let evaluated = engine.eval_step(&validation_batch(&data, 64)).unwrap();
            reported.push(evaluated.loss_sum as f32 / 64.0);
        }
        eprintln!("{format:?}: {reported:?}");
        results.push(reported);
    }
    let cpu = results.remove(0);
    for actual in &results {
        let worst = worst_loss(actual, &cpu);
        // After scaling, a byte may be rounded differently.
        assert!(worst < 5e-3, "{actual:?} / {cpu:?}");
    }
}
