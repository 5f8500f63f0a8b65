//! Transforms of pictures in folders. Results are equal at any number of ranks and threads, after a resume, and in the
//! preview.

use crate::data::{batches, bundled, first_batch, validation_batches_by};
use lockstep_data::{
    Picture,
    loader::{BatchFormat, DataSource, EpochPlan},
};
use lockstep_protocol::spec::{Augment, DataSpec, ImageSize, Validation};
use std::{fs, path::Path};
use tempfile::TempDir;

/// Pictures of many sizes in two classes.
fn folder(pictures: u32) -> TempDir {
    let dir = TempDir::new().expect("a folder");
    for (c, class) in (0..).zip(["cat", "dog"]) {
        let home = dir.path().join("train").join(class);
        fs::create_dir_all(&home).expect("a folder");
        for number in 0..pictures / 2 {
            let (width, height) = (40 + number * 7 % 31, 32 + number * 5 % 23);
            let picture = image::RgbImage::from_fn(width, height, |x, y| {
                let wave = ((x * 9 + c * 40) as f32 / 20.0).sin() * 60.0 + (y * (number + 3)) as f32 % 90.0;
                image::Rgb([(90.0 + wave) as u8, (x * 5 % 250) as u8, (number * 11 + y * 3) as u8])
            });
            let name = format!("{number:03}.{}", if number % 2 == 0 { "png" } else { "jpg" });
            picture.save(home.join(name)).expect("writes");
        }
    }
    dir
}

/// A specification with all transforms.
fn all_transforms() -> DataSpec {
    DataSpec {
        validation: Validation::Fraction(0.25),
        image_size: Some(ImageSize::Fixed(24)),
        random_resized_crop: true,
        vertical_flip: true,
        color_jitter: [0.4, 0.4, 0.4, 0.1],
        augment: Augment::Trivial,
        random_erasing: 0.5,
        mean: Some(vec![0.5; 3]),
        std: Some(vec![0.25; 3]),
        ..DataSpec::default()
    }
}

fn open(dir: &Path, spec: &DataSpec) -> DataSource {
    DataSource::open(dir, spec, 11).expect("opens")
}

/// The second epoch, in steps of 8 pictures over all ranks.
fn plan(rank: u32, world_size: u32) -> EpochPlan {
    EpochPlan { epoch: 1, rank, world_size, drop_remainder: true, ..EpochPlan::of(8 / world_size as usize) }
}

#[test]
fn a_step_has_the_same_pixels_at_any_number_of_ranks_and_threads_and_after_a_resume() {
    let dir = folder(64);
    for spec in [
        all_transforms(),
        DataSpec { augment: Augment::Rand, ..all_transforms() },
        // Padded crops in training, whole pictures in validation.
        DataSpec { random_resized_crop: false, resize_size: Some(28), ..all_transforms() },
    ] {
        let source = open(dir.path(), &spec);
        let single = batches(&source, plan(0, 1));
        assert!(single.len() > 4 && single.len() as u64 == source.shape.train_samples / 8);
        for world_size in [2, 4] {
            let reopened = open(dir.path(), &spec);
            let ranks: Vec<_> = (0..world_size).map(|r| batches(&reopened, plan(r, world_size))).collect();
            for (step, whole) in single.iter().enumerate() {
                let joined: Vec<f32> = ranks.iter().flat_map(|b| b[step].images.clone()).collect();
                assert!(joined == whole.images, "step {step} of {world_size} ranks");
            }
        }
        for threads in [2, 5] {
            assert!(batches(&source, EpochPlan { threads, ..plan(0, 1) }) == single, "{threads} threads");
        }
        let rest = batches(&open(dir.path(), &spec), EpochPlan { first_step: 4, threads: 3, ..plan(0, 1) });
        assert!(rest == single[4..]);
        assert!(batches(&source, EpochPlan { epoch: 2, ..plan(0, 1) })[0].images != single[0].images);
        let validation_batches = |threads| validation_batches_by(&open(dir.path(), &spec), 5, threads);
        assert!(validation_batches(1) == validation_batches(4));
        let validated = validation_batches(3).iter().map(|b| b.labels.len() as u64).sum::<u64>();
        assert!(validated > 5 && validated == source.shape.validation_samples);
    }
}

