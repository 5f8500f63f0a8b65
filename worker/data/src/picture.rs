//! Decoded pictures: recognising, decoding and resizing files.

use decode::Header;
use image::ImageFormat;
use lockstep_host::files;
use std::{io::Read, path::Path};

pub(super) use decode::{Decoder, is_plain_jpeg};
pub(super) use resize::{Area, Region, Resize};
pub use scale_table::ScaleTable;

pub(super) mod decode;
pub(super) mod jpeg;
mod resize;
mod scale_table;
mod whole;

/// The supported formats, for messages.
pub(super) const FORMATS: &str = "JPEG, PNG, WebP, GIF, BMP or TIFF";
/// Number of first bytes of a file by which its format is recognised.
const HEAD_BYTES: u64 = 32;
/// Maximum number of pixels. Larger pictures are rejected before they are decoded.
const MAX_PIXELS: u64 = 64 << 20;
/// Maximum size of a picture in bytes, decoded and as a file. Eight bytes per pixel are four channels of 16 bits.
pub(super) const MAX_BYTES: u64 = MAX_PIXELS * 8;

/// Extensions of supported formats.
const SUPPORTED: [&str; 10] = ["jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff"];
/// Extensions of picture formats that are not supported.
const UNSUPPORTED: [&str; 21] = [
    "heic", "heif", "avif", "jxl", "jp2", "j2k", "svg", "ico", "psd", "tga", "ppm", "pgm", "pbm", "pnm",
    "exr", "dng", "cr2", "cr3", "nef", "arw", "raw",
];

/// A decoded picture, in the order of height, width and channels, with one byte per value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Picture {
    pub width: u32,
    pub height: u32,
    pub channels: u32,
    pub pixels: Vec<u8>,
}

/// A view of a decoded picture, in the order of height, width and channels, with one byte per value.
#[derive(Debug, Clone, Copy)]
pub(super) struct PictureRef<'a> {
    pub(super) width: u32,
    pub(super) height: u32,
    /// Number of channels: 1 or 3.
    pub(super) channels: u32,
    pub(super) pixels: &'a [u8],
}

