//! Folders with pictures of every format, and with files that are no pictures or cannot be read.

use lockstep_data::{ChangeDetection, Picture, fingerprint, inspect, loader::DataSource};
use lockstep_protocol::{
    dataset::DatasetInfo,
    spec::{BrokenFiles, DataSpec, ImageSize, Validation},
};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs,
    os::unix::{ffi::OsStrExt, fs::symlink, net::UnixListener},
    path::Path,
};
use tempfile::TempDir;

/// A picture that differs for each number.
fn picture(number: u32, width: u32, height: u32) -> image::RgbImage {
    // The picture is smooth, so JPEG compression hardly changes it.
    image::RgbImage::from_fn(width, height, |x, y| {
        image::Rgb([(x * 2 + number % 100) as u8, (y * 3) as u8, (x + y + number % 50) as u8])
    })
}

pub(crate) fn encode(picture: impl Into<image::DynamicImage>, format: image::ImageFormat) -> Vec<u8> {
    let mut file = std::io::Cursor::new(Vec::new());
    picture.into().write_to(&mut file, format).expect("writes");
    file.into_inner()
}

/// Writes `per_class` PNG files to each of `train/cat` and `train/dog`.
fn write_folder(dir: &Path, per_class: u32) {
    for (c, class) in (0..).zip(["cat", "dog"]) {
        let home = dir.join("train").join(class);
        fs::create_dir_all(&home).expect("a folder");
        for number in 0..per_class {
            picture(c * 100 + number, 32, 32).save(home.join(format!("{number}.png"))).expect("writes");
        }
    }
}

fn spec(broken_files: BrokenFiles) -> DataSpec {
    DataSpec {
        validation: Validation::Split("none".into()),
        image_size: Some(ImageSize::Fixed(32)),
        broken_files,
        ..DataSpec::default()
    }
}

/// The names of the files that a job with `broken_files = "skip"` leaves out.
fn skipped_files(dir: &Path) -> Vec<String> {
    DataSource::open(dir, &spec(BrokenFiles::Skip), 0).expect("opens").shape.skipped
}

/// The error of a job with `broken_files = "fail"`.
fn open_error(dir: &Path) -> String {
    DataSource::open(dir, &spec(BrokenFiles::Fail), 0).expect_err("must not open").to_string()
}

/// The path of each broken file and the reason.
fn broken_files(info: &DatasetInfo) -> BTreeSet<String> {
    info.broken.iter().map(|b| format!("{} {}", b.file, b.detail)).collect()
}

