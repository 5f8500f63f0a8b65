//! A decoded picture and the ways to make one.

use crate::files;
use fast_image_resize::{
    FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer, images::Image, images::ImageRef,
};
use image::{ImageDecoder, ImageFormat, ImageReader, Limits};
use std::{
    io::{Cursor, Read},
    path::Path,
};

mod whole;

/// The formats that are read, for sentences.
pub(super) const FORMATS: &str = "JPEG, PNG, WebP, GIF, BMP or TIFF";
/// So many of a file's first bytes tell its format.
const HEAD_BYTES: u64 = 32;
/// Larger pictures are refused before they are decoded.
const MAX_PIXELS: u64 = 64 << 20;
/// Decoded, and in the file: eight bytes a pixel are 16 bits in each of four channels.
pub(super) const MAX_BYTES: u64 = MAX_PIXELS * 8;

/// What pictures are called, those that are read first. A camera's raw format is often a TIFF whose first picture is
/// a thumbnail.
const READ: [&str; 10] = ["jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff"];
const NOT_READ: [&str; 21] = [
    "heic", "heif", "avif", "jxl", "jp2", "j2k", "svg", "ico", "psd", "tga", "ppm", "pgm", "pbm", "pnm",
    "exr", "dng", "cr2", "cr3", "nef", "arw", "raw",
];

/// Pixels as they lie in a file: height, width, channels; one byte each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Picture {
    pub width: u32,
    pub height: u32,
    pub channels: u32,
    pub pixels: Vec<u8>,
}