#[test]
fn the_preview_shows_the_network_s_input() {
    let dir = folder(32);
    let source = open(dir.path(), &all_transforms());
    let byte = |v: &f32| ((v * 0.25 + 0.5) * 255.0).round() as u8;
    let mut erased = 0;
    for batch in batches(&source, plan(0, 1)) {
        for (index, pixels) in batch.indices.iter().zip(batch.images.chunks_exact(24 * 24 * 3)) {
            let is_validation = false;
            let (_, picture) = source.picture(is_validation, *index, Some(1)).expect("readable");
            assert!(picture.pixels == pixels.iter().map(byte).collect::<Vec<_>>(), "picture {index}");
            erased += usize::from(pixels.iter().filter(|v| **v == 0.0).count() >= 3 * 8);
        }
    }
    // About half of 24 pictures. Only erased values are 0, because no byte is normalised to 0.
    assert!((5..20).contains(&erased), "{erased} of 24 have a rectangle that is 0");
    for batch in validation_batches_by(&source, 3, 1) {
        for (index, pixels) in batch.indices.iter().zip(batch.images.chunks_exact(24 * 24 * 3)) {
            let is_validation = true;
            let (_, picture) = source.picture(is_validation, *index, None).expect("readable");
            assert!(picture.pixels == pixels.iter().map(byte).collect::<Vec<_>>(), "picture {index}");
        }
    }
}

#[test]
fn transforms_do_not_affect_each_other_s_random_numbers() {
    let dir = folder(16);
    let crops = DataSpec {
        horizontal_flip: false,
        vertical_flip: false,
        color_jitter: [0.0; 4],
        augment: Augment::None,
        random_erasing: 0.0,
        validation: Validation::Split("none".into()),
        ..all_transforms()
    };
    let images = |spec: &DataSpec| batches(&open(dir.path(), spec), plan(0, 1)).remove(0).images;
    let plain = images(&crops);
    let row = 24 * 3;
    let (mut flips_seen, mut unchanged) = (0, 0);
    let flipped = images(&DataSpec { vertical_flip: true, ..crops.clone() });
    for (a, b) in plain.chunks_exact(24 * row).zip(flipped.chunks_exact(24 * row)) {
        let upside_down: Vec<f32> = a.chunks_exact(row).rev().flatten().copied().collect();
        unchanged += u32::from(a == b);
        flips_seen += u32::from(upside_down == b);
    }
    assert_eq!(unchanged + flips_seen, 8);
    assert!(unchanged > 0 && flips_seen > 0, "{unchanged} of 8 unchanged");
    let erased = images(&DataSpec { random_erasing: 1.0, ..crops });
    let changed = plain.iter().zip(&erased).filter(|(a, b)| a != b);
    assert!(changed.clone().count() > 0 && changed.clone().all(|(_, b)| *b == 0.0));
}

#[test]
fn alternating_flips_show_both_views_in_two_epochs_and_borders_reflect() {
    let dir = folder(16);
    let spec = DataSpec {
        crop_padding: 0,
        alternating_flip: true,
        image_size: None,
        validation: Validation::Split("none".into()),
        ..DataSpec::default()
    };
    let source = |spec: &DataSpec| {
        open(dir.path(), &DataSpec { image_size: Some(ImageSize::Fixed(16)), ..spec.clone() })
    };
    // As stored if `epoch` is `None`, otherwise as augmented in this epoch.
    let pixels = |source: &DataSource, position: u64, epoch: Option<u32>| {
        let is_validation = false;
        let (_, picture) = source.picture(is_validation, position, epoch).expect("readable");
        picture.pixels
    };
    let flips = source(&spec);
    let mirrored = |pixels: &[u8]| -> Vec<u8> {
        pixels.chunks_exact(16 * 3).flat_map(|row| row.chunks_exact(3).rev().flatten().copied()).collect()
    };
    let mut flips_seen = 0;
    for position in 0..8 {
        let [plain, first, second, third] =
            [None, Some(0), Some(1), Some(2)].map(|epoch| pixels(&flips, position, epoch));
        assert!(second == mirrored(&first) && third == first, "{position}");
        flips_seen += u32::from(plain != first);
    }
    assert!((1..8).contains(&flips_seen), "{flips_seen} of 8 are mirrored in the first epoch");

    // All values of a reflected crop are in the picture; a black border adds zeros.
    let crops = DataSpec { crop_padding: 4, horizontal_flip: false, ..spec };
    let (black, reflected) = (source(&crops), source(&DataSpec { reflect_border: true, ..crops.clone() }));
    let mut differ = 0;
    for position in 0..8 {
        let [black, reflected] = [&black, &reflected].map(|source| pixels(source, position, Some(0)));
        for (a, b) in black.chunks_exact(3).zip(reflected.chunks_exact(3)) {
            assert!(a == b || a == [0, 0, 0], "only the border differs");
            differ += u32::from(a != b);
        }
    }
    assert!(differ > 0);
}

