//! Datasets: the bundled pictures, CIFAR and IDX files, and folders, valid and broken.

mod formats;
mod mixing;

use flate2::{Compression, write::GzEncoder};
use lockstep_data::{
    inspect,
    loader::{Batch, BatchFormat, DataSource, EpochPlan, MixParams, Mixing},
};
use lockstep_protocol::spec::{BrokenFiles, DataSpec, ImageSize, Validation};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Write,
    path::{Path, PathBuf},
};
use tempfile::TempDir;

pub(crate) fn bundled() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/fashion-mnist")
}

/// The first epoch, in steps of 64 pictures over all ranks.
fn plan(rank: u32, world_size: u32) -> EpochPlan {
    EpochPlan {
        rank,
        world_size,
        drop_remainder: true,
        threads: 2,
        ..EpochPlan::of(64 / world_size as usize)
    }
}

pub(crate) fn batches(source: &DataSource, plan: EpochPlan) -> Vec<Batch> {
    source.epoch(plan).map(|b| b.expect("readable")).collect()
}

/// The whole validation split.
fn validation_batches(source: &DataSource, batch_size: usize) -> Vec<Batch> {
    validation_batches_by(source, batch_size, 1)
}

/// The whole validation split, prepared by this number of threads.
pub(crate) fn validation_batches_by(source: &DataSource, batch_size: usize, threads: usize) -> Vec<Batch> {
    let (rank, world_size) = (0, 1);
    source.validation(rank, world_size, batch_size, threads).map(|b| b.expect("readable")).collect()
}

pub(crate) fn first_batch(source: &DataSource, plan: EpochPlan) -> Batch {
    source.epoch(plan).next().expect("a batch").expect("readable")
}

fn open_error(path: &Path, spec: &DataSpec) -> String {
    DataSource::open(path, spec, 0).expect_err("must not open").to_string()
}

/// Pictures whose values in a batch are their bytes.
fn unnormalised(spec: DataSpec) -> DataSpec {
    DataSpec { mean: Some(vec![0.0]), std: Some(vec![1.0 / 255.0]), ..spec }
}

/// Writes a file and the folders that contain it.
fn write(path: &Path, content: impl AsRef<[u8]>) {
    fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    fs::write(path, content).expect("writes");
}

#[track_caller]
fn assert_contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{text:?} should contain {part:?}");
    }
}

#[test]
fn the_bundled_pictures_are_as_documented() {
    let info = inspect(&bundled()).expect("readable");
    assert_eq!((info.format.as_str(), info.height, info.width, info.channels), ("idx", 28, 28, 1));
    assert_eq!(info.classes[9], "Ankle boot");
    assert_eq!(info.splits[0].per_class, [800; 10]);
    assert_eq!(info.splits[1].samples, 1000);
    // Fashion-MNIST's published statistics over all its pictures are 0.2860 and 0.3530.
    assert!((info.mean[0] - 0.286).abs() < 0.01 && (info.std[0] - 0.353).abs() < 0.01, "{info:?}");
}

#[test]
fn ranks_divide_each_step_s_pictures_equally_without_overlap() {
    let source = DataSource::open(&bundled(), &DataSpec::default(), 7).expect("opens");
    let single = batches(&source, plan(0, 1));
    assert_eq!(single.len(), 125);
    // Every picture occurs once.
    assert_eq!(single.iter().flat_map(|b| &b.indices).collect::<BTreeSet<_>>().len(), 8000);
    for world_size in [2, 4] {
        let ranks: Vec<_> = (0..world_size).map(|r| batches(&source, plan(r, world_size))).collect();
        for (step, whole) in single.iter().enumerate() {
            let joined: Vec<f32> = ranks.iter().flat_map(|b| b[step].images.clone()).collect();
            assert!(
                joined == whole.images,
                "step {step} of {world_size} ranks differs in its pictures or their augmentation"
            );
            assert!(ranks.iter().all(|b| b[step].labels.len() == 64 / world_size as usize));
        }
    }
}

#[test]
fn epochs_and_seeds_shuffle_differently_and_repeatably() {
    let open = |seed| DataSource::open(&bundled(), &DataSpec::default(), seed).expect("opens");
    let first = |source: &DataSource, epoch| first_batch(source, EpochPlan { epoch, ..plan(0, 1) });
    let source = open(1);
    assert_eq!(first(&source, 0), first(&open(1), 0));
    assert_ne!(first(&source, 0).indices, first(&source, 1).indices);
    assert_ne!(first(&source, 0).indices, first(&open(2), 0).indices);
}

#[test]
fn continuing_in_an_epoch_gives_its_remaining_pictures() {
    let source = DataSource::open(&bundled(), &DataSpec::default(), 3).expect("opens");
    let plan = EpochPlan { accumulate: 2, batch_size: 16, ..plan(1, 2) };
    let whole = batches(&source, plan);
    let rest = batches(&source, EpochPlan { first_step: 50, ..plan });
    assert!(rest == whole[100..]);
}

