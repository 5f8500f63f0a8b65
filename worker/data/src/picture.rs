//! A decoded picture and the ways to make one.

use decode::Header;
use image::ImageFormat;
use lockstep_host::files;
use std::{io::Read, path::Path};

pub(super) use decode::{Decoder, is_plain_jpeg};
pub(super) use resize::{Area, Region, Resize};
pub use weights::ScaleTable;

pub(super) mod decode;
pub(super) mod jpeg;
mod resize;
mod weights;
mod whole;

/// The formats that are read, for sentences.
pub(super) const FORMATS: &str = "JPEG, PNG, WebP, GIF, BMP or TIFF";
/// The format shows in so many of a file's first bytes.
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

/// A picture that lies somewhere else: height, width, channels; one byte each.
#[derive(Debug, Clone, Copy)]
pub(super) struct PictureRef<'a> {
    pub(super) width: u32,
    pub(super) height: u32,
    /// 1 or 3.
    pub(super) channels: u32,
    pub(super) pixels: &'a [u8],
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

/// Why a picture of this size is not read, if it is not.
pub(super) fn too_large(width: u32, height: u32) -> Option<String> {
    let fits = width > 0 && height > 0 && u64::from(width) * u64::from(height) <= MAX_PIXELS;
    (!fits).then(|| format!("is {width} x {height} pixels; up to {} megapixels are read", MAX_PIXELS >> 20))
}

/// Refuses what nothing here decodes, by its name where its first bytes do not show the format.
fn readable(path: &Path, bytes: &[u8]) -> Result<(), String> {
    // Phones give JPEG files such names, too; a camera's raw file begins as a TIFF does.
    let is_known = matches!(image::guess_format(bytes), Ok(format) if format != image::ImageFormat::Tiff);
    let extension = extension(path);
    if !is_known && NOT_READ.contains(&extension.as_str()) {
        return Err(format!("is a {extension} file, which is not read; convert it to {FORMATS}"));
    }
    Ok(())
}

/// The first bytes of a file, enough to recognise its format.
pub(super) fn head(path: &Path) -> Result<Vec<u8>, String> {
    let mut head = Vec::new();
    let (file, _) = files::open(path)?;
    file.take(HEAD_BYTES).read_to_end(&mut head).map_err(files::cannot_be_read)?;
    Ok(head)
}

/// JPEG's [`format_number`].
pub(super) const JPEG: u8 = 1;

/// A format's number in an index; see [`super::index::Entry::format`].
pub(super) fn format_number(bytes: &[u8]) -> u8 {
    match format_of(bytes) {
        Some(ImageFormat::Jpeg) => JPEG,
        Some(ImageFormat::Png) => 2,
        Some(ImageFormat::WebP) => 3,
        Some(ImageFormat::Gif) => 4,
        Some(ImageFormat::Bmp) => 5,
        Some(ImageFormat::Tiff) => 6,
        _ => 0,
    }
}

/// Width and height of a picture that seems whole, once it is upright. It is decoded only where its format does not mark its
/// end; a scan that a GPU may decode is followed, since a GPU does not report damage. `path` names it: kinds that are not read are recognised by name.
pub(super) fn dimensions(path: &Path, bytes: &[u8]) -> Result<(u32, u32), String> {
    readable(path, bytes)?;
    let header = Header::read(bytes)?;
    let size = header.dimensions();
    if !whole::marks_its_end(header.format) {
        Decoder::default().pixels_of(header)?;
    } else if jpeg::has_damaged_scan(bytes) {
        return Err("is damaged: its data breaks off or cannot be followed; get it again".into());
    }
    Ok(size)
}

impl Picture {
    /// Width and height as a file's beginning has them; none where it is no picture that is read.
    pub fn size_of(bytes: &[u8]) -> Option<(u32, u32)> {
        Header::read(bytes).ok().map(|header| header.dimensions())
    }

    /// Decodes a picture of any size and colour type as RGB, upright, with Pillow's meaning.
    ///
    /// # Errors
    /// What is wrong with it, to stand after its name.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        Decoder::default().decode_owned(bytes)
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

    /// All of it, scaled to a square of `side` pixels.
    pub fn stretched(self, side: u32) -> Self {
        self.resized(Area::Whole, side)
    }

    /// torchvision's `Resize(resize)`, then `CenterCrop(side)`; `resize` is not below `side`.
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
    /// The largest centred square; `None` when it is the picture, of `side` pixels already.
    pub(super) fn centre_square(self, side: u32) -> Option<Area> {
        if self.width == side && self.height == side {
            return None;
        }
        let cut = self.width.min(self.height);
        let left = f64::from((self.width - cut) / 2);
        let top = f64::from((self.height - cut) / 2);
        Some(Area::Window(left, top, cut.into(), cut.into()))
    }

    /// What of the picture is seen when its short side is resized to `resize` pixels and a centred square of `side` is cut
    /// out of that; the rest need not be computed. Sizes and places are rounded as torchvision's `Resize` and
    /// `CenterCrop` round them.
    pub(super) fn centre_crop(self, resize: u32, side: u32) -> Area {
        let short = u64::from(self.width.min(self.height)).max(1);
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
