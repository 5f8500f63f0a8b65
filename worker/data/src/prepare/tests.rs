//! Prepared copies of small datasets: their content, and continuation after an interruption.

mod interrupted;

use super::*;
use crate::{
    Picture,
    loader::replaced::too_many,
    picture::{Area, Resize},
    test_catalog::{assert_contains, encode, listing, open, repository, write_class},
};
use image::{ImageFormat, Rgb, RgbImage};
use std::{
    cell::RefCell,
    collections::BTreeMap,
    fs,
    io::{Cursor, Read},
};
use tempfile::TempDir;

/// A smooth picture, which JPEG preserves well, different for each `number`.
fn picture(width: u32, height: u32, number: u32) -> RgbImage {
    RgbImage::from_fn(width, height, |x, y| {
        let along = |v: u32, length: u32| (v * 150 / length) as u8;
        Rgb([along(x, width) + number as u8 * 9, along(y, height) + 40, 200 - along(x + y, width + height)])
    })
}

/// A dataset with `train` and `val`, classes `cat` and `a dog`, and pictures of 60 x 40 pixels: `per_class` to train, two to validate.
fn folder(per_class: u32) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (split, count) in [("train", per_class), ("val", 2)] {
        for (c, class) in (0..).zip(["a dog", "cat"]) {
            let home = dir.path().join(split).join(class);
            write_class(&home, 0..count, |number| picture(60, 40, number % 5 + c * 5));
        }
    }
    dir
}

fn settings(short_side: u32) -> PrepareSettings {
    PrepareSettings { short_side, ..PrepareSettings::default() }
}

fn run(from: &Path, to: &Path, settings: &PrepareSettings) -> Result<Prepared, DataError> {
    prepare(from, to, settings, |_| {})
}

fn prepare_error(from: &Path, to: &Path, settings: &PrepareSettings) -> String {
    run(from, to, settings).unwrap_err().to_string()
}

/// The name and content of every file.
fn files_of(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap())).collect()
}

fn members(shard: &Path) -> Vec<(String, Vec<u8>)> {
    let mut archive = tar::Archive::new(fs::File::open(shard).unwrap());
    let name_and_content = |entry: std::io::Result<tar::Entry<'_, fs::File>>| {
        let mut entry = entry.unwrap();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).unwrap();
        (entry.path().unwrap().display().to_string(), content)
    };
    archive.entries().unwrap().map(name_and_content).collect()
}

/// Settings for shards of about ten of `folder`'s pictures.
fn small_shards() -> PrepareSettings {
    PrepareSettings { shard_bytes: 10 * shard::sample_bytes(900), ..settings(16) }
}

#[test]
fn a_copy_is_read_like_its_source() {
    let (from, to) = (folder(20), tempfile::tempdir().unwrap());
    let reported = RefCell::new(Vec::new());
    let prepared = prepare(from.path(), to.path(), &settings(20), |p| reported.borrow_mut().push(p));
    let prepared = prepared.unwrap();
    assert_eq!(prepared.splits, [("train".into(), 40), ("val".into(), 4)]);
    assert_eq!((prepared.shards, prepared.kept_shards, prepared.broken.len()), (2, 0, 0));
    assert_eq!(reported.borrow().last(), Some(&Progress { done: 44, total: 44 }));
    let names: Vec<_> = files_of(to.path()).into_keys().collect();
    assert_eq!(names, ["classes.txt", "prepared.json", "train-000000.tar", "val-000000.tar"]);
    let copy = open(to.path()).unwrap();
    assert_eq!(copy.classes, ["a dog", "cat"]);
    let source = open(from.path()).unwrap();
    // Each picture of the source is in the copy once, with its class and nearly the same pixels.
    for (split, original) in copy.splits.iter().zip(&source.splits) {
        assert_eq!((&split.name, split.labels.len()), (&original.name, original.labels.len()));
        let mut expected: Vec<_> = (0..original.labels.len())
            .map(|i| {
                let picture = listing(original).picture(i).unwrap();
                let mut pixels = vec![0; 30 * 20 * 3];
                Resize::default().run(picture.view(), Area::Whole, (30, 20), &mut pixels);
                (original.labels[i], pixels)
            })
            .collect();
        for (index, label) in split.labels.iter().enumerate() {
            let picture = listing(split).picture(index).unwrap();
            assert_eq!((picture.width, picture.height), (30, 20));
            let distance = |pixels: &[u8]| -> u32 {
                pixels.iter().zip(&picture.pixels).map(|(a, b)| u32::from(a.abs_diff(*b))).sum()
            };
            let same_class = expected.iter().enumerate().filter(|(_, (l, _))| l == label);
            let (distance, nearest) =
                same_class.map(|(i, (_, pixels))| (distance(pixels), i)).min().expect("a picture is left");
            // Pillow's JPEG of this quality differs by 1.4 on average; the next picture is brighter by 9 in red.
            let mean = f64::from(distance) / f64::from(30 * 20 * 3);
            assert!(mean < 3.0, "{index} of {} differs by {mean} from the source's nearest", split.name);
            expected.remove(nearest);
        }
    }
    // Classes are shuffled: each run of one class is much shorter than its folder.
    let labels = &copy.splits[0].labels;
    assert!(labels.chunk_by(|a, b| a == b).all(|run| run.len() < 12), "{labels:?}");
}

