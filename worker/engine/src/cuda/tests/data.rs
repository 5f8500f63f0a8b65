//! Tests of datasets on the GPU.

use super::*;
use crate::cuda::steps::split_batch;
use lockstep_data::loader::View;

/// Path of the bundled pictures, on this or another machine.
pub(super) fn fashion_mnist() -> PathBuf {
    let bundled = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/fashion-mnist");
    std::env::var_os("LOCKSTEP_TEST_PICTURES").map_or_else(|| bundled.into(), PathBuf::from)
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_pictures_are_augmented_as_on_the_cpu() {
    // Pictures are cropped and flipped, with a mirrored border and with a black one, and also enlarged or reduced.
    for (side, reflect_border) in [(28, true), (28, false), (64, false), (16, false)] {
        let spec = DataSpec {
            crop_padding: 3,
            reflect_border,
            alternating_flip: reflect_border,
            horizontal_flip: true,
            image_size: Some(ImageSize::Fixed(side)),
            ..DataSpec::default()
        };
        let network = network_of(Arch::ResNet20, Stem::Cifar, side as usize, 1);
        let config = config(64);
        let plan = EpochPlan { epoch: 1, drop_remainder: true, threads: 2, ..EpochPlan::of(64) };
        let mut results = Vec::new();
        for (format, on_gpu) in
            [(BatchFormat::Normalised, false), (BatchFormat::AugmentParams, true), (BatchFormat::Bytes, true)]
        {
            let mut data = DataSource::open(&fashion_mnist(), &spec, 3).unwrap();
            let mut engine =
                if on_gpu { cuda(&network, &config, Precision::Fp32) } else { cpu(&network, &config) };
            assert_eq!(engine.take_data(&data).unwrap() == BatchFormat::AugmentParams, on_gpu);
            data.set_format(format);
            let batch = data.epoch(plan).next().unwrap().unwrap();
            let result = engine.train_step(&[batch], 0.01).unwrap();
            let validation = validation_batch(&data, 64);
            let evaluated = engine.eval_step(&validation).unwrap();
            // The same pictures in two batches.
            for part in split_batch(&validation, 40, &network).iter() {
                engine.start_evaluation(part).unwrap();
            }
            let in_parts = engine.finish_evaluation().unwrap();
            assert_near(in_parts.loss_sum, evaluated.loss_sum, 1e-5, "sum of losses of two batches");
            assert_eq!((in_parts.correct, in_parts.samples), (evaluated.correct, evaluated.samples));
            // Views of pictures of the network's size.
            let views = if side == 28 { View::of(6) } else { Vec::new() };
            let of_view = |view: &View| engine.eval_step(&view.apply(&validation, 28, 1)).unwrap().loss_sum;
            let of_views: Vec<f64> = views.iter().map(of_view).collect();
            eprintln!(
                "{side} px, {format:?}: loss {}, gradient {}, {evaluated:?}",
                result.loss, result.grad_norm
            );
            results.push((result.loss, evaluated.loss_sum, of_views));
        }
        let (expected_loss, expected_sum, expected_views) = &results[0];
        for (loss, loss_sum, of_views) in &results[1..] {
            // After scaling, a byte may be rounded differently.
            assert_near(*loss, *expected_loss, 2e-3, format_args!("{side} px: loss"));
            assert_near(
                *loss_sum,
                *expected_sum,
                5e-3,
                format_args!("{side} px: sum of losses of the evaluation"),
            );
            for (actual, expected) in of_views.iter().zip(expected_views) {
                assert_near(*actual, *expected, 5e-3, format_args!("{side} px: sum of losses of a view"));
            }
        }
        // The six views differ.
        assert!(expected_views.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