/// What these first bytes of a file are.
pub(super) fn format_of(head: &[u8]) -> Option<ImageFormat> {
    match head {
        [0xff, 0xd8, 0xff, ..] => Some(ImageFormat::Jpeg),
        [0x89, b'P', b'N', b'G', 0x0d, 0x0a, 0x1a, 0x0a, ..] => Some(ImageFormat::Png),
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some(ImageFormat::WebP),
        [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => Some(ImageFormat::Gif),
        // Two letters are little: the size of the header that follows.
        [b'B', b'M', _, _, _, _, _, _, _, _, _, _, _, _, 12 | 40 | 52 | 56 | 64 | 108 | 124, 0, 0, 0, ..] => {
            Some(ImageFormat::Bmp)
        }
        [b'I', b'I', 42, 0, ..] | [b'M', b'M', 0, 42, ..] => Some(ImageFormat::Tiff),
        _ => None,
    }
}

/// Whether a file is named as pictures are, of whatever kind.
pub(super) fn is_named_like_one(path: &Path) -> bool {
    let extension = extension(path);
    READ.contains(&extension.as_str()) || NOT_READ.contains(&extension.as_str())
}

fn extension(path: &Path) -> String {
    path.extension().map(|e| e.to_string_lossy().to_lowercase()).unwrap_or_default()
}

fn no_picture(bytes: &[u8]) -> String {
    let text =
        !bytes.is_empty() && bytes.iter().take(64).all(|b| b.is_ascii_graphic() || b.is_ascii_whitespace());
    match (bytes.is_empty(), text, bytes) {
        (true, ..) => "is empty".into(),
        (_, _, [_, _, _, _, b'f', b't', b'y', b'p', b'h' | b'm' | b'a', b'e' | b'i' | b'v', ..]) => {
            format!("is a HEIF or AVIF picture, which is not read; convert it to {FORMATS}")
        }
        (_, true, _) => format!("is text, not a {FORMATS} picture"),
        _ => format!("is not a {FORMATS} picture"),
    }
}

fn decoder(bytes: &[u8]) -> Result<(ImageFormat, impl ImageDecoder + '_), String> {
    let format = format_of(bytes).ok_or_else(|| no_picture(bytes))?;
    if !whole::is_whole(format, bytes) {
        return Err(format!("is cut off: a {format:?} picture without its end; get it again"));
    }
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    let mut limits = Limits::default();
    limits.max_alloc = Some(MAX_BYTES);
    reader.limits(limits);
    let decoder = reader.into_decoder().map_err(cannot_be_decoded)?;
    let (width, height) = decoder.dimensions();
    if width == 0 || height == 0 || u64::from(width) * u64::from(height) > MAX_PIXELS {
        return Err(format!("is {width} x {height} pixels; up to {} megapixels are read", MAX_PIXELS >> 20));
    }
    if decoder.total_bytes() > MAX_BYTES {
        return Err(format!(
            "is {width} x {height} pixels of {:?}, {} MiB; up to {} MiB are read",
            decoder.color_type(),
            decoder.total_bytes() >> 20,
            MAX_BYTES >> 20
        ));
    }
    Ok((format, decoder))
}

fn cannot_be_decoded(error: image::ImageError) -> String {
    format!("cannot be decoded: {error}")
}

fn rgb(decoder: impl ImageDecoder) -> Result<Picture, String> {
    let picture = image::DynamicImage::from_decoder(decoder).map_err(cannot_be_decoded)?.into_rgb8();
    Ok(Picture { width: picture.width(), height: picture.height(), channels: 3, pixels: picture.into_raw() })
}

/// Refuses what nothing here decodes, by its name where its first bytes do not tell.
fn readable(path: &Path, bytes: &[u8]) -> Result<(), String> {
    // Phones give JPEG files such names, too; a camera's raw file begins as a TIFF does.
    let told = matches!(image::guess_format(bytes), Ok(format) if format != image::ImageFormat::Tiff);
    let extension = extension(path);
    if !told && NOT_READ.contains(&extension.as_str()) {
        return Err(format!("is a {extension} file, which is not read; convert it to {FORMATS}"));
    }
    Ok(())
}

/// The first bytes of a file, enough to tell its format.
pub(super) fn head(path: &Path) -> Result<Vec<u8>, String> {
    let mut head = Vec::new();
    let (file, _) = files::open(path)?;
    file.take(HEAD_BYTES).read_to_end(&mut head).map_err(files::cannot_be_read)?;
    Ok(head)
}

/// A format's number in an index; see [`super::index::Entry::format`].
pub(super) fn format_number(bytes: &[u8]) -> u8 {
    match format_of(bytes) {
        Some(ImageFormat::Jpeg) => 1,
        Some(ImageFormat::Png) => 2,
        Some(ImageFormat::WebP) => 3,
        Some(ImageFormat::Gif) => 4,
        Some(ImageFormat::Bmp) => 5,
        Some(ImageFormat::Tiff) => 6,
        _ => 0,
    }
}

/// Width and height of a picture that looks whole. It is decoded only where its format does not tell where it ends.
/// `path` names it: kinds that are not read are told by name.
pub(super) fn dimensions(path: &Path, bytes: &[u8]) -> Result<(u32, u32), String> {
    readable(path, bytes)?;
    let (format, decoder) = decoder(bytes)?;
    let size = decoder.dimensions();
    if !whole::is_told(format) {
        rgb(decoder)?;
    }
    Ok(size)
}

impl Picture {
    /// Decodes a picture of any size and colour type as RGB; of a film, its first picture.
    ///
    /// # Errors
    /// What is wrong with it, to stand after its name.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let (_, decoder) = decoder(bytes)?;
        rgb(decoder)
    }

    /// The largest centred square, scaled to `side` pixels.
    pub fn centre_square(self, side: u32) -> Self {
        if self.width == side && self.height == side {
            return self;
        }
        let cut = self.width.min(self.height);
        let left = f64::from((self.width - cut) / 2);
        let top = f64::from((self.height - cut) / 2);
        self.scaled(side, Some((left, top, f64::from(cut))))
    }

    /// All of it, scaled to a square of `side` pixels.
    pub(crate) fn stretched(self, side: u32) -> Self {
        self.scaled(side, None)
    }

    fn scaled(self, side: u32, crop: Option<(f64, f64, f64)>) -> Self {
        let mut pixels = vec![0; (side * side * self.channels) as usize];
        Scaler::new(side, self.channels).scale(&self.pixels, self.width, self.height, crop, &mut pixels);
        Self { width: side, height: side, channels: self.channels, pixels }
    }
}

/// Scales pictures to a square: bilinear, averaging over the source's pixels when it makes them smaller.
pub(super) struct Scaler {
    resizer: Resizer,
    kind: PixelType,
    side: u32,
}

impl Scaler {
    pub(super) fn new(side: u32, channels: u32) -> Self {
        let kind = if channels == 1 { PixelType::U8 } else { PixelType::U8x3 };
        Self { resizer: Resizer::new(), kind, side }
    }

    /// `crop` is left, top and side of the square to take; the whole picture when absent.
    /// Both slices must have the sizes said.
    pub(super) fn scale(
        &mut self,
        from: &[u8],
        width: u32,
        height: u32,
        crop: Option<(f64, f64, f64)>,
        to: &mut [u8],
    ) {
        let mut options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(FilterType::Bilinear));
        if let Some((left, top, side)) = crop {
            options = options.crop(left, top, side, side);
        }
        let scaled = ImageRef::new(width, height, from, self.kind)
            .ok()
            .zip(Image::from_slice_u8(self.side, self.side, to, self.kind).ok());
        if let Some((source, mut target)) = scaled {
            // Sizes and pixel types fit by construction, which is all that can fail here.
            let fits = self.resizer.resize(&source, &mut target, &options);
            debug_assert!(fits.is_ok(), "{fits:?}");
        }
    }
}