#[test]
fn rows_of_parquet_files_are_copied_in_a_fixed_shuffled_order() {
    let from = repository("tests/data/parquet/plain");
    let source = open(&from).unwrap();
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let prepared = run(&from, first.path(), &small_shards()).unwrap();
    assert!(prepared.shards > 1 && prepared.splits == [("train".into(), 160)], "{prepared:?}");
    run(&from, second.path(), &small_shards()).unwrap();
    assert!(files_of(first.path()) == files_of(second.path()));
    let copy = open(first.path()).unwrap();
    // The classes and colours of all pictures, sorted.
    let all = |catalog: &Catalog| {
        let listing = listing(&catalog.splits[0]);
        let class_and_colour = |(index, label): (usize, &u32)| {
            let pixels = listing.picture(index).unwrap().pixels;
            (*label, pixels.iter().map(|p| u32::from(*p)).sum::<u32>() / pixels.len() as u32)
        };
        catalog.splits[0].labels.iter().enumerate().map(class_and_colour).collect::<Vec<_>>()
    };
    let (before, after) = (all(&source), all(&copy));
    assert_ne!(before, after, "shuffled");
    let labels = |all: &[(u32, u32)]| {
        let mut labels: Vec<_> = all.iter().map(|(label, _)| *label).collect();
        labels.sort_unstable();
        labels
    };
    assert_eq!(labels(&before), labels(&after));
}

#[test]
fn reading_runs_of_rows_equals_reading_each_row() {
    let from = repository("tests/data/parquet");
    for name in ["plain", "hub", "odd/rows.parquet"] {
        let catalog = open(&from.join(name)).unwrap();
        let listing = listing(&catalog.splits[0]);
        for count in [1, 2, 7].into_iter().filter(|count| *count <= listing.len()) {
            for first in 0..=listing.len() - count {
                let run: Vec<_> = listing.read_run(first, count).into_iter().map(Result::unwrap).collect();
                let each: Vec<_> = (first..first + count).map(|i| listing.read(i).unwrap()).collect();
                assert!(run == each, "{name}: {count} from {first}");
            }
        }
    }
}

#[test]
fn members_have_webdataset_names_and_the_requested_size() {
    let (from, to) = (folder(3), tempfile::tempdir().unwrap());
    run(from.path(), to.path(), &settings(16)).unwrap();
    let members = members(&to.path().join("train-000000.tar"));
    let names: Vec<_> = members.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names[..4], ["000000000.jpg", "000000000.cls", "000000001.jpg", "000000001.cls"]);
    assert_eq!(names.len(), 12);
    for pair in members.chunks(2) {
        let jpeg = &pair[0].1;
        let frame = jpeg.windows(2).position(|marker| marker == [0xff, 0xc0]).expect("a baseline frame");
        // Height and width, then twice as many samples of the first component as of the others in both directions.
        assert_eq!(jpeg[frame + 5..frame + 9], [0, 16, 0, 24]);
        assert_eq!((jpeg[frame + 11], jpeg[frame + 14], jpeg[frame + 17]), (0x22, 0x11, 0x11));
        assert!(matches!(pair[1].1[..], [b'0' | b'1']));
    }
}