/// The format of a file that begins with `head`.
pub(super) fn format_of(head: &[u8]) -> Option<ImageFormat> {
    match head {
        [0xff, 0xd8, 0xff, ..] => Some(ImageFormat::Jpeg),
        [0x89, b'P', b'N', b'G', 0x0d, 0x0a, 0x1a, 0x0a, ..] => Some(ImageFormat::Png),
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some(ImageFormat::WebP),
        [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => Some(ImageFormat::Gif),
        // Two letters prove little, so the size of the following header is checked too.
        [b'B', b'M', _, _, _, _, _, _, _, _, _, _, _, _, 12 | 40 | 52 | 56 | 64 | 108 | 124, 0, 0, 0, ..] => {
            Some(ImageFormat::Bmp)
        }
        [b'I', b'I', 42, 0, ..] | [b'M', b'M', 0, 42, ..] => Some(ImageFormat::Tiff),
        _ => None,
    }
}

/// Whether a file has the extension of a picture, supported or not.
pub fn has_picture_extension(path: &Path) -> bool {
    let extension = extension(path);
    SUPPORTED.contains(&extension.as_str()) || UNSUPPORTED.contains(&extension.as_str())
}

fn extension(path: &Path) -> String {
    path.extension().map(|e| e.to_string_lossy().to_lowercase()).unwrap_or_default()
}

fn not_a_picture_detail(bytes: &[u8]) -> String {
    let is_text = bytes.iter().take(64).all(|b| b.is_ascii_graphic() || b.is_ascii_whitespace());
    match bytes {
        [] => "is empty".into(),
        [_, _, _, _, b'f', b't', b'y', b'p', b'h' | b'm' | b'a', b'e' | b'i' | b'v', ..] => {
            format!("has the format HEIF or AVIF, which is not supported; convert it to {FORMATS}")
        }
        _ if is_text => format!("is text, not a {FORMATS} picture"),
        _ => format!("is not a {FORMATS} picture"),
    }
}

/// Why a picture of this size is rejected. `None` if the size is allowed.
pub(super) fn size_refusal(width: u32, height: u32) -> Option<String> {
    let fits = width > 0 && height > 0 && u64::from(width) * u64::from(height) <= MAX_PIXELS;
    (!fits)
        .then(|| format!("is {width} x {height} pixels; at most {} megapixels are allowed", MAX_PIXELS >> 20))
}

/// Rejects unsupported formats, by the file's name if the first bytes do not show the format.
fn check_supported(path: &Path, bytes: &[u8]) -> Result<(), String> {
    // Phones also use these extensions for JPEG files. A camera's raw file begins like a TIFF file.
    let is_known = matches!(image::guess_format(bytes), Ok(format) if format != image::ImageFormat::Tiff);
    let extension = extension(path);
    if !is_known && UNSUPPORTED.contains(&extension.as_str()) {
        let format = extension.to_uppercase();
        return Err(format!("has the format {format}, which is not supported; convert it to {FORMATS}"));
    }
    Ok(())
}

/// Whether a file certainly is not a picture, according to its first bytes. A file that cannot be read may be a picture.
pub(super) fn is_not_a_picture(path: &Path) -> bool {
    let mut head = Vec::new();
    let is_read =
        files::open(path).is_ok_and(|(file, _)| file.take(HEAD_BYTES).read_to_end(&mut head).is_ok());
    is_read && format_of(&head).is_none()
}

/// Width and height of the upright picture, if the file seems intact. The picture is decoded only if its format has no
/// end marker. The codes of a JPEG scan are checked, because a GPU does not report damage. `path` helps to recognise
/// unsupported formats.
pub(super) fn dimensions(path: &Path, bytes: &[u8]) -> Result<(u32, u32), String> {
    check_supported(path, bytes)?;
    let header = Header::read(bytes)?;
    let size = header.dimensions();
    if !whole::has_end_marker(header.format) {
        Decoder::default().pixels_of(header)?;
    } else if jpeg::has_damaged_scan(bytes) {
        return Err("is damaged: its data is truncated or invalid; get it again".into());
    }
    Ok(size)
}

impl Picture {
    /// Width and height of the upright picture, from the header. `None` if the file is not a supported picture.
    pub fn size_of(bytes: &[u8]) -> Option<(u32, u32)> {
        Header::read(bytes).ok().map(|header| header.dimensions())
    }

    /// Decodes a picture of any size and colour type as upright RGB, with Pillow's semantics.
    ///
    /// # Errors
    /// Why the picture cannot be decoded, as a phrase to follow its name.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let mut decoder = Decoder::default();
        let (width, height, pixels) = decoder.pixels_of(Header::read(bytes)?)?;
        Ok(Self { width, height, channels: 3, pixels: std::mem::take(pixels) })
    }

    pub(super) fn view(&self) -> PictureRef<'_> {
        let Self { width, height, channels, pixels } = self;
        PictureRef { width: *width, height: *height, channels: *channels, pixels }
    }

    /// The largest centred square, scaled to `side` pixels.
    pub fn centre_square(self, side: u32) -> Self {
        match self.view().centre_square(side) {
            Some(square) => self.resized(square, side),
            None => self,
        }
    }

    /// The whole picture, scaled to a square of `side` pixels.
    pub fn stretched(self, side: u32) -> Self {
        self.resized(Area::Whole, side)
    }

    /// torchvision's `Resize(resize)`, then `CenterCrop(side)`. `resize` must be at least `side`.
    pub fn resized_and_cropped(self, resize: u32, side: u32) -> Self {
        let window = self.view().centre_crop(resize, side);
        self.resized(window, side)
    }

    fn resized(self, area: Area, side: u32) -> Self {
        let mut pixels = vec![0; side as usize * side as usize * self.channels as usize];
        Resize::default().run(self.view(), area, (side, side), &mut pixels);
        Self { width: side, height: side, channels: self.channels, pixels }
    }
}

impl PictureRef<'_> {
    /// The area of the largest centred square. `None` if the picture already is a square of `side` pixels.
    pub(super) fn centre_square(self, side: u32) -> Option<Area> {
        if self.width == side && self.height == side {
            return None;
        }
        let short_side = self.width.min(self.height);
        let left = f64::from((self.width - short_side) / 2);
        let top = f64::from((self.height - short_side) / 2);
        Some(Area::Window(left, top, short_side.into(), short_side.into()))
    }

    /// The area that is visible when the short side is resized to `resize` pixels and a centred square of `side` is
    /// cut out; the rest need not be computed. Sizes and positions are rounded as by torchvision's `Resize` and
    /// `CenterCrop`.
    pub(super) fn centre_crop(self, resize: u32, side: u32) -> Area {
        let short = u64::from(self.width.min(self.height)).max(1);
        // The first pixel and the length of the area along one axis, in pixels of this picture.
        let along = |length: u32| {
            let resized = (u64::from(resize) * u64::from(length) / short) as f64;
            let scale = f64::from(length) / resized;
            let first = ((resized - f64::from(side)) / 2.0).round_ties_even().max(0.0) * scale;
            (first, (f64::from(side) * scale).min(f64::from(length) - first))
        };
        let ((left, width), (top, height)) = (along(self.width), along(self.height));
        Area::Window(left, top, width, height)
    }
}
