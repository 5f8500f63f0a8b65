//! Tests a Rust version of the kernel's `Planes` on planes of real files that the host decodes. Pixels must equal those of the CPU's
//! decoder.

use super::*;
use zune_jpeg::{
    JpegDecoder as Zune,
    zune_core::{bytestream::ZCursor, colorspace::ColorSpace, options::DecoderOptions},
};

/// All supported subsamplings.
pub(super) const SAMPLINGS: [SamplingFactor; 4] =
    [SamplingFactor::R_4_4_4, SamplingFactor::R_4_2_2, SamplingFactor::R_4_4_0, SamplingFactor::R_4_2_0];

/// Whether, at a side of this length, decoders need no chroma beyond the border. `step`: pixels per chroma sample along the side. Beyond
/// the border, the CPU's decoder reads the content of the file's last block, which planes do not have.
pub(super) fn decoders_agree(side: u32, step: u32) -> bool {
    step == 1 || side % 2 == 1 || side.is_multiple_of(16)
}

/// The kernel's `Planes::pixel` in Rust. Addresses are offsets in `memory`.
pub(super) fn pixel(memory: &[u8], p: &Planes, column: u32, row: u32) -> [u8; 3] {
    let nearest = |at: u32, halved: u32, samples: u32| {
        let first = at >> halved;
        match (halved, at & 1) {
            (0, _) => [first, first],
            (_, 0) => [first, first.saturating_sub(1)],
            _ => [first, (first + 1).min(samples - 1)],
        }
    };
    let sample = |plane: u64, pitch: u32, column: u32, row: u32| {
        i32::from(memory[plane as usize + row as usize * pitch as usize + column as usize])
    };
    let between = |first: i32, second: i32| (3 * first + second + 2) >> 2;
    let columns = nearest(column, p.half_columns, p.chroma_width);
    let rows = nearest(row, p.half_rows, p.chroma_height);
    let chroma = |plane: u64| {
        let [first, second] = columns.map(|column| {
            let [first, second] = rows.map(|row| sample(plane, p.chroma_pitch, column, row));
            between(first, second)
        });
        between(first, second) - 128
    };
    // Full-range BT.601 in 14-bit fixed point, as in `planes.cu`.
    let luma = sample(p.luma, p.luma_pitch, column, row) * 16384 + 8191;
    let (cb, cr) = (chroma(p.cb), chroma(p.cr));
    [luma + 22970 * cr, luma - 11700 * cr - 5638 * cb, luma + 29032 * cb]
        .map(|value| (value >> 14).clamp(0, 255) as u8)
}

/// Decodes a file into planes that are appended to `memory`.
pub(super) fn decode(file: &[u8], stored: Stored, memory: &mut Vec<u8>) -> Result<Planes, String> {
    let planes = Planes::new(stored, memory.len() as u64);
    memory.resize(memory.len() + planes_bytes(stored), GREY);
    let (width, height) = stored.chroma();
    let sizes = [(stored.width, stored.height), (width, height), (width, height)];
    for ((plane, samples), (width, height)) in
        planes.destinations().into_iter().zip(samples(file, stored)?).zip(sizes)
    {
        assert_eq!(samples.len(), (width * height) as usize);
        for (row, samples) in samples.chunks_exact(width as usize).enumerate() {
            memory[plane.address as usize + row * plane.pitch..][..samples.len()].copy_from_slice(samples);
        }
    }
    Ok(planes)
}

