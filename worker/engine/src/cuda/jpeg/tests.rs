//! Tests that batches whose pictures a device decodes equal batches decoded on CPU cores. Except in `gpu.rs`, the device is the host itself
//! (`HostDecoder`): it decodes, and runs the algorithm of the kernel `crop` on the same `Cropping`s.

use super::*;
use lockstep_data::device::{Stored, Subsampling};
use lockstep_data::loader::{Batch, BatchFormat, DataSource, EpochPlan, Mixing};
use lockstep_protocol::spec::{Augment, BrokenFiles, DataSpec, ImageSize, SizeFrom, Validation};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
};
use tempfile::TempDir;

macro_rules! fixture {
    ($name:literal) => {
        include_bytes!(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../tests/pytorch/fixtures/pictures/decoding/",
            $name
        ))
    };
}

mod broken;
mod gpu;
mod planes;

/// The kernel `crop` in Rust. Addresses in `p` are offsets in `memory`.
fn crop(memory: &[u8], tables: &[i32], p: &Cropping, (width, height): (u32, u32)) -> Vec<u8> {
    // Entry `output` of a table: the index of the first input, the number of used weights, then `taps` weights.
    // Sums are in fixed point with `shift` fractional bits.
    let weighted = |table: u32, taps: u32, shift: u32, output: u32, value: &dyn Fn(i64) -> u8| {
        let entry = &tables[(table + output * (2 + taps)) as usize..][..2 + taps as usize];
        let mut sum = 1 << (shift - 1);
        for (k, weight) in entry[2..2 + entry[1] as usize].iter().enumerate() {
            sum += i32::from(value(i64::from(entry[0]) + k as i64)) * weight;
        }
        (sum >> shift).min(255) as u8
    };
    let mut output = vec![0; (width * height * 3) as usize];
    for y in 0..height {
        // One output row, resized only vertically.
        let mut row_values = vec![0; (p.column_count * 3) as usize];
        for (i, value) in row_values.iter_mut().enumerate() {
            let (x, channel) = (i64::from(p.first_column) + i as i64 / 3, i % 3);
            *value = weighted(p.row_table, p.row_taps, p.row_shift, y, &|row| {
                // The same pixel in the stored picture, before its orientation is applied.
                let stored_column =
                    i64::from(p.column) + x * i64::from(p.column_right) + row * i64::from(p.column_down);
                let stored_row = i64::from(p.row) + x * i64::from(p.row_right) + row * i64::from(p.row_down);
                planes::pixel(memory, &p.planes, stored_column as u32, stored_row as u32)[channel]
            });
        }
        for x in 0..width {
            let at = if p.flip == 1 { width - 1 - x } else { x };
            for channel in 0..3 {
                let value = weighted(p.column_table, p.column_taps, p.column_shift, x, &|column| {
                    row_values[((column - i64::from(p.first_column)) * 3) as usize + channel]
                });
                output[((y * width + at) * 3) as usize + channel] = value;
            }
        }
    }
    output
}

/// A decoder on the host that simulates a GPU.
#[derive(Debug, Default)]
struct HostDecoder {
    /// Refuses every n-th picture.
    refused_every: Option<usize>,
    fails: bool,
    calls: AtomicUsize,
    /// Maximum number of pictures that are decoded together.
    max_pictures: Option<usize>,
}

impl DeviceDecoder for HostDecoder {
    fn name(&self) -> String {
        "the host".into()
    }

    fn concurrent_calls(&self) -> usize {
        3
    }

