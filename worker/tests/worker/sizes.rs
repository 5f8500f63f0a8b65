//! Progressive resizing: each epoch has pictures of its size, and an engine that changes its size computes the same as an
//! engine that is built for the new size.

use crate::{
    data::{batches, bundled, validation_batches_by},
    pytorch::{config, sgd},
};
use lockstep_comm::SingleRank;
use lockstep_data::{
    DataError,
    loader::{Batch, DataSource, EpochPlan},
};
use lockstep_engine::{
    Engine, EngineConfig, LossConfig, build_cpu,
    net::{Network, init, resnet},
};
use lockstep_protocol::spec::{Arch, DataSpec, ImageSize, ModelSpec, SizeFrom, Stem};
use std::sync::Arc;

const BATCH: usize = 8;

fn network(model: &ModelSpec, side: usize) -> Arc<Network> {
    Arc::new(resnet::build(model, side, 3, 10).expect("large enough"))
}

fn engine(network: Arc<Network>) -> Box<dyn Engine> {
    let initial = init::initial_parameters(&network, false, 1);
    let loss = LossConfig { label_smoothing: 0.1, ..LossConfig::default() };
    let config = EngineConfig { loss, ..config(BATCH, sgd(1e-4)) };
    build_cpu(network, &initial, config, Arc::new(SingleRank)).expect("an engine")
}

/// A batch of `pictures` pictures, which differ between steps.
fn batch(side: usize, step: usize, pictures: usize) -> Batch {
    let value = |i: usize| (((i * 31 + step * 977) % 509) as f32 / 254.5 - 1.0) * 1.5;
    Batch {
        images: (0..pictures * side * side * 3).map(value).collect(),
        labels: (0..pictures).map(|i| ((i * 3 + step) % 10) as u32).collect(),
        indices: (0..pictures as u64).collect(),
        global_samples: pictures,
        ..Batch::default()
    }
}

#[test]
fn a_resized_network_equals_one_built_for_that_size() {
    for arch in [Arch::ResNet20, Arch::ResNet18, Arch::ResNet50, Arch::ResNeXt50_32x4d] {
        for stem in [Stem::Cifar, Stem::Imagenet] {
            let model = ModelSpec { arch, stem, ..ModelSpec::default() };
            let base = network(&model, 64);
            for side in [32, 33, 96, 224] {
                assert_eq!(base.resized(side), *network(&model, side), "{arch:?}, {stem:?}, {side}");
            }
            assert_eq!(base.resized(224).parameters(), base.parameters());
        }
    }
}

#[test]
fn changing_the_image_size_gives_the_bits_of_a_new_engine() {
    for (arch, stem, sides, evaluation_side) in [
        (Arch::ResNet20, Stem::Cifar, [16, 24], 32),
        // A network with max pooling, whose gradients are not summed exactly.
        (Arch::ResNet18, Stem::Imagenet, [24, 32], 40),
    ] {
        let model = ModelSpec { arch, stem, ..ModelSpec::default() };
        let mut resized = engine(network(&model, sides[1]));
        resized.add_image_sizes(&sides[..1], &[evaluation_side]).expect("room");
        // The size changes back and forth, and a smaller batch follows. Values of another size must not remain in any buffer.
        for (visit, side) in [sides[0], sides[1], sides[0], sides[1]].into_iter().enumerate() {
            let mut fresh = engine(network(&model, side));
            fresh.set_parameters(&resized.parameters().unwrap()).unwrap();
            fresh.set_optimizer_state(&resized.optimizer_state().unwrap()).unwrap();
            resized.set_image_size(side).expect("a size of this engine");
            for (step, pictures) in [BATCH, BATCH, BATCH - 3].into_iter().enumerate() {
                let batch = [batch(side, 10 * visit + step, pictures)];
                let (found, expected) = (resized.train_step(&batch, 0.05), fresh.train_step(&batch, 0.05));
                let (found, expected) = (found.unwrap(), expected.unwrap());
                assert_eq!(
                    (found.loss, found.grad_norm),
                    (expected.loss, expected.grad_norm),
                    "{arch:?} {side}"
                );
            }
            let weights = resized.parameters().unwrap();
            assert!(weights == fresh.parameters().unwrap(), "{arch:?} at {side}, visit {visit}");
            assert!(resized.optimizer_state().unwrap() == fresh.optimizer_state().unwrap());

            let mut evaluator = engine(network(&model, evaluation_side));
            evaluator.set_parameters(&weights).unwrap();
            resized.set_image_size(evaluation_side).expect("a size of this engine");
            let validation = batch(evaluation_side, 99, BATCH);
            assert_eq!(resized.eval_step(&validation).unwrap(), evaluator.eval_step(&validation).unwrap());
            assert_eq!(resized.predict(&validation).unwrap(), evaluator.predict(&validation).unwrap());
        }
        let error = resized.set_image_size(48).expect_err("an unknown size").to_string();
        assert!(error.contains("48 pixels"), "{error}");
        let error =
            resized.train_step(&[batch(sides[0], 0, BATCH)], 0.05).expect_err("of another size").to_string();
        assert!(error.contains("8 labels"), "{error}");
    }
}