/// The three components, not upsampled. The available decoder upsamples chroma, so the file's header is changed to that of a
/// picture whose components are not upsampled, or only by copying.
fn samples(file: &[u8], stored: Stored) -> Result<[Vec<u8>; 3], String> {
    let Subsampling { columns, rows } = stored.subsampling;
    // Number of blocks of chroma in each direction.
    let (across, down) = (stored.width.div_ceil(8 * columns), stored.height.div_ceil(8 * rows));
    let (unchanged, chroma) = (Decoded::new(file, ColorSpace::YCbCr)?, stored.chroma());
    let (cb, cr) = match (columns, rows) {
        (1, 1) => (unchanged.plane(1, 1, chroma), unchanged.plane(2, 1, chroma)),
        // Four blocks of luma per block of chroma, in a row: the decoder does not interpolate by a factor of four.
        (2, 2) => {
            let in_a_row = with_frame(file, (across * 32, down * 8), |frame| frame[7] = 0x41, |_| {});
            let decoded = Decoded::new(&in_a_row, ColorSpace::YCbCr)?;
            (decoded.plane(1, 4, chroma), decoded.plane(2, 4, chroma))
        }
        // Two blocks of luma per block of chroma: each becomes a component, in addition to the two components of chroma.
        _ => {
            let repeat_entry = |list: &mut Vec<u8>, first: usize, entry: usize| {
                list[first - 1] = 4;
                let mut copy = list[first..first + entry].to_vec();
                copy[0] = 99;
                drop(list.splice(first + entry..first + entry, copy));
            };
            let frame = |frame: &mut Vec<u8>| {
                frame[7] = 0x11;
                repeat_entry(frame, 6, 3);
            };
            let of_four = with_frame(file, (across * 8, down * 8), frame, |scan| repeat_entry(scan, 1, 2));
            let decoded = Decoded::new(&of_four, ColorSpace::CMYK)?;
            (decoded.plane(2, 1, chroma), decoded.plane(3, 1, chroma))
        }
    };
    Ok([unchanged.plane(0, 1, (stored.width, stored.height)), cb, cr])
}

/// The decoder's output.
struct Decoded {
    width: usize,
    channels: usize,
    values: Vec<u8>,
}

impl Decoded {
    fn new(file: &[u8], colors: ColorSpace) -> Result<Self, String> {
        let options = DecoderOptions::default().set_strict_mode(false).jpeg_set_out_colorspace(colors);
        let mut decoder = Zune::new_with_options(ZCursor::new(file), options);
        let values = decoder.decode().map_err(|error| error.to_string())?;
        let (width, _) = decoder.dimensions().unwrap();
        Ok(Self { width, channels: colors.num_components(), values })
    }

    /// Every `step`-th column of a channel. At least `width` such columns must exist.
    fn plane(&self, channel: usize, step: usize, (width, height): (u32, u32)) -> Vec<u8> {
        let all = (0..height as usize).flat_map(|y| (0..width as usize).map(move |x| (x, y)));
        all.map(|(x, y)| self.values[(y * self.width + x * step) * self.channels + channel]).collect()
    }
}

/// The file with another size and changed contents of its frame and scan headers.
fn with_frame(
    file: &[u8],
    (width, height): (u32, u32),
    frame: impl Fn(&mut Vec<u8>),
    scan: impl Fn(&mut Vec<u8>),
) -> Vec<u8> {
    let (mut changed, mut at) = (file[..2].to_vec(), 2);
    loop {
        let (marker, length) = (file[at + 1], usize::from(u16::from_be_bytes([file[at + 2], file[at + 3]])));
        let mut segment = file[at + 4..at + 2 + length].to_vec();
        match marker {
            0xc0 => {
                segment[1..3].copy_from_slice(&(height as u16).to_be_bytes());
                segment[3..5].copy_from_slice(&(width as u16).to_be_bytes());
                frame(&mut segment);
            }
            0xda => scan(&mut segment),
            _ => {}
        }
        changed.extend([0xff, marker]);
        changed.extend((segment.len() as u16 + 2).to_be_bytes());
        changed.extend(segment);
        at += 2 + length;
        if marker == 0xda {
            return [&changed[..], &file[at..]].concat();
        }
    }
}

/// The file's pixels computed from planes, in stored orientation.
fn pixels(file: &[u8]) -> (Stored, Vec<[u8; 3]>) {
    let stored = for_hardware(file).unwrap();
    // Planes that do not start at offset 0.
    let mut memory = vec![7; 1000];
    let planes = decode(file, stored, &mut memory).unwrap();
    let all = (0..stored.height).flat_map(|y| (0..stored.width).map(move |x| (x, y)));
    (stored, all.map(|(x, y)| pixel(&memory, &planes, x, y)).collect())
}