    fn decode<'a>(
        &self,
        size: (u32, u32),
        take_pictures: &mut dyn FnMut(usize) -> Vec<Encoded<'a>>,
        use_results: &mut dyn FnMut(&[Option<&[u8]>]),
    ) -> Result<(), String> {
        let pictures = take_pictures(self.max_pictures.unwrap_or(64));
        if pictures.is_empty() {
            return Ok(());
        }
        self.calls.fetch_add(1, Ordering::Relaxed);
        if self.fails {
            return Err("it is broken".into());
        }
        let (mut memory, mut tables, mut outputs) = (Vec::new(), Vec::new(), Vec::new());
        for (number, picture) in pictures.iter().enumerate() {
            let planes = planes::decode(picture.bytes, picture.stored, &mut memory)?;
            let cropping = Cropping::new(picture, planes, number as u32, &mut tables);
            let is_refused = self.refused_every.is_some_and(|every| number % every == 0);
            outputs.push((!is_refused).then(|| crop(&memory, &tables, &cropping, size)));
        }
        use_results(&outputs.iter().map(Option::as_deref).collect::<Vec<_>>());
        Ok(())
    }
}

fn picture(number: u32, width: u32, height: u32) -> image::RgbImage {
    image::RgbImage::from_fn(width, height, |x, y| {
        let wave = ((x * 9 + number * 40) as f32 / 20.0).sin() * 60.0 + (y * (number + 3)) as f32 % 90.0;
        image::Rgb([(90.0 + wave) as u8, (x * 5 % 250) as u8, (number * 11 + y * 3) as u8])
    })
}

/// Adds an EXIF block with an orientation.
fn with_orientation(file: &[u8], orientation: u8) -> Vec<u8> {
    let mut exif =
        *b"\xff\xe1\0\x22Exif\0\0II\x2a\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0";
    exif[28] = orientation;
    [&file[..2], &exif, &file[2..]].concat()
}

fn jpeg(picture: &image::DynamicImage) -> Vec<u8> {
    let mut file = std::io::Cursor::new(Vec::new());
    picture.write_to(&mut file, image::ImageFormat::Jpeg).unwrap();
    file.into_inner()
}

/// Writes a dataset of 18 pictures, all in `train/all`. 16 are JPEG files, two for each EXIF orientation; file `n` has the size `size(n)`.
/// They have the four subsamplings in turn, except at sizes where decoders may differ in subsampled chroma: those files are not subsampled.
/// The last two, a PNG file and a grey JPEG file, are decoded only on CPU cores.
fn make_dataset(size: impl Fn(u32) -> (u32, u32)) -> TempDir {
    let dir = TempDir::new().unwrap();
    let home = dir.path().join("train/all");
    fs::create_dir_all(&home).unwrap();
    for number in 0..16 {
        let (width, height) = size(number);
        let decoders_agree = [width, height].iter().all(|side| planes::decoders_agree(*side, 2));
        let sampling =
            if decoders_agree { planes::SAMPLINGS[number as usize % 4] } else { SamplingFactor::R_4_4_4 };
        let file = encode(&picture(number, width, height), sampling).unwrap();
        fs::write(home.join(format!("{number:02}.jpg")), with_orientation(&file, (number % 8 + 1) as u8))
            .unwrap();
    }
    let (width, height) = size(0);
    picture(20, width, height).save(home.join("png.png")).unwrap();
    let grey = image::DynamicImage::ImageRgb8(picture(21, width, height)).grayscale();
    fs::write(home.join("grey.jpg"), jpeg(&grey)).unwrap();
    dir
}

fn spec() -> DataSpec {
    DataSpec {
        validation: Validation::Fraction(0.3),
        // With this seed, five pictures of `make_dataset` are held out.
        validation_seed: 9,
        mean: Some(vec![0.5; 3]),
        std: Some(vec![0.25; 3]),
        ..DataSpec::default()
    }
}

fn resized_crops(side: u32) -> DataSpec {
    DataSpec { image_size: Some(ImageSize::Fixed(side)), random_resized_crop: true, ..spec() }
}

const PLAN: EpochPlan = EpochPlan { epoch: 1, threads: 2, ..EpochPlan::of(6) };

fn open(dir: &Path, spec: &DataSpec, format: BatchFormat) -> DataSource {
    let mut data = DataSource::open(dir, spec, 5).unwrap();
    data.set_format(format);
    data
}