#[test]
fn inspections_and_jobs_name_the_same_unusable_files_without_blocking() {
    let dir = TempDir::new().expect("a folder");
    write_folder(dir.path(), 3);
    let train = dir.path().join("train");
    let cat = train.join("cat");
    let pipe = |at: &Path| mknodat(CWD, at, FileType::Fifo, Mode::RUSR, 0).expect("a pipe");
    pipe(&cat.join("pipe.jpg"));
    pipe(&cat.join("a pipe without a picture's name"));
    let _socket = UnixListener::bind(cat.join("socket.png")).expect("a socket");
    symlink("/dev/zero", cat.join("device.png")).expect("a link");
    symlink("nowhere.png", cat.join("dangling.png")).expect("a link");
    symlink("looping.png", cat.join("looping.png")).expect("a link");
    symlink("../..", cat.join("up")).expect("a link");
    // A regular file that nobody can read, not even root.
    symlink("/proc/self/mem", cat.join("unreadable.jpg")).expect("a link");
    fs::write(cat.join("IMG_1.HEIC"), b"\0\0\0\x18ftypheic\0\0\0\0").expect("writes");
    fs::write(cat.join("heic by another name.jpg"), b"\0\0\0\x18ftypheic\0\0\0\0").expect("writes");
    fs::write(cat.join("drawing.svg"), "<svg/>").expect("writes");
    fs::create_dir(cat.join("more")).expect("a folder");
    fs::copy(cat.join("0.png"), cat.join("more/0.png")).expect("copies");
    fs::copy(cat.join("0.png"), train.join("contact sheet.png")).expect("copies");
    let latin = train.join(OsStr::from_bytes(b"caf\xe9"));
    fs::create_dir(&latin).expect("a folder");
    fs::copy(cat.join("0.png"), latin.join("0.png")).expect("copies");
    symlink("gone", train.join("fox")).expect("a link");
    symlink("..", train.join("round")).expect("a link");
    symlink("gone", dir.path().join("val")).expect("a link");
    // Ignored: files that are neither pictures nor named like pictures, empty folders, hidden files, and files outside a split.
    fs::write(cat.join("Thumbs.db"), b"not a picture").expect("writes");
    fs::write(cat.join("notes"), b"BM is not all there is to a bitmap").expect("writes");
    fs::write(train.join("labels.csv"), "a,b").expect("writes");
    fs::create_dir(cat.join("nothing in it")).expect("a folder");
    symlink("gone", cat.join(".hidden")).expect("a link");
    pipe(&dir.path().join("elsewhere"));

    let expected = [
        ("pipe.jpg", "is a named pipe (FIFO), not a regular file"),
        ("a pipe without a picture's name", "is a named pipe (FIFO), not a regular file"),
        ("socket.png", "is a socket, not a regular file"),
        ("device.png", "is a device, not a regular file"),
        ("dangling.png", "is a link to nowhere.png, which does not exist"),
        ("looping.png", "is a link that leads back to itself"),
        ("cat/up", "is a link to a folder that contains the link"),
        ("unreadable.jpg", "cannot be read: Input/output error"),
        ("IMG_1.HEIC", "has the format HEIC, which is not supported; convert it to JPEG, PNG"),
        ("heic by another name.jpg", "has the format HEIF or AVIF, which is not supported"),
        ("drawing.svg", "has the format SVG, which is not supported"),
        ("cat/more", "is a folder inside a class folder (1 file in it)"),
        ("contact sheet.png", "is not in a class folder"),
        ("train/caf\u{fffd}", "is a class folder whose name is not UTF-8 (1 file in it); rename it"),
        ("train/fox", "is a link to gone, which does not exist"),
        ("train/round", "is a link to a folder that contains the link"),
        ("/val", "is a link to gone, which does not exist"),
    ];
    let info = inspect(dir.path()).expect("readable");
    assert_eq!((info.classes.join(" "), info.splits[0].per_class.clone()), ("cat dog".into(), vec![3, 3]));
    let all = broken_files(&info);
    for (name, detail) in expected {
        let expected = format!("{name} {detail}");
        assert!(all.iter().any(|text| text.contains(&expected)), "{expected} is not in {all:#?}");
    }
    assert_eq!((all.len(), info.broken_count), (expected.len(), expected.len() as u64), "{all:#?}");
    // A job leaves out the same files, or refuses the dataset.
    assert_eq!(skipped_files(dir.path()).into_iter().collect::<BTreeSet<_>>(), all);
    let message = open_error(dir.path());
    assert!(message.starts_with("17 broken files: "), "{message}");
    // The check before a job starts neither refuses the dataset nor blocks.
    assert!(fingerprint(dir.path(), ChangeDetection::Files).is_ok());
}