#[test]
fn only_padded_crops_and_flips_run_on_the_engine() {
    let open_bundled = |spec: DataSpec| open(&bundled(), &spec);
    assert!(open_bundled(DataSpec::default()).resident().is_some());
    assert!(!open_bundled(DataSpec::default()).is_prepared_each_step());
    for spec in [
        DataSpec { random_resized_crop: true, ..DataSpec::default() },
        DataSpec { resize_size: Some(32), ..DataSpec::default() },
        DataSpec { vertical_flip: true, ..DataSpec::default() },
        DataSpec { color_jitter: [0.0, 0.0, 0.0, 0.1], ..DataSpec::default() },
        DataSpec { augment: Augment::Rand, ..DataSpec::default() },
        DataSpec { random_erasing: 0.1, ..DataSpec::default() },
    ] {
        let mut source = open_bundled(spec.clone());
        assert!(source.resident().is_none() && source.is_prepared_each_step(), "{spec:?}");
        // Bytes cannot represent a value of 0 after normalisation.
        source.set_format(BatchFormat::Bytes);
        let batch = first_batch(&source, plan(0, 1));
        let normalised = spec.random_erasing > 0.0;
        assert_eq!((batch.bytes.is_empty(), batch.images.is_empty()), (normalised, !normalised), "{spec:?}");
    }
}

#[test]
fn validation_is_resized_and_cropped_in_imagenet_s_proportion() {
    let dir = folder(8);
    let source = open(dir.path(), &DataSpec { image_size: Some(ImageSize::Fixed(28)), ..all_transforms() });
    assert_eq!(source.shape.resize, Some(32));
    assert_eq!(
        open(dir.path(), &DataSpec { resize_size: Some(30), ..all_transforms() }).shape.resize,
        Some(30)
    );
    let plain = DataSpec { random_resized_crop: false, ..all_transforms() };
    assert_eq!(open(dir.path(), &plain).shape.resize, None);
    // Without image_size, the dataset's own size is compared.
    let open_bundled = |resize_size| {
        DataSource::open(&bundled(), &DataSpec { resize_size: Some(resize_size), ..DataSpec::default() }, 0)
    };
    let message = open_bundled(27).expect_err("must not open").to_string();
    assert!(message.contains("data.resize_size") && message.contains("give 32 or more"), "{message}");
    assert!(open_bundled(28).is_ok());
}

#[test]
fn errors_name_a_file_that_breaks_while_a_job_runs() {
    let dir = folder(16);
    let source = open(dir.path(), &all_transforms());
    for class in ["cat", "dog"] {
        for entry in fs::read_dir(dir.path().join("train").join(class)).expect("a folder") {
            fs::write(entry.expect("a file").path(), "no picture").expect("writes");
        }
    }
    for threads in [1, 4] {
        let first = source.epoch(EpochPlan { threads, ..plan(0, 1) }).next().expect("a result");
        let message = first.expect_err("is broken").to_string();
        assert!(
            message.contains("/train/") && message.contains("has changed since it was first inspected"),
            "{message}"
        );
    }
}

fn fixtures() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/pytorch/fixtures/pictures/decoding")
}

/// Compares with `ImageOps.exif_transpose(Image.open(file)).convert("RGB")`.
#[test]
fn every_format_has_pillow_s_pixels() {
    let mut seen = 0;
    let mut failures = Vec::new();
    for entry in fs::read_dir(fixtures()).expect("fixtures") {
        let path = entry.expect("a file").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        if name.ends_with(".rgb.png") {
            continue;
        }
        let expected = image::open(format!("{}.rgb.png", path.display())).expect("readable").into_rgb8();
        let found = match fs::read(&path).map_err(|e| e.to_string()).and_then(|bytes| Picture::decode(&bytes))
        {
            Ok(found) => found,
            Err(error) => {
                failures.push(format!("{name} {error}"));
                continue;
            }
        };
        assert_eq!((found.width, found.height), expected.dimensions(), "{name}");
        let differences = found.pixels.iter().zip(expected.as_raw()).map(|(a, b)| a.abs_diff(*b));
        // Decoders of lossy formats may interpolate colours differently. Other formats have exact pixels.
        let is_lossy = name.ends_with(".jpg") || name.starts_with("lossy") || name.starts_with("cmyk");
        let largest = differences.clone().max().unwrap_or(0);
        let mean = differences.map(f64::from).sum::<f64>() / found.pixels.len() as f64;
        if largest > if is_lossy { 4 } else { 0 } || mean > 0.5 {
            failures.push(format!("{name}: values differ by {mean:.3} on average, by {largest} at most"));
        }
        seen += 1;
    }
    assert!(failures.is_empty(), "{failures:#?}");
    assert!(seen >= 34, "{seen} files");
}