/// The same data, decoded on CPU cores and by a [`HostDecoder`].
fn open_both(dir: &Path, spec: &DataSpec, format: BatchFormat) -> [DataSource; 2] {
    let [on_cores, mut on_device] = [(); 2].map(|()| open(dir, spec, format));
    on_device.set_decoder(Arc::new(HostDecoder::default()));
    [on_cores, on_device]
}

/// The batches of one epoch of training, then the batches of one validation.
fn batches(data: &DataSource) -> Vec<Batch> {
    let (rank, world_size, batch_size, threads) = (0, 1, 4, 2);
    let validation = data.validation(rank, world_size, batch_size, threads);
    data.epoch(PLAN).chain(validation).map(Result::unwrap).collect()
}

/// The pictures that a decoder makes of whole files, resized to `size`, in one group. `None` for refused files.
fn decode(decoder: &dyn DeviceDecoder, files: &[impl AsRef<[u8]>], size: (u32, u32)) -> Vec<Option<Vec<u8>>> {
    let tables = |file: &[u8]| {
        let stored = for_hardware(file).unwrap();
        let sides = (stored.width, stored.height);
        let (width, height) = if stored.orientation > 4 { (sides.1, sides.0) } else { sides };
        (stored, ScaleTable::new(height, size.1), ScaleTable::new(width, size.0))
    };
    let tables: Vec<_> = files.iter().map(|file| tables(file.as_ref())).collect();
    let encoded = files.iter().zip(&tables).map(|(file, (stored, rows, columns))| Encoded {
        bytes: file.as_ref(),
        stored: *stored,
        left: 0,
        top: 0,
        rows,
        columns,
        flip: false,
    });
    let mut given: Vec<Encoded<'_>> = encoded.collect();
    let mut pictures = Vec::new();
    decoder
        .decode(size, &mut |_| std::mem::take(&mut given), &mut |decoded| {
            pictures = decoded.iter().map(|pixels| pixels.map(<[u8]>::to_vec)).collect();
        })
        .unwrap();
    pictures
}

/// Maximum difference of values.
fn max_difference(a: &[u8], b: &[u8]) -> u8 {
    a.iter().zip(b).map(|(a, b)| a.abs_diff(*b)).max().unwrap()
}

#[test]
fn pictures_decoded_by_a_device_equal_those_of_cpu_cores() {
    let of_all_sizes = make_dataset(|number| (40 + number * 7 % 31, 32 + number * 5 % 23));
    let of_one_size = make_dataset(|_| (48, 48));
    let augmented = DataSpec {
        vertical_flip: true,
        color_jitter: [0.4, 0.4, 0.4, 0.1],
        augment: Augment::Trivial,
        ..resized_crops(24)
    };
    for (name, dir, spec, formats) in [
        (
            "random resized crops",
            &of_all_sizes,
            resized_crops(24),
            &[BatchFormat::Bytes, BatchFormat::Normalised][..],
        ),
        ("enlarged", &of_all_sizes, resized_crops(90), &[BatchFormat::Bytes][..]),
        ("flipped and recoloured", &of_all_sizes, augmented.clone(), &[BatchFormat::Bytes][..]),
        (
            "erased",
            &of_all_sizes,
            DataSpec { random_erasing: 0.5, ..augmented },
            &[BatchFormat::Normalised][..],
        ),
        // Training crops the largest centred square; only validation needs the whole picture.
        (
            "squares",
            &of_all_sizes,
            DataSpec { image_size: Some(ImageSize::Fixed(24)), resize_size: Some(28), ..spec() },
            &[BatchFormat::Bytes][..],
        ),
        (
            "unchanged size",
            &of_one_size,
            DataSpec { resize_size: Some(50), ..spec() },
            &[BatchFormat::Bytes][..],
        ),
    ] {
        for format in formats {
            let [on_cores, on_device] = open_both(dir.path(), &spec, *format);
            assert!(on_cores.is_prepared_each_step() && on_cores.decodes_jpeg(), "{name}");
            assert!(batches(&on_cores) == batches(&on_device), "{name}, {format:?}");
            assert_eq!(on_cores.decoded(), None);
            let decoded = on_device.decoded().unwrap();
            let cores = BTreeMap::from([(CpuDecodeReason::OtherFormat, 1), (CpuDecodeReason::Grey, 1)]);
            assert_eq!((decoded.by_device, &decoded.by_cores), (16, &cores), "{name}");
        }
    }
}

