//! Datasets as people have them: the bundled pictures, CIFAR files, folders, and all of them broken.

use flate2::{Compression, write::GzEncoder};
use lockstep_protocol::spec::{BrokenFiles, DataSpec, ImageSize, Validation};
use lockstep_worker::data::{
    inspect,
    loader::{Batch, DataSource, EpochPlan, Form, Mixing},
};
use std::{
    collections::BTreeSet,
    fs,
    io::Write,
    path::{Path, PathBuf},
};
use tempfile::TempDir;

fn bundled() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/fashion-mnist")
}

fn plan(rank: u32, world_size: u32) -> EpochPlan {
    EpochPlan {
        epoch: 0,
        first_step: 0,
        rank,
        world_size,
        batch_size: 64 / world_size as usize,
        accumulate: 1,
        drop_remainder: true,
        threads: 2,
    }
}

fn batches(source: &DataSource, plan: EpochPlan) -> Vec<Batch> {
    source.epoch(plan).map(|b| b.expect("readable")).collect()
}

fn error(path: &Path, spec: &DataSpec) -> String {
    DataSource::open(path, spec, 0).expect_err("must not open").to_string()
}

#[track_caller]
fn says(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{text:?} should contain {word:?}");
    }
}

#[test]
fn the_bundled_pictures_are_what_they_say() {
    let info = inspect(&bundled()).expect("readable");
    assert_eq!((info.format.as_str(), info.height, info.width, info.channels), ("idx", 28, 28, 1));
    assert_eq!(info.classes[9], "Ankle boot");
    assert_eq!(info.splits[0].per_class, [800; 10]);
    assert_eq!(info.splits[1].samples, 1000);
    // Fashion-MNIST's published statistics over all its pictures are 0.2860 and 0.3530.
    assert!((info.mean[0] - 0.286).abs() < 0.01 && (info.std[0] - 0.353).abs() < 0.01, "{info:?}");
}