#[test]
fn small_upright_jpegs_are_copied_unchanged_and_no_picture_is_enlarged() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let home = from.path().join("train/only");
    fs::create_dir_all(&home).unwrap();
    let small = encode(&picture(40, 32, 1), ImageFormat::Jpeg);
    let large = encode(&picture(40, 33, 1), ImageFormat::Jpeg);
    let grey = image::DynamicImage::ImageLuma8(image::GrayImage::new(20, 20));
    let mut grey_jpeg = Cursor::new(Vec::new());
    grey.write_to(&mut grey_jpeg, ImageFormat::Jpeg).unwrap();
    let rotated = repository("tests/pytorch/fixtures/pictures/decoding/orientation-6.jpg");
    let rotated = fs::read(rotated).unwrap();
    for (name, bytes) in
        [("a.jpg", &small), ("b.jpg", &large), ("c.jpg", grey_jpeg.get_ref()), ("d.jpg", &rotated)]
    {
        fs::write(home.join(name), bytes).unwrap();
    }
    fs::write(home.join("e.png"), encode(&picture(18, 17, 1), ImageFormat::Png)).unwrap();
    run(from.path(), to.path(), &settings(32)).unwrap();
    let source = Picture::decode(&rotated).unwrap();
    let pictures: Vec<_> = members(&to.path().join("train-000000.tar"))
        .into_iter()
        .filter(|(name, _)| name.ends_with("jpg"))
        .map(|(_, bytes)| bytes)
        .collect();
    assert_eq!(pictures.iter().filter(|bytes| **bytes == small).count(), 1, "copied unchanged");
    for other in [&large, grey_jpeg.get_ref(), &rotated] {
        assert!(!pictures.contains(other));
    }
    let mut sizes: Vec<_> =
        pictures.iter().map(|b| Picture::decode(b).unwrap()).map(|p| (p.width, p.height)).collect();
    let short = source.width.min(source.height).min(32);
    let along = |length: u32| length * short / source.width.min(source.height);
    let mut expected = [(40, 32), (38, 32), (20, 20), (18, 17), (along(source.width), along(source.height))];
    sizes.sort_unstable();
    expected.sort_unstable();
    assert_eq!(sizes, expected);
    assert!(pictures.iter().all(|bytes| crate::picture::is_plain_jpeg(bytes)));
}

#[test]
fn broken_pictures_are_named_and_fail_the_copy_or_are_left_out() {
    let from = folder(10);
    fs::write(from.path().join("train/cat/003.png"), "no picture").unwrap();
    // Header and end are intact, so only decoding reveals the damage.
    let damaged = from.path().join("train/cat/004.png");
    let mut bytes = fs::read(&damaged).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0xff;
    fs::write(&damaged, &bytes).unwrap();
    let to = tempfile::tempdir().unwrap();
    assert_contains(
        prepare_error(from.path(), to.path(), &settings(16)),
        &["003.png is text", "--broken-files skip"],
    );
    assert!(files_of(to.path()).is_empty());
    let skip = PrepareSettings { broken_files: BrokenFiles::Skip, ..settings(16) };
    let prepared = run(from.path(), to.path(), &skip).unwrap();
    let named: Vec<_> = prepared.broken.iter().map(|broken| &broken.file[broken.file.len() - 7..]).collect();
    assert_eq!((named, prepared.splits[0].1), (vec!["003.png", "004.png"], 18));
    assert_eq!(open(to.path()).unwrap().splits[0].labels.len(), 18);
    // The picture is still reported if nothing is left to do, and is still fatal without `skip`.
    assert_eq!(run(from.path(), to.path(), &skip).unwrap().broken.len(), 2);
    fs::remove_file(from.path().join("train/cat/003.png")).unwrap();
    let fail = tempfile::tempdir().unwrap();
    assert_contains(prepare_error(from.path(), fail.path(), &settings(16)), &["004.png cannot be decoded"]);
}

