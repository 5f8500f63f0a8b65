//! Tests that need a GPU.

use super::*;
use cases::{Case, cases};
use std::thread;

#[path = "../../../../../data/src/picture/jpeg/cases.rs"]
mod cases;

/// Maximum mean difference, of 255, between pictures of nvJPEG and of the CPU's decoder.
const MAX_MEAN_DIFFERENCE: f64 = 2.0;

#[test]
#[ignore = "needs a GPU"]
fn gpu_crops_equal_the_host_s_bit_for_bit() {
    let device = Device::open(0).unwrap();
    let kernels = Kernels::load(&device, DType::F16).unwrap().without_dependent_launch();
    let mut cropper = Cropper::new().unwrap();
    // Includes pictures too wide for a block's shared memory, and a single pixel.
    for (width, height, size) in
        [(97, 61, (40, 30)), (31, 20, (224, 224)), (8192, 3, (224, 8)), (1, 1, (5, 7))]
    {
        let rows = ScaleTable::window(height, 0.0, f64::from(height), size.1);
        let columns = ScaleTable::window(width, f64::from(width) * 0.1, f64::from(width) * 0.8, size.0);
        let subsamplings =
            [(1, 1), (2, 1), (1, 2), (2, 2)].map(|(columns, rows)| Subsampling { columns, rows });
        for (orientation, subsampling) in (1..=8).flat_map(|o| subsamplings.map(|s| (o, s))) {
            let stored = if orientation > 4 { (height, width) } else { (width, height) };
            let stored = Stored { width: stored.0, height: stored.1, orientation, subsampling };
            // Noise, so that each sample matters.
            let samples: Vec<u8> = (0..planes_bytes(stored) as u32)
                .map(|i| (i.wrapping_mul(2_654_435_761) >> 21) as u8)
                .collect();
            let memory = device.upload(&samples).unwrap();
            let (on_device, on_host) = (Planes::new(stored, memory.ptr), Planes::new(stored, 0));
            let encoded = Encoded {
                bytes: &[],
                stored,
                left: 0,
                top: 0,
                rows: &rows,
                columns: &columns,
                flip: orientation % 2 == 0,
            };
            let (mut tables, mut host_tables) = (Vec::new(), Vec::new());
            let croppings: Vec<Cropping> =
                (0..3).map(|to| Cropping::new(&encoded, on_device, to, &mut tables)).collect();
            let expected =
                crop(&samples, &tables, &Cropping::new(&encoded, on_host, 0, &mut host_tables), size);
            cropper.allocate(&device, 3, size).unwrap();
            cropper.run(&device, &kernels, &croppings, &tables).unwrap();
            cropper.start_download(3).unwrap();
            cropper.stream.0.synchronize().unwrap();
            let actual = cropper.pixels(3 * expected.len());
            let differing = actual
                .chunks_exact(expected.len())
                .flatten()
                .zip(expected.iter().cycle())
                .filter(|(a, b)| a != b);
            assert_eq!(differing.count(), 0, "{width} x {height} to {size:?}, {stored:?}");
        }
    }
}