/// Opens the bundled pictures, of 28 x 28.
fn open(spec: &DataSpec) -> Result<DataSource, DataError> {
    DataSource::open(&bundled(), spec, 5)
}

fn plan(epoch: u32, first_step: u64) -> EpochPlan {
    EpochPlan { epoch, first_step, drop_remainder: true, threads: 2, ..EpochPlan::of(500) }
}

#[test]
fn epochs_and_validation_have_pictures_of_their_sizes() {
    for random_resized_crop in [false, true] {
        let spec = DataSpec { random_resized_crop, ..DataSpec::default() };
        let sizes = [(1, 16), (3, 24), (4, 32)].map(|(epoch, size)| SizeFrom { epoch, size });
        let scheduled = open(&DataSpec {
            image_size: Some(ImageSize::Schedule(sizes.to_vec())),
            validation_size: Some(40),
            ..spec.clone()
        })
        .expect("opens");
        assert_eq!(scheduled.shape.image_size, 40);
        assert_eq!(scheduled.shape.training_sizes, [(0, 16), (2, 24), (3, 32)]);
        let fixed = |side: u32| {
            open(&DataSpec { image_size: Some(ImageSize::Fixed(side)), ..spec.clone() }).expect("opens")
        };
        for (epoch, side) in [(0, 16), (1, 16), (2, 24), (3, 32), (9, 32)] {
            assert_eq!(scheduled.shape.training_size(epoch), side as usize);
            if ![1, 2, 9].contains(&epoch) {
                continue;
            }
            let reference = fixed(side);
            // These batches begin in the middle of the epoch, as after a restart.
            let [found, expected] = [&scheduled, &reference].map(|source| batches(source, plan(epoch, 14)));
            assert!(found.len() == 2 && found == expected, "epoch {epoch}");
            let is_validation = false;
            let labelled = scheduled.picture(is_validation, 7, Some(epoch)).unwrap();
            let (_, picture) = &labelled;
            assert_eq!((picture.width, picture.height), (side, side));
            assert!(labelled == reference.picture(is_validation, 7, Some(epoch)).unwrap(), "epoch {epoch}");
        }
        let reference = fixed(40);
        let [found, expected] = [&scheduled, &reference].map(|source| validation_batches_by(source, 100, 1));
        assert!(found == expected, "validation");
        let is_validation = true;
        let picture = |source: &DataSource| source.picture(is_validation, 3, None).unwrap();
        assert!(picture(&scheduled) == picture(&reference));
    }
}

#[test]
fn validation_may_be_larger_than_the_dataset_s_own_size_but_not_smaller() {
    let larger = open(&DataSpec { validation_size: Some(32), ..DataSpec::default() }).expect("opens");
    assert_eq!((larger.shape.image_size, larger.shape.training_size(0)), (32, 28));
    let smaller = DataSpec { validation_size: Some(26), ..DataSpec::default() };
    let error = open(&smaller).expect_err("refused").to_string();
    assert!(error.contains("26 pixels are less than training's 28; give 28 or more"), "{error}");
}