#[test]
fn a_lost_disk_is_not_reported_as_broken_pictures() {
    assert!(!too_many(16, 100, 100) && too_many(17, 100, 100), "a few in any dataset");
    assert!(!too_many(100, 1000, 1000) && too_many(101, 1000, 1000), "a tenth");
    assert!(too_many(3, 3, 3));
    let (from, to) = (folder(10), tempfile::tempdir().unwrap());
    let remove_split = |_: Progress| {
        let _ = fs::remove_dir_all(from.path().join("val"));
    };
    let skip = PrepareSettings { broken_files: BrokenFiles::Skip, ..settings(16) };
    assert_contains(
        prepare(from.path(), to.path(), &skip, remove_split).unwrap_err(),
        &["cannot be read: No such file", "Check the dataset's disk"],
    );
    let names: Vec<_> = files_of(to.path()).into_keys().collect();
    assert_eq!(names, ["classes.txt", "train-000000.tar", "unfinished.json"]);
}

#[test]
fn temporarily_unreadable_pictures_are_not_omitted_from_copies() {
    let (from, to) = (folder(10), tempfile::tempdir().unwrap());
    let (picture, moved) = (from.path().join("train/cat/003.png"), from.path().join("003.png"));
    fs::rename(&picture, &moved).unwrap();
    // Reading the first byte is an input/output error.
    std::os::unix::fs::symlink("/proc/self/mem", &picture).unwrap();
    let skip = PrepareSettings { broken_files: BrokenFiles::Skip, ..small_shards() };
    assert_contains(
        prepare_error(from.path(), to.path(), &skip),
        &["003.png cannot be read: Input/output error"],
    );
    assert!(files_of(to.path()).is_empty());
    fs::rename(&moved, &picture).unwrap();
    let prepared = run(from.path(), to.path(), &skip).unwrap();
    assert_eq!((prepared.splits[0].1, prepared.broken.len()), (20, 0));
}

#[test]
fn impossible_copies_are_refused_before_writing() {
    let home = tempfile::tempdir().unwrap();
    let to = home.path().join("copy");
    let from = folder(1);
    for (side, is_allowed) in [(15, false), (16, true), (4096, true), (4097, false)] {
        let result = run(from.path(), &to, &settings(side));
        assert_eq!(result.is_ok(), is_allowed, "{side}: {result:?}");
        let _ = fs::remove_dir_all(&to);
    }
    for (quality, is_allowed) in [(0, false), (1, true), (100, true), (101, false)] {
        let result = run(from.path(), &to, &PrepareSettings { quality, ..settings(16) });
        assert_eq!(result.is_ok(), is_allowed, "{quality}: {result:?}");
        let _ = fs::remove_dir_all(&to);
    }
    fs::rename(from.path().join("val"), from.path().join("holdout")).unwrap();
    assert_contains(
        prepare_error(from.path(), &to, &settings(16)),
        &["has a split \"holdout\", which cannot be the prefix of a shard's name"],
    );
    fs::remove_dir_all(from.path().join("holdout")).unwrap();
    fs::rename(from.path().join("train/cat"), from.path().join("train/cat ")).unwrap();
    assert_contains(
        prepare_error(from.path(), &to, &settings(16)),
        &["class \"cat \" cannot be a line of classes.txt"],
    );
    let bundled = repository("assets/fashion-mnist");
    assert!(prepare_error(&bundled, &to, &settings(16)).contains("train on it directly"));
    assert!(!to.exists());
    // The longest side that JPEG supports, and one pixel more.
    for (length, is_allowed) in [(65_535, true), (65_536, false)] {
        let bytes = encode(&RgbImage::new(length, 2), ImageFormat::Bmp);
        let prepared = Encoder::new(&settings(16)).convert(bytes);
        assert_eq!(prepared.is_ok(), is_allowed, "{prepared:?}");
    }
}
