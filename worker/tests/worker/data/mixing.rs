//! mixup and cutmix.

use super::*;

/// The bundled pictures, mixed by mixup and cutmix.
fn open_mixed(spec: &DataSpec) -> DataSource {
    let mut source = DataSource::open(&bundled(), spec, 5).expect("opens");
    source.set_mixing(Mixing { mixup: 0.4, cutmix: 1.0 });
    source
}

#[test]
fn mixed_pictures_of_a_step_are_the_same_at_any_number_of_ranks_and_micro_batches() {
    let spec = DataSpec { crop_padding: 2, horizontal_flip: true, ..DataSpec::default() };
    let source = open_mixed(&spec);
    // The last steps of the epoch: 8000 = 133 * 60 + 20, so the last step is small.
    let whole = EpochPlan { first_step: 104, batch_size: 60, drop_remainder: false, ..plan(0, 1) };
    let single = batches(&source, whole);
    for (world_size, accumulate) in [(2, 1), (4, 1), (1, 3), (2, 2)] {
        let plan = |rank| EpochPlan {
            batch_size: 60 / (world_size as usize * accumulate),
            accumulate,
            rank,
            world_size,
            ..whole
        };
        let ranks: Vec<_> = (0..world_size).map(|rank| batches(&source, plan(rank))).collect();
        for (step, whole) in single.iter().enumerate() {
            let parts =
                (0..accumulate).flat_map(|micro| ranks.iter().map(move |r| &r[step * accumulate + micro]));
            let mut joined = Batch::default();
            for part in parts {
                assert_eq!(part.lambda, whole.lambda);
                joined.images.extend(&part.images);
                joined.labels.extend(&part.labels);
                joined.mixed_labels.extend(&part.mixed_labels);
                joined.indices.extend(&part.indices);
            }
            assert!(joined.images == whole.images, "step {step}, {world_size} ranks x {accumulate}");
            assert_eq!(
                (joined.labels, joined.mixed_labels, joined.indices),
                (whole.labels.clone(), whole.mixed_labels.clone(), whole.indices.clone())
            );
        }
    }
    // An epoch can be continued in its middle, and another epoch mixes pictures differently.
    let rest = batches(&source, EpochPlan { first_step: 120, ..whole });
    assert!(rest == single[16..]);
    let lambdas =
        |epoch| batches(&source, EpochPlan { epoch, ..whole }).iter().map(|b| b.lambda).collect::<Vec<_>>();
    assert_ne!(lambdas(0), lambdas(1));
}

#[test]
fn each_picture_of_a_step_is_mixed_with_its_cyclic_predecessor() {
    let spec = DataSpec { crop_padding: 2, ..DataSpec::default() };
    let plain = DataSource::open(&bundled(), &spec, 5).expect("opens");
    let (plain, mixed) = (batches(&plain, plan(0, 1)), batches(&open_mixed(&spec), plan(0, 1)));
    let size = 28 * 28;
    let (mut blended, mut cut) = (0, 0);
    for (plain, mixed) in plain.iter().zip(&mixed) {
        assert_eq!((&plain.labels, &plain.indices), (&mixed.labels, &mixed.indices));
        let predecessors: Vec<u32> = (0..64).map(|i| plain.labels[(i + 63) % 64]).collect();
        assert_eq!(mixed.mixed_labels, predecessors);
        let lambda = mixed.lambda;
        assert!((0.0..=1.0).contains(&lambda), "{lambda}");
        let picture = |i: usize| &plain.images[i % 64 * size..][..size];
        let all = || {
            (0..64)
                .flat_map(|i| picture(i).iter().zip(picture(i + 63)).zip(&mixed.images[i * size..][..size]))
        };
        let is_blend =
            all().all(|((own, before), v)| (own * lambda + before * (1.0 - lambda) - v).abs() < 1e-5);
        let is_cut = all().all(|((own, before), v)| v == own || v == before);
        assert!(is_blend || is_cut, "lambda {lambda}");
        blended += usize::from(is_blend && !is_cut);
        cut += usize::from(is_cut && !is_blend);
    }
    assert!(blended > 40 && cut > 40, "{blended} steps are blended and {cut} cut");
}

#[test]
fn mixed_bytes_match_mixed_normalised_pictures_to_the_nearest_byte() {
    let spec =
        DataSpec { crop_padding: 2, mean: Some(vec![0.0]), std: Some(vec![1.0]), ..DataSpec::default() };
    let mut source = open_mixed(&spec);
    let normalised = batches(&source, plan(0, 1));
    source.set_format(BatchFormat::Bytes);
    for (bytes, normalised) in batches(&source, plan(0, 1)).iter().zip(&normalised) {
        assert_eq!((bytes.lambda, bytes.bytes.len()), (normalised.lambda, 64 * 28 * 28));
        for (byte, value) in bytes.bytes.iter().zip(&normalised.images) {
            assert!((f32::from(*byte) - value * 255.0).abs() < 0.51, "{byte} instead of {}", value * 255.0);
        }
    }
}