#[test]
fn cpu_cores_decode_what_a_device_refuses_or_fails_at() {
    let dir = make_dataset(|number| (40 + number * 7 % 31, 32 + number * 5 % 23));
    let home = dir.path().join("train/all");
    fs::write(home.join("progressive.jpg"), fixture!("progressive.jpg")).unwrap();
    let spec = resized_crops(24);
    let expected = batches(&open(dir.path(), &spec, BatchFormat::Bytes));
    let mut data = open(dir.path(), &spec, BatchFormat::Bytes);

    data.set_decoder(Arc::new(HostDecoder { refused_every: Some(2), ..HostDecoder::default() }));
    assert!(batches(&data) == expected);
    let decoded = data.decoded().unwrap();
    let refused = decoded.by_cores[&CpuDecodeReason::Refused];
    assert!(refused >= 8 && decoded.by_device + refused == 16, "{decoded:?}");
    assert_eq!(decoded.by_cores[&CpuDecodeReason::Progressive], 1);
    let text = decoded.to_string();
    assert!(text.contains("1 progressive") && text.contains("refused by nvJPEG"), "{text}");

    // After four consecutive failed batches the device is not used again. A batch counts once, even if several of its groups fail.
    let failing = Arc::new(HostDecoder { fails: true, max_pictures: Some(2), ..HostDecoder::default() });
    data.set_decoder(failing.clone());
    let whole = EpochPlan { batch_size: 16, threads: 1, ..PLAN };
    assert!(data.epoch(whole).all(|batch| batch.is_ok()));
    assert!(failing.calls.load(Ordering::Relaxed) > 4 && !data.decoded().unwrap().given_up, "{failing:?}");

    // Each failed batch is one call here, and the device gets no fifth batch.
    let failing = Arc::new(HostDecoder { fails: true, ..HostDecoder::default() });
    data.set_decoder(failing.clone());
    for epoch in 0..4 {
        assert!(data.epoch(EpochPlan { epoch, threads: 1, ..PLAN }).all(|batch| batch.is_ok()));
    }
    assert_eq!(failing.calls.load(Ordering::Relaxed), 4);
    let decoded = data.decoded().unwrap();
    assert!(decoded.given_up && decoded.by_device == 0, "{decoded:?}");
    let text = decoded.to_string();
    assert!(text.contains("it is broken") && text.contains("from now on"), "{text}");
    assert!(batches(&data) == expected);
}

#[test]
fn bytes_of_files_held_for_a_device_are_limited() {
    let dir = make_dataset(|_| (40, 40));
    let spec = resized_crops(24);
    let expected = batches(&open(dir.path(), &spec, BatchFormat::Bytes));
    // One batch has all pictures of the training split.
    let plan = EpochPlan { batch_size: 64, threads: 1, ..PLAN };
    let mut data = open(dir.path(), &spec, BatchFormat::Bytes);
    let chosen = data.epoch(plan).next().unwrap().unwrap().indices;
    let mut files: Vec<_> =
        fs::read_dir(dir.path().join("train/all")).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    let bytes: usize = chosen.iter().map(|i| fs::metadata(&files[*i as usize]).unwrap().len() as usize).sum();
    for (max_bytes, left_to_cores) in [(bytes, None), (bytes - 1, Some(1))] {
        data.set_decoder_with_limit(Arc::new(HostDecoder::default()), max_bytes);
        assert_eq!(data.epoch(plan).count(), 1);
        let decoded = data.decoded().unwrap();
        assert_eq!(decoded.by_cores.get(&CpuDecodeReason::LongBatch).copied(), left_to_cores, "{decoded:?}");
    }
    data.set_decoder_with_limit(Arc::new(HostDecoder::default()), 1);
    assert!(batches(&data) == expected);
    assert_eq!(data.decoded().unwrap().by_device, 0);
}

