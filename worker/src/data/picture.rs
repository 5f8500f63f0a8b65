//! A decoded picture and the ways to make one.

use super::DataError;
use fast_image_resize::{
    FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer, images::Image, images::ImageRef,
};
use image::{ImageDecoder, ImageFormat, ImageReader, Limits};
use std::{fs, io::Cursor, path::Path};

/// Larger pictures are refused before they are decoded.
const MAX_PIXELS: u64 = 64 << 20;

/// Pixels as they lie in a file: height, width, channels; one byte each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Picture {
    pub width: u32,
    pub height: u32,
    pub channels: u32,
    pub pixels: Vec<u8>,
}

/// Whether these first bytes of a file are a JPEG's or PNG's.
pub(super) fn format_of(head: &[u8]) -> Option<ImageFormat> {
    match head {
        [0xff, 0xd8, 0xff, ..] => Some(ImageFormat::Jpeg),
        [0x89, b'P', b'N', b'G', 0x0d, 0x0a, 0x1a, 0x0a, ..] => Some(ImageFormat::Png),
        _ => None,
    }
}

/// Whether the picture's data has no end. The JPEG decoder fills what is missing with grey, and files
/// too many to keep in memory are only looked at by their headers when a job starts, so it is told
/// from the markers. Both formats may have other data behind the picture.
fn is_cut_off(format: ImageFormat, bytes: &[u8]) -> bool {
    match format {
        // Neither "start of scan" nor "end of image" occurs inside a scan's data.
        ImageFormat::Jpeg => {
            bytes.windows(2).rfind(|w| matches!(w, [0xff, 0xda | 0xd9])).is_none_or(|w| w[1] == 0xda)
        }
        _ => !bytes.windows(4).rev().any(|w| w == b"IEND"),
    }
}

fn decoder(bytes: &[u8]) -> Result<impl ImageDecoder + '_, String> {
    let Some(format) = format_of(bytes) else {
        let text = !bytes.is_empty()
            && bytes.iter().take(64).all(|b| b.is_ascii_graphic() || b.is_ascii_whitespace());
        return Err(match (bytes.is_empty(), text) {
            (true, _) => "is empty".into(),
            (_, true) => "is text, not a JPEG or PNG picture".into(),
            _ => "is not a JPEG or PNG picture".into(),
        });
    };
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    let mut limits = Limits::default();
    limits.max_alloc = Some(MAX_PIXELS * 8);
    reader.limits(limits);
    let decoder = reader.into_decoder().map_err(|e| format!("cannot be decoded: {e}"))?;
    let (width, height) = decoder.dimensions();
    if is_cut_off(format, bytes) {
        return Err(format!("is cut off: a {format:?} picture without its end; get it again"));
    }
    if width == 0 || height == 0 || u64::from(width) * u64::from(height) > MAX_PIXELS {
        return Err(format!("is {width} x {height} pixels; up to {} megapixels are read", MAX_PIXELS >> 20));
    }
    Ok(decoder)
}

/// Width and height of a picture file that looks whole, without decoding it.
pub(super) fn dimensions(path: &Path) -> Result<(u32, u32), DataError> {
    let broken = |detail: String| DataError::File { path: path.display().to_string(), detail };
    let bytes = fs::read(path).map_err(|e| broken(format!("cannot be read: {e}")))?;
    decoder(&bytes).map(|d| d.dimensions()).map_err(broken)
}

impl Picture {
    /// Reads a JPEG or PNG file of any size and colour type as RGB.
    ///
    /// # Errors
    /// [`DataError::File`] with what is wrong with it.
    pub fn read(path: &Path) -> Result<Self, DataError> {
        let broken = |detail: String| DataError::File { path: path.display().to_string(), detail };
        let bytes = fs::read(path).map_err(|e| broken(format!("cannot be read: {e}")))?;
        Self::decode(&bytes).map_err(broken)
    }

    /// Decodes a JPEG or PNG of any size and colour type as RGB.
    ///
    /// # Errors
    /// What is wrong with it, to stand after its name.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let picture = image::DynamicImage::from_decoder(decoder(bytes)?)
            .map_err(|e| format!("cannot be decoded: {e}"))?
            .into_rgb8();
        Ok(Self { width: picture.width(), height: picture.height(), channels: 3, pixels: picture.into_raw() })
    }

    /// The largest centred square, scaled to `side` pixels.
    pub fn centre_square(self, side: u32) -> Self {
        if self.width == side && self.height == side {
            return self;
        }
        let cut = self.width.min(self.height);
        let mut scaler = Scaler::new(side, self.channels);
        let mut pixels = vec![0; (side * side * self.channels) as usize];
        let left = f64::from((self.width - cut) / 2);
        let top = f64::from((self.height - cut) / 2);
        scaler.scale(&self.pixels, self.width, self.height, Some((left, top, f64::from(cut))), &mut pixels);
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