#[test]
fn every_kind_of_picture_is_read_and_truncated_files_are_named() {
    let formats = ["png", "jpg", "webp", "gif", "bmp", "tiff"];
    let dir = TempDir::new().expect("a folder");
    let home = dir.path().join("train/cat");
    fs::create_dir_all(&home).expect("a folder");
    for name in formats {
        let saved = picture(1, 48, 48);
        let path = home.join(format!("whole.{name}"));
        match name {
            // Few colours, because a GIF file has a palette.
            "gif" => image::RgbaImage::from_fn(48, 48, |x, _| image::Rgba([x as u8 / 16 * 60, 9, 200, 255]))
                .save(path),
            _ => saved.save(path),
        }
        .expect("writes");
        let whole = fs::read(home.join(format!("whole.{name}"))).expect("readable");
        let decoded = Picture::decode(&whole).unwrap_or_else(|e| panic!("{name} {e}"));
        assert_eq!((decoded.width, decoded.height, decoded.channels), (48, 48, 3));
        let is_close = |a: &[u8], b: &[u8]| a.iter().zip(b).all(|(a, b)| a.abs_diff(*b) < 40);
        assert!(name == "gif" || is_close(&decoded.pixels, saved.as_raw()), "{name} has other pixels");
        fs::write(home.join(format!("cut.{name}")), &whole[..whole.len() / 2]).expect("writes");
    }
    fs::create_dir_all(dir.path().join("train/dog")).expect("a folder");
    picture(2, 48, 48).save(dir.path().join("train/dog/whole.png")).expect("writes");
    let info = inspect(dir.path()).expect("readable");
    let all = broken_files(&info);
    assert_eq!((info.splits[0].samples, info.broken_count), (7, 6), "{all:#?}");
    assert!(
        formats.iter().all(|name| all.iter().any(|text| text.contains(&format!("cut.{name} ")))),
        "{all:#?}"
    );
    assert_eq!(skipped_files(dir.path()).into_iter().collect::<BTreeSet<_>>(), all);
}

#[test]
fn pictures_with_trailing_data_are_complete() {
    let dir = TempDir::new().expect("a folder");
    write_folder(dir.path(), 1);
    let home = dir.path().join("train/cat");
    let jpeg = encode(picture(5, 64, 48), image::ImageFormat::Jpeg);
    let png = fs::read(home.join("0.png")).expect("readable");
    // The film of a motion photograph, which contains the marker of a scan; a second picture, as of stereo cameras and gain
    // maps, whole and truncated; fill bytes.
    let film =
        [b"\0\0\0\x20ftypisom\0\0\x02\0isomiso2mp41\0\0\x10\0mdat".as_slice(), &[0xff, 0xda, 0, 12, 7, 7]]
            .concat();
    for (number, trailing) in
        [&film[..], &jpeg, &jpeg[..jpeg.len() / 2], &[0xff; 300]].into_iter().enumerate()
    {
        fs::write(home.join(format!("{number}.jpg")), [&jpeg, trailing].concat()).expect("writes");
        fs::write(home.join(format!("trailing {number}.png")), [&png, trailing].concat()).expect("writes");
    }
    let info = inspect(dir.path()).expect("readable");
    assert_eq!((info.broken_count, info.splits[0].per_class[0]), (0, 9), "{:?}", info.broken);
    assert_eq!(skipped_files(dir.path()), Vec::<String>::new());
    // A truncated picture with a film after it is still truncated.
    fs::write(home.join("cut.jpg"), [&jpeg[..jpeg.len() - 40], &film].concat()).expect("writes");
    assert!(open_error(dir.path()).contains("cut.jpg is cut off: a JPEG picture without its end"));
}

#[test]
fn large_and_small_pictures_have_equal_weight_in_the_mean() {
    let dir = TempDir::new().expect("a folder");
    let home = dir.path().join("train/cat");
    fs::create_dir_all(&home).expect("a folder");
    // One large dark picture, which has the pixels of 300 small pictures, and three small bright ones.
    image::RgbImage::from_pixel(400, 300, image::Rgb([0, 0, 0])).save(home.join("0.png")).expect("writes");
    fs::create_dir_all(dir.path().join("train/dog")).expect("a folder");
    for number in 1..4 {
        let path = dir.path().join(format!("train/{}/{number}.png", if number < 3 { "cat" } else { "dog" }));
        image::RgbImage::from_pixel(20, 20, image::Rgb([200, 100, 50])).save(path).expect("writes");
    }
    let info = inspect(dir.path()).expect("readable");
    let job = DataSource::open(dir.path(), &spec(BrokenFiles::Fail), 0).expect("opens").shape;
    let expected = [200.0 * 0.75 / 255.0, 100.0 * 0.75 / 255.0, 50.0 * 0.75 / 255.0];
    for (channel, expected) in expected.into_iter().enumerate() {
        let (inspected, trained) = (info.mean[channel], job.mean[channel]);
        assert!(
            (inspected - expected).abs() < 1e-4 && (trained - expected).abs() < 1e-4,
            "means of an inspection {inspected}, of a job {trained}"
        );
        assert!((info.std[channel] - job.std[channel]).abs() < 1e-4, "{:?}, not {:?}", info.std, job.std);
    }
    // A job reads the central square of a picture that is not square.
    image::RgbImage::from_fn(300, 100, |x, _| image::Rgb([if (100..200).contains(&x) { 0 } else { 255 }; 3]))
        .save(home.join("0.png"))
        .expect("writes");
    let info = inspect(dir.path()).expect("readable");
    assert!((info.mean[0] - expected[0]).abs() < 1e-4, "{:?}", info.mean);
}