#[test]
fn validation_pictures_are_never_mixed() {
    let source = open_mixed(&DataSpec::default());
    let plain = DataSource::open(&bundled(), &DataSpec::default(), 5).expect("opens");
    assert!(validation_batches(&source, 50) == validation_batches(&plain, 50));
}

/// An engine that holds the pictures can mix them with only a batch's augmentation parameters: the indices of the pictures and of
/// their partners, and the rectangle, at any number of ranks and micro-batches.
#[test]
fn an_engine_with_resident_pictures_can_mix_them() {
    let spec = DataSpec { crop_padding: 2, horizontal_flip: true, ..DataSpec::default() };
    let plain = DataSource::open(&bundled(), &spec, 5).expect("opens");
    let mut resident = open_mixed(&spec);
    assert!(resident.resident().is_some());
    assert!(resident.is_prepared_each_step(), "CPU cores mix the pictures");
    resident.set_format(BatchFormat::AugmentParams);
    assert!(!resident.is_prepared_each_step(), "no picture is prepared on the host");
    let (size, params_by_index, pictures) = (28 * 28, augment_params(&spec), augmented_pictures(&plain));
    for (world_size, accumulate) in [(1, 1), (2, 2)] {
        for rank in 0..world_size {
            let plan = EpochPlan {
                batch_size: 64 / world_size as usize / accumulate,
                accumulate,
                rank,
                world_size,
                ..last_steps()
            };
            let source = open_mixed(&spec);
            let expected = batches(&source, plan);
            for (number, (batch, expected)) in batches(&resident, plan).iter().zip(&expected).enumerate() {
                assert!(batch.images.is_empty() && batch.bytes.is_empty());
                assert_eq!((&batch.labels, &batch.indices), (&expected.labels, &expected.indices));
                assert_eq!((&batch.mixed_labels, batch.lambda), (&expected.mixed_labels, expected.lambda));
                assert_eq!((batch.augment_params.len(), &expected.mix_params), (batch.labels.len(), &None));
                let params = batch.mix_params.clone().expect("mixed");
                let MixParams { mix, previous_index, previous_params } = params;
                assert_eq!(mix.lambda, batch.lambda);
                let all_params = batch
                    .indices
                    .iter()
                    .zip(&batch.augment_params)
                    .chain([(&previous_index, &previous_params)]);
                for (index, params) in all_params {
                    assert_eq!(params_by_index[index], *params, "picture {index}");
                }
                let mut predecessor = previous_index;
                for (index, expected) in batch.indices.iter().zip(expected.images.chunks_exact(size)) {
                    for (pixel, expected) in expected.iter().enumerate() {
                        let (y, x) = (pixel / 28, pixel % 28);
                        let [own, before] = [index, &predecessor].map(|index| pictures[index][pixel]);
                        let value = match &mix.cut {
                            Some([rows, columns]) if rows.contains(&y) && columns.contains(&x) => before,
                            Some(_) => own,
                            None => own * mix.lambda + before * (1.0 - mix.lambda),
                        };
                        assert_eq!(value, *expected, "batch {number}, picture {index}, {y} {x}");
                    }
                    predecessor = *index;
                }
            }
        }
    }
}

/// The last 20 of the first epoch's 125 steps.
fn last_steps() -> EpochPlan {
    EpochPlan { first_step: 105, ..plan(0, 1) }
}

/// Each training picture of [`last_steps`] as it is augmented, by its index.
fn augmented_pictures(plain: &DataSource) -> BTreeMap<u64, Vec<f32>> {
    let all = batches(plain, last_steps()).into_iter();
    let pictures = |batch: Batch| {
        let pictures: Vec<_> = batch.images.chunks_exact(28 * 28).map(<[f32]>::to_vec).collect();
        batch.indices.into_iter().zip(pictures)
    };
    all.flat_map(pictures).collect()
}

/// The augmentation parameters of each training picture of [`last_steps`], without mixing.
fn augment_params(spec: &DataSpec) -> BTreeMap<u64, u32> {
    let mut source = DataSource::open(&bundled(), spec, 5).expect("opens");
    source.set_format(BatchFormat::AugmentParams);
    let all = batches(&source, last_steps()).into_iter();
    all.flat_map(|batch| batch.indices.into_iter().zip(batch.augment_params)).collect()
}