/// Compares batches of a GPU's decoder with those of the CPU. Returns the data, and the mean and largest difference, of 255.
fn compare(dir: &Path, spec: &DataSpec) -> (DataSource, f64, u8) {
    let expected = batches(&open(dir, spec, BatchFormat::Bytes));
    let mut data = open(dir, spec, BatchFormat::Bytes);
    data.set_decoder(super::super::open(0, DType::F16).unwrap());
    let actual = batches(&data);
    let pairs = || {
        expected
            .iter()
            .zip(&actual)
            .flat_map(|(a, b)| a.bytes.iter().zip(&b.bytes))
            .map(|(a, b)| a.abs_diff(*b))
    };
    let count = pairs().count();
    assert_eq!(expected.iter().map(|b| b.bytes.len()).sum::<usize>(), count);
    let mean = pairs().map(u64::from).sum::<u64>() as f64 / count as f64;
    let largest = pairs().max().unwrap();
    eprintln!("{}: values apart by {mean:.3} on average, {largest} at most", data.decoded().unwrap());
    (data, mean, largest)
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_batches_decoded_by_the_gpu_are_close_to_those_of_cpu_cores() {
    let spec = resized_crops(64);
    let dir = make_dataset(|number| (140 + number * 7 % 31, 132 + number * 5 % 23));
    let (data, mean, _) = compare(dir.path(), &spec);
    let decoded = data.decoded().unwrap();
    assert_eq!((decoded.by_device, decoded.by_cores.len()), (16, 2), "{decoded}");
    assert!(mean <= MAX_MEAN_DIFFERENCE, "{mean}");
    // Chroma has half the width, or half the width and height; each picture has only some hundred pixels.
    for (name, file) in [
        ("4:2:2", &fixture!("half-chroma.jpg")[..]),
        ("4:2:0", fixture!("orientation-1.jpg")),
        ("4:2:0 on its side", fixture!("orientation-6.jpg")),
    ] {
        let dir = TempDir::new().unwrap();
        let home = dir.path().join("train/all");
        fs::create_dir_all(&home).unwrap();
        (0..16).for_each(|i| fs::write(home.join(format!("{i}.jpg")), file).unwrap());
        let (data, mean, _) = compare(dir.path(), &spec);
        let decoded = data.decoded().unwrap();
        assert_eq!((decoded.by_device, decoded.by_cores.len()), (16, 0), "{name}: {decoded}");
        assert!(mean <= 3.0 * MAX_MEAN_DIFFERENCE, "{name}: {mean}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_jpeg_files_of_all_kinds_match_libjpeg_or_are_left_to_cpu_cores() {
    let (mut for_cores, mut refused, mut failures, mut equal) = (BTreeMap::new(), Vec::new(), Vec::new(), 0);
    let mut by_size: BTreeMap<(u32, u32), Vec<Case>> = BTreeMap::new();
    for case in cases() {
        match for_hardware(&case.file) {
            Ok(_) => by_size.entry(case.pixels.dimensions()).or_default().push(case),
            Err(why) => *for_cores.entry(why).or_insert(0) += 1,
        }
    }
    let decoder = super::super::open(0, DType::F16).unwrap();
    for (size, cases) in by_size {
        let files: Vec<&[u8]> = cases.iter().map(|case| &case.file[..]).collect();
        for (case, picture) in cases.iter().zip(decode(decoder.as_ref(), &files, size)) {
            match picture.map(|pixels| max_difference(&pixels, case.pixels.as_raw())) {
                None => refused.push(case.name.clone()),
                // Odd sizes differ as in `planes.rs`.
                Some(difference) if difference <= 12 => equal += 1,
                Some(difference) => failures.push((case.name.clone(), difference)),
            }
        }
    }
    eprintln!(
        "equal: {equal}; refused by nvJPEG: {refused:?}; left to cores: {for_cores:?}; wrong: {failures:?}"
    );
    assert!(failures.is_empty() && equal >= 8, "{failures:?}");
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_a_damaged_picture_does_not_change_others() {
    let whole = encode(&picture(1, 160, 96), SamplingFactor::R_4_2_0).unwrap();
    let decoder = super::super::open(0, DType::F16).unwrap();
    let single = decode(decoder.as_ref(), &[&whole], (160, 96)).remove(0).unwrap();
    // A truncated scan with an end marker, or a scan of zeros.
    let truncated = [&whole[..whole.len() / 2], b"\xff\xd9"].concat();
    let mut zeros = whole.clone();
    let middle = whole.len() / 2;
    zeros[middle..middle + 40].fill(0);
    for damaged in [truncated, zeros] {
        let decoded = decode(decoder.as_ref(), &[&whole, &damaged, &whole], (160, 96));
        assert!(decoded[0].as_ref() == Some(&single) && decoded[2].as_ref() == Some(&single));
        // The GPU does not report damage, but the host excludes such files when it indexes the dataset.
        eprintln!(
            "the damaged picture differs by {:?} of 255",
            decoded[1].as_ref().map(|pixels| max_difference(pixels, &single))
        );
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_after_a_decoder_is_closed_cpu_cores_decode() {
    let dir = make_dataset(|_| (140, 132));
    let spec = resized_crops(64);
    let mut data = open(dir.path(), &spec, BatchFormat::Bytes);
    data.set_decoder(super::super::open(0, DType::F16).unwrap());
    assert_eq!(batches(&data).len(), batches(&data).len());
    data.close_decoder();
    assert!(batches(&data) == batches(&open(dir.path(), &spec, BatchFormat::Bytes)));
}

/// Files of a group, with different pictures and sizes.
fn group(number: u32) -> Vec<Vec<u8>> {
    let side = |i: u32, seed: u32| 90 + (i * 37 + number * 61 + seed) % 250;
    (0..40).map(|i| jpeg(&picture(number * 40 + i, side(i, 0), side(i, 113)).into())).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_concurrent_groups_decode_as_separate_groups() {
    let decoder = super::super::open(0, DType::F16).unwrap();
    let groups: Vec<Vec<Vec<u8>>> = (0..6).map(group).collect();
    let separate: Vec<_> = groups.iter().map(|files| decode(decoder.as_ref(), files, (96, 80))).collect();
    assert!(separate.iter().flatten().all(Option::is_some), "an ordinary file is refused");
    thread::scope(|scope| {
        for first in 0..6 {
            let (decoder, groups, separate) = (&decoder, &groups, &separate);
            scope.spawn(move || {
                for round in 0..30 {
                    let number = (first + round * 5) % 6;
                    let actual = decode(decoder.as_ref(), &groups[number], (96, 80));
                    assert!(actual == separate[number], "group {number} in round {round}");
                }
            });
        }
    });
}