/// A black PNG file of this size.
fn black(width: u32, height: u32) -> Vec<u8> {
    use flate2::{Compression, write::ZlibEncoder};
    use std::io::Write;
    let chunk = |kind: &[u8; 4], data: &[u8]| {
        let checked = [kind.as_slice(), data].concat();
        let length = (data.len() as u32).to_be_bytes();
        let check = crc32fast::hash(&checked).to_be_bytes();
        [length.as_slice(), &checked, &check].concat()
    };
    let mut packed = ZlibEncoder::new(Vec::new(), Compression::fast());
    // One grey bit per pixel, and one filter byte per row.
    let row = vec![0; 1 + width.div_ceil(8) as usize];
    (0..height).for_each(|_| packed.write_all(&row).expect("packs"));
    let header = [width.to_be_bytes().as_slice(), &height.to_be_bytes(), &[1, 0, 0, 0, 0]].concat();
    [
        b"\x89PNG\r\n\x1a\n".to_vec(),
        chunk(b"IHDR", &header),
        chunk(b"IDAT", &packed.finish().expect("packs")),
        chunk(b"IEND", &[]),
    ]
    .concat()
}

#[test]
fn pictures_above_the_size_limit_are_refused_with_a_reason() {
    let max_pixels = 64 << 20;
    let (width, height) = (1 << 16, max_pixels >> 16);
    let largest = Picture::decode(&black(width, height)).expect("is read");
    assert_eq!((largest.width, largest.height), (width, height));
    drop(largest);
    let bomb = black(width, height + 1);
    assert!(bomb.len() < 1 << 20, "{} bytes become 200 MB", bomb.len());
    let message = Picture::decode(&bomb).expect_err("must not be decoded");
    let advice = "scale it down, or save it as baseline JPEG, which is scaled down as it is read";
    assert_eq!(message, format!("is 65536 x 1025 pixels; at most 64 megapixels are allowed: {advice}"));
    // A header with an absurd size.
    let mut absurd = black(8, 8);
    absurd[16..24].copy_from_slice(&[0x7f, 0xff, 0xff, 0xff, 0x7f, 0xff, 0xff, 0xff]);
    let check = crc32fast::hash(&absurd[12..29]).to_be_bytes();
    absurd[29..33].copy_from_slice(&check);
    let message = Picture::decode(&absurd).expect_err("must not be decoded");
    assert!(
        message.contains("2147483647 x 2147483647 pixels") || message.contains("cannot be decoded"),
        "{message}"
    );

    // A sparse file, which has a length but no data.
    let dir = TempDir::new().expect("a folder");
    write_folder(dir.path(), 1);
    let sparse = fs::File::create(dir.path().join("train/cat/sparse.jpg")).expect("writes");
    sparse.set_len((512 << 20) + 1).expect("writes");
    assert!(open_error(dir.path()).contains("sparse.jpg has 536870913 bytes; at most 536870912 are allowed"));
    sparse.set_len(512 << 20).expect("writes");
    // The file is read, but is no picture.
    assert!(open_error(dir.path()).contains("sparse.jpg is not a JPEG, PNG"));
}