#[test]
fn shards_are_disjoint_equal_and_the_same_pictures_a_step_at_any_number_of_ranks() {
    let source = DataSource::open(&bundled(), &DataSpec::default(), 7).expect("opens");
    let alone = batches(&source, plan(0, 1));
    assert_eq!(alone.len(), 125);
    assert_eq!(
        alone.iter().flat_map(|b| &b.indices).collect::<BTreeSet<_>>().len(),
        8000,
        "every picture once"
    );
    for world_size in [2, 4] {
        let ranks: Vec<_> = (0..world_size).map(|r| batches(&source, plan(r, world_size))).collect();
        for (step, whole) in alone.iter().enumerate() {
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
fn epochs_and_seeds_shuffle_anew_and_repeat_exactly() {
    let open = |seed| DataSource::open(&bundled(), &DataSpec::default(), seed).expect("opens");
    let first = |source: &DataSource, epoch| {
        source.epoch(EpochPlan { epoch, ..plan(0, 1) }).next().expect("a batch").expect("readable")
    };
    let source = open(1);
    assert_eq!(first(&source, 0), first(&open(1), 0));
    assert_ne!(first(&source, 0).indices, first(&source, 1).indices);
    assert_ne!(first(&source, 0).indices, first(&open(2), 0).indices);
}

#[test]
fn an_epoch_continued_in_its_middle_is_the_rest_of_it() {
    let source = DataSource::open(&bundled(), &DataSpec::default(), 3).expect("opens");
    let plan = EpochPlan { accumulate: 2, batch_size: 16, ..plan(1, 2) };
    let whole = batches(&source, plan);
    let rest = batches(&source, EpochPlan { first_step: 50, ..plan });
    assert!(rest == whole[100..]);
}

/// The bundled pictures, mixed by both at once.
fn mixed(spec: &DataSpec) -> DataSource {
    let mut source = DataSource::open(&bundled(), spec, 5).expect("opens");
    source.set_mixing(Mixing { mixup: 0.4, cutmix: 1.0 });
    source
}

#[test]
fn mixed_pictures_of_a_step_are_the_same_at_any_number_of_ranks_and_micro_batches() {
    let spec = DataSpec { crop_padding: 2, horizontal_flip: true, ..DataSpec::default() };
    let source = mixed(&spec);
    // 8000 = 133 * 60 + 20: the last step is a small one.
    let whole = EpochPlan { batch_size: 60, drop_remainder: false, ..plan(0, 1) };
    let alone = batches(&source, whole);
    for (world_size, accumulate) in [(2, 1), (4, 1), (1, 3), (2, 2)] {
        let plan = |rank| EpochPlan {
            batch_size: 60 / (world_size as usize * accumulate),
            accumulate,
            rank,
            world_size,
            ..whole
        };
        let ranks: Vec<_> = (0..world_size).map(|rank| batches(&source, plan(rank))).collect();
        for (step, whole) in alone.iter().enumerate() {
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
    // It goes on in its middle, and in another epoch the same pictures would be mixed otherwise.
    let rest = batches(&source, EpochPlan { first_step: 100, ..whole });
    assert!(rest == alone[100..]);
    let lambdas =
        |epoch| batches(&source, EpochPlan { epoch, ..whole }).iter().map(|b| b.lambda).collect::<Vec<_>>();
    assert_ne!(lambdas(0), lambdas(1));
}

#[test]
fn each_picture_of_a_step_is_mixed_with_the_one_before_it_and_the_first_with_the_last() {
    let spec = DataSpec { crop_padding: 2, ..DataSpec::default() };
    let plain = DataSource::open(&bundled(), &spec, 5).expect("opens");
    let (plain, mixed) = (batches(&plain, plan(0, 1)), batches(&mixed(&spec), plan(0, 1)));
    let size = 28 * 28;
    let (mut blended, mut cut) = (0, 0);
    for (plain, mixed) in plain.iter().zip(&mixed) {
        assert_eq!((&plain.labels, &plain.indices), (&mixed.labels, &mixed.indices));
        let others: Vec<u32> = (0..64).map(|i| plain.labels[(i + 63) % 64]).collect();
        assert_eq!(mixed.mixed_labels, others);
        let lambda = mixed.lambda;
        assert!((0.0..=1.0).contains(&lambda), "{lambda}");
        let picture = |i: usize| &plain.images[i % 64 * size..][..size];
        let all = || {
            (0..64)
                .flat_map(|i| picture(i).iter().zip(picture(i + 63)).zip(&mixed.images[i * size..][..size]))
        };
        let is_blend =
            all().all(|((own, other), v)| (own * lambda + other * (1.0 - lambda) - v).abs() < 1e-5);
        let is_cut = all().all(|((own, other), v)| v == own || v == other);
        assert!(is_blend || is_cut, "lambda {lambda}");
        blended += usize::from(is_blend && !is_cut);
        cut += usize::from(is_cut && !is_blend);
    }
    assert!(blended > 40 && cut > 40, "{blended} steps are blended and {cut} cut");
}

#[test]
fn bytes_are_mixed_as_normalised_pictures_are_to_the_nearest_byte() {
    let spec =
        DataSpec { crop_padding: 2, mean: Some(vec![0.0]), std: Some(vec![1.0]), ..DataSpec::default() };
    let mut source = mixed(&spec);
    assert!(source.resident().is_none(), "an engine does not mix by itself");
    let normalised = batches(&source, plan(0, 1));
    source.set_form(Form::Bytes);
    for (bytes, normalised) in batches(&source, plan(0, 1)).iter().zip(&normalised) {
        assert_eq!((bytes.lambda, bytes.bytes.len()), (normalised.lambda, 64 * 28 * 28));
        for (byte, value) in bytes.bytes.iter().zip(&normalised.images) {
            assert!((f32::from(*byte) - value * 255.0).abs() < 0.51, "{byte} instead of {}", value * 255.0);
        }
    }
}

#[test]
fn validation_pictures_are_never_mixed() {
    let source = mixed(&DataSpec::default());
    let plain = DataSource::open(&bundled(), &DataSpec::default(), 5).expect("opens");
    let all = |source: &DataSource| {
        source.validation(0, 1, 50, 1).map(|b| b.expect("readable")).collect::<Vec<_>>()
    };
    assert!(all(&source) == all(&plain));
}

#[test]
fn the_last_small_step_is_kept_when_asked_for_and_no_rank_goes_without() {
    let source = DataSource::open(&bundled(), &DataSpec::default(), 3).expect("opens");
    // 8000 = 15 * 513 + 305; then 8000 = 2 * 3999 + 2, fewer than ranks.
    for (batch_size, last) in [(171, [101, 102, 102]), (1333, [1, 1, 1])] {
        let count = |rank| {
            let plan = EpochPlan { batch_size, drop_remainder: false, world_size: 3, rank, ..plan(0, 1) };
            batches(&source, plan).last().expect("a batch").labels.len()
        };
        assert_eq!([count(0), count(1), count(2)], last);
    }
}

#[test]
fn every_rank_knows_how_many_pictures_all_have_in_each_micro_batch() {
    let source = DataSource::open(&bundled(), &DataSpec::default(), 3).expect("opens");
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
            for batches in &ranks {
                assert_eq!(batches[number].global_samples, all, "{world_size} ranks, micro-batch {number}");
            }
        }
    }
}

#[test]
fn validation_counts_every_picture_on_one_rank_and_leaves_it_as_it_is() {
    let source = DataSource::open(&bundled(), &DataSpec::default(), 0).expect("opens");
    let shares: Vec<Vec<Batch>> =
        (0..3).map(|r| source.validation(r, 3, 50, 2).map(|b| b.expect("readable")).collect()).collect();
    let seen: Vec<u64> = shares.iter().flatten().flat_map(|b| b.indices.clone()).collect();
    assert_eq!(seen, (0..1000).collect::<Vec<_>>());
    let mean = shares.iter().flatten().flat_map(|b| &b.images).sum::<f32>() / (1000.0 * 784.0);
    assert!(mean.abs() < 0.05, "normalised pictures have a mean near 0, this is {mean}");
}

#[test]
fn a_fraction_is_held_out_and_never_trained_on() {
    let spec = DataSpec { validation: Validation::Fraction(0.1), ..DataSpec::default() };
    let source = DataSource::open(&bundled(), &spec, 0).expect("opens");
    assert_eq!((source.shape.train_samples, source.shape.validation_samples), (7200, 800));
    let held: BTreeSet<u64> =
        source.validation(0, 1, 100, 1).flat_map(|b| b.expect("readable").indices).collect();
    assert!(batches(&source, plan(0, 1)).iter().flat_map(|b| &b.indices).all(|i| !held.contains(i)));
    assert_eq!(held.len(), 800);
}

#[test]
fn pictures_are_scaled_to_the_size_that_the_job_wants() {
    let spec = DataSpec { image_size: Some(ImageSize::Fixed(56)), ..DataSpec::default() };
    let source = DataSource::open(&bundled(), &spec, 0).expect("opens");
    assert_eq!(batches(&source, plan(0, 1))[0].images.len(), 64 * 56 * 56);
}

/// The first bundled pictures of each split as a CIFAR-10 file: grey as three equal planes.
fn cifar(dir: &Path, pictures: usize) {
    let spec = DataSpec {
        mean: Some(vec![0.0]),
        std: Some(vec![1.0 / 255.0]),
        image_size: Some(ImageSize::Fixed(32)),
        ..DataSpec::default()
    };
    let source = DataSource::open(&bundled(), &spec, 0).expect("opens");
    let all: Vec<Batch> = source.validation(0, 1, pictures, 1).map(|b| b.expect("readable")).collect();
    for (name, batch) in [("data_batch_1.bin", &all[0]), ("test_batch.bin", &all[1])] {
        let mut file = Vec::new();
        for (label, picture) in batch.labels.iter().zip(batch.images.chunks_exact(1024)) {
            file.push(*label as u8);
            (0..3).for_each(|plane| file.extend(picture.iter().map(|v| v.round() as u8 / (plane + 1))));
        }
        fs::write(dir.join(name), file).expect("writes");
    }
}

#[test]
fn cifar_planes_become_pixels_and_a_truncated_file_is_named() {
    let dir = TempDir::new().expect("a folder");
    let inner = dir.path().join("cifar-10-batches-bin");
    fs::create_dir(&inner).expect("a folder");
    cifar(&inner, 100);
    let info = inspect(dir.path()).expect("readable");
    assert_eq!((info.format.as_str(), info.width, info.splits[0].samples), ("cifar10", 32, 100));
    assert!(
        info.mean[0] > 1.8 * info.mean[1] && info.mean[1] > 1.3 * info.mean[2],
        "red, green, blue: {:?}",
        info.mean
    );

    let file = inner.join("data_batch_1.bin");
    let whole = fs::read(&file).expect("readable");
    fs::write(inner.join("data_batch_2.bin"), &whole[..5000]).expect("writes");
    says(
        &error(dir.path(), &DataSpec::default()),
        &["data_batch_2.bin", "5000 bytes", "3073", "broken_files = \"skip\""],
    );
    let skip = DataSpec { broken_files: BrokenFiles::Skip, ..DataSpec::default() };
    let source = DataSource::open(dir.path(), &skip, 0).expect("opens without it");
    assert_eq!((source.shape.train_samples, source.shape.skipped.len()), (100, 1));
    assert_eq!(inspect(dir.path()).expect("readable").broken_count, 1);

    let mut wrong = whole.clone();
    wrong[3073] = 11;
    fs::write(inner.join("data_batch_2.bin"), wrong).expect("writes");
    says(&error(dir.path(), &DataSpec::default()), &["record 1 has label 11", "0 to 9"]);
}

/// `classes` folders of real pictures, bundled ones as PNG and JPEG, `sizes` by turns.
fn folder(dir: &Path, split: &str, classes: &[&str], each: usize, sizes: &[u32]) {
    let spec = DataSpec { mean: Some(vec![0.0]), std: Some(vec![1.0 / 255.0]), ..DataSpec::default() };
    let source = DataSource::open(&bundled(), &spec, 0).expect("opens");
    let mut pictures = source.validation(0, 1, 1, 1);
    for (c, class) in classes.iter().enumerate() {
        let home = dir.join(split).join(class);
        fs::create_dir_all(&home).expect("a folder");
        for i in 0..each {
            let grey: Vec<u8> = pictures
                .next()
                .expect("a picture")
                .expect("readable")
                .images
                .iter()
                .map(|v| v.round() as u8)
                .collect();
            let picture = image::GrayImage::from_raw(28, 28, grey).expect("28 x 28");
            let size = sizes[(i + c) % sizes.len()];
            let picture = image::imageops::resize(
                &picture,
                size,
                size + (size % 10),
                image::imageops::FilterType::Triangle,
            );
            let name = home.join(format!("{i:04}.{}", if i % 2 == 0 { "png" } else { "jpg" }));
            picture.save(name).expect("writes");
        }
    }
}

#[test]
fn folders_hold_pictures_of_any_size() {
    let dir = TempDir::new().expect("a folder");
    folder(dir.path(), "train", &["cat", "dog"], 8, &[28, 37, 64]);
    folder(dir.path(), "val", &["dog"], 4, &[28]);
    fs::write(dir.path().join("train/cat/Thumbs.db"), b"not a picture, and not called one").expect("writes");
    let info = inspect(dir.path()).expect("readable");
    assert_eq!(
        (info.format.as_str(), info.classes.join(" ").as_str(), info.width, info.channels),
        ("image_folder", "cat dog", 0, 3)
    );
    assert_eq!(
        (info.splits[0].per_class.clone(), info.splits[1].per_class.clone()),
        (vec![8, 8], vec![0, 4])
    );

    says(&error(dir.path(), &DataSpec::default()), &["no split \"test\"", "train, val", "a fraction"]);
    let spec = DataSpec { validation: Validation::Split("val".into()), ..DataSpec::default() };
    says(&error(dir.path(), &spec), &["differ in size", "data.image_size"]);
    let spec = DataSpec { image_size: Some(ImageSize::Fixed(24)), ..spec };
    let source = DataSource::open(dir.path(), &spec, 0).expect("opens");
    let batch = &batches(&source, EpochPlan { batch_size: 16, ..plan(0, 1) })[0];
    assert_eq!((batch.images.len(), batch.labels.iter().sum::<u32>()), (16 * 24 * 24 * 3, 8));
}

#[test]
fn broken_pictures_are_named_counted_and_fatal_or_skipped() {
    let dir = TempDir::new().expect("a folder");
    folder(dir.path(), "train", &["cat", "dog"], 8, &[32]);
    let cat = dir.path().join("train/cat");
    fs::write(cat.join("text.jpg"), "I am no picture").expect("writes");
    fs::write(cat.join("empty.png"), "").expect("writes");
    let whole = fs::read(cat.join("0001.jpg")).expect("readable");
    fs::write(cat.join("cut.jpg"), &whole[..whole.len() / 2]).expect("writes");
    let whole = fs::read(cat.join("0000.png")).expect("readable");
    fs::write(cat.join("cut.png"), &whole[..whole.len() / 2]).expect("writes");

    let info = inspect(dir.path()).expect("readable");
    assert_eq!(info.broken_count, 4, "{:?}", info.broken);
    assert_eq!(info.splits[0].per_class, [8, 8]);
    let spec = DataSpec {
        validation: Validation::Fraction(0.25),
        image_size: Some(ImageSize::Fixed(32)),
        ..DataSpec::default()
    };
    says(
        &error(dir.path(), &spec),
        &[
            "4 broken files",
            "text.jpg is text, not a JPEG, PNG, WebP, GIF, BMP or TIFF picture",
            "empty.png is empty",
            "skip",
        ],
    );
    let skip = DataSpec { broken_files: BrokenFiles::Skip, ..spec };
    let shape = DataSource::open(dir.path(), &skip, 0).expect("opens").shape;
    assert_eq!((shape.train_samples + shape.validation_samples, shape.skipped.len()), (16, 4));
    says(&shape.skipped.join("\n"), &["cut.jpg is cut off", "cut.png is cut off"]);
}

#[test]
fn what_is_no_dataset_says_what_was_looked_for() {
    let dir = TempDir::new().expect("a folder");
    let path = dir.path();
    let refuses = || inspect(path).expect_err("no dataset").to_string();
    says(&refuses(), &["data_batch_1.bin", "train-images-idx3-ubyte", "train/<class>/", "is empty"]);
    says(&error(&path.join("nowhere"), &DataSpec::default()), &["nowhere does not exist"]);
    fs::write(path.join("data_batch_1"), "pickle").expect("writes");
    says(&refuses(), &["Python version", "binary version"]);
    fs::create_dir_all(path.join("train/cat")).expect("a folder");
    says(&refuses(), &["train/cat has no picture", "put some"]);
    fs::remove_dir_all(path.join("train")).expect("removes");
    folder(path, "train", &["cat"], 2, &[28]);
    folder(path, "test", &["dog"], 2, &[28]);
    says(&refuses(), &["test/dog", "training split does not have"]);
}

#[test]
fn damaged_idx_files_are_named() {
    let dir = TempDir::new().expect("a folder");
    for name in ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"] {
        fs::copy(bundled().join(name), dir.path().join(name)).expect("copies");
    }
    let pictures = dir.path().join("train-images-idx3-ubyte.gz");
    let labels = dir.path().join("train-labels-idx1-ubyte.gz");
    let spec = DataSpec { validation: Validation::Fraction(0.1), ..DataSpec::default() };
    assert_eq!(
        DataSource::open(dir.path(), &spec, 0).expect("opens").shape.classes[3],
        "3",
        "no names: numbers"
    );
    let pack = |bytes: &[u8]| {
        let mut gz = GzEncoder::new(Vec::new(), Compression::fast());
        gz.write_all(bytes).expect("packs");
        gz.finish().expect("packs")
    };
    let whole = fs::read(&pictures).expect("readable");
    fs::write(&pictures, &whole[..whole.len() / 2]).expect("writes");
    says(&error(dir.path(), &spec), &["train-images", "cannot be unpacked"]);
    fs::write(&pictures, pack(&[0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 1, 9])).expect("writes");
    says(&error(dir.path(), &spec), &["train-images", "[2, 1, 1]", "1 follow"]);
    fs::write(&pictures, pack(&[0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 1, 9, 9])).expect("writes");
    says(&error(dir.path(), &spec), &["2 pictures", "8000 labels"]);
    fs::copy(&labels, &pictures).expect("copies");
    says(&error(dir.path(), &spec), &["0x00000801", "0x00000803"]);
    fs::write(
        &pictures,
        pack(&[&[0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1][..], &[7; 1 << 20]].concat()),
    )
    .expect("writes");
    says(&error(dir.path(), &spec), &["[1, 1, 1]", "more follow"]);
    fs::write(
        &pictures,
        [0, 0, 8, 3, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
    )
    .expect("writes");
    says(&error(dir.path(), &spec), &["0 follow"]);
    fs::remove_file(&pictures).expect("removes");
    says(&error(dir.path(), &spec), &["looked for"]);
}

#[test]
fn normalisation_must_fit_the_channels() {
    let spec = DataSpec { mean: Some(vec![0.1, 0.2, 0.3]), ..DataSpec::default() };
    says(&error(&bundled(), &spec), &["data.mean has 3 values", "1 channel"]);
}

#[test]
fn padding_wider_than_the_picture_is_refused() {
    let spec = DataSpec { crop_padding: 28, ..DataSpec::default() };
    says(&error(&bundled(), &spec), &["data.crop_padding", "28 x 28"]);
    let spec = DataSpec { crop_padding: 27, ..DataSpec::default() };
    assert_eq!(batches(&DataSource::open(&bundled(), &spec, 0).expect("opens"), plan(0, 1)).len(), 125);
}

#[test]
fn idx_files_with_and_without_gzip_hold_the_same_and_splits_must_fit_each_other() {
    let dir = TempDir::new().expect("a folder");
    for entry in fs::read_dir(bundled()).expect("readable") {
        let path = entry.expect("readable").path();
        let name = path.file_name().and_then(|n| n.to_str()).expect("a name");
        let bytes = fs::read(&path).expect("readable");
        match name.strip_suffix(".gz") {
            Some(plain) => {
                let mut unpacked = Vec::new();
                std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(&bytes[..]), &mut unpacked)
                    .expect("unpacks");
                fs::write(dir.path().join(plain), unpacked).expect("writes");
            }
            None => fs::write(dir.path().join(name), bytes).expect("writes"),
        }
    }
    let open = |path: &Path| DataSource::open(path, &DataSpec::default(), 5).expect("opens");
    assert!(batches(&open(dir.path()), plan(0, 1)) == batches(&open(&bundled()), plan(0, 1)));

    let test = dir.path().join("t10k-images-idx3-ubyte");
    let mut bytes = fs::read(&test).expect("readable");
    (bytes[11], bytes[15]) = (14, 56);
    fs::write(&test, bytes).expect("writes");
    says(&error(dir.path(), &DataSpec::default()), &["t10k-images", "56 x 14", "28 x 28"]);
}

#[test]
fn pictures_larger_than_the_job_wants_are_scaled_by_their_centre_and_other_folders_are_let_be() {
    let dir = TempDir::new().expect("a folder");
    for (class, rgb) in [("red", [200, 0, 0]), ("green", [0, 200, 0])] {
        let home = dir.path().join("train").join(class);
        fs::create_dir_all(&home).expect("a folder");
        // Blue on both sides, which the centred square leaves out.
        let picture = image::RgbImage::from_fn(300, 100, |x, _| {
            if (100..200).contains(&x) { image::Rgb(rgb) } else { image::Rgb([0, 0, 255]) }
        });
        picture.save(home.join("wide.png")).expect("writes");
    }
    fs::create_dir_all(dir.path().join("notes/of mine")).expect("a folder");
    let spec = DataSpec {
        validation: Validation::Split("none".into()),
        image_size: Some(ImageSize::Fixed(16)),
        crop_padding: 0,
        mean: Some(vec![0.0]),
        std: Some(vec![1.0 / 255.0]),
        ..DataSpec::default()
    };
    let source = DataSource::open(dir.path(), &spec, 0).expect("opens");
    let batch = &batches(&source, EpochPlan { batch_size: 2, ..plan(0, 1) })[0];
    assert_eq!(batch.images.len(), 2 * 16 * 16 * 3);
    for (label, picture) in batch.labels.iter().zip(batch.images.chunks_exact(16 * 16 * 3)) {
        // Classes are sorted: green, red.
        let expected = if *label == 0 { [0.0, 200.0, 0.0] } else { [200.0, 0.0, 0.0] };
        for (i, pixel) in picture.chunks_exact(3).enumerate() {
            // Bilinear scaling mixes a little of its neighbours into the outermost columns.
            let outermost = [0, 15].contains(&(i % 16));
            let near = |(a, b): (&f32, f32)| (a - b).abs() < 0.01;
            assert!(outermost || pixel.iter().zip(expected).all(near), "{i}: {pixel:?}");
        }
    }
    assert_eq!(source.validation(0, 1, 4, 1).count(), 0);
    says(&error(dir.path(), &DataSpec { image_size: None, ..spec }), &["300 x 100", "data.image_size"]);
}

#[test]
fn data_behind_a_picture_does_not_make_it_broken() {
    let dir = TempDir::new().expect("a folder");
    folder(dir.path(), "train", &["cat", "dog"], 2, &[32]);
    for name in ["0000.png", "0001.jpg"] {
        let path = dir.path().join("train/cat").join(name);
        let mut bytes = fs::read(&path).expect("readable");
        bytes.extend([0xff; 300]);
        fs::write(&path, bytes).expect("writes");
    }
    assert_eq!(inspect(dir.path()).expect("readable").broken, []);
}

#[test]
fn batches_come_in_order_from_any_number_of_threads_and_a_dropped_epoch_ends_them() {
    let source = DataSource::open(&bundled(), &DataSpec::default(), 9).expect("opens");
    let one = batches(&source, EpochPlan { threads: 1, ..plan(0, 1) });
    assert!(one == batches(&source, EpochPlan { threads: 5, ..plan(0, 1) }));
    let mut epoch = source.epoch(EpochPlan { threads: 3, ..plan(0, 1) });
    assert!(epoch.next().expect("a batch").expect("readable") == one[0]);
}