#[test]
fn resized_and_mixed_pictures_of_a_device_equal_those_of_cpu_cores() {
    let dir = make_dataset(|number| (40 + number * 7 % 31, 32 + number * 5 % 23));
    let sizes = [(1, 16), (3, 24)].map(|(epoch, size)| SizeFrom { epoch, size });
    let sized = DataSpec {
        image_size: Some(ImageSize::Schedule(sizes.to_vec())),
        validation_size: Some(32),
        ..spec()
    };
    for spec in [
        DataSpec { random_resized_crop: true, ..sized.clone() },
        // In training: the largest centred square, then a random crop of the padded square.
        DataSpec { resize_size: Some(36), ..sized },
    ] {
        for mixing in
            [Mixing::default(), Mixing { mixup: 0.4, cutmix: 0.0 }, Mixing { mixup: 0.0, cutmix: 1.0 }]
        {
            let [mut on_cores, mut on_device] = open_both(dir.path(), &spec, BatchFormat::Bytes);
            on_cores.set_mixing(mixing);
            on_device.set_mixing(mixing);
            for (epoch, side) in [(0, 16), (1, 16), (2, 24)] {
                let plan = EpochPlan { epoch, batch_size: 3, accumulate: 2, ..PLAN };
                let expected: Vec<Batch> = on_cores.epoch(plan).map(Result::unwrap).collect();
                let actual: Vec<Batch> = on_device.epoch(plan).map(Result::unwrap).collect();
                assert!(actual == expected, "{mixing:?}, epoch {epoch}");
                assert!(actual.iter().all(|batch| batch.bytes.len() == batch.labels.len() * side * side * 3));
                let seen: BTreeSet<u64> = actual.iter().flat_map(|batch| &batch.indices).copied().collect();
                assert_eq!(seen.len() as u64, on_device.shape.train_samples, "{mixing:?}, epoch {epoch}");
            }
            assert!(batches(&on_device) == batches(&on_cores), "{mixing:?}, validation");
            assert!(on_device.decoded().unwrap().by_device > 0);
        }
    }
}

#[test]
fn a_device_decodes_pictures_of_shards_like_cpu_cores() {
    // Odd sizes, because `prepare` writes grey and PNG pictures as 4:2:0, and decoders agree in 4:2:0 only at odd sizes and
    // multiples of 16.
    let dir = make_dataset(|number| (41 + number % 7 * 2, 33 + number % 5 * 2));
    let to = TempDir::new().unwrap();
    let settings = lockstep_data::PrepareSettings::default();
    lockstep_data::prepare(dir.path(), to.path(), &settings, |_| {}).unwrap();
    let [on_cores, on_device] = open_both(to.path(), &resized_crops(24), BatchFormat::Bytes);
    assert!(on_device.decodes_jpeg());
    assert!(batches(&on_device) == batches(&on_cores));
    // Grey pictures and PNG files were converted to ordinary JPEG.
    let decoded = on_device.decoded().unwrap();
    assert_eq!((decoded.by_device, decoded.by_cores.len()), (18, 0), "{decoded}");
}

#[test]
fn a_dataset_without_jpeg_files_uses_no_device_decoder() {
    let dir = make_dataset(|_| (40, 40));
    let home = dir.path().join("train/all");
    let spec = resized_crops(24);
    for file in fs::read_dir(&home).unwrap().map(|entry| entry.unwrap().path()) {
        if file.extension().is_some_and(|extension| extension == "jpg") {
            fs::remove_file(file).unwrap();
        }
    }
    // A file's name does not determine its format.
    picture(22, 40, 40).save(home.join("other.png")).unwrap();
    fs::rename(home.join("other.png"), home.join("other.jpg")).unwrap();
    let data = open(dir.path(), &spec, BatchFormat::Bytes);
    assert!(data.is_prepared_each_step() && !data.decodes_jpeg());
}