#[test]
fn a_jpeg_of_too_many_pixels_is_scaled_down_as_it_is_read() {
    let (width, height) = (8200u16, 8201u16);
    let mut pixels = vec![40; usize::from(width) * usize::from(height)];
    pixels[usize::from(width) * 4000..].fill(220);
    let mut file = Vec::new();
    let encoder = jpeg_encoder::Encoder::new(&mut file, 90);
    encoder.encode(&pixels, width, height, jpeg_encoder::ColorType::Luma).expect("encodes");
    drop(pixels);
    let picture = Picture::decode(&file).expect("is read");
    assert_eq!((picture.width, picture.height), (4100, 4101));
    let row = |y: usize| &picture.pixels[y * 4100 * 3..][..4100 * 3];
    assert!(row(1990).iter().all(|v| v.abs_diff(40) < 3) && row(2010).iter().all(|v| v.abs_diff(220) < 3));
    // A progressive JPEG is refused, because all of its coefficients would be in memory.
    let frame = file.windows(2).position(|marker| marker == [0xff, 0xc0]).expect("a frame");
    file[frame + 1] = 0xc2;
    let message = Picture::decode(&file).expect_err("must not be decoded");
    let advice = "save it as baseline JPEG, which is scaled down as it is read";
    assert_eq!(message, format!("is 8200 x 8201 pixels; at most 64 megapixels are allowed: {advice}"));
}

#[test]
fn unsupported_tiff_pictures_are_refused_with_advice() {
    let tiff = |picture: image::DynamicImage| encode(picture, image::ImageFormat::Tiff);
    // With another PhotometricInterpretation (tag 262, a short).
    let with_interpretation = |picture: image::DynamicImage, kind: u8| {
        let mut file = tiff(picture);
        let tag = file.windows(4).position(|tag| tag == [6, 1, 3, 0]).expect("the tag");
        file[tag + 8] = kind;
        file
    };
    let (grey, colours) = (image::DynamicImage::new_luma8(6, 4), image::DynamicImage::new_rgb8(6, 4));
    let as_png = "save it as RGB or grey of 8 or 16 bits, or as PNG";
    for (kind, file, advice) in [
        ("palette", with_interpretation(grey, 3), as_png),
        ("YCbCr", with_interpretation(colours.clone(), 6), as_png),
        ("CIE Lab", with_interpretation(colours.clone(), 8), as_png),
        ("ICC Lab", with_interpretation(colours, 9), as_png),
        ("float", tiff(image::DynamicImage::new_rgb32f(6, 4)), "convert it to 8 or 16 bits"),
    ] {
        let message = Picture::decode(&file).expect_err(kind);
        assert!(message.contains(advice), "{kind}: {message}");
    }
}

#[test]
fn values_of_12_bits_in_16_are_refused_instead_of_read_as_black() {
    for format in [image::ImageFormat::Png, image::ImageFormat::Tiff] {
        let decode = |picture: image::DynamicImage| Picture::decode(&encode(picture, format));
        let grey = |value: fn(u32) -> u16| image::ImageBuffer::from_fn(8, 8, |x, _| image::Luma([value(x)]));
        let message = decode(grey(|x| x as u16 * 585).into()).expect_err("must not be read");
        assert!(
            message.contains("values of up to 4095 in 16 bits") && message.contains("scale"),
            "{message}"
        );
        // Alpha values do not count.
        let clear = image::ImageBuffer::from_fn(8, 8, |x, _| image::Rgba([x as u16, 7, 9, u16::MAX]));
        assert!(decode(image::DynamicImage::ImageRgba16(clear)).is_err(), "{format:?}");
        assert!(decode(grey(|x| x as u16 * 586).into()).is_ok(), "{format:?}");
        assert!(decode(grey(|_| 0).into()).is_ok(), "black is black");
    }
}