#[test]
fn a_small_last_step_is_kept_on_request_with_pictures_for_every_rank() {
    let source = DataSource::open(&bundled(), &DataSpec::default(), 3).expect("opens");
    // Steps of 3 * 171 = 513 pictures: 8000 = 15 * 513 + 305. Steps of 3 * 1333 = 3999 pictures: 8000 = 2 * 3999 + 2, and 2
    // pictures are fewer than ranks.
    for (batch_size, last) in [(171, [101, 102, 102]), (1333, [1, 1, 1])] {
        let count = |rank| {
            let plan = EpochPlan { batch_size, drop_remainder: false, world_size: 3, rank, ..plan(0, 1) };
            batches(&source, plan).last().expect("a batch").labels.len()
        };
        assert_eq!([count(0), count(1), count(2)], last);
    }
}

#[test]
fn every_rank_knows_the_global_size_of_each_micro_batch() {
    let mut source = DataSource::open(&bundled(), &DataSpec::default(), 3).expect("opens");
    let weights: Vec<f32> = (1..=10u8).map(|class| f32::from(class) / 4.0).collect();
    source.set_class_weights(weights.clone());
    for (world_size, accumulate, batch_size) in
        [(1, 1, 64), (3, 1, 171), (3, 1, 1333), (2, 4, 77), (5, 3, 41)]
    {
        let plan = |rank| EpochPlan {
            batch_size,
            accumulate,
            drop_remainder: false,
            world_size,
            rank,
            ..plan(0, 1)
        };
        let ranks: Vec<_> = (0..world_size).map(|rank| batches(&source, plan(rank))).collect();
        for number in 0..ranks[0].len() {
            let all: usize = ranks.iter().map(|batches| batches[number].labels.len()).sum();
            let labels = ranks.iter().flat_map(|batches| &batches[number].labels);
            let weight: f64 = labels.map(|label| f64::from(weights[*label as usize])).sum();
            for batches in &ranks {
                assert_eq!(batches[number].global_samples, all, "{world_size} ranks, micro-batch {number}");
                assert_eq!(batches[number].global_weight, Some(weight), "micro-batch {number}");
            }
        }
    }
}

#[test]
fn validation_reads_every_picture_once_without_augmentation() {
    let source = DataSource::open(&bundled(), &DataSpec::default(), 0).expect("opens");
    let shares: Vec<Vec<Batch>> =
        (0..3).map(|r| source.validation(r, 3, 50, 2).map(|b| b.expect("readable")).collect()).collect();
    let seen: Vec<u64> = shares.iter().flatten().flat_map(|b| b.indices.clone()).collect();
    assert_eq!(seen, (0..1000).collect::<Vec<_>>());
    let mean = shares.iter().flatten().flat_map(|b| &b.images).sum::<f32>() / (1000.0 * 784.0);
    assert!(mean.abs() < 0.05, "normalised pictures have a mean near 0, not {mean}");
}

#[test]
fn a_fraction_is_held_out_and_never_trained_on() {
    let spec = DataSpec { validation: Validation::Fraction(0.1), ..DataSpec::default() };
    let source = DataSource::open(&bundled(), &spec, 0).expect("opens");
    assert_eq!((source.shape.train_samples, source.shape.validation_samples), (7159, 841));
    let held_out: BTreeSet<u64> =
        validation_batches(&source, 100).into_iter().flat_map(|batch| batch.indices).collect();
    assert!(batches(&source, plan(0, 1)).iter().flat_map(|b| &b.indices).all(|i| !held_out.contains(i)));
    assert_eq!(held_out.len(), 841);
}

#[test]
fn pictures_are_scaled_to_the_job_s_size() {
    let spec = DataSpec { image_size: Some(ImageSize::Fixed(56)), ..DataSpec::default() };
    let source = DataSource::open(&bundled(), &spec, 0).expect("opens");
    assert_eq!(first_batch(&source, plan(0, 1)).images.len(), 64 * 56 * 56);
}

#[test]
fn grey_pictures_use_the_mean_of_a_colour_normalisation() {
    let spec = DataSpec {
        mean: Some(vec![0.125, 0.25, 0.375]),
        std: Some(vec![0.25, 0.5, 0.75]),
        ..DataSpec::default()
    };
    let shape = DataSource::open(&bundled(), &spec, 0).expect("opens").shape;
    assert_eq!((shape.mean, shape.std), (vec![0.25], vec![0.5]));
}

#[test]
fn padding_wider_than_the_picture_is_refused() {
    let spec = DataSpec { crop_padding: 28, ..DataSpec::default() };
    assert_contains(&open_error(&bundled(), &spec), &["data.crop_padding", "28 x 28"]);
    let spec = DataSpec { crop_padding: 27, ..DataSpec::default() };
    let source = DataSource::open(&bundled(), &spec, 0).expect("opens");
    assert_eq!(first_batch(&source, plan(0, 1)).labels.len(), 64);
}

#[test]
fn batches_keep_their_order_with_any_threads_and_epochs_can_be_dropped() {
    let source = DataSource::open(&bundled(), &DataSpec::default(), 9).expect("opens");
    let one = batches(&source, EpochPlan { threads: 1, ..plan(0, 1) });
    assert!(one == batches(&source, EpochPlan { threads: 5, ..plan(0, 1) }));
    // Dropped before its end, while threads prepare further batches.
    let mut epoch = source.epoch(EpochPlan { threads: 3, ..plan(0, 1) });
    assert!(epoch.next().expect("a batch").expect("readable") == one[0]);
}