#[test]
fn planes_become_the_pixels_that_cores_make() {
    for sampling in SAMPLINGS {
        for (number, (width, height)) in
            [(1, 1), (2, 2), (3, 5), (7, 4), (16, 16), (17, 33), (31, 20), (64, 48), (66, 34), (95, 63)]
                .into_iter()
                .enumerate()
        {
            let file = encode(&picture(number as u32, width, height), sampling).unwrap();
            let expected = Picture::decode(&file).unwrap();
            let (stored, actual) = pixels(&file);
            assert_eq!((stored.width, stored.height), (width, height));
            let Subsampling { columns, rows } = stored.subsampling;
            let mut compared = 0;
            for (number, (actual, expected)) in actual.iter().zip(expected.pixels.chunks_exact(3)).enumerate()
            {
                let (x, y) = (number as u32 % width, number as u32 / width);
                let is_ambiguous = (x + 1 == width && !decoders_agree(width, columns))
                    || (y + 1 == height && !decoders_agree(height, rows));
                if !is_ambiguous {
                    assert_eq!(actual, expected, "{sampling:?}, {width} x {height}, column {x}, row {y}");
                    compared += 1;
                }
            }
            assert!(
                compared > 0 && compared >= (width - 1) * (height - 1),
                "{sampling:?}, {width} x {height}"
            );
        }
    }
}

/// Compares with Pillow (libjpeg-turbo), which does not read chroma beyond the border either.
#[test]
fn pixels_of_planes_are_close_to_pillow_s_except_at_the_border() {
    for (name, file, pillow) in [
        ("4:4:4", &fixture!("full-chroma.jpg")[..], &fixture!("full-chroma.jpg.rgb.png")[..]),
        ("4:2:2", fixture!("half-chroma.jpg"), fixture!("half-chroma.jpg.rgb.png")),
        ("4:2:0", fixture!("orientation-1.jpg"), fixture!("orientation-1.jpg.rgb.png")),
    ] {
        let expected = image::load_from_memory(pillow).unwrap().into_rgb8();
        let (stored, actual) = pixels(file);
        assert_eq!(expected.dimensions(), (stored.width, stored.height));
        let largest =
            actual.iter().flatten().zip(expected.as_raw()).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
        assert!(largest <= 4, "{name}: values differ by up to {largest} of 255");
    }
}

#[test]
fn undecoded_parts_of_a_picture_are_grey() {
    for (columns, rows) in [(1, 1), (2, 2)] {
        let stored =
            Stored { width: 3, height: 3, orientation: 1, subsampling: Subsampling { columns, rows } };
        assert_eq!(pixel(&vec![GREY; planes_bytes(stored)], &Planes::new(stored, 0), 2, 2), [128; 3]);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_pictures_of_odd_sizes_match_cpu_cores_except_at_the_border() {
    let decoder = super::super::open(0, DType::F16).unwrap();
    for sampling in SAMPLINGS {
        for (width, height) in [(1, 1), (31, 17), (95, 63), (479, 371)] {
            // The picture is saturated and smooth, so undecoded grey areas differ much from it, and rounding only little.
            let drawn = image::RgbImage::from_fn(width, height, |x, y| {
                image::Rgb([200 + (x * 40 / width) as u8, 20 + (y * 40 / height) as u8, 40])
            });
            let file = encode(&drawn, sampling).unwrap();
            let expected = Picture::decode(&file).unwrap();
            let actual = super::decode(decoder.as_ref(), &[&file], (width, height)).remove(0);
            let largest = actual.map(|pixels| max_difference(&pixels, &expected.pixels));
            eprintln!("{sampling:?}, {width} x {height}: values apart by at most {largest:?} of 255");
            assert!(
                largest.is_none_or(|largest| largest <= 12),
                "{sampling:?}, {width} x {height}: {largest:?}"
            );
            // Most files have one of these two subsamplings.
            let is_common = matches!(sampling, SamplingFactor::R_4_4_4 | SamplingFactor::R_4_2_0);
            assert!(largest.is_some() || !is_common || width == 1, "{sampling:?} is refused");
        }
    }
}