#[test]
fn a_folder_without_usable_files_is_refused_with_a_reason() {
    let dir = TempDir::new().expect("a folder");
    let train = dir.path().join("train");
    fs::create_dir_all(train.join(OsStr::from_bytes(b"caf\xe9"))).expect("a folder");
    let message = inspect(dir.path()).expect_err("no dataset").to_string();
    assert!(message.contains("no usable class folder") && message.contains("not UTF-8"), "{message}");
    fs::remove_dir_all(&train).expect("removes");
    symlink("gone", &train).expect("a link");
    let message = inspect(dir.path()).expect_err("no dataset").to_string();
    assert!(message.contains("train is a link to gone, which does not exist"), "{message}");
}

/// As in torchvision's `ImageFolder` ("Found no valid file for the classes ..."): no network can learn a class without pictures,
/// and leaving the class out would renumber the other classes.
#[test]
fn classes_without_pictures_are_refused_everywhere() {
    let dir = TempDir::new().expect("a folder");
    write_folder(dir.path(), 2);
    let check = |expected: &str| {
        let inspected = inspect(dir.path()).expect_err("no dataset").to_string();
        for message in [inspected, open_error(dir.path())] {
            assert!(message.contains(expected), "{expected} in {message}");
        }
    };
    // In the training split, also after the dataset was inspected; then in the validation split.
    for class in ["train/ant", "train/zebra"] {
        inspect(dir.path()).expect("readable");
        let class = dir.path().join(class);
        fs::create_dir(&class).expect("a folder");
        check(&format!("class folder {} has no picture: add pictures", class.display()));
        fs::write(class.join("notes.txt"), "no picture").expect("writes");
        fs::create_dir(class.join("nothing in it")).expect("a folder");
        check(&format!("class folder {} has no picture", class.display()));
        // A class of which no file can be used is refused as well.
        let more = class.join("more");
        fs::create_dir(&more).expect("a folder");
        fs::write(more.join("0.png"), "no picture").expect("writes");
        let unusable = format!("class folder {} has no usable picture: {}", class.display(), class.display());
        check(&format!("{unusable}/more is a folder inside a class folder"));
        fs::remove_dir_all(&more).expect("removes");
        fs::write(class.join("0.png"), "no picture").expect("writes");
        check(&format!("{unusable}/0.png is text"));
        fs::remove_dir_all(&class).expect("removes");
    }
    let class = dir.path().join("val/cat");
    fs::create_dir_all(&class).expect("a folder");
    check(&format!("class folder {} has no picture", class.display()));
}

#[test]
fn a_folder_with_only_validation_pictures_is_refused_with_advice() {
    let dir = TempDir::new().expect("a folder");
    write_folder(dir.path(), 2);
    fs::rename(dir.path().join("train"), dir.path().join("val")).expect("renames");
    let message = inspect(dir.path()).expect_err("no dataset").to_string();
    assert!(
        message.contains("it has val/; ") && message.contains("into a folder train/<class>/"),
        "{message}"
    );
}

#[test]
fn unreadable_cifar_files_are_named_without_blocking() {
    let dir = TempDir::new().expect("a folder");
    fs::write(dir.path().join("data_batch_1.bin"), [vec![3], vec![7; 3072]].concat()).expect("writes");
    mknodat(CWD, dir.path().join("data_batch_2.bin"), FileType::Fifo, Mode::RUSR, 0).expect("a pipe");
    symlink("gone", dir.path().join("data_batch_3.bin")).expect("a link");
    let all = broken_files(&inspect(dir.path()).expect("readable"));
    assert_eq!(all.len(), 2, "{all:?}");
    assert_eq!(skipped_files(dir.path()).into_iter().collect::<BTreeSet<_>>(), all);
    assert!(open_error(dir.path()).contains("data_batch_2.bin is a named pipe"));
    mknodat(CWD, dir.path().join("batches.meta.txt"), FileType::Fifo, Mode::RUSR, 0).expect("a pipe");
    assert!(open_error(dir.path()).contains("batches.meta.txt is a named pipe"));
}
